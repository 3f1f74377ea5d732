// transfer/address.h: numeric addresses of data endpoints: "host:port", "[v6]:port", with or without
// "tcp://" in front.  Names are not looked up: that would block whoever asks.
#pragma once

#include <sys/socket.h>

#include <string>

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

}  // namespace di::transfer
