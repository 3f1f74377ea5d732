#include "net/zmq.h"

#include <zmq.h>

#include <array>
#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace di::net {

namespace {

// Incoming connections are named by the 32 bits of the routing id that the ROUTER draws for each.
constexpr ConnectionId incoming_bit = ConnectionId{1} << 62;
constexpr std::size_t routing_id_bytes = 5;  // zero, then the 32 bits
constexpr std::size_t incoming_max = 8192;   // two generations of peers_max

// Messages taken from one socket per turn, so that the others get theirs.
constexpr int drain_max = 256;

// The first retries of a connection to an address that nobody has bound yet, and the slowest.
constexpr int reconnect_ms = 20;
constexpr int reconnect_ms_max = 500;

// After the ROUTER's monitor reports a broken connection its pipe may live on for a moment in the
// library's own thread; the incoming ones are probed at these times after it.
constexpr std::array<milliseconds, 4> probe_after{milliseconds(0), milliseconds(5), milliseconds(50),
                                                  milliseconds(500)};

Error zmq_error(const std::string& what) {
  const int number = zmq_errno();
  return Error{number == EADDRINUSE || number == EADDRNOTAVAIL ? Code::io : Code::invalid, number,
               what + ": " + zmq_strerror(number)};
}

void set_int(void* socket, int option, int value) {
  const int failed = zmq_setsockopt(socket, option, &value, sizeof value);
  DI_ASSERT(failed == 0);
}

// Every option of every socket of ours.  Liveness is ours (net/peer.h): ZeroMQ's own heartbeats stay
// off.  IMMEDIATE: nothing is queued for a connection that does not exist.
void set_options(void* socket, int type) {
  set_int(socket, ZMQ_LINGER, 0);
  set_int(socket, ZMQ_SNDHWM, transport_queue_max);
  set_int(socket, ZMQ_RCVHWM, transport_queue_max);
  const std::int64_t bytes_max = static_cast<std::int64_t>(message_bytes_max);
  const int failed = zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &bytes_max, sizeof bytes_max);
  DI_ASSERT(failed == 0);
  set_int(socket, ZMQ_IMMEDIATE, 1);
  set_int(socket, ZMQ_HEARTBEAT_IVL, 0);
  set_int(socket, ZMQ_HANDSHAKE_IVL, 3000);
  set_int(socket, ZMQ_RECONNECT_IVL, reconnect_ms);
  set_int(socket, ZMQ_RECONNECT_IVL_MAX, reconnect_ms_max);
  set_int(socket, ZMQ_BACKLOG, 1024);
  if (type == ZMQ_ROUTER) set_int(socket, ZMQ_ROUTER_MANDATORY, 1);
}

// An owned zmq_msg_t.
class Part {
 public:
  Part() { zmq_msg_init(&message_); }
  ~Part() { zmq_msg_close(&message_); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  zmq_msg_t* get() { return &message_; }
  [[nodiscard]] bool more() const { return zmq_msg_more(&message_) != 0; }
  ByteView view() {
    return {static_cast<const std::byte*>(zmq_msg_data(&message_)), zmq_msg_size(&message_)};
  }

 private:
  zmq_msg_t message_{};
};

// A socket, its monitor, and the watches of both.  Its callbacks may destroy it through `gone`.
class Source {
 public:
  struct Handlers {
    std::function<void(std::span<const ByteView>)> message;
    std::function<void()> established;
    std::function<void()> broken;
  };

  Source(loop::Loop& loop, void* context, int type, std::uint64_t number, Handlers handlers)
      : loop_(loop), handlers_(std::move(handlers)), alive_(std::make_shared<bool>(true)) {
    socket_ = zmq_socket(context, type);
    DI_ASSERT(socket_ != nullptr);
    set_options(socket_, type);
    const std::string address = "inproc://monitor." + std::to_string(number);
    int failed =
        zmq_socket_monitor(socket_, address.c_str(), ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED);
    DI_ASSERT(failed == 0);
    monitor_ = zmq_socket(context, ZMQ_PAIR);
    DI_ASSERT(monitor_ != nullptr);
    set_int(monitor_, ZMQ_LINGER, 0);
    failed = zmq_connect(monitor_, address.c_str());
    DI_ASSERT(failed == 0);
    socket_watch_ = std::make_unique<loop::Watch>(loop_, fd(socket_), "zmq");
    socket_watch_->on_readable([this] { drain(); });
    monitor_watch_ = std::make_unique<loop::Watch>(loop_, fd(monitor_), "zmq monitor");
    monitor_watch_->on_readable([this] { drain_monitor(); });
    // A descriptor signals only after its socket was once found empty.
    post_drain();
    loop_.post("zmq monitor", [this, alive = alive_] {
      if (*alive) drain_monitor();
    });
  }

  ~Source() {
    *alive_ = false;
    socket_watch_.reset();
    monitor_watch_.reset();
    zmq_socket_monitor(socket_, nullptr, 0);
    zmq_close(monitor_);
    zmq_close(socket_);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  void* socket() { return socket_; }

  // ZMQ_EVENTS: also makes the library look at what its own threads reported, and with that eats the
  // descriptor's edge.  Whoever calls it acts on ZMQ_POLLIN.
  [[nodiscard]] int events() {
    int value = 0;
    std::size_t bytes = sizeof value;
    const int failed = zmq_getsockopt(socket_, ZMQ_EVENTS, &value, &bytes);
    DI_ASSERT(failed == 0);
    return value;
  }

  // 0, or the errno of the first part.  `id` is put in front for a ROUTER.
  int send(ByteView id, std::span<const ByteView> frames) {
    int error = send_parts(id, frames);
    // The library looks at its own threads' reports only now and then while sending.
    if (error == EAGAIN && (events() & ZMQ_POLLOUT) != 0) error = send_parts(id, frames);
    look();
    return error;
  }

  // Takes what has arrived; true when this Source still lives.
  bool drain() {
    const std::shared_ptr<bool> alive = alive_;
    for (int taken = 0; (events() & ZMQ_POLLIN) != 0; ++taken) {
      if (taken == drain_max) {
        post_drain();
        return true;
      }
      receive();
      if (!*alive) return false;
    }
    return true;
  }

 private:
  static int fd(void* socket) {
    int value = -1;
    std::size_t bytes = sizeof value;
    const int failed = zmq_getsockopt(socket, ZMQ_FD, &value, &bytes);
    DI_ASSERT(failed == 0);
    return value;
  }

  // After anything that may have eaten the edge that a message arrived with.
  void look() {
    if ((events() & ZMQ_POLLIN) != 0) post_drain();
  }

  void post_drain() {
    if (drain_posted_) return;
    drain_posted_ = true;
    loop_.post("zmq", [this, alive = alive_] {
      if (!*alive) return;
      drain_posted_ = false;
      drain();
    });
  }

  int send_parts(ByteView id, std::span<const ByteView> frames) {
    if (!id.empty() && zmq_send(socket_, id.data(), id.size(), ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
      return zmq_errno();
    int error = 0;
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const int flags = ZMQ_DONTWAIT | (i + 1 < frames.size() ? ZMQ_SNDMORE : 0);
      if (zmq_send(socket_, frames[i].data(), frames[i].size(), flags) < 0) {
        if (i == 0 && id.empty()) return zmq_errno();
        // In the middle of a message: the library drops the parts up to the last, so they are sent.
        if (error == 0) error = EHOSTUNREACH;
      }
    }
    return error;
  }

  void receive() {
    std::array<Part, frames_max + 1> parts;
    std::vector<ByteView> views;
    bool whole = true;
    while (true) {
      Part spill;
      Part& part = views.size() < parts.size() ? parts[views.size()] : spill;
      if (zmq_msg_recv(part.get(), socket_, ZMQ_DONTWAIT) < 0) return;
      if (&part == &spill) {
        whole = false;  // more frames than any message of ours has
      } else {
        views.push_back(part.view());
      }
      if (!part.more()) break;
    }
    if (whole) handlers_.message(views);
  }

  void drain_monitor() {
    const std::shared_ptr<bool> alive = alive_;
    while (true) {
      Part event;
      Part address;
      if (zmq_msg_recv(event.get(), monitor_, ZMQ_DONTWAIT) < 0) return;
      if (event.more()) zmq_msg_recv(address.get(), monitor_, ZMQ_DONTWAIT);
      const ByteView bytes = event.view();
      if (bytes.size() < 2) continue;
      std::uint16_t kind = 0;
      std::memcpy(&kind, bytes.data(), sizeof kind);  // host order, from our own process
      if (kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
        look();  // attaches the new pipe, so that a send finds it
        handlers_.established();
      } else if (kind == ZMQ_EVENT_DISCONNECTED) {
        // What arrived before the break comes before the news of it.
        if (!drain()) return;
        handlers_.broken();
      }
      if (!*alive) return;
    }
  }

  loop::Loop& loop_;
  const Handlers handlers_;
  std::shared_ptr<bool> alive_;
  void* socket_ = nullptr;
  void* monitor_ = nullptr;
  std::unique_ptr<loop::Watch> socket_watch_;
  std::unique_ptr<loop::Watch> monitor_watch_;
  bool drain_posted_ = false;
};

class ZmqTransport final : public Transport {
 public:
  explicit ZmqTransport(loop::Loop& loop)
      : loop_(loop),
        context_(zmq_ctx_new()),
        probe_(loop, loop::TimerKind::liveness, "zmq probe", [this] { probe(); }) {
    DI_ASSERT(context_ != nullptr);
    // Two sockets per connection; the default of 1,023 would end at 500 peers.
    const int failed = zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, 16384);
    DI_ASSERT(failed == 0);
  }
  ~ZmqTransport() override {
    outgoing_.clear();
    router_.reset();
    closing_.clear();
    zmq_ctx_term(context_);
  }

  void set_events(Events events) override { events_ = std::move(events); }

  Result<std::string> bind(const std::string& address) override {
    if (!router_) {
      router_ = std::make_unique<Source>(
          loop_, context_, ZMQ_ROUTER, ++sources_,
          Source::Handlers{[this](std::span<const ByteView> frames) { incoming_message(frames); }, [] {},
                           [this] { begin_probe(); }});
    }
    if (zmq_bind(router_->socket(), address.c_str()) != 0) return zmq_error("bind " + address);
    std::array<char, 512> actual{};
    std::size_t bytes = actual.size();
    if (zmq_getsockopt(router_->socket(), ZMQ_LAST_ENDPOINT, actual.data(), &bytes) != 0) {
      return zmq_error("bind " + address);
    }
    return std::string(actual.data());
  }

  Result<ConnectionId> connect(const std::string& address) override {
    const ConnectionId id = ++connections_;
    auto source = std::make_unique<Source>(
        loop_, context_, ZMQ_DEALER, ++sources_,
        Source::Handlers{[this, id](std::span<const ByteView> frames) {
                           if (frames.size() == 1 && frames[0].empty()) return;  // a probe
                           if (!outgoing_.contains(id)) return;  // closed while it was being drained
                           if (events_.message) events_.message(id, frames);
                         },
                         [this, id] { established(id); }, [this, id] { broken(id); }});
    if (zmq_connect(source->socket(), address.c_str()) != 0) return zmq_error("connect " + address);
    outgoing_[id] = {std::move(source), false};
    return id;
  }

  void close(ConnectionId id) override {
    const auto found = outgoing_.find(id);
    if (found == outgoing_.end()) {
      incoming_.erase(id);
      return;
    }
    // Its own callback may be running.
    closing_.push_back(std::move(found->second.source));
    outgoing_.erase(found);
    loop_.post("zmq close", [this, alive = std::weak_ptr<bool>(alive_)] {
      if (alive.lock()) closing_.clear();
    });
  }

  Status send(ConnectionId id, std::span<const ByteView> frames) override {
    DI_ASSERT(!frames.empty() && frames.size() <= frames_max);
    int error = 0;
    if ((id & incoming_bit) != 0) {
      if (!router_ || !incoming_.contains(id)) return gone();
      error = router_->send(routing_id(id), frames);
    } else {
      const auto found = outgoing_.find(id);
      if (found == outgoing_.end() || !found->second.established) return gone();
      error = found->second.source->send({}, frames);
    }
    if (error == 0) return {};
    if (error == EAGAIN) return Error{Code::busy, error, "queue full"};
    return gone();
  }

 private:
  struct Outgoing {
    std::unique_ptr<Source> source;
    bool established = false;
  };

  static Error gone() { return Error{Code::unreachable, 0, "no connection"}; }

  // The bytes live in a member because a span of them is returned.
  ByteView routing_id(ConnectionId id) {
    routing_id_[0] = std::byte{0};
    put_le<std::uint32_t>(&routing_id_[1], static_cast<std::uint32_t>(id));
    return routing_id_;
  }

  void incoming_message(std::span<const ByteView> frames) {
    const ByteView id_bytes = frames[0];
    // None of ours chooses its own routing id.
    if (id_bytes.size() != routing_id_bytes || id_bytes[0] != std::byte{0} || frames.size() < 2) return;
    const ConnectionId id = incoming_bit | get_le<std::uint32_t>(&id_bytes[1]);
    if (!incoming_.contains(id)) {
      if (incoming_.size() >= incoming_max) return;
      incoming_.insert(id);
    }
    if (events_.message) events_.message(id, frames.subspan(1));
  }

  void established(ConnectionId id) {
    const auto found = outgoing_.find(id);
    if (found == outgoing_.end()) return;
    found->second.established = true;
    if (events_.connected) events_.connected(id);
  }

  void broken(ConnectionId id) {
    const auto found = outgoing_.find(id);
    // A handshake that failed: the library tries again.
    if (found == outgoing_.end() || !found->second.established) return;
    close(id);
    if (events_.disconnected) events_.disconnected(id);
  }

  void begin_probe() {
    probe_step_ = 0;
    probe_.start_after(probe_after[0]);
  }

  // A monitor does not say whose connection broke: ROUTER_MANDATORY does, for each that is asked.
  void probe() {
    static constexpr ByteView empty;
    std::vector<ConnectionId> lost;
    for (const ConnectionId id : incoming_) {
      if (router_->send(routing_id(id), {&empty, 1}) == EHOSTUNREACH) lost.push_back(id);
    }
    if (++probe_step_ < probe_after.size()) probe_.start_after(probe_after[probe_step_]);
    for (const ConnectionId id : lost) {
      if (incoming_.erase(id) > 0 && events_.disconnected) events_.disconnected(id);
    }
  }

  loop::Loop& loop_;
  void* context_;
  Events events_;
  std::unique_ptr<Source> router_;
  std::map<ConnectionId, Outgoing> outgoing_;
  std::set<ConnectionId> incoming_;
  std::vector<std::unique_ptr<Source>> closing_;
  std::array<std::byte, routing_id_bytes> routing_id_{};
  std::uint64_t sources_ = 0;
  ConnectionId connections_ = 0;
  loop::Timer probe_;
  std::size_t probe_step_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace

std::unique_ptr<Transport> make_zmq_transport(loop::Loop& loop) {
  return std::make_unique<ZmqTransport>(loop);
}

}  // namespace di::net
