// daemon/exit.h: exit statuses, as every manual page's EXIT STATUS section has them.
#pragma once

namespace di::daemon {

inline constexpr int exit_ok = 0;       // stopped as asked
inline constexpr int exit_failure = 1;  // runtime failure
inline constexpr int exit_usage = 64;   // wrong command line
inline constexpr int exit_config = 78;  // wrong configuration

}  // namespace di::daemon
