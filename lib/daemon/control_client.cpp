#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>

#include "base/clock.h"
#include "base/fd.h"
#include "daemon/control.h"
#include "daemon/stream.h"

namespace di::daemon {

namespace {

// The answer to ctl_hello needs no work of the daemon.
constexpr Duration hello_silence_max = seconds(10);

}  // namespace

struct ControlClient::Impl {
  Fd fd;
  std::string path;
  std::string daemon;
  Bytes in;
  std::size_t used = 0;  // of `in`, by the message returned last

  Status send(const Bytes& bytes) {
    std::size_t at = 0;
    while (at < bytes.size()) {
      const ssize_t sent = ::send(fd.get(), &bytes[at], bytes.size() - at, MSG_NOSIGNAL);
      if (sent < 0) return hung_up();
      at += static_cast<std::size_t>(sent);
    }
    return {};
  }
  [[nodiscard]] Error hung_up() const { return Error{Code::unreachable, 0, path + ": the daemon hung up"}; }

  // The next message; its body is valid until the next call.
  Result<StreamMessage> next(Duration silence_max) {
    in.erase(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(used));
    used = 0;
    const MonotonicClock clock;
    while (true) {
      auto taken = stream_take(in, wire::body_bytes_max);
      if (!taken) {
        const bool version = taken.fault() == wire::Fault::version;
        return Error{version ? Code::unsupported : Code::corrupt, 0,
                     version ? "another protocol version" : std::string(wire::fault_name(taken.fault()))};
      }
      if (taken->has_value()) {
        used = (*taken)->used;
        return **taken;
      }
      pollfd entry{fd.get(), POLLIN, 0};
      const int ready = ::poll(&entry, 1, static_cast<int>(to_ms(silence_max)));
      if (ready == 0) {
        return Error{Code::timeout, 0,
                     path + ": no answer within " + std::to_string(to_ms(silence_max)) + " ms"};
      }
      std::array<std::byte, 65536> buffer;
      const ssize_t got = ready < 0 ? -1 : ::recv(fd.get(), buffer.data(), buffer.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return hung_up();
      in.insert(in.end(), buffer.begin(), buffer.begin() + got);
    }
  }
};

ControlClient::ControlClient() : impl_(std::make_unique<Impl>()) {}
ControlClient::~ControlClient() = default;
ControlClient::ControlClient(ControlClient&&) noexcept = default;

Result<ControlClient> ControlClient::connect(const std::string& path, std::string_view program) {
  ControlClient client;
  Impl& impl = *client.impl_;
  impl.path = path;
  sockaddr_un address{};
  if (path.size() >= sizeof address.sun_path) {
    return Error{Code::invalid, 0, path + ": longer than a socket path can be"};
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  impl.fd = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!impl.fd.valid()) return errno_error("socket " + path);
  if (::connect(impl.fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    Error error = errno_error("connect " + path);
    if (error.code == Code::io) error.code = Code::unreachable;
    return error;
  }
  Bytes hello;
  stream_append(hello, wire::ctl_hello{std::string(program), wire::protocol_version});
  DI_TRY(impl.send(hello));
  Result<StreamMessage> answer = impl.next(hello_silence_max);
  const Error incompatible{Code::unsupported, 0,
                           "incompatible " + std::string(program) + " and the daemon at " + path};
  if (!answer) {
    if (answer.error().code == Code::unsupported || answer.error().code == Code::corrupt) return incompatible;
    return answer.error();
  }
  wire::Decoded<wire::ctl_hello> message = wire::body_decode<wire::ctl_hello>(answer->body);
  if (answer->header.number != wire::ctl_hello::number || !message) return incompatible;
  impl.daemon = message->program;
  if (message->protocol != wire::protocol_version) {
    return Error{Code::unsupported, 0, "incompatible " + std::string(program) + " and " + impl.daemon};
  }
  return client;
}

Status ControlClient::request(const std::vector<std::string>& words,
                              const std::function<void(const wire::ctl_row&)>& row, Duration silence_max) {
  Bytes request;
  stream_append(request, wire::ctl_request{words});
  DI_TRY(impl_->send(request));
  while (true) {
    const Result<StreamMessage> message = impl_->next(silence_max);
    if (!message) return message.error();
    if (message->header.number == wire::ctl_row::number) {
      wire::Decoded<wire::ctl_row> decoded = wire::body_decode<wire::ctl_row>(message->body);
      if (!decoded) return Error{Code::corrupt, 0, std::string(wire::fault_name(decoded.fault()))};
      if (row) row(*decoded);
    } else if (message->header.number == wire::ctl_end::number) {
      wire::Decoded<wire::ctl_end> end = wire::body_decode<wire::ctl_end>(message->body);
      if (!end) return Error{Code::corrupt, 0, std::string(wire::fault_name(end.fault()))};
      if (end->code == 0) return {};
      return Error{static_cast<Code>(end->code), 0, end->reason};
    }
  }
}

const std::string& ControlClient::daemon() const {
  return impl_->daemon;
}

}  // namespace di::daemon
