#include "http/client.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>

#include "base/clock.h"
#include "http/address.h"

namespace di::http {

namespace {

constexpr std::size_t head_bytes_max = 64 << 10;

Error broken(std::string_view what) {
  return Error{Code::unreachable, 0, std::string(what) + ": the server closed the connection"};
}
Error corrupt(std::string_view what) {
  return Error{Code::corrupt, 0, "the answer is not HTTP: " + std::string(what)};
}

bool number(std::string_view text, int base, std::size_t& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out, base);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

}  // namespace

Client::Client(Fd fd, std::string host, Duration timeout, int cancel_fd)
    : fd_(std::move(fd)), host_(std::move(host)), timeout_(timeout), cancel_fd_(cancel_fd) {}

Result<Client> Client::connect(std::string_view address, Duration timeout, int cancel_fd) {
  auto parsed = address_parse(address);
  if (!parsed) return parsed.error();
  const std::string what = "connect " + std::string(address);
  Fd fd(::socket(parsed->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno_error(what);
  const int raw = fd.get();
  Client client(std::move(fd), parsed->is_unix() ? "localhost" : std::string(address), timeout, cancel_fd);
  if (::connect(raw, parsed->get(), parsed->bytes) != 0) {
    if (errno != EINPROGRESS) {
      Error error = errno_error(what);
      error.code = Code::unreachable;
      return error;
    }
    if (const Status ready = client.wait(POLLOUT); !ready) return ready.error().in(what);
    int failed = 0;
    socklen_t bytes = sizeof failed;
    if (::getsockopt(raw, SOL_SOCKET, SO_ERROR, &failed, &bytes) != 0) return errno_error(what);
    if (failed != 0) {
      Error error = errno_error(what, failed);
      error.code = Code::unreachable;
      return error;
    }
  }
  if (!parsed->is_unix()) {
    const int on = 1;
    if (::setsockopt(raw, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) return errno_error(what);
  }
  return client;
}

Status Client::wait(short events) {
  const MonotonicClock clock;
  const Instant end = clock.now() + timeout_;
  for (;;) {
    const std::int64_t left_ms = to_ms(end - clock.now());
    if (left_ms <= 0) return Error{Code::timeout, 0, "no answer in time"};
    pollfd look[] = {{fd_.get(), events, 0}, {cancel_fd_, POLLIN, 0}};  // poll() passes -1 over
    const int count = ::poll(look, 2, static_cast<int>(std::min<std::int64_t>(left_ms, 60'000)));
    if (count > 0 && look[1].revents != 0) return Error{Code::cancelled, 0, "cancelled"};
    if (count > 0) return {};
    if (count < 0 && errno != EINTR) return errno_error("poll");
  }
}

Status Client::send_all(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return {};  // the server has answered without reading on: its answer says why
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      DI_TRY(wait(POLLOUT));
    } else if (errno != EINTR) {
      return errno_error("send");
    }
  }
  return {};
}

Result<bool> Client::fill() {
  std::array<char, 16 << 10> buffer;
  for (;;) {
    const ssize_t count = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      in_.append(buffer.data(), static_cast<std::size_t>(count));
      return true;
    }
    if (count == 0 || errno == ECONNRESET) return false;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      DI_TRY(wait(POLLIN));
    } else if (errno != EINTR) {
      return errno_error("receive");
    }
  }
}

Result<std::string> Client::line() {
  for (;;) {
    const std::size_t end = in_.find("\r\n");
    if (end != std::string::npos) {
      std::string out = in_.substr(0, end);
      in_.erase(0, end + 2);
      return out;
    }
    if (in_.size() > head_bytes_max) return corrupt("a line is too long");
    const auto more = fill();
    if (!more) return more.error();
    if (!*more) return broken("receive");
  }
}

Status Client::read_head(ClientReply& reply) {
  auto first = line();
  if (!first) return first.error();
  std::size_t status = 0;
  if (first->substr(0, 7) != "HTTP/1." || first->size() < 12 || !number(first->substr(9, 3), 10, status)) {
    return corrupt("status line");
  }
  reply.status = static_cast<int>(status);
  std::size_t bytes = 0;
  for (;;) {
    auto field = line();
    if (!field) return field.error();
    if (field->empty()) return {};
    bytes += field->size();
    const std::size_t colon = field->find(':');
    if (colon == std::string::npos || bytes > head_bytes_max) return corrupt("header field");
    std::string name = field->substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
    reply.headers.emplace_back(std::move(name),
                               std::string(trimmed(std::string_view(*field).substr(colon + 1))));
  }
}

Status Client::read_body(ClientReply& reply, bool none, const OnBytes& on_bytes) {
  bool wanted = true;
  bool fits = true;
  const auto take = [&](std::string_view bytes) {
    if (bytes.empty()) return;
    if (on_bytes) {
      wanted = on_bytes(bytes);
    } else if (reply.body.size() + bytes.size() > reply_bytes_max) {
      fits = false;
    } else {
      reply.body.append(bytes);
    }
  };
  // Takes `left` bytes (or all there are until the end of the stream, when `to_end`).
  const auto take_bytes = [&](std::size_t left, bool to_end) -> Result<bool> {
    while ((left > 0 || to_end) && wanted && fits) {
      if (in_.empty()) {
        const auto more = fill();
        if (!more) return more.error();
        if (!*more) return to_end;
      }
      const std::size_t count = to_end ? in_.size() : std::min(left, in_.size());
      take(std::string_view(in_).substr(0, count));
      in_.erase(0, count);
      left -= to_end ? 0 : count;
    }
    return wanted && fits;
  };

  const auto length = reply.header("content-length");
  const auto coding = reply.header("transfer-encoding");
  if (none || reply.status == 204 || reply.status == 304) {
    reply.complete = true;
    return {};
  }
  if (coding) {
    for (;;) {
      const auto head = line();
      if (!head) return head.error().code == Code::unreachable ? Status() : Status(head.error());
      std::size_t bytes = 0;
      if (!number(std::string_view(*head).substr(0, head->find(';')), 16, bytes)) return corrupt("chunk");
      const auto whole = take_bytes(bytes, false);
      if (!whole) return whole.error();
      if (!*whole) break;
      const auto end = line();
      if (!end) return end.error().code == Code::unreachable ? Status() : Status(end.error());
      if (!end->empty()) return corrupt("chunk");
      if (bytes == 0) {
        reply.complete = true;
        break;
      }
    }
  } else if (length) {
    std::size_t bytes = 0;
    if (!number(*length, 10, bytes)) return corrupt("Content-Length");
    const auto whole = take_bytes(bytes, false);
    if (!whole) return whole.error();
    reply.complete = *whole;
  } else {
    const auto whole = take_bytes(0, true);
    if (!whole) return whole.error();
    reply.complete = *whole;
  }
  if (!fits) return Error{Code::no_space, 0, "the answer is too large"};
  return {};
}

Result<ClientReply> Client::get(std::string_view path, const Headers& headers) {
  return request("GET", path, headers, {});
}

Result<ClientReply> Client::post(std::string_view path, std::string_view json, const Headers& headers) {
  return request("POST", path, headers, json);
}

Result<ClientReply> Client::request(std::string_view method, std::string_view path, const Headers& headers,
                                    std::string_view body, const OnBytes& on_bytes) {
  if (!fd_.valid()) return broken("request");
  std::string out;
  out.append(method).append(" ").append(path).append(" HTTP/1.1\r\nHost: ").append(host_).append("\r\n");
  for (const auto& [name, value] : headers) out.append(name).append(": ").append(value).append("\r\n");
  if (!body.empty() || method == "POST") {
    out.append("Content-Type: application/json\r\nContent-Length: ")
        .append(std::to_string(body.size()))
        .append("\r\n");
  }
  out.append("\r\n").append(body);
  if (const Status sent = send_all(out); !sent) return sent.error();
  ClientReply reply;
  do {
    reply = ClientReply();
    if (const Status head = read_head(reply); !head) return head.error();
  } while (reply.status == 100);
  if (const Status read = read_body(reply, method == "HEAD", on_bytes); !read) return read.error();
  const auto connection = reply.header("connection");
  if (!reply.complete || connection == "close" ||
      (!reply.header("content-length") && !reply.header("transfer-encoding"))) {
    fd_.reset();
  }
  return reply;
}

}  // namespace di::http
