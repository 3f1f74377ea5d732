// config/toml.h: a TOML file and -o overrides into the rows of a Params (toml++ underneath).
//
// All errors are reported, each one line: `di-kvd.toml:3:3: unknown key 'bogus'` for the file,
// `-o kv.arena=1: ...` for an override.  Nothing here reads the environment.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/param.h"

namespace di::config {

// Sets what `text` gives; `name` is what positions are reported against, and relative paths in it
// (StringOptions::path) begin in its folder.  Returns the errors, in
// the order of the text; empty means that every value was accepted.  Members whose value was
// refused keep their default.
[[nodiscard]] std::vector<std::string> parse_text(Params& params, std::string_view text,
                                                  std::string_view name);

// The same with the contents of a file.  Positions carry `path` as given.
[[nodiscard]] std::vector<std::string> parse_file(Params& params, const std::string& path);

// One `key=value`, value in TOML or, for everything but numbers and booleans, as it is; a list is
// TOML or words between commas.  Applied after the file.
[[nodiscard]] std::vector<std::string> parse_override(Params& params, std::string_view assignment);

// Required rows that neither file nor overrides gave; call last.
[[nodiscard]] std::vector<std::string> check_required(const Params& params, std::string_view name);

}  // namespace di::config
