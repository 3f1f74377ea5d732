// daemon/log_modules.h: the modules that `di-ctl log LEVEL MODULE` can name, which are the first words of the
// log lines of all daemons.  One list for all: a command goes to every daemon, and one that has no line of a
// module may take its level all the same.  scripts/check-style compares it with the calls.
#pragma once

#include <array>
#include <string_view>

namespace di::daemon {

inline constexpr std::array<std::string_view, 17> log_modules = {
    "access", "account", "arena", "control", "daemon", "data",   "fabric", "fault", "fleet",
    "host",   "http",    "loop",  "meta",    "net",    "script", "shm",    "store"};

}  // namespace di::daemon
