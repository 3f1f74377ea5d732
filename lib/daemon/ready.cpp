#include "daemon/ready.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/fd.h"

namespace di::daemon {

void notify_supervisor(std::string_view state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return;
  const std::size_t length = std::strlen(path);
  sockaddr_un address{};
  if (length == 0 || length >= sizeof address.sun_path) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // abstract
  const Fd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return;
  const socklen_t bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  // A supervisor that is gone is not our problem.
  [[maybe_unused]] const ssize_t sent = ::sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
                                                 reinterpret_cast<const sockaddr*>(&address), bytes);
}

std::optional<Duration> watchdog_interval() {
  const char* text = std::getenv("WATCHDOG_USEC");
  if (text == nullptr) return std::nullopt;
  if (const char* pid = std::getenv("WATCHDOG_PID"); pid != nullptr && pid != std::to_string(::getpid())) {
    return std::nullopt;
  }
  std::int64_t us = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, us);
  if (error != std::errc{} || rest != end || us <= 0) return std::nullopt;
  return microseconds(us);
}

void write_ready_byte(int fd) {
  if (fd < 0) return;
  [[maybe_unused]] const ssize_t written = ::write(fd, "1", 1);
  ::close(fd);
}

}  // namespace di::daemon
