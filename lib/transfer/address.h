// transfer/address.h: data endpoints: their numeric addresses, "host:port" or "[v6]:port", with or without
// "tcp://" in front, and the TCP sockets at them.  Names are not looked up: that would block whoever asks.
#pragma once

#include <sys/socket.h>

#include <string>

#include "base/fd.h"
#include "base/result.h"

namespace di::transfer {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] int family() const { return storage.ss_family; }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// An empty host or "*" is every address of this machine.  Errors: invalid.
[[nodiscard]] Result<Address> address_parse(const std::string& text);
// "host:port", "[v6]:port".
[[nodiscard]] std::string address_print(const Address& address);

struct DataListener {
  Fd fd;                 // not blocking; not valid: nobody is to come
  std::string endpoint;  // what was bound, with "tcp://"
};
// Nobody is to come when `text` is empty.  Errors: invalid, denied, io.
[[nodiscard]] Result<DataListener> data_listen(const std::string& text);
// The next connection that came; not valid: there is none.  Errors: io (no descriptor, no memory).
[[nodiscard]] Result<Fd> data_accept(int listener);
// Begun: the socket is writable when it has ended.  Errors: invalid, denied, io.
[[nodiscard]] Result<Fd> data_connect(const std::string& text);

}  // namespace di::transfer
