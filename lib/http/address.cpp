#include "http/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace di::http {

namespace {

Error invalid(std::string_view text, std::string_view why) {
  return Error{Code::invalid, 0, "address '" + std::string(text) + "': " + std::string(why)};
}

}  // namespace

Result<SocketAddress> address_parse(std::string_view text) {
  SocketAddress out;
  constexpr std::string_view scheme = "unix:";
  if (text.substr(0, scheme.size()) == scheme) {
    const std::string_view path = text.substr(scheme.size());
    sockaddr_un un{};
    un.sun_family = AF_UNIX;
    if (path.empty()) return invalid(text, "the path is missing");
    if (path.size() >= sizeof un.sun_path) {
      return invalid(text, "the path is longer than " + std::to_string(sizeof un.sun_path - 1) + " bytes");
    }
    std::copy(path.begin(), path.end(), un.sun_path);
    out.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
    std::memcpy(&out.storage, &un, sizeof un);
    out.path = path;
    return out;
  }
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return invalid(text, "want HOST:PORT or unix:PATH");
  std::string host(text.substr(0, colon));
  const std::string port(text.substr(colon + 1));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (host.empty()) return invalid(text, "the host is missing");
  if (!digits || std::stoi(port) > 65535) return invalid(text, "the port is not a number from 0 to 65535");
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return Error{Code::not_found, 0, "address '" + std::string(text) + "': " + ::gai_strerror(error)};
  }
  std::memcpy(&out.storage, found->ai_addr, found->ai_addrlen);
  out.bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
  return out;
}

std::string address_text(const SocketAddress& address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address.storage.ss_family == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, &address.storage, sizeof in);
    ::inet_ntop(AF_INET, &in.sin_addr, text, sizeof text);
    return std::string(text) + ":" + std::to_string(ntohs(in.sin_port));
  }
  if (address.storage.ss_family == AF_INET6) {
    sockaddr_in6 in{};
    std::memcpy(&in, &address.storage, sizeof in);
    ::inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof text);
    return "[" + std::string(text) + "]:" + std::to_string(ntohs(in.sin6_port));
  }
  return "unix";
}

}  // namespace di::http
