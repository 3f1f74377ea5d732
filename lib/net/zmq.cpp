#include "net/zmq.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/log.h"

namespace di::net {

namespace {

constexpr const char* zap_address = "inproc://zeromq.zap.01";  // RFC 27
constexpr std::string_view zap_domain = "di";
constexpr std::size_t zap_frames =
    9;  // routing id, empty, version, request, domain, address, id, mechanism, key
constexpr std::size_t key_bytes = 32;

// Incoming connections are named by the 32 bits of the routing id that the ROUTER draws for each.
constexpr ConnectionId incoming_bit = ConnectionId{1} << 62;
constexpr std::size_t routing_id_bytes = 5;  // zero, then the 32 bits
constexpr std::size_t incoming_max = 8192;   // two generations of peers_max

// Messages taken from one socket per turn, so that the others get theirs.
constexpr int drain_max = 256;

// The first retries of a connection to an address that nobody has bound yet, and the slowest.
constexpr int reconnect_ms = 20;
constexpr int reconnect_ms_max = 500;

// After a handshake that failed the library either gives up or, because the connection as such worked,
// tries again every 20 ms: the pauses are ours.  The longest is what a peer waits at most after it was
// entered in a list of keys or was woken from a stop.
constexpr Duration handshake_pause_first = milliseconds(100);
constexpr Duration handshake_pause_max = seconds(2);

// A SYN that got lost is otherwise repeated at 1, 3, 7, 15, 31 s: a link that is back would not be seen.
constexpr int connect_timeout_ms = 3000;
// Peers are given up by their heartbeats (net/peer.h).  What is left of the TCP connection of one that
// vanished, or that is cut in one direction, ends after about these times.
constexpr int keepalive_idle_s = 5;
constexpr int keepalive_interval_s = 2;
constexpr int keepalive_count = 3;
constexpr int unacknowledged_ms_max = 10000;

// After the ROUTER's monitor reports a broken connection its pipe may live on for a moment in the
// library's own thread; the incoming ones are probed at these times after it.
constexpr std::array<milliseconds, 4> probe_after{milliseconds(0), milliseconds(5), milliseconds(50),
                                                  milliseconds(500)};

Error zmq_error(const std::string& what) {
  const int number = zmq_errno();
  Code code = Code::invalid;
  if (number == EADDRINUSE || number == EADDRNOTAVAIL) code = Code::io;
  if (number == EMFILE || number == ENFILE || number == ENOMEM) code = Code::busy;
  return Error{code, number, what + ": " + zmq_strerror(number)};
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
  set_int(socket, ZMQ_CONNECT_TIMEOUT, connect_timeout_ms);
  set_int(socket, ZMQ_TCP_KEEPALIVE, 1);
  set_int(socket, ZMQ_TCP_KEEPALIVE_IDLE, keepalive_idle_s);
  set_int(socket, ZMQ_TCP_KEEPALIVE_INTVL, keepalive_interval_s);
  set_int(socket, ZMQ_TCP_KEEPALIVE_CNT, keepalive_count);
  set_int(socket, ZMQ_TCP_MAXRT, unacknowledged_ms_max);
  if (type == ZMQ_ROUTER) set_int(socket, ZMQ_ROUTER_MANDATORY, 1);
}

void set_text(void* socket, int option, std::string_view value) {
  const int failed = zmq_setsockopt(socket, option, value.data(), value.size());
  DI_ASSERT(failed == 0);
}

// What holds for connections that are opened, or accepted, at `address` from now on.
void set_address_options(void* socket, std::string_view address) {
  set_int(socket, ZMQ_IPV6, address.starts_with("tcp://[") ? 1 : 0);
}

void set_server_keys(void* socket, const Curve& curve) {
  set_int(socket, ZMQ_CURVE_SERVER, 1);
  set_text(socket, ZMQ_CURVE_SECRETKEY, curve.own.secret_key);
  set_text(socket, ZMQ_ZAP_DOMAIN, zap_domain);
}

void set_client_keys(void* socket, const Curve& curve, const std::string& server_key) {
  set_text(socket, ZMQ_CURVE_SERVERKEY, server_key);
  set_text(socket, ZMQ_CURVE_PUBLICKEY, curve.own.public_key);
  set_text(socket, ZMQ_CURVE_SECRETKEY, curve.own.secret_key);
}

// Why a handshake failed, from the monitor's event.
std::string_view handshake_fault(std::uint16_t kind, std::uint32_t value) {
  if (kind == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) return "its net.public_keys does not have our key";
  if (kind == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL) {
    return "it closed: it does not hold the key that we have of it, or it stops";
  }
  switch (value) {
    case ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
      return "one side has keys and the other has none";
    case ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
      return "the keys do not fit";
    default:
      return "it does not speak our protocol";
  }
}

#ifdef __SANITIZE_THREAD__
// libzmq is built without the sanitizer, which so cannot see what orders the writes of its threads (decrypted
// bytes, properties of a connection) before our reads.  These two reads are not looked at; every other one is of
// the copy.
__attribute__((no_sanitize("thread"), noinline)) std::size_t unseen_length(const char* text) {
  const volatile char* at = text;
  std::size_t length = 0;
  while (at[length] != 0) ++length;
  return length;
}
__attribute__((no_sanitize("thread"), noinline)) void unseen_copy(const void* from, std::size_t bytes,
                                                                  char* to) {
  const auto* at = static_cast<const volatile char*>(from);
  for (std::size_t i = 0; i < bytes; ++i) to[i] = at[i];
}
#endif

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
    const void* data = zmq_msg_data(&message_);
    const std::size_t bytes = zmq_msg_size(&message_);
#ifdef __SANITIZE_THREAD__
    seen_.resize(bytes);
    unseen_copy(data, bytes, seen_.data());
    data = seen_.data();
#endif
    return {static_cast<const std::byte*>(data), bytes};
  }
  // A property of the connection that it came on; empty when there is none of this name.
  std::string property(const char* name) {
    const char* value = zmq_msg_gets(&message_, name);
    if (value == nullptr) return "";
#ifdef __SANITIZE_THREAD__
    std::string copy(unseen_length(value), '\0');
    unseen_copy(value, copy.size(), copy.data());
    return copy;
#else
    return value;
#endif
  }
  // The descriptor of that connection, which may be closed by now; -1 when unknown.
  int descriptor() {
    return zmq_msg_get(&message_, ZMQ_SRCFD);
  }

 private:
  zmq_msg_t message_{};
#ifdef __SANITIZE_THREAD__
  std::string seen_;
#endif
};

constexpr int handshake_failed_events = ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                        ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;

// A socket, its monitor, and the watches of both.  Its callbacks may destroy it through `gone`.
class Source {
 public:
  struct Handlers {
    // `last` is the last frame.
    std::function<void(std::span<const ByteView>, Part& last)> message;
    std::function<void()> established{};
    std::function<void()> broken{};
    std::function<void(std::uint16_t kind, std::uint32_t value)> failed{};  // a handshake
  };

  // `what` begins the error.  Errors: busy when there are no descriptors left for it.
  static Result<std::unique_ptr<Source>> make(loop::Loop& loop, void* context, int type, std::uint64_t number,
                                              Handlers handlers, const std::string& what) {
    std::unique_ptr<Source> source(new Source(loop, type, std::move(handlers)));
    if (!source->open(context, number)) return zmq_error(what);
    return source;
  }

  ~Source() {
    *alive_ = false;
    socket_watch_.reset();
    monitor_watch_.reset();
    if (socket_ != nullptr) zmq_socket_monitor(socket_, nullptr, 0);
    if (monitor_ != nullptr) zmq_close(monitor_);
    if (socket_ != nullptr) zmq_close(socket_);
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

  // Takes what has arrived, a turn's share of it.
  void drain() {
    const std::shared_ptr<bool> alive = alive_;
    for (int taken = 0; (events() & ZMQ_POLLIN) != 0; ++taken) {
      if (taken == drain_max) {
        post_drain();
        return;
      }
      receive();
      if (!*alive) return;
      if (broken_ && all_before_taken_) {
        post_drain();
        break;
      }
    }
    if (!broken_) return;
    broken_ = false;
    taken_since_.clear();
    all_before_taken_ = false;
    post_drain_monitor();
    if (handlers_.broken) handlers_.broken();
  }

 private:
  Source(loop::Loop& loop, int type, Handlers handlers)
      : loop_(loop), type_(type), handlers_(std::move(handlers)), alive_(std::make_shared<bool>(true)) {}

  // False: zmq_errno() says why.
  bool open(void* context, std::uint64_t number) {
    socket_ = zmq_socket(context, type_);
    if (socket_ == nullptr) return false;
    set_options(socket_, type_);
    const std::string address = "inproc://monitor." + std::to_string(number);
    if (zmq_socket_monitor(
            socket_, address.c_str(),
            ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED | handshake_failed_events) != 0) {
      return false;
    }
    monitor_ = zmq_socket(context, ZMQ_PAIR);
    if (monitor_ == nullptr) return false;
    set_int(monitor_, ZMQ_LINGER, 0);
    const int failed = zmq_connect(monitor_, address.c_str());
    DI_ASSERT(failed == 0);
    socket_watch_ = std::make_unique<loop::Watch>(loop_, fd(socket_), "zmq");
    socket_watch_->on_readable([this] { drain(); });
    monitor_watch_ = std::make_unique<loop::Watch>(loop_, fd(monitor_), "zmq monitor");
    monitor_watch_->on_readable([this] { drain_monitor(); });
    // A descriptor signals only after its socket was once found empty.
    post_drain();
    post_drain_monitor();
    return true;
  }

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
  void post_drain_monitor() {
    loop_.post("zmq monitor", [this, alive = alive_] {
      if (*alive) drain_monitor();
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
    if (broken_) count_taken(views[0]);
    if (whole) handlers_.message(views, parts[views.size() - 1]);
  }

  // The library takes from its connections by turns, and none had more than transport_queue_max waiting: when one
  // has had so many turns since, so has the one that broke, or it had less.
  void count_taken(ByteView first) {
    const std::string from(type_ == ZMQ_ROUTER ? as_text(first) : std::string_view());
    if (++taken_since_[from] > transport_queue_max || taken_since_.size() > incoming_max) {
      all_before_taken_ = true;
    }
  }

  void drain_monitor() {
    const std::shared_ptr<bool> alive = alive_;
    while (!broken_) {
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
        if (handlers_.established) handlers_.established();
      } else if (kind == ZMQ_EVENT_DISCONNECTED) {
        // What arrived before the break comes before the news of it, and that before any later event.  Of a
        // connection that we opened the library drops with the break what was not taken by then.
        broken_ = true;
        drain();
      } else if ((kind & handshake_failed_events) != 0 && bytes.size() >= 6) {
        std::uint32_t value = 0;
        std::memcpy(&value, bytes.data() + 2, sizeof value);
        if (handlers_.failed) handlers_.failed(kind, value);
      }
      if (!*alive) return;
    }
  }

  loop::Loop& loop_;
  const int type_;
  const Handlers handlers_;
  std::shared_ptr<bool> alive_;
  void* socket_ = nullptr;
  void* monitor_ = nullptr;
  std::unique_ptr<loop::Watch> socket_watch_;
  std::unique_ptr<loop::Watch> monitor_watch_;
  bool drain_posted_ = false;
  bool broken_ = false;  // a connection is, and the handler hears of it when all that came has been taken
  std::map<std::string, int> taken_since_;  // messages of each connection since one broke; incoming_max
  bool all_before_taken_ = false;           // what had come by then: others may send without a pause
};

class ZmqTransport final : public Transport {
 public:
  ZmqTransport(loop::Loop& loop, std::optional<Curve> curve)
      : loop_(loop),
        context_(zmq_ctx_new()),
        curve_(std::move(curve)),
        probe_(loop, loop::TimerKind::liveness, "zmq probe", [this] { probe(); }),
        again_(loop, loop::TimerKind::liveness, "zmq handshake", [this] { open_due(); }) {
    DI_ASSERT(context_ != nullptr);
    // Two sockets per connection; the default of 1,023 would end at 500 peers.
    const int failed = zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, 16384);
    DI_ASSERT(failed == 0);
  }
  ~ZmqTransport() override {
    outgoing_.clear();
    router_.reset();
    closing_.clear();
    zap_.reset();
    zmq_ctx_term(context_);
  }

  void set_events(Events events) override { events_ = std::move(events); }

  Result<std::string> bind(const std::string& address) override {
    if (router_) return Error{Code::exists, 0, "bind " + address + ": one address is bound already"};
    // Before any socket is bound: without a handler the library would let every key in.
    if (curve_) DI_TRY(begin_to_judge());
    Result<std::unique_ptr<Source>> made = Source::make(
        loop_, context_, ZMQ_ROUTER, ++sources_,
        Source::Handlers{
            .message = [this](std::span<const ByteView> frames,
                              Part& last) { incoming_message(frames, last); },
            .broken = [this] { begin_probe(); },
            .failed = [this](std::uint16_t kind, std::uint32_t value) { caller_failed(kind, value); }},
        "bind " + address);
    if (!made) return made.error();
    std::unique_ptr<Source> router = *std::move(made);
    set_address_options(router->socket(), address);
    if (curve_ && !is_ipc(address)) set_server_keys(router->socket(), *curve_);
    if (zmq_bind(router->socket(), address.c_str()) != 0) return zmq_error("bind " + address);
    router_ = std::move(router);
    std::array<char, 512> actual{};
    std::size_t bytes = actual.size();
    if (zmq_getsockopt(router_->socket(), ZMQ_LAST_ENDPOINT, actual.data(), &bytes) != 0) {
      return zmq_error("bind " + address);
    }
    return std::string(actual.data());
  }

  Result<ConnectionId> connect(const std::string& address, const std::string& server_key) override {
    const bool wants_keys = !is_ipc(address) && (curve_ || !server_key.empty());
    if (wants_keys && !curve_) {
      return Error{Code::denied, 0,
                   "connect " + address + ": it has a key and we have none: set net.secret_key"};
    }
    if (wants_keys && !is_key(server_key)) {
      return Error{Code::denied, 0, "connect " + address + ": its public key is not known"};
    }
    Outgoing outgoing;
    outgoing.address = address;
    if (wants_keys) outgoing.server_key = server_key;
    const ConnectionId id = ++connections_;
    DI_TRY(open(id, outgoing));
    outgoing_[id] = std::move(outgoing);
    return id;
  }

  void close(ConnectionId id) override {
    const auto found = outgoing_.find(id);
    if (found == outgoing_.end()) {
      incoming_.erase(id);
      return;
    }
    retire(std::move(found->second.source));
    outgoing_.erase(found);
  }

  void refuse(ConnectionId id) override {
    const auto found = incoming_.find(id);
    if (found == incoming_.end()) return;
    Incoming& incoming = found->second;
    incoming.refused = true;
    // The library cannot close one connection of a ROUTER.  Its descriptor can be shut down, if it is
    // still that of this connection.
    if (incoming.descriptor >= 0 && remote_of(incoming.descriptor) == incoming.remote) {
      ::shutdown(incoming.descriptor, SHUT_RDWR);
    }
  }

  [[nodiscard]] std::string peer_key(ConnectionId id) const override {
    if (const auto found = incoming_.find(id); found != incoming_.end()) return found->second.key;
    const auto found = outgoing_.find(id);
    return found != outgoing_.end() && found->second.established ? found->second.server_key : "";
  }

  [[nodiscard]] const TransportCounters& counters() const override { return counters_; }

  Status send(ConnectionId id, std::span<const ByteView> frames) override {
    DI_ASSERT(!frames.empty() && frames.size() <= frames_max);
    int error = 0;
    if ((id & incoming_bit) != 0) {
      const auto found = incoming_.find(id);
      if (!router_ || found == incoming_.end() || found->second.refused) return gone();
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
    std::string address;
    std::string server_key;          // empty: in the clear
    std::unique_ptr<Source> source;  // null in the pause after a handshake that failed
    std::uint64_t number = 0;        // of the source
    bool established = false;
    Duration pause = handshake_pause_first;
    Instant again_at = instant_never;
  };
  struct Incoming {
    std::string key;      // that it proved
    std::string remote;   // address and port, raw; empty when not TCP
    int descriptor = -1;  // the library's
    bool refused = false;
  };

  static Error gone() { return Error{Code::unreachable, 0, "no connection"}; }

  static std::string remote_of(int descriptor) {
    sockaddr_storage address{};
    socklen_t bytes = sizeof address;
    if (::getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return {};
    if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return {};
    return {reinterpret_cast<const char*>(&address), bytes};
  }

  // The bytes live in a member because a span of them is returned.
  ByteView routing_id(ConnectionId id) {
    routing_id_[0] = std::byte{0};
    put_le<std::uint32_t>(&routing_id_[1], static_cast<std::uint32_t>(id));
    return routing_id_;
  }

  // ---- Callers

  Status begin_to_judge() {
    if (zap_) return {};
    Result<std::unique_ptr<Source>> made = Source::make(
        loop_, context_, ZMQ_ROUTER, ++sources_,
        Source::Handlers{.message = [this](std::span<const ByteView> frames, Part&) { judge(frames); }},
        "judge of keys");
    if (!made) return made.error();
    const int failed = zmq_bind((*made)->socket(), zap_address);
    DI_ASSERT(failed == 0);
    zap_ = *std::move(made);
    return {};
  }

  // A request of RFC 27: may the holder of this key connect?
  void judge(std::span<const ByteView> frames) {
    if (frames.size() < 4) return;
    std::string key;
    if (frames.size() == zap_frames && as_text(frames[7]) == "CURVE" && frames[8].size() == key_bytes) {
      std::array<char, key_chars + 1> text{};
      zmq_z85_encode(text.data(), reinterpret_cast<const std::uint8_t*>(frames[8].data()), key_bytes);
      key = text.data();
    }
    const bool admitted = !key.empty() && curve_->admits(key);
    if (!admitted) {
      ++counters_.keys_refused;
      log_warn("net", "key refused",
               {{"key", key}, {"address", frames.size() > 5 ? as_text(frames[5]) : std::string_view()}});
    }
    // The key comes back as the property User-Id of each message of the connection.
    const std::array<ByteView, 7> answer{ByteView{},
                                         as_bytes("1.0"),
                                         frames[3],
                                         as_bytes(admitted ? "200" : "400"),
                                         as_bytes(admitted ? "OK" : "not listed"),
                                         as_bytes(key),
                                         ByteView{}};
    zap_->send(frames[0], answer);
  }

  void caller_failed(std::uint16_t kind, std::uint32_t value) {
    // A key that judge() refused is counted there; one that closes in the middle is somebody who stops.
    if (kind != ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) return;
    ++counters_.handshakes_refused;
    log_warn("net", "handshake refused", {{"reason", handshake_fault(kind, value)}});
  }

  void incoming_message(std::span<const ByteView> frames, Part& last) {
    const ByteView id_bytes = frames[0];
    // None of ours chooses its own routing id.
    if (id_bytes.size() != routing_id_bytes || id_bytes[0] != std::byte{0} || frames.size() < 2) return;
    const ConnectionId id = incoming_bit | get_le<std::uint32_t>(&id_bytes[1]);
    auto found = incoming_.find(id);
    if (found == incoming_.end()) {
      if (incoming_.size() >= incoming_max) return;
      Incoming incoming;
      incoming.key = last.property("User-Id");
      incoming.descriptor = last.descriptor();
      if (incoming.descriptor >= 0) incoming.remote = remote_of(incoming.descriptor);
      if (incoming.remote.empty()) incoming.descriptor = -1;
      const bool revoked = !incoming.key.empty() && !curve_->admits(incoming.key);
      found = incoming_.emplace(id, std::move(incoming)).first;
      if (revoked) {
        ++counters_.keys_refused;
        refuse(id);
      }
    }
    if (found->second.refused) {
      ++counters_.dropped_refused;
      return;
    }
    if (events_.message) events_.message(id, frames.subspan(1));
  }

  void begin_probe() {
    probe_step_ = 0;
    probe_.start_after(probe_after[0]);
  }

  // A monitor does not say whose connection broke: ROUTER_MANDATORY does, for each that is asked.
  void probe() {
    static constexpr ByteView empty;
    std::vector<ConnectionId> lost;
    for (const auto& [id, incoming] : incoming_) {
      if (router_->send(routing_id(id), {&empty, 1}) == EHOSTUNREACH) lost.push_back(id);
    }
    if (++probe_step_ < probe_after.size()) probe_.start_after(probe_after[probe_step_]);
    for (const ConnectionId id : lost) {
      const auto found = incoming_.find(id);
      if (found == incoming_.end()) continue;
      const bool refused = found->second.refused;
      incoming_.erase(found);
      if (!refused && events_.disconnected) events_.disconnected(id);
    }
  }

  // ---- Calls

  Status open(ConnectionId id, Outgoing& outgoing) {
    const std::uint64_t number = ++sources_;
    // A source that was replaced may still report something in the turn in which it is retired.
    const auto current = [this, id, number]() -> Outgoing* {
      const auto found = outgoing_.find(id);
      return found != outgoing_.end() && found->second.number == number && found->second.source != nullptr
                 ? &found->second
                 : nullptr;
    };
    Result<std::unique_ptr<Source>> made =
        Source::make(loop_, context_, ZMQ_DEALER, number,
                     Source::Handlers{.message =
                                          [this, id, current](std::span<const ByteView> frames, Part&) {
                                            if (frames.size() == 1 && frames[0].empty()) return;  // a probe
                                            if (current() == nullptr)
                                              return;  // closed while it was being drained
                                            if (events_.message) events_.message(id, frames);
                                          },
                                      .established =
                                          [this, id, current] {
                                            Outgoing* mine = current();
                                            if (mine == nullptr) return;
                                            mine->established = true;
                                            mine->pause = handshake_pause_first;
                                            if (events_.connected) events_.connected(id);
                                          },
                                      .broken =
                                          [this, id, current] {
                                            const Outgoing* mine = current();
                                            if (mine == nullptr || !mine->established) return;
                                            close(id);
                                            if (events_.disconnected) events_.disconnected(id);
                                          },
                                      .failed =
                                          [this, current](std::uint16_t kind, std::uint32_t value) {
                                            if (Outgoing* mine = current()) call_failed(*mine, kind, value);
                                          }},
                     "connect " + outgoing.address);
    if (!made) return made.error();
    std::unique_ptr<Source> source = *std::move(made);
    set_address_options(source->socket(), outgoing.address);
    if (!outgoing.server_key.empty()) set_client_keys(source->socket(), *curve_, outgoing.server_key);
    if (zmq_connect(source->socket(), outgoing.address.c_str()) != 0) {
      return zmq_error("connect " + outgoing.address);
    }
    outgoing.source = std::move(source);
    outgoing.number = number;
    outgoing.again_at = instant_never;
    return {};
  }

  void call_failed(Outgoing& outgoing, std::uint16_t kind, std::uint32_t value) {
    if (outgoing.established) return;
    ++counters_.handshakes_failed;
    log_warn("net", "handshake failed",
             {{"address", outgoing.address}, {"reason", handshake_fault(kind, value)}});
    retire(std::move(outgoing.source));
    outgoing.again_at = loop_.monotonic_now() + outgoing.pause;
    outgoing.pause = std::min(outgoing.pause * 2, handshake_pause_max);
    arm();
  }

  void arm() {
    Instant due = instant_never;
    for (const auto& [id, outgoing] : outgoing_) due = std::min(due, outgoing.again_at);
    if (due != instant_never) again_.start_at(due);
  }

  void open_due() {
    const Instant now = loop_.monotonic_now();
    for (auto& [id, outgoing] : outgoing_) {
      if (outgoing.again_at > now) continue;
      if (const Status opened = open(id, outgoing); !opened.ok()) {
        outgoing.again_at = now + handshake_pause_max;  // no descriptors left
      }
    }
    arm();
  }

  // Its own callback may be running.
  void retire(std::unique_ptr<Source> source) {
    if (source == nullptr) return;
    closing_.push_back(std::move(source));
    loop_.post("zmq close", [this, alive = std::weak_ptr<bool>(alive_)] {
      if (alive.lock()) closing_.clear();
    });
  }

  loop::Loop& loop_;
  void* context_;
  const std::optional<Curve> curve_;
  Events events_;
  TransportCounters counters_;
  std::unique_ptr<Source> zap_;
  std::unique_ptr<Source> router_;
  std::map<ConnectionId, Outgoing> outgoing_;
  std::map<ConnectionId, Incoming> incoming_;
  std::vector<std::unique_ptr<Source>> closing_;
  std::array<std::byte, routing_id_bytes> routing_id_{};
  std::uint64_t sources_ = 0;
  ConnectionId connections_ = 0;
  loop::Timer probe_;
  std::size_t probe_step_ = 0;
  loop::Timer again_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace

std::unique_ptr<Transport> make_zmq_transport(loop::Loop& loop, std::optional<Curve> curve) {
  return std::make_unique<ZmqTransport>(loop, std::move(curve));
}

bool is_endpoint(std::string_view address) {
  if (is_ipc(address)) {
    const std::size_t path = address.size() - 6;
    return path > 0 && path < sizeof sockaddr_un{}.sun_path;
  }
  const std::size_t colon = address.rfind(':');
  if (!address.starts_with("tcp://") || colon < 7) return false;
  const std::string_view host = address.substr(6, colon - 6);
  const std::string_view port = address.substr(colon + 1);
  const bool bracketed = host.starts_with('[') && host.ends_with(']') && host.size() > 2;
  if (!bracketed && host.find_first_of(":[]") != std::string_view::npos) return false;
  if (host.find_first_of(" \t/;*") != std::string_view::npos) return false;
  std::uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  return error == std::errc{} && end == port.data() + port.size() && number != 0;
}

bool is_ipc(std::string_view address) {
  return address.starts_with("ipc://");
}

bool is_local(std::string_view address) {
  if (is_ipc(address)) return true;
  const std::size_t colon = address.rfind(':');
  if (!address.starts_with("tcp://") || colon < 6) return false;
  const std::string_view host = address.substr(6, colon - 6);
  // 127.0.0.0/8 in numbers: a name may begin in any way.
  return host == "localhost" || host == "[::1]" ||
         (host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string_view::npos);
}

KeyPair key_pair_make() {
  std::array<char, key_chars + 1> public_key{};
  std::array<char, key_chars + 1> secret_key{};
  // One of 85 begins with the character that begins a comment.
  do {
    const int failed = zmq_curve_keypair(public_key.data(), secret_key.data());
    DI_ASSERT(failed == 0);  // a library without CURVE is refused when it is built
  } while (public_key[0] == '#' || secret_key[0] == '#');
  return {public_key.data(), secret_key.data()};
}

Result<KeyPair> key_pair_of(const std::string& secret_key) {
  std::array<char, key_chars + 1> public_key{};
  if (!is_key(secret_key) || zmq_curve_public(public_key.data(), secret_key.c_str()) != 0) {
    return Error{Code::invalid, 0, "not a secret key of 40 characters"};
  }
  if (!is_key(public_key.data())) {
    return Error{Code::invalid, 0, "its public key begins with '#', which begins a comment: make another"};
  }
  return KeyPair{public_key.data(), secret_key};
}

}  // namespace di::net
