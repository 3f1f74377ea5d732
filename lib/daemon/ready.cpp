#include "daemon/ready.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/fd_packet.h"

namespace di::daemon {

namespace {

// Where systemd starts to number what it passes.
constexpr int listen_fds_first = 3;
constexpr int listen_fds_max = 64;

std::optional<std::int64_t> number_of(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  std::int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc{} || rest != end) return std::nullopt;
  return value;
}

// Errors: unsupported without NOTIFY_SOCKET, io.
Status notify(std::string_view state, int passed_fd) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr) return Error{Code::unsupported, 0, "no NOTIFY_SOCKET"};
  const std::size_t length = std::strlen(path);
  sockaddr_un address{};
  if (length == 0 || length >= sizeof address.sun_path)
    return Error{Code::invalid, 0, "NOTIFY_SOCKET is no path"};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // abstract
  const Fd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno_error("socket");
  const socklen_t bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
    return errno_error("connect NOTIFY_SOCKET");
  return fd_packet_send(fd.get(), as_bytes(state), passed_fd);
}

}  // namespace

void notify_supervisor(std::string_view state) {
  // A supervisor that is gone is not our problem.
  static_cast<void>(notify(state, -1));
}

bool supervisor_stores_fds() {
  return std::getenv("NOTIFY_SOCKET") != nullptr && number_of("FDSTORE").value_or(0) > 0;
}

Status supervisor_store_fd(std::string_view name, int fd) {
  return notify("FDSTORE=1\nFDPOLL=0\nFDNAME=" + std::string(name), fd);
}

void supervisor_drop_fd(std::string_view name) {
  static_cast<void>(notify("FDSTOREREMOVE=1\nFDNAME=" + std::string(name), -1));
}

Fd supervisor_stored_fd(std::string_view name) {
  const char* names = std::getenv("LISTEN_FDNAMES");
  if (names == nullptr || number_of("LISTEN_PID") != ::getpid()) return {};
  const std::int64_t count = std::min<std::int64_t>(number_of("LISTEN_FDS").value_or(0), listen_fds_max);
  std::string_view rest = names;
  Fd found;
  for (int i = 0; i < count; ++i) {
    const std::size_t colon = rest.find(':');
    if (rest.substr(0, colon) == name) {
      const int fd = listen_fds_first + i;
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
      found = Fd(fd);
    }
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  return found;
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
