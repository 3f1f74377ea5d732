// daemon/ready.h: how the supervisor is told: systemd's datagram by hand, and the byte on --ready-fd.
//
// The only reader of the environment, and only of what systemd sets.  Main thread.
#pragma once

#include <optional>
#include <string_view>

#include "base/time.h"

namespace di::daemon {

// Sends `state` ("READY=1") to NOTIFY_SOCKET; does nothing without one.
void notify_supervisor(std::string_view state);
// WATCHDOG_USEC when it is meant for this process.
[[nodiscard]] std::optional<Duration> watchdog_interval();
// One byte, then closes `fd`; nothing for -1.
void write_ready_byte(int fd);

}  // namespace di::daemon
