// cmd/di-ctl/commands.h: the commands, one row each; help and checks come from the rows.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/flags.h"

namespace di::ctl {

// Whom a command is for.
enum class Scope : std::uint8_t {
  each,   // every instance, or the one of -d; those that do not know it are passed over
  first,  // every instance until one knows the answer
  named,  // the instance its last word names
  local,  // nobody: di-ctl itself
};

struct Command {
  std::string_view words;      // "show kv", fixed words only
  std::string_view arguments;  // "ID", "LEVEL [MODULE]"; brackets: may be missing
  Scope scope;
  std::string_view help;  // empty: not listed
  std::string_view by{};  // who answers: of `each` the only program, of `named` in words; empty: several do
  std::string_view columns{};  // what text shows without -a, divided by blanks; empty: all
};
[[nodiscard]] std::span<const Command> commands();

// For -h.
[[nodiscard]] std::string command_list();

// Runs the command line; returns the exit status.
int run(const daemon::ControlFlags& flags, bool interactive);

}  // namespace di::ctl
