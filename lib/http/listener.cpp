#include "http/listener.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "http/address.h"

namespace di::http {

namespace {

constexpr int listen_backlog = 1024;

// Removes a socket file that nobody listens on.
Status unix_path_free(const SocketAddress& address, const std::string& what) {
  struct stat info {};
  if (::lstat(address.path.c_str(), &info) != 0) {
    return errno == ENOENT ? Status() : Status(errno_error(what));
  }
  // Connecting to any other file is refused just like connecting to a dead socket.
  if (!S_ISSOCK(info.st_mode)) {
    return Error{Code::exists, EEXIST, what + ": there is a file that is not a socket"};
  }
  const Fd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return errno_error(what);
  if (::connect(probe.get(), address.get(), address.bytes) == 0 || errno == EAGAIN) {
    return Error{Code::busy, EADDRINUSE, what + ": the address is in use"};
  }
  if (errno == ECONNREFUSED && ::unlink(address.path.c_str()) != 0) return errno_error(what);
  return {};
}

Error refused(const std::string& what) {
  if (errno == EADDRINUSE) return Error{Code::busy, EADDRINUSE, what + ": the address is in use"};
  return errno_error(what);
}

}  // namespace

Listener::~Listener() {
  watch.reset();
  if (!path.empty()) ::unlink(path.c_str());
}

Result<std::unique_ptr<Listener>> listen_on(std::string_view text) {
  const auto address = address_parse(text);
  if (!address) return address.error();
  auto listener = std::make_unique<Listener>();
  const std::string what = "listen " + std::string(text);
  listener->fd = Fd(::socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener->fd.valid()) return errno_error(what);
  const int fd = listener->fd.get();
  if (address->is_unix()) {
    DI_TRY(unix_path_free(*address, what));
  } else {
    const int on = 1;
    if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) return errno_error(what);
  }
  if (::bind(fd, address->get(), address->bytes) != 0) return refused(what);
  listener->path = address->path;
  if (address->is_unix() && ::chmod(address->path.c_str(), 0660) != 0) return errno_error(what);
  if (::listen(fd, listen_backlog) != 0) return refused(what);
  SocketAddress actual;
  actual.bytes = sizeof actual.storage;
  if (::getsockname(fd, actual.get(), &actual.bytes) != 0) return errno_error(what);
  listener->address = address->is_unix() ? std::string(text) : address_text(actual);
  return listener;
}

}  // namespace di::http
