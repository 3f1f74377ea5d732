#include "transfer/address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <array>
#include <cstring>

namespace di::transfer {

Result<Address> address_parse(const std::string& text) {
  constexpr std::string_view scheme = "tcp://";
  std::string rest = text.starts_with(scheme) ? text.substr(scheme.size()) : text;
  const auto wrong = [&text] {
    return Error{Code::invalid, 0, text + ": want a numeric address, HOST:PORT or [HOST]:PORT"};
  };
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos) return wrong();
  const std::string port = rest.substr(colon + 1);
  std::string host = rest.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    return wrong();
  }
  if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(port) > 65535) {
    return wrong();
  }
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  const bool any = host.empty() || host == "*";
  if (any) hints.ai_family = AF_INET;
  addrinfo* found = nullptr;
  if (::getaddrinfo(any ? nullptr : host.c_str(), port.c_str(), &hints, &found) != 0) return wrong();
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

std::string address_print(const Address& address) {
  std::array<char, 64> host{};
  std::array<char, 8> port{};
  if (::getnameinfo(address.get(), address.length, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return {};
  }
  const std::string name = host.data();
  return (address.family() == AF_INET6 ? "[" + name + "]" : name) + ":" + port.data();
}

}  // namespace di::transfer
