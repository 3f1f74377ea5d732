// daemon/flags.h: the command lines of the daemons and of di-ctl (CLI11 underneath).
//
// Both exit by themselves: 0 after -h and -V, 64 for a wrong command line with one line on stderr.
#pragma once

#include <string>
#include <vector>

#include "daemon/daemon.h"

namespace di::daemon {

struct ControlFlags {
  std::string run_dir;       // -r, or what find_run_dir() says
  std::string instance;      // -d; empty: all
  bool json = false;         // -j
  bool all_columns = false;  // -a
  std::string model;         // -m, -k and -u: of chat
  std::string key_file;
  std::string url;
  std::vector<std::string> words;  // the command
};
// Where the fleet is that a user of this machine means: `system`, unless it has no instance and `local` has one, or is
// not there.
[[nodiscard]] std::string find_run_dir(const std::string& system = "/run/di",
                                       const std::string& local = "run");
// `epilog` lists the commands under -h.
[[nodiscard]] ControlFlags parse_control_flags(int argc, char** argv, const std::string& epilog);

}  // namespace di::daemon
