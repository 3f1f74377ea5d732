// http/address.h: the one spelling of where a server listens and a client connects:
// "127.0.0.1:8080", "[::1]:8080", "localhost:8080" or "unix:/run/di/di-router.http".
//
// Any thread; looks names up, so only at start and in programs that may wait.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>

#include "base/result.h"

namespace di::http {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  std::string path;  // of a Unix socket, else empty

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  [[nodiscard]] bool is_unix() const { return storage.ss_family == AF_UNIX; }
};

// Errors: invalid for another spelling, not_found for an unknown name.
[[nodiscard]] Result<SocketAddress> address_parse(std::string_view text);
// "127.0.0.1:8080"; "unix" for every Unix socket, whose peers have no name.
[[nodiscard]] std::string address_text(const SocketAddress& address);

}  // namespace di::http
