#include "transfer/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace di::transfer {

namespace {

constexpr int same_machine_send_bytes = 512 << 10;

void set_option(int fd, int level, int option, int value) {
  // Failing means slower or later, not wrong.
  [[maybe_unused]] const int set = ::setsockopt(fd, level, option, &value, sizeof value);
}

// Without delay, and dead soon when the other side is.
void set_socket(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 10'000);
}

using NameOf = int (*)(int, sockaddr*, socklen_t*);

// The host of one end of a connection, or empty.
std::string host_of(int fd, NameOf name_of) {
  Address address;
  address.length = sizeof address.storage;
  if (name_of(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) return {};
  const auto bytes_of = [](const auto& field) {
    return std::string(reinterpret_cast<const char*>(&field), sizeof field);
  };
  if (address.family() == AF_INET6)
    return bytes_of(reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr);
  return bytes_of(reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr);
}

// Between two processes of one machine nothing is under way on a wire: what the kernel holds beyond what
// fits in a core's cache is only copied out to memory and back.
void set_connection(int fd) {
  const std::string here = host_of(fd, ::getsockname);
  if (!here.empty() && here == host_of(fd, ::getpeername))
    set_option(fd, SOL_SOCKET, SO_SNDBUF, same_machine_send_bytes);
}

Fd socket_of(const Address& address) {
  return Fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

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

Result<DataListener> data_listen(const std::string& text) {
  if (text.empty()) return DataListener{};
  const std::string what = "data endpoint " + text;
  const Result<Address> address = address_parse(text);
  if (!address) return address.error().in("data endpoint");
  DataListener out{socket_of(*address), {}};
  if (!out.fd.valid()) return errno_error(what);
  set_option(out.fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  Address bound;
  bound.length = sizeof bound.storage;
  if (::bind(out.fd.get(), address->get(), address->length) != 0 || ::listen(out.fd.get(), 128) != 0 ||
      ::getsockname(out.fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    return errno_error(what);
  }
  out.endpoint = "tcp://" + address_print(bound);
  return out;
}

Result<Fd> data_accept(int listener) {
  while (true) {
    Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      set_socket(fd.get());
      set_connection(fd.get());
      return fd;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Fd();
    return errno_error("accept");
  }
}

Result<Fd> data_connect(const std::string& text) {
  const Result<Address> address = address_parse(text);
  if (!address) return address.error();
  Fd fd = socket_of(*address);
  if (!fd.valid()) return errno_error("connect " + text);
  set_socket(fd.get());
  if (::connect(fd.get(), address->get(), address->length) != 0 && errno != EINPROGRESS) {
    return errno_error("connect " + text);
  }
  set_connection(fd.get());
  return fd;
}

}  // namespace di::transfer
