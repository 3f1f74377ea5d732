// daemon/ready.h: how the supervisor is told: systemd's datagram by hand, and the byte on --ready-fd.
//
// The only reader of the environment, and only of what systemd sets.  Main thread.
#pragma once

#include <optional>
#include <string_view>

#include "base/fd.h"
#include "base/result.h"
#include "base/time.h"

namespace di::daemon {

// Sends `state` ("READY=1") to NOTIFY_SOCKET; does nothing without one.
void notify_supervisor(std::string_view state);
// Descriptors that systemd keeps for the next start of the service (FileDescriptorStoreMax=).
//
// Whether there is room for one: FDSTORE in the environment, which systemd sets since version 254, and our
// unit for older ones.
[[nodiscard]] bool supervisor_stores_fds();
// Errors: unsupported without NOTIFY_SOCKET, io.  systemd does not say whether it took it.
Status supervisor_store_fd(std::string_view name, int fd);
void supervisor_drop_fd(std::string_view name);
// The one of that name with which this process was started; invalid when there is none.  Once per name.
[[nodiscard]] Fd supervisor_stored_fd(std::string_view name);
// WATCHDOG_USEC when it is meant for this process.
[[nodiscard]] std::optional<Duration> watchdog_interval();
// One byte, then closes `fd`; nothing for -1.
void write_ready_byte(int fd);

}  // namespace di::daemon
