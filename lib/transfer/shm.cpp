#include "transfer/shm.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/fd_packet.h"
#include "base/log.h"
#include "wire/codec.h"

namespace di::transfer {

namespace {

Result<Fd> make_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno_error("socket");
  return fd;
}

template <class M>
Bytes packet_of(const M& message) {
  const Bytes body = wire::body_encode(message);
  wire::Header header;
  header.number = M::number;
  const auto head = wire::header_encode(header, body);
  Bytes packet(head.begin(), head.end());
  packet.insert(packet.end(), body.begin(), body.end());
  return packet;
}

template <class M>
Result<M> message_of(ByteView packet) {
  if (packet.size() < wire::header_bytes) return Error{Code::corrupt, 0, "a packet is too short"};
  const ByteView body = packet.subspan(wire::header_bytes);
  auto header = wire::header_decode(packet.first(wire::header_bytes), body);
  if (!header || header->number != M::number)
    return Error{Code::corrupt, 0, "not the packet that was expected"};
  auto message = wire::body_decode<M>(body);
  if (!message) return Error{Code::corrupt, 0, "a packet does not decode"};
  return std::move(*message);
}

}  // namespace

// ---- server

struct ShmServer::Connection {
  Connection(ShmServer& server, Fd descriptor)
      : fd(std::move(descriptor)),
        hello_timer(server.loop_, loop::TimerKind::liveness, "shm-hello",
                    [this, &server] { server.end(*this); }),
        watch(server.loop_, fd.get(), "shm-client") {
    hello_timer.start_after(shm_hello_within);
    watch.on_readable([this, &server] { server.receive(*this); });
  }

  Fd fd;
  bool attached = false;
  wire::arena_hello hello;
  loop::Timer hello_timer;
  loop::Watch watch;
};

Result<std::unique_ptr<ShmServer>> ShmServer::listen(loop::Loop& loop, const std::string& path, Region region,
                                                     Events events) {
  Result<sockaddr_un> address = unix_address(path);
  if (!address) return address.error();
  Result<Fd> fd = make_socket();
  if (!fd) return fd.error().in(path);
  ::unlink(path.c_str());
  if (::bind(fd->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    return errno_error("bind " + path);
  }
  if (::listen(fd->get(), 64) != 0) return errno_error("listen " + path);
  return std::unique_ptr<ShmServer>(
      new ShmServer(loop, path, *std::move(fd), std::move(region), std::move(events)));
}

ShmServer::ShmServer(loop::Loop& loop, std::string path, Fd fd, Region region, Events events)
    : loop_(loop),
      path_(std::move(path)),
      fd_(std::move(fd)),
      region_(std::move(region)),
      events_(std::move(events)),
      accept_timer_(loop, loop::TimerKind::liveness, "shm-accept", [this] { accept_again(); }) {
  watch_ = std::make_unique<loop::Watch>(loop_, fd_.get(), "shm-listen");
  accept_again();
}

ShmServer::~ShmServer() {
  watch_.reset();
  connections_.clear();
  ::unlink(path_.c_str());
}

void ShmServer::accept_again() {
  watch_->on_readable([this] { accept_all(); });
}

void ShmServer::accept_all() {
  while (true) {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        accept_failed_ = false;
        return;
      }
      // The socket stays readable, so it is left alone for a while.
      if (!std::exchange(accept_failed_, true))
        log_warn("shm", "no client is accepted", {{"error", errno_error("accept " + path_)}});
      watch_->on_readable(nullptr);
      return accept_timer_.start_after(shm_accept_pause);
    }
    if (const Status same = check_same_user(fd.get()); !same.ok()) {
      log_warn("shm", "refused a client", {{"error", same.error()}});
      continue;
    }
    if (connections_.size() >= shm_clients_max) {
      log_warn("shm", "refused a client: too many", {{"clients", connections_.size()}});
      continue;
    }
    connections_.push_back(std::make_unique<Connection>(*this, std::move(fd)));
  }
}

void ShmServer::receive(Connection& connection) {
  Result<FdPacket> packet = fd_packet_receive(connection.fd.get(), shm_packet_bytes_max);
  if (!packet) {
    if (packet.error().code != Code::busy) end(connection);
    return;
  }
  // Anything after the hello is nonsense, and so is a client that sends it.
  Result<wire::arena_hello> hello = message_of<wire::arena_hello>(packet->bytes);
  if (connection.attached || !hello) {
    log_warn("shm", "a client sent nonsense", {{"peer", connection.hello.instance}});
    end(connection);
    return;
  }
  wire::arena_region region;
  region.generation = region_.generation;
  region.bytes = region_.bytes;
  region.instance = region_.instance;
  if (!fd_packet_send(connection.fd.get(), packet_of(region), region_.fd).ok()) {
    end(connection);
    return;
  }
  connection.hello = *std::move(hello);
  connection.attached = true;
  connection.hello_timer.cancel();
  if (events_.attached) events_.attached(connection.hello);
}

void ShmServer::end(Connection& connection) {
  for (auto it = connections_.begin(); it != connections_.end(); ++it) {
    if (it->get() != &connection) continue;
    const std::unique_ptr<Connection> ended = std::move(*it);
    connections_.erase(it);
    if (ended->attached && events_.detached) events_.detached(ended->hello);
    return;
  }
}

void ShmServer::drop(const std::string& instance) {
  connections_.remove_if([&](const std::unique_ptr<Connection>& connection) {
    return connection->attached && connection->hello.instance == instance;
  });
}

std::size_t ShmServer::attached_count() const {
  std::size_t count = 0;
  for (const auto& connection : connections_) count += connection->attached ? 1 : 0;
  return count;
}

// ---- client

Result<std::unique_ptr<ShmClient>> ShmClient::connect(loop::Loop& loop, const std::string& path,
                                                      const wire::arena_hello& hello, Events events) {
  Result<sockaddr_un> address = unix_address(path);
  if (!address) return address.error();
  Result<Fd> fd = make_socket();
  if (!fd) return fd.error().in(path);
  // On a Unix socket this succeeds or fails at once.
  if (::connect(fd->get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
    const int why = errno;
    Error error = errno_error("connect " + path, why);
    if (why == ENOENT || why == ECONNREFUSED || why == EAGAIN) error.code = Code::unreachable;
    return error;
  }
  if (Status same = check_same_user(fd->get()); !same.ok()) return same.error().in(path);
  if (Status sent = fd_packet_send(fd->get(), packet_of(hello), -1); !sent.ok()) return sent.error().in(path);
  return std::unique_ptr<ShmClient>(new ShmClient(loop, *std::move(fd), std::move(events)));
}

ShmClient::ShmClient(loop::Loop& loop, Fd fd, Events events)
    : fd_(std::move(fd)), events_(std::move(events)) {
  watch_ = std::make_unique<loop::Watch>(loop, fd_.get(), "shm-server");
  watch_->on_readable([this] { receive(); });
}

ShmClient::~ShmClient() = default;

void ShmClient::receive() {
  Result<FdPacket> packet = fd_packet_receive(fd_.get(), shm_packet_bytes_max);
  if (!packet) {
    if (packet.error().code != Code::busy) end(packet.error());
    return;
  }
  Result<wire::arena_region> region = message_of<wire::arena_region>(packet->bytes);
  if (attached_ || !region || !packet->fd.valid()) {
    end(Error{Code::corrupt, 0, "arena socket: the server sent nonsense"});
    return;
  }
  attached_ = true;
  if (events_.attached) events_.attached(*region, std::move(packet->fd));
}

void ShmClient::end(const Error& why) {
  // The callback may destroy this object.
  watch_->on_readable(nullptr);
  const auto detached = std::move(events_.detached);
  if (detached) detached(why);
}

}  // namespace di::transfer
