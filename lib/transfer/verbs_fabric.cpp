#include "transfer/verbs_fabric.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/assert.h"
#include "base/crypto.h"
#include "base/log.h"
#include "transfer/address.h"
#include "transfer/exposure.h"
#include "transfer/stream.h"
#include "transfer/verbs_message.h"

namespace di::transfer {

namespace {

// Looks at deadlines this often while there are any.
constexpr Duration sweep_every = milliseconds(10);
constexpr std::size_t connections_max = 2 * peers_max + 64;
// Of a queue pair.  Every request of the other side that is under way may have its data and its answer in the
// queue, and as much again that the device has not acknowledged yet; above that requests wait.
constexpr std::uint32_t sends_max = 4 * verbs_units_max;
constexpr std::uint32_t receives_max = 2 * verbs_units_max;
constexpr std::size_t message_block_bytes = receives_max * verbs_message_bytes;
// Completions of one queue pair in one turn.
constexpr std::size_t poll_batch = 32;
constexpr int poll_batches_max = 8;
// Of the TCP connection: it carries one frame each way.
constexpr std::size_t turn_bytes = 4 << 20;
// As in transfer/mover.cpp.
constexpr double rate_memory_s = 0.5;
constexpr Duration rate_sample = milliseconds(5);

enum class Post : std::uint8_t { receive = 1, send = 2, data = 3 };
constexpr std::uint64_t post_id(Post kind, std::uint32_t index) {
  return static_cast<std::uint64_t>(kind) << 32 | index;
}

void set_option(int fd, int level, int option, int value) {
  // Failing means slower or later, not wrong.
  [[maybe_unused]] const int set = ::setsockopt(fd, level, option, &value, sizeof value);
}

void set_socket(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 10'000);
}

// Memory of our own that is registered.
class Mapping {
 public:
  static Result<Mapping> make(std::uint64_t bytes) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return errno_error("memory to register");
    return Mapping({static_cast<std::byte*>(at), bytes});
  }
  Mapping() = default;
  ~Mapping() {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  }
  Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  [[nodiscard]] MutableByteView bytes() const { return bytes_; }

 private:
  explicit Mapping(MutableByteView bytes) : bytes_(bytes) {}
  MutableByteView bytes_;
};

struct Rail {
  Mapping messages;  // receive buffers, a block a queue pair; outlives its registration
  std::unique_ptr<VerbsRail> verbs;
  std::vector<VerbsKeys> keys;  // of each chunk
  VerbsKeys message_keys;
  std::vector<std::uint32_t> free_blocks;
  std::unique_ptr<loop::Watch> watch;
  std::unique_ptr<loop::Watch> event_watch;
};

// Registered memory that the asked side may be sent to.
struct Chunk {
  std::byte* at = nullptr;
  std::uint64_t bytes = 0;
};
struct Spot {
  std::uint32_t chunk = 0;
  std::uint64_t offset = 0;
  std::uint64_t left = 0;
};

struct Connection;

// A part of an operation that the other side was asked for.
struct Unit {
  bool used = false;
  std::uint32_t tag = 0;
  OpId op = 0;
  std::uint32_t bytes = 0;
  std::uint64_t offset = 0;             // in the operation
  std::optional<std::uint32_t> bounce;  // slot
};
// What the other side asked for and this side's device is doing.
struct Ask {
  bool used = false;
  std::uint32_t tag = 0;
  TransferId transfer = 0;
  bool write = false;  // into this side's memory
  std::uint32_t bytes = 0;
};

// One queue pair.
struct Lane {
  std::uint64_t id = 0;
  Connection* connection = nullptr;
  std::size_t rail = 0;
  std::unique_ptr<VerbsQueuePair> qp;
  std::uint32_t block = 0;  // of the rail's messages
  std::uint32_t sends_out = 0;
  std::array<Unit, verbs_units_max> units{};
  std::vector<std::uint32_t> free_units;
  std::uint32_t serial = 0;
  std::array<Ask, verbs_units_max> asks{};
  std::deque<VerbsMessage> deferred;  // at most one an ask

  [[nodiscard]] bool may_ask() const { return !free_units.empty() && sends_out < sends_max; }
};

enum class State : std::uint8_t { idle, asked, connecting, greeting, up, pause };

// One per peer that operations go to; the states are those of transfer/mover.h.
struct Link {
  Peer peer;
  State state = State::idle;
  Connection* connection = nullptr;
  Ticket ticket;
  unsigned failures = 0;
  Instant until;      // of the dial, or of the pause
  Instant wanted_at;  // last operation
  std::array<std::deque<OpId>, classes> waiting;
  std::size_t next_lane = 0;
  std::uint64_t under_way_bytes = 0;
  Instant moved_at;
  std::optional<Instant> busy_from;
  Duration busy{0};
  std::uint64_t busy_bytes = 0;
  double bytes_per_s = 0;

  [[nodiscard]] bool waits() const {
    return !waiting[0].empty() || !waiting[1].empty() || !waiting[2].empty();
  }
};

struct Connection {
  Connection(std::uint64_t number, Fd fd, MutableByteView drain) : id(number), stream(std::move(fd), drain) {}

  const std::uint64_t id;
  Stream stream;
  std::unique_ptr<loop::Watch> watch;
  bool dialled = false;  // by this side
  bool connected = true;
  bool greeted = false;
  bool closed = false;
  Link* link = nullptr;  // of a dialled one, while the link is there
  Peer peer;
  Instant until;  // of the greeting
  std::optional<Tickets::Granted> granted;
  Bytes said;
  Bytes heard;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<VerbsMemory> memories;  // of the other side, when it asks
};

struct Op {
  Peer peer;
  bool write = false;
  TransferId transfer = 0;
  Place place;
  std::byte* local = nullptr;  // only read from by a write
  Class cls = Class::fetch;
  std::uint64_t next = 0;  // bytes that units were made of
  std::uint64_t acked = 0;
  std::uint32_t under_way = 0;  // units
  std::optional<Code> ending;   // what went wrong first; waits for its units
  Instant until;                // of the operation, then of its ending
};

class Verbs final : public VerbsFabric {
 public:
  Verbs(loop::Loop& loop, const VerbsFabricOptions& options)
      : loop_(loop),
        options_(options),
        self_(options.self),
        drain_(frame_header_bytes),
        budget_(options.budget),
        sweep_timer_(loop, loop::TimerKind::liveness, "verbs-sweep", [this] { sweep(); }),
        budget_timer_(loop, loop::TimerKind::liveness, "verbs-budget", [this] { pump(); }),
        alive_(std::make_shared<bool>(true)) {}
  ~Verbs() override { *alive_ = false; }

  Status open_rails();
  Status open_listener();

  std::string endpoint() const override { return endpoint_; }
  void set_self(const Peer& self) override { self_ = self; }
  void set_events(Events events) override { events_ = std::move(events); }

  Status expose(const Peer& to, TransferId transfer, Access access, std::vector<SlotName> slots) override;
  Status extend(const Peer& to, TransferId transfer, std::vector<SlotName> slots) override;
  void conceal(const Peer& to, TransferId transfer) override;
  Result<Ticket> grant(const Peer& to, bool seal) override;

  void ticket(const Peer& peer, const std::string& endpoint, const Ticket& ticket) override;
  void ticket_refused(const Peer& peer) override;
  Result<OpId> write(const Peer& peer, TransferId transfer, const Place& to, ByteView from,
                     Class cls) override {
    // Nothing is written there.
    return submit(peer, true, transfer, to, {const_cast<std::byte*>(from.data()), from.size()}, cls);
  }
  Result<OpId> read(const Peer& peer, TransferId transfer, const Place& from, MutableByteView into,
                    Class cls) override {
    return submit(peer, false, transfer, from, into, cls);
  }
  void cancel(OpId op) override {
    if (ops_.contains(op)) fail_op(op, Code::cancelled);
  }

  void peer_lost(const Peer& peer) override;
  void see_arrivals() const override {}  // this thread has seen the completions
  Region* view(const Peer&) override { return nullptr; }
  LinkState link(const Peer& peer) const override {
    const auto at = peers_.find(peer);
    return at == peers_.end() ? LinkState{} : LinkState{at->second.queued_bytes, at->second.bytes_per_s};
  }
  FabricGauges gauges() const override {
    return {connections_.size(), ops_.size() + finishing_, exposed_.size(), tickets_.count()};
  }
  FabricCounters counters() const override { return counters_; }

 private:
  struct Exposed {
    std::size_t slots = 0;
    bool concealing = false;
  };
  struct PeerState {
    std::size_t ops = 0;
    std::uint64_t queued_bytes = 0;
    double bytes_per_s = 0;
  };

  void later(std::function<void()> what) {
    loop_.post("verbs", [alive = alive_, what = std::move(what)] {
      if (*alive) what();
    });
  }
  [[nodiscard]] Instant now() const { return loop_.monotonic_now(); }

  // Memory.
  Status add_chunks(MutableByteView bytes, int dmabuf, std::uint64_t dmabuf_offset);
  [[nodiscard]] std::optional<Spot> find_memory(const std::byte* at) const;
  [[nodiscard]] std::vector<VerbsPiece> pieces_of(MutableByteView bytes, std::size_t rail) const;

  // Links and operations.
  Result<OpId> submit(const Peer& peer, bool write, TransferId transfer, const Place& place,
                      MutableByteView local, Class cls);
  Link* find_link(const Peer& peer);
  [[nodiscard]] bool make_room_for_link();
  void remove_link(Link& link);
  void begin_dial(Link& link);
  void dial_failed(Link& link);
  void fail_op(OpId id, Code code);
  void finish_op(OpId id, Code code);
  void fail_ops(const Link& link, bool begun_only);
  [[nodiscard]] bool may_send(const Link& link) const;
  [[nodiscard]] std::uint64_t unit_bytes(const Op& op) const;
  bool schedule();
  bool ask(Link& link, Lane& lane, OpId id, std::uint32_t bytes);
  void pump();
  void pump_later();
  void measure(Link& link, std::uint64_t bytes);

  // Connections.
  void accept_all();
  Connection& add_connection(Fd fd);
  void close(Connection& connection);
  void arm(Connection& connection);
  void on_writable(Connection& connection);
  void receive(Connection& connection);
  void flush(Connection& connection);
  bool on_header(Connection& connection);
  bool on_frame(Connection& connection);
  bool on_hello(Connection& connection);
  bool on_welcome(Connection& connection);
  void refuse_ticket(Connection& connection);
  bool malformed(Connection& connection);
  Status add_lanes(Connection& connection, std::size_t count);
  void drop_lane(Lane& lane);
  [[nodiscard]] VerbsSetup setup_of(const Connection& connection) const;

  // Queue pairs.  Each is false when the connection was closed meanwhile.
  void on_ready(Rail& rail);
  void on_rail_event(Rail& rail);
  void drain_lane(std::uint64_t id);
  bool on_completion(Lane& lane, const VerbsCompletion& completion);
  bool on_receive(Lane& lane, const VerbsCompletion& completion);
  bool answered(Lane& lane, std::uint32_t tag, Code code, bool by_imm, std::uint32_t bytes);
  bool asked(Lane& lane, const VerbsMessage& message);
  bool serve(Lane& lane, const VerbsMessage& message);
  bool served(Lane& lane, std::uint32_t index);
  bool answer(Lane& lane, std::uint32_t tag, Code code);
  [[nodiscard]] VerbsPiece message_place(const Lane& lane, std::uint32_t index) const;
  bool post_receive(Lane& lane, std::uint32_t index);
  bool posted(Lane& lane, const Status& status);

  // Exposures.
  [[nodiscard]] bool moving(const Peer& to, TransferId transfer) const;
  void conceal_now(const Peer& to, TransferId transfer);
  void look_at_concealing();

  // Time.
  void arm_sweep();
  [[nodiscard]] bool timed() const;
  void sweep();

  loop::Loop& loop_;
  const VerbsFabricOptions options_;
  Peer self_;
  Events events_;
  std::string endpoint_;
  Fd listener_;
  std::unique_ptr<loop::Watch> listener_watch_;
  bool accepting_ = true;

  Mapping bounce_;  // outlives its registration
  std::vector<std::unique_ptr<Rail>> rails_;
  std::vector<Chunk> chunks_;
  std::map<const std::byte*, std::uint32_t> chunk_at_;
  std::uint32_t bounce_chunk_ = 0;
  std::vector<std::uint32_t> free_bounce_;

  Bytes drain_;
  Budget budget_;
  Exposures exposures_;
  std::map<std::pair<Peer, TransferId>, Exposed> exposed_;
  std::size_t exposed_slots_ = 0;
  std::map<std::pair<Peer, TransferId>, Instant> concealing_;  // accesses of it are under way; since
  Tickets tickets_;

  std::map<OpId, Op> ops_;
  std::size_t finishing_ = 0;  // done() is under way
  std::size_t ending_ = 0;     // of ops_: wait for their units
  OpId next_op_ = 1;
  std::map<Peer, PeerState> peers_;
  std::map<Peer, Link> links_;
  std::vector<Link*> ring_;
  std::array<std::size_t, classes> turn_{};
  bool pumping_ = false;

  std::unordered_map<std::uint64_t, Lane*> lanes_;
  std::map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Connection>> ended_;  // until nobody can hold them any more
  std::uint64_t next_id_ = 1;
  std::size_t greetings_ = 0;

  loop::Timer sweep_timer_;
  loop::Timer budget_timer_;
  FabricCounters counters_;
  std::shared_ptr<bool> alive_;
};

// ---- memory

Status Verbs::open_rails() {
  for (const VerbsPort& port : options_.rails) {
    Result<std::unique_ptr<VerbsRail>> verbs = VerbsRail::open(port);
    if (!verbs) return verbs.error();
    auto rail = std::make_unique<Rail>();
    rail->verbs = *std::move(verbs);
    Result<Mapping> messages = Mapping::make(connections_max * message_block_bytes);
    if (!messages) return messages.error();
    rail->messages = *std::move(messages);
    Result<VerbsKeys> keys = rail->verbs->add_memory(rail->messages.bytes());
    if (!keys) return keys.error();
    rail->message_keys = *keys;
    for (std::uint32_t i = 0; i < connections_max; ++i) rail->free_blocks.push_back(i);
    rails_.push_back(std::move(rail));
  }
  for (const VerbsFabricOptions::Memory& memory : options_.memory) {
    DI_TRY(add_chunks(memory.bytes, memory.dmabuf, memory.dmabuf_offset));
  }
  Result<Mapping> bounce = Mapping::make(options_.bounce_bytes);
  if (!bounce) return bounce.error();
  bounce_ = *std::move(bounce);
  bounce_chunk_ = static_cast<std::uint32_t>(chunks_.size());
  DI_TRY(add_chunks(bounce_.bytes(), -1, 0));
  for (std::uint32_t i = 0; i < options_.bounce_bytes / options_.max_unit_bytes; ++i)
    free_bounce_.push_back(i);
  for (const std::unique_ptr<Rail>& each : rails_) {
    Rail& rail = *each;
    rail.watch = std::make_unique<loop::Watch>(loop_, rail.verbs->fd(), "verbs");
    rail.watch->on_readable([this, &rail] { on_ready(rail); });
    rail.event_watch = std::make_unique<loop::Watch>(loop_, rail.verbs->event_fd(), "verbs-event");
    rail.event_watch->on_readable([this, &rail] { on_rail_event(rail); });
  }
  return {};
}

Status Verbs::add_chunks(MutableByteView bytes, int dmabuf, std::uint64_t dmabuf_offset) {
  while (!bytes.empty()) {
    const MutableByteView part = bytes.first(std::min<std::uint64_t>(bytes.size(), verbs_region_bytes_max));
    if (chunks_.size() >= verbs_memories_max)
      return Error{Code::invalid, 0, "more memory than can be registered"};
    for (const std::unique_ptr<Rail>& rail : rails_) {
      Result<VerbsKeys> keys = rail->verbs->add_memory(part, dmabuf, dmabuf_offset);
      if (!keys) return keys.error();
      rail->keys.push_back(*keys);
    }
    chunk_at_[part.data()] = static_cast<std::uint32_t>(chunks_.size());
    chunks_.push_back({part.data(), part.size()});
    dmabuf_offset += part.size();
    bytes = bytes.subspan(part.size());
  }
  return {};
}

std::optional<Spot> Verbs::find_memory(const std::byte* at) const {
  auto found = chunk_at_.upper_bound(at);
  if (found == chunk_at_.begin()) return std::nullopt;
  --found;
  const Chunk& chunk = chunks_[found->second];
  const auto offset = static_cast<std::uint64_t>(at - chunk.at);
  if (offset >= chunk.bytes) return std::nullopt;
  return Spot{found->second, offset, chunk.bytes - offset};
}

// At most two, because a unit is smaller than a chunk that has another behind it; none when some of it is not
// registered.
std::vector<VerbsPiece> Verbs::pieces_of(MutableByteView bytes, std::size_t rail) const {
  std::vector<VerbsPiece> pieces;
  while (!bytes.empty()) {
    const std::optional<Spot> spot = find_memory(bytes.data());
    if (!spot || pieces.size() == 2) return {};
    const std::uint64_t part = std::min<std::uint64_t>(bytes.size(), spot->left);
    pieces.push_back({bytes.data(), static_cast<std::uint32_t>(part), rails_[rail]->keys[spot->chunk].local});
    bytes = bytes.subspan(part);
  }
  return pieces;
}

// ---- owner

Status Verbs::expose(const Peer& to, TransferId transfer, Access access, std::vector<SlotName> slots) {
  if (options_.region == nullptr) return Error{Code::invalid, 0, "no memory to open to a peer"};
  if (exposed_.contains({to, transfer})) return Error{Code::exists, 0, "the transfer is open already"};
  if (exposed_.size() >= exposures_max || exposed_slots_ + slots.size() > exposed_slots_max) {
    return Error{Code::busy, 0, "too much is open to peers"};
  }
  exposed_.emplace(std::pair{to, transfer}, Exposed{slots.size(), false});
  exposed_slots_ += slots.size();
  DI_ASSERT(exposures_.open(to, transfer, access, slots));
  return {};
}

Status Verbs::extend(const Peer& to, TransferId transfer, std::vector<SlotName> slots) {
  const auto at = exposed_.find({to, transfer});
  if (at == exposed_.end() || at->second.concealing) return Error{Code::not_found, 0, "no such transfer"};
  if (exposed_slots_ + slots.size() > exposed_slots_max)
    return Error{Code::busy, 0, "too much is open to peers"};
  at->second.slots += slots.size();
  exposed_slots_ += slots.size();
  exposures_.extend(to, transfer, slots);
  return {};
}

void Verbs::conceal(const Peer& to, TransferId transfer) {
  const auto at = exposed_.find({to, transfer});
  if (at != exposed_.end() && std::exchange(at->second.concealing, true)) return;
  exposures_.close(to, transfer, now());
  if (moving(to, transfer)) {
    concealing_.emplace(std::pair{to, transfer}, now());
    arm_sweep();
  } else {
    conceal_now(to, transfer);
  }
}

bool Verbs::moving(const Peer& to, TransferId transfer) const {
  for (const auto& [id, connection] : connections_) {
    if (connection->dialled || connection->peer != to) continue;
    for (const std::unique_ptr<Lane>& lane : connection->lanes) {
      for (const Ask& ask : lane->asks) {
        if (ask.used && ask.transfer == transfer) return true;
      }
    }
  }
  return false;
}

void Verbs::conceal_now(const Peer& to, TransferId transfer) {
  later([this, to, transfer] {
    if (const auto at = exposed_.find({to, transfer}); at != exposed_.end()) {
      exposed_slots_ -= at->second.slots;
      exposed_.erase(at);
    }
    if (events_.concealed) events_.concealed(to, transfer);
  });
}

void Verbs::look_at_concealing() {
  for (auto at = concealing_.begin(); at != concealing_.end();) {
    if (moving(at->first.first, at->first.second)) {
      ++at;
      continue;
    }
    conceal_now(at->first.first, at->first.second);
    at = concealing_.erase(at);
  }
}

Result<Ticket> Verbs::grant(const Peer& to, bool seal) {
  if (seal) return Error{Code::unsupported, 0, "verbs cannot seal"};
  if (tickets_.count() >= tickets_max) return Error{Code::busy, 0, "too many tickets are out"};
  Ticket ticket;
  random_bytes(std::as_writable_bytes(std::span(ticket.secret)));
  tickets_.add(to, ticket, now() + options_.ticket_life);
  arm_sweep();
  return ticket;
}

void Verbs::peer_lost(const Peer& peer) {
  tickets_.forget(peer);
  // The link goes first: the end of its connection must not begin a dial.
  if (Link* link = find_link(peer)) {
    Connection* connection = link->connection;
    link->connection = nullptr;
    link->state = State::idle;
    if (connection != nullptr) close(*connection);
    fail_ops(*link, false);
    remove_link(*link);
  }
  std::vector<Connection*> theirs;
  for (const auto& [id, connection] : connections_) {
    const bool greets = connection->granted && connection->granted->to == peer;
    if (greets || connection->peer == peer) theirs.push_back(connection.get());
  }
  for (Connection* connection : theirs) close(*connection);
  for (auto at = exposed_.lower_bound({peer, 0}); at != exposed_.end() && at->first.first == peer; ++at) {
    if (std::exchange(at->second.concealing, true)) continue;
    exposures_.close(peer, at->first.second, now());
    conceal_now(peer, at->first.second);
  }
  if (const auto at = peers_.find(peer); at != peers_.end()) {
    at->second.bytes_per_s = 0;
    if (at->second.ops == 0) peers_.erase(at);
  }
}

// ---- initiator

Result<OpId> Verbs::submit(const Peer& to, bool write, TransferId transfer, const Place& place,
                           MutableByteView local, Class cls) {
  if (place.bytes == 0 || place.bytes != local.size()) {
    return Error{Code::invalid, 0, "an operation of no or two sizes"};
  }
  if (!peers_.contains(to) && peers_.size() >= peers_max) {
    std::erase_if(peers_, [](const auto& entry) { return entry.second.ops == 0; });
    if (peers_.size() >= peers_max) return Error{Code::busy, 0, "too many peers"};
  }
  PeerState& peer = peers_[to];
  if (peer.ops >= ops_max || (peer.ops > 0 && peer.queued_bytes + place.bytes > queue_bytes_max)) {
    return Error{Code::busy, 0, "the peer's queue is full"};
  }
  Link* link = find_link(to);
  if (link == nullptr) {
    if (!make_room_for_link()) return Error{Code::busy, 0, "too many peers"};
    link = &links_[to];
    link->peer = to;
    ring_.push_back(link);
  }
  ++peer.ops;
  peer.queued_bytes += place.bytes;
  const OpId id = next_op_++;
  Op op;
  op.peer = to;
  op.write = write;
  op.transfer = transfer;
  op.place = place;
  op.local = local.data();
  op.cls = cls;
  op.until = now() + options_.op_wait;
  ops_.emplace(id, std::move(op));
  link->wanted_at = now();
  arm_sweep();
  if (link->state != State::up && link->failures > 0) {
    fail_op(id, Code::unreachable);
    return id;
  }
  link->waiting[static_cast<std::size_t>(cls)].push_back(id);
  if (link->state == State::idle) begin_dial(*link);
  if (link->state == State::up) {
    if (!link->busy_from) link->busy_from = now();
    pump_later();
  }
  return id;
}

Link* Verbs::find_link(const Peer& peer) {
  const auto at = links_.find(peer);
  return at == links_.end() ? nullptr : &at->second;
}

void Verbs::remove_link(Link& link) {
  DI_ASSERT(link.connection == nullptr && !link.waits());
  std::erase(ring_, &link);
  links_.erase(Peer(link.peer));
}

bool Verbs::make_room_for_link() {
  if (links_.size() < peers_max) return true;
  for (Link* link : ring_) {
    if (link->connection != nullptr || link->waits() || link->state == State::asked) continue;
    remove_link(*link);
    return true;
  }
  return false;
}

void Verbs::begin_dial(Link& link) {
  link.state = State::asked;
  link.until = now() + options_.dial_wait;
  arm_sweep();
  later([this, peer = link.peer] {
    const Link* asked = find_link(peer);
    if (asked == nullptr || asked->state != State::asked) return;
    if (events_.want_ticket) {
      events_.want_ticket(peer);
    } else {
      ticket_refused(peer);
    }
  });
}

void Verbs::dial_failed(Link& link) {
  ++counters_.dials_failed;
  ++link.failures;
  link.state = State::pause;
  link.until = now() + dial_pause(link.failures, options_.dial_pause_min, options_.dial_pause_max);
  arm_sweep();
  if (Connection* connection = link.connection) {
    link.connection = nullptr;
    connection->link = nullptr;
    close(*connection);
  }
  fail_ops(link, false);
}

void Verbs::ticket_refused(const Peer& peer) {
  Link* link = find_link(peer);
  if (link != nullptr && link->state == State::asked) dial_failed(*link);
}

void Verbs::ticket(const Peer& peer, const std::string& endpoint, const Ticket& ticket) {
  Link* link = find_link(peer);
  if (link == nullptr || link->state != State::asked) return;  // the answer comes too late
  ++counters_.dials;
  const Result<Address> address = address_parse(endpoint);
  Fd fd;
  int failed = address && !ticket.seal ? 0 : EINVAL;
  if (failed == 0) {
    fd = Fd(::socket(address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd.valid()) failed = errno;
  }
  if (failed == 0) {
    set_socket(fd.get());
    if (::connect(fd.get(), address->get(), address->length) != 0 && errno != EINPROGRESS) failed = errno;
  }
  if (failed != 0) {
    log_write(LogLevel::debug, "fabric", "dial failed", {{"peer", peer.instance}, {"errno", failed}});
    dial_failed(*link);
    return;
  }
  Connection& connection = add_connection(std::move(fd));
  connection.dialled = true;
  connection.connected = false;
  connection.link = link;
  connection.peer = peer;
  link->connection = &connection;
  link->ticket = ticket;
  link->state = State::connecting;
  arm(connection);
}

// The first thing that goes wrong with an operation; it ends when the device is through with it.
void Verbs::fail_op(OpId id, Code code) {
  Op& op = ops_.at(id);
  if (op.ending) return;
  if (Link* link = find_link(op.peer); link != nullptr && op.next < op.place.bytes) {
    std::erase(link->waiting[static_cast<std::size_t>(op.cls)], id);
  }
  if (op.under_way == 0) {
    finish_op(id, code);
    return;
  }
  op.ending = code;
  op.until = now() + options_.cancel_wait;
  ++ending_;
  arm_sweep();
}

// The one way in which an operation ends.  Afterwards its memory is in nobody's hands.
void Verbs::finish_op(OpId id, Code code) {
  const auto at = ops_.find(id);
  DI_ASSERT(at != ops_.end() && at->second.under_way == 0);
  if (at->second.ending) --ending_;
  if (code == Code::cancelled) {
    ++counters_.ops_cancelled;
  } else if (code != Code::ok) {
    ++counters_.ops_failed;
  }
  if (Link* link = find_link(at->second.peer); link != nullptr && link->busy_from) measure(*link, 0);
  ++finishing_;
  later([this, id, code, peer = at->second.peer, bytes = at->second.place.bytes] {
    --finishing_;
    const auto state = peers_.find(peer);
    DI_ASSERT(state != peers_.end());
    --state->second.ops;
    state->second.queued_bytes -= bytes;
    if (events_.done) events_.done(id, code);
  });
  ops_.erase(at);
}

void Verbs::fail_ops(const Link& link, bool begun_only) {
  std::vector<OpId> ids;
  for (const auto& [id, op] : ops_) {
    if (op.peer == link.peer && (!begun_only || op.next > 0)) ids.push_back(id);
  }
  for (const OpId id : ids) {
    const Op& op = ops_.at(id);
    DI_ASSERT(op.under_way == 0);
    if (op.ending) {
      finish_op(id, *op.ending);
    } else {
      fail_op(id, Code::unreachable);
    }
  }
}

bool Verbs::may_send(const Link& link) const {
  if (link.state != State::up) return false;
  if (std::none_of(link.connection->lanes.begin(), link.connection->lanes.end(),
                   [](const std::unique_ptr<Lane>& lane) { return lane->may_ask(); })) {
    return false;
  }
  return link.under_way_bytes == 0 || link.under_way_bytes + options_.max_unit_bytes <= options_.window_bytes;
}

// Of the next unit; 0 when it needs to be copied and there is no room for that.
std::uint64_t Verbs::unit_bytes(const Op& op) const {
  const std::uint64_t bytes = std::min<std::uint64_t>(options_.max_unit_bytes, op.place.bytes - op.next);
  const std::optional<Spot> spot = find_memory(op.local + op.next);
  if (spot) return std::min(bytes, spot->left);
  return free_bounce_.empty() ? 0 : bytes;
}

// Asks for one unit; false when none may go.
bool Verbs::schedule() {
  Budget::Heads heads{};
  std::array<std::size_t, classes> from{};
  for (std::size_t cls = 0; cls < classes; ++cls) {
    for (std::size_t i = 0; i < ring_.size() && heads[cls].bytes == 0; ++i) {
      const std::size_t at = (turn_[cls] + i) % ring_.size();
      const Link& link = *ring_[at];
      if (link.waiting[cls].empty() || link.state != State::up) continue;
      heads[cls].backlog = true;
      if (!may_send(link)) continue;
      heads[cls].bytes = unit_bytes(ops_.at(link.waiting[cls].front()));
      from[cls] = at;
    }
  }
  const std::optional<Class> taken = budget_.take(heads, now());
  if (!taken) return false;
  const auto cls = static_cast<std::size_t>(*taken);
  Link& link = *ring_[from[cls]];
  turn_[cls] = from[cls] + 1;
  const OpId id = link.waiting[cls].front();
  const std::vector<std::unique_ptr<Lane>>& lanes = link.connection->lanes;
  while (!lanes[link.next_lane % lanes.size()]->may_ask()) ++link.next_lane;
  Lane& lane = *lanes[link.next_lane++ % lanes.size()];
  ask(link, lane, id, static_cast<std::uint32_t>(heads[cls].bytes));
  return true;
}

bool Verbs::ask(Link& link, Lane& lane, OpId id, std::uint32_t bytes) {
  Op& op = ops_.at(id);
  std::byte* local = op.local + op.next;
  const std::uint32_t index = lane.free_units.back();
  lane.free_units.pop_back();
  Unit& unit = lane.units[index];
  unit = {true, ++lane.serial * verbs_units_max + index, id, bytes, op.next, {}};
  VerbsMessage message;
  if (const std::optional<Spot> spot = find_memory(local)) {
    message.memory = spot->chunk;
    message.memory_offset = spot->offset;
  } else {
    unit.bounce = free_bounce_.back();
    free_bounce_.pop_back();
    message.memory = bounce_chunk_;
    message.memory_offset = static_cast<std::uint64_t>(*unit.bounce) * options_.max_unit_bytes;
    if (op.write) std::memcpy(bounce_.bytes().data() + message.memory_offset, local, bytes);
  }
  message.kind = op.write ? VerbsKind::write : VerbsKind::read;
  message.tag = unit.tag;
  message.transfer = op.transfer;
  message.slot = op.place.slot;
  message.offset = op.place.offset + op.next;
  message.bytes = bytes;
  if (link.under_way_bytes == 0) link.moved_at = now();
  link.under_way_bytes += bytes;
  ++op.under_way;
  op.next += bytes;
  if (op.next == op.place.bytes) link.waiting[static_cast<std::size_t>(op.cls)].pop_front();
  ++lane.sends_out;
  return posted(lane, lane.qp->send(post_id(Post::send, index), verbs_message_encode(message)));
}

void Verbs::pump() {
  while (schedule()) {
  }
  const Instant ready = budget_.ready_at(now());
  if (ready > now()) {
    const bool waits = std::any_of(ring_.begin(), ring_.end(), [](const Link* link) {
      return link->state == State::up && link->waits();
    });
    if (waits) budget_timer_.start_at(ready);
  }
}

void Verbs::pump_later() {
  if (std::exchange(pumping_, true)) return;
  later([this] {
    pumping_ = false;
    pump();
  });
}

void Verbs::measure(Link& link, std::uint64_t bytes) {
  const Instant at = now();
  if (link.busy_from) link.busy += at - std::min(at, *link.busy_from);
  link.busy_from.reset();
  if (link.state == State::up && (link.waits() || link.under_way_bytes > 0)) link.busy_from = at;
  link.busy_bytes += bytes;
  if (link.busy < rate_sample) return;
  const double busy_s = static_cast<double>(link.busy.count()) * 1e-9;
  const double rate = static_cast<double>(link.busy_bytes) / busy_s;
  link.bytes_per_s = link.bytes_per_s == 0 ? rate
                                           : link.bytes_per_s + (1 - std::exp(-busy_s / rate_memory_s)) *
                                                                    (rate - link.bytes_per_s);
  link.busy = Duration(0);
  link.busy_bytes = 0;
  if (const auto peer = peers_.find(link.peer); peer != peers_.end())
    peer->second.bytes_per_s = link.bytes_per_s;
}

// ---- connections

Status Verbs::open_listener() {
  if (options_.listen.empty()) return {};
  Result<Address> address = address_parse(options_.listen);
  if (!address) return address.error().in("data endpoint");
  listener_ = Fd(::socket(address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener_.valid()) return errno_error("data endpoint " + options_.listen);
  set_option(listener_.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  Address bound;
  bound.length = sizeof bound.storage;
  if (::bind(listener_.get(), address->get(), address->length) != 0 || ::listen(listener_.get(), 128) != 0 ||
      ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    return errno_error("data endpoint " + options_.listen);
  }
  endpoint_ = "tcp://" + address_print(bound);
  listener_watch_ = std::make_unique<loop::Watch>(loop_, listener_.get(), "verbs-listener");
  listener_watch_->on_readable([this] { accept_all(); });
  return {};
}

void Verbs::accept_all() {
  while (true) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        // No descriptor or no memory.  The listener stays readable, so it is left alone until the sweep.
        accepting_ = false;
        listener_watch_->on_readable(nullptr);
        arm_sweep();
      }
      return;
    }
    if (greetings_ >= options_.greetings_max || connections_.size() >= connections_max) {
      ++counters_.refused_connections;
      continue;
    }
    set_socket(fd.get());
    Connection& connection = add_connection(std::move(fd));
    connection.until = now() + options_.ticket_life;
    ++greetings_;
    arm_sweep();
    arm(connection);
  }
}

Connection& Verbs::add_connection(Fd fd) {
  const std::uint64_t id = next_id_++;
  auto [at, fresh] = connections_.emplace(id, std::make_unique<Connection>(id, std::move(fd), drain_));
  DI_ASSERT(fresh);
  Connection& connection = *at->second;
  connection.watch = std::make_unique<loop::Watch>(loop_, connection.stream.fd(), "verbs-peer");
  return connection;
}

void Verbs::close(Connection& connection) {
  if (connection.closed) return;
  connection.closed = true;
  connection.watch.reset();
  // The other side shall know now, not when the object goes.
  ::shutdown(connection.stream.fd(), SHUT_RDWR);
  if (!connection.dialled && !connection.greeted) --greetings_;
  // Destroyed queue pairs are drained: from here on nothing of this connection moves, here.
  for (const std::unique_ptr<Lane>& lane : connection.lanes) drop_lane(*lane);
  for (const std::unique_ptr<Lane>& lane : connection.lanes) {
    for (Unit& unit : lane->units) {
      if (!unit.used) continue;
      unit.used = false;
      if (unit.bounce) free_bounce_.push_back(*unit.bounce);
      --ops_.at(unit.op).under_way;
    }
    for (Ask& ask : lane->asks) ask.used = false;
  }
  const auto at = connections_.find(connection.id);
  if (ended_.empty()) later([this] { ended_.clear(); });
  ended_.push_back(std::move(at->second));
  connections_.erase(at);
  look_at_concealing();
  Link* link = std::exchange(connection.link, nullptr);
  if (link == nullptr) return;
  link->under_way_bytes = 0;
  link->busy_from.reset();
  if (link->connection != &connection) return;
  link->connection = nullptr;
  if (link->state != State::up) {
    dial_failed(*link);
    return;
  }
  link->state = State::idle;
  fail_ops(*link, true);
  if (link->waits()) begin_dial(*link);
}

void Verbs::arm(Connection& connection) {
  if (connection.closed) return;
  const bool writes = !connection.connected || connection.stream.unsent_bytes() > 0;
  connection.watch->on_readable(
      connection.connected ? loop::Callback([this, &connection] { receive(connection); }) : loop::Callback());
  connection.watch->on_writable(writes ? loop::Callback([this, &connection] { on_writable(connection); })
                                       : loop::Callback());
}

void Verbs::on_writable(Connection& connection) {
  if (connection.connected) return flush(connection);
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(connection.stream.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) return close(connection);
  connection.connected = true;
  connection.link->state = State::greeting;
  if (const Status made = add_lanes(connection, rails_.size()); !made.ok()) {
    log_warn("fabric", "no queue pair", {{"peer", connection.peer.instance}, {"why", made.error()}});
    return close(connection);
  }
  connection.said = verbs_setup_encode(setup_of(connection));
  Frame hello = frame_hello(connection.link->ticket.secret, false);
  hello.bytes = static_cast<std::uint32_t>(connection.said.size());
  connection.stream.push(hello, connection.said);
  flush(connection);
}

void Verbs::flush(Connection& connection) {
  std::size_t budget = turn_bytes;
  if (connection.stream.flush(budget) == Stream::Sent::ended) return close(connection);
  arm(connection);
}

bool Verbs::malformed(Connection& connection) {
  ++counters_.malformed;
  close(connection);
  return false;
}

void Verbs::receive(Connection& connection) {
  std::size_t budget = turn_bytes;
  while (!connection.closed) {
    switch (connection.stream.receive(budget)) {
      case Stream::Got::nothing:
        return;
      case Stream::Got::header:
        if (!on_header(connection)) return;
        break;
      case Stream::Got::frame:
        if (!on_frame(connection)) return;
        break;
      case Stream::Got::ended:
        // A stranger who leaves without a ticket is worth a count.
        if (!connection.dialled && !connection.greeted) ++counters_.refused_connections;
        return close(connection);
      case Stream::Got::malformed:
      case Stream::Got::forged:
        malformed(connection);
        return;
    }
  }
}

bool Verbs::on_header(Connection& connection) {
  const Frame& frame = connection.stream.frame();
  const FrameKind wanted = connection.dialled ? FrameKind::welcome : FrameKind::hello;
  if (connection.greeted || frame.kind != wanted || frame.bytes == 0 || frame.bytes > verbs_setup_bytes_max) {
    return malformed(connection);
  }
  if (!connection.dialled) {
    connection.granted = tickets_.use(frame_ticket(frame), now());
    if (!connection.granted || frame.sealed) {
      refuse_ticket(connection);
      return false;
    }
  }
  connection.heard.resize(frame.bytes);
  connection.stream.payload_into(connection.heard);
  return true;
}

void Verbs::refuse_ticket(Connection& connection) {
  ++counters_.refused_ticket;
  close(connection);
}

bool Verbs::on_frame(Connection& connection) {
  return connection.dialled ? on_welcome(connection) : on_hello(connection);
}

bool Verbs::on_hello(Connection& connection) {
  Result<VerbsSetup> setup = verbs_setup_decode(connection.heard);
  if (!setup) return malformed(connection);
  if (setup->peer != connection.granted->to) {
    refuse_ticket(connection);
    return false;
  }
  // The peer has given up what it had before: what is still on the way there must not come after what it
  // sends here.
  std::vector<Connection*> older;
  for (const auto& [id, other] : connections_) {
    if (!other->dialled && other->greeted && other->peer == setup->peer) older.push_back(other.get());
  }
  for (Connection* other : older) close(*other);
  connection.peer = setup->peer;
  const std::size_t lanes = std::min(rails_.size(), setup->lanes.size());
  Status made = add_lanes(connection, lanes);
  for (std::size_t i = 0; i < lanes && made.ok(); ++i)
    made = connection.lanes[i]->qp->connect(setup->lanes[i]);
  if (!made.ok()) {
    log_warn("fabric", "no queue pair", {{"peer", connection.peer.instance}, {"why", made.error()}});
    ++counters_.refused_connections;
    close(connection);
    return false;
  }
  connection.memories = std::move(setup->memories);
  connection.greeted = true;
  --greetings_;
  connection.said = verbs_setup_encode(setup_of(connection));
  Frame welcome;
  welcome.kind = FrameKind::welcome;
  welcome.bytes = static_cast<std::uint32_t>(connection.said.size());
  connection.stream.push(welcome, connection.said);
  flush(connection);
  return !connection.closed;
}

bool Verbs::on_welcome(Connection& connection) {
  Result<VerbsSetup> setup = verbs_setup_decode(connection.heard);
  if (!setup || setup->lanes.size() > connection.lanes.size() || !setup->memories.empty()) {
    return malformed(connection);
  }
  if (setup->peer != connection.peer) {
    // Another process has the address by now.
    log_write(LogLevel::debug, "fabric", "dial failed: another process answers",
              {{"peer", connection.peer.instance}});
    close(connection);
    return false;
  }
  for (std::size_t i = setup->lanes.size(); i < connection.lanes.size(); ++i) drop_lane(*connection.lanes[i]);
  connection.lanes.resize(setup->lanes.size());
  for (std::size_t i = 0; i < connection.lanes.size(); ++i) {
    const Status joined = connection.lanes[i]->qp->connect(setup->lanes[i]);
    if (joined.ok()) continue;
    log_warn("fabric", "no queue pair", {{"peer", connection.peer.instance}, {"why", joined.error()}});
    close(connection);
    return false;
  }
  connection.greeted = true;
  Link& link = *connection.link;
  link.state = State::up;
  link.failures = 0;
  if (link.waits()) link.busy_from = now();
  pump_later();
  return true;
}

Status Verbs::add_lanes(Connection& connection, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Rail& rail = *rails_[i];
    if (rail.free_blocks.empty()) return Error{Code::busy, 0, "too many queue pairs"};
    auto lane = std::make_unique<Lane>();
    lane->id = next_id_++;
    lane->connection = &connection;
    lane->rail = i;
    Result<std::unique_ptr<VerbsQueuePair>> qp =
        VerbsQueuePair::make(*rail.verbs, {lane->id, sends_max, receives_max, connection.dialled});
    if (!qp) return qp.error();
    lane->qp = *std::move(qp);
    lane->block = rail.free_blocks.back();
    rail.free_blocks.pop_back();
    for (std::uint32_t unit = verbs_units_max; unit-- > 0;) lane->free_units.push_back(unit);
    lanes_[lane->id] = lane.get();
    connection.lanes.push_back(std::move(lane));
    Lane& made = *connection.lanes.back();
    for (std::uint32_t index = 0; index < receives_max; ++index) {
      DI_TRY(made.qp->receive(post_id(Post::receive, index), message_place(made, index)));
    }
  }
  return {};
}

void Verbs::drop_lane(Lane& lane) {
  if (!lane.qp) return;
  lane.qp.reset();
  rails_[lane.rail]->free_blocks.push_back(lane.block);
  lanes_.erase(lane.id);
}

VerbsSetup Verbs::setup_of(const Connection& connection) const {
  VerbsSetup setup;
  setup.peer = self_;
  for (const std::unique_ptr<Lane>& lane : connection.lanes) setup.lanes.push_back(lane->qp->address());
  if (!connection.dialled) return setup;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    VerbsMemory memory{reinterpret_cast<std::uint64_t>(chunks_[i].at), chunks_[i].bytes, {}};
    for (const std::unique_ptr<Lane>& lane : connection.lanes)
      memory.keys.push_back(rails_[lane->rail]->keys[i].remote);
    setup.memories.push_back(std::move(memory));
  }
  return setup;
}

// ---- queue pairs

void Verbs::on_ready(Rail& rail) {
  for (int i = 0; i < poll_batches_max; ++i) {
    const std::optional<std::uint64_t> id = rail.verbs->next_ready();
    if (!id) break;
    drain_lane(*id);
  }
  // What was answered makes room.
  pump();
}

void Verbs::on_rail_event(Rail& rail) {
  while (const std::optional<VerbsEvent> event = rail.verbs->next_event()) {
    switch (event->kind) {
      case VerbsEvent::Kind::port_down:
        // The queue pairs find out by themselves, when their retries are exhausted.
        log_warn("fabric", "port down", {{"rail", rail.verbs->name()}});
        break;
      case VerbsEvent::Kind::port_up:
        log_info("fabric", "port up", {{"rail", rail.verbs->name()}});
        break;
      case VerbsEvent::Kind::queue_pair: {
        const auto broken = std::find_if(lanes_.begin(), lanes_.end(), [&](const auto& entry) {
          return rails_[entry.second->rail].get() == &rail && entry.second->qp->address().qpn == event->qpn;
        });
        if (broken != lanes_.end()) close(*broken->second->connection);
        break;
      }
      case VerbsEvent::Kind::device: {
        log_error("fabric", "device failed", {{"rail", rail.verbs->name()}, {"event", event->what}});
        std::set<Connection*> theirs;
        for (const auto& [id, lane] : lanes_) {
          if (rails_[lane->rail].get() == &rail) theirs.insert(lane->connection);
        }
        for (Connection* connection : theirs) close(*connection);
        break;
      }
      case VerbsEvent::Kind::other:
        break;
    }
  }
}

void Verbs::drain_lane(std::uint64_t id) {
  std::array<VerbsCompletion, poll_batch> found;
  for (int batch = 0; batch < poll_batches_max; ++batch) {
    const auto at = lanes_.find(id);
    if (at == lanes_.end()) return;
    Lane& lane = *at->second;
    const Result<std::size_t> got = lane.qp->poll(found);
    if (!got) {
      log_warn("fabric", "completions lost",
               {{"peer", lane.connection->peer.instance}, {"why", got.error()}});
      close(*lane.connection);
      return;
    }
    if (*got == 0) return;
    for (std::size_t i = 0; i < *got; ++i) {
      if (!on_completion(lane, found[i])) return;
    }
  }
  // Others have their turn; no event tells of what is left.
  later([this, id] {
    drain_lane(id);
    pump();
  });
}

bool Verbs::on_completion(Lane& lane, const VerbsCompletion& completion) {
  if (!completion.ok) {
    log_write(LogLevel::debug, "fabric", "queue pair failed",
              {{"peer", lane.connection->peer.instance}, {"why", completion.why}});
    close(*lane.connection);
    return false;
  }
  const auto index = static_cast<std::uint32_t>(completion.id);
  switch (static_cast<Post>(completion.id >> 32)) {
    case Post::receive:
      return on_receive(lane, completion);
    case Post::send:
      --lane.sends_out;
      break;
    case Post::data:
      --lane.sends_out;
      if (!served(lane, index)) return false;
      break;
  }
  while (!lane.deferred.empty() && lane.sends_out + 2 <= sends_max) {
    const VerbsMessage message = lane.deferred.front();
    lane.deferred.pop_front();
    if (!serve(lane, message)) return false;
  }
  return true;
}

VerbsPiece Verbs::message_place(const Lane& lane, std::uint32_t index) const {
  const Rail& rail = *rails_[lane.rail];
  std::byte* block = rail.messages.bytes().data() + lane.block * message_block_bytes;
  return {block + index * verbs_message_bytes, verbs_message_bytes, rail.message_keys.local};
}

bool Verbs::post_receive(Lane& lane, std::uint32_t index) {
  return posted(lane, lane.qp->receive(post_id(Post::receive, index), message_place(lane, index)));
}

bool Verbs::posted(Lane& lane, const Status& status) {
  if (status.ok()) return true;
  log_warn("fabric", "queue pair refuses",
           {{"peer", lane.connection->peer.instance}, {"why", status.error()}});
  close(*lane.connection);
  return false;
}

bool Verbs::on_receive(Lane& lane, const VerbsCompletion& completion) {
  const auto index = static_cast<std::uint32_t>(completion.id);
  if (completion.imm) {
    return post_receive(lane, index) && answered(lane, *completion.imm, Code::ok, true, completion.bytes);
  }
  const VerbsPiece place = message_place(lane, index);
  const Result<VerbsMessage> message =
      verbs_message_decode({place.at, std::min<std::size_t>(completion.bytes, place.bytes)});
  const bool answers = lane.connection->dialled;
  if (!message || (message->kind == VerbsKind::answer) != answers) return malformed(*lane.connection);
  if (!post_receive(lane, index)) return false;
  return answers ? answered(lane, message->tag, message->code, false, 0) : asked(lane, *message);
}

bool Verbs::answered(Lane& lane, std::uint32_t tag, Code code, bool by_imm, std::uint32_t bytes) {
  const std::uint32_t index = tag % verbs_units_max;
  Unit& unit = lane.units[index];
  if (!lane.connection->dialled || !unit.used || unit.tag != tag) return malformed(*lane.connection);
  const OpId id = unit.op;
  Op& op = ops_.at(id);
  const bool fits = by_imm ? !op.write && bytes == unit.bytes : op.write || code != Code::ok;
  if (!fits) return malformed(*lane.connection);
  unit.used = false;
  lane.free_units.push_back(index);
  if (unit.bounce) {
    if (by_imm && !op.ending) {
      std::memcpy(op.local + unit.offset,
                  bounce_.bytes().data() + *unit.bounce * std::uint64_t{options_.max_unit_bytes}, unit.bytes);
    }
    free_bounce_.push_back(*unit.bounce);
  }
  Link& link = *lane.connection->link;
  link.under_way_bytes -= unit.bytes;
  link.moved_at = now();
  --op.under_way;
  if (code == Code::ok) {
    (op.write ? counters_.written_bytes : counters_.read_bytes) += unit.bytes;
    op.acked += unit.bytes;
  }
  measure(link, code == Code::ok ? unit.bytes : 0);
  if (op.ending) {
    if (op.under_way == 0) finish_op(id, *op.ending);
  } else if (code != Code::ok) {
    fail_op(id, code);
  } else if (op.acked == op.place.bytes) {
    finish_op(id, Code::ok);
  }
  return true;
}

bool Verbs::asked(Lane& lane, const VerbsMessage& message) {
  const std::vector<VerbsMemory>& memories = lane.connection->memories;
  if (lane.asks[message.tag % verbs_units_max].used || lane.deferred.size() >= verbs_units_max ||
      message.bytes > frame_payload_bytes_max || message.memory >= memories.size()) {
    return malformed(*lane.connection);
  }
  const VerbsMemory& memory = memories[message.memory];
  if (message.memory_offset > memory.bytes || message.bytes > memory.bytes - message.memory_offset) {
    return malformed(*lane.connection);
  }
  if (lane.sends_out + 2 > sends_max) {
    lane.deferred.push_back(message);
    return true;
  }
  return serve(lane, message);
}

bool Verbs::serve(Lane& lane, const VerbsMessage& message) {
  const Connection& connection = *lane.connection;
  const std::uint32_t index = message.tag % verbs_units_max;
  if (lane.asks[index].used) return malformed(*lane.connection);
  if (options_.region == nullptr) {
    ++counters_.refused_transfer;
    return answer(lane, message.tag, Code::not_found);
  }
  const bool write = message.kind == VerbsKind::write;
  const Admission admission =
      exposures_.check(connection.peer, message.transfer, write ? Access::write : Access::read,
                       {message.slot, message.offset, message.bytes}, *options_.region, now());
  if (admission.refusal) {
    ++(counters_.*refusal_counter(admission.refusal->why));
    return answer(lane, message.tag, admission.refusal->code);
  }
  const std::vector<VerbsPiece> pieces = pieces_of(admission.bytes, lane.rail);
  if (pieces.empty()) {
    log_error("fabric", "slot is not registered", {{"slot", message.slot.slot}});
    return answer(lane, message.tag, Code::io);
  }
  const VerbsMemory& memory = connection.memories[message.memory];
  const std::uint64_t address = memory.address + message.memory_offset;
  lane.asks[index] = {true, message.tag, message.transfer, write, message.bytes};
  ++lane.sends_out;
  const std::uint64_t id = post_id(Post::data, index);
  return posted(lane, write ? lane.qp->read(id, pieces, address, memory.keys[lane.rail])
                            : lane.qp->write_imm(id, pieces, address, memory.keys[lane.rail], message.tag));
}

bool Verbs::served(Lane& lane, std::uint32_t index) {
  Ask& ask = lane.asks[index];
  DI_ASSERT(ask.used);
  ask.used = false;
  (ask.write ? counters_.received_bytes : counters_.served_bytes) += ask.bytes;
  if (!concealing_.empty()) look_at_concealing();
  return !ask.write || answer(lane, ask.tag, Code::ok);
}

bool Verbs::answer(Lane& lane, std::uint32_t tag, Code code) {
  VerbsMessage message;
  message.kind = VerbsKind::answer;
  message.tag = tag;
  message.code = code;
  ++lane.sends_out;
  return posted(lane,
                lane.qp->send(post_id(Post::send, tag % verbs_units_max), verbs_message_encode(message)));
}

// ---- time

bool Verbs::timed() const {
  return !ops_.empty() || tickets_.count() > 0 || greetings_ > 0 || !accepting_ || !concealing_.empty() ||
         std::any_of(ring_.begin(), ring_.end(),
                     [](const Link* link) { return link->state != State::idle && link->state != State::up; });
}

void Verbs::arm_sweep() {
  if (!sweep_timer_.armed()) sweep_timer_.start_after(sweep_every);
}

void Verbs::sweep() {
  const Instant at = now();
  tickets_.expire(at);
  if (!accepting_) {
    accepting_ = true;
    listener_watch_->on_readable([this] { accept_all(); });
  }
  std::vector<Connection*> late;
  for (const auto& [id, connection] : connections_) {
    if (!connection->dialled && !connection->greeted && connection->until <= at)
      late.push_back(connection.get());
  }
  for (Connection* connection : late) {
    ++counters_.refused_connections;
    close(*connection);
  }
  // Numbers and deadlines of operations grow together, but for those that are ending.
  std::vector<OpId> overdue;
  std::set<Link*> silent;
  for (auto op = ops_.begin(); op != ops_.end() && (ending_ > 0 || op->second.until <= at); ++op) {
    if (op->second.until > at) continue;
    if (op->second.ending) {
      silent.insert(find_link(op->second.peer));
    } else {
      overdue.push_back(op->first);
    }
  }
  for (const OpId id : overdue) fail_op(id, Code::timeout);
  for (const auto& [name, since] : std::map(concealing_)) {
    if (since + options_.stall_max > at) continue;
    for (const auto& [id, connection] : connections_) {
      if (connection->dialled || connection->peer != name.first) continue;
      close(*connection);
      break;
    }
  }
  const std::vector<Link*> links = ring_;
  for (Link* link : links) {
    switch (link->state) {
      case State::idle:
        break;
      case State::asked:
      case State::connecting:
      case State::greeting:
        if (link->until <= at) dial_failed(*link);
        break;
      case State::up:
        if (link->busy_from) measure(*link, 0);
        if (silent.contains(link) ||
            (link->under_way_bytes > 0 && link->moved_at + options_.stall_max <= at)) {
          close(*link->connection);
        }
        break;
      case State::pause:
        if (link->until > at) break;
        if (link->wanted_at + dial_interest > at) {
          begin_dial(*link);
        } else {
          remove_link(*link);
        }
        break;
    }
  }
  pump();
  if (timed()) arm_sweep();
}

}  // namespace

Result<std::unique_ptr<VerbsFabric>> make_verbs_fabric(loop::Loop& loop, const VerbsFabricOptions& options) {
  if (options.max_unit_bytes == 0 || options.max_unit_bytes > frame_payload_bytes_max) {
    return Error{Code::invalid, 0, "max_unit_bytes: want 1 to " + std::to_string(frame_payload_bytes_max)};
  }
  if (options.rails.empty() || options.rails.size() > verbs_lanes_max) {
    return Error{Code::invalid, 0, "rails: want 1 to " + std::to_string(verbs_lanes_max)};
  }
  if (options.bounce_bytes < options.max_unit_bytes || options.bounce_bytes > verbs_region_bytes_max) {
    return Error{Code::invalid, 0, "bounce_bytes: want one unit at least, and one region at most"};
  }
  auto fabric = std::make_unique<Verbs>(loop, options);
  DI_TRY(fabric->open_rails());
  DI_TRY(fabric->open_listener());
  return std::unique_ptr<VerbsFabric>(std::move(fabric));
}

}  // namespace di::transfer
