// transfer/verbs_state.h: inside of transfer/verbs_fabric.h: the fabric and what it is made of.
//
//   verbs_fabric.cpp       memory, exposures, deadlines
//   verbs_links.cpp        links and the operations that go over them: who asks
//   verbs_connections.cpp  the TCP connection that introduces two sides to each other
//   verbs_lanes.cpp        queue pairs: requests, data and answers on them
//
// Owner: the fabric's thread.  Bounds: connections_max, and those of transfer/fabric.h.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "transfer/budget.h"
#include "transfer/exposure.h"
#include "transfer/links.h"
#include "transfer/stream.h"
#include "transfer/verbs.h"
#include "transfer/verbs_fabric.h"
#include "transfer/verbs_message.h"

namespace di::transfer::verbs {

inline constexpr std::size_t connections_max = 2 * peers_max + 64;
// Of a queue pair.  Every request of the other side that is under way may have its data and its answer in the
// queue, and as much again that the device has not acknowledged yet; above that requests wait.
inline constexpr std::uint32_t sends_max = 4 * verbs_units_max;
inline constexpr std::uint32_t receives_max = 2 * verbs_units_max;
inline constexpr std::size_t message_block_bytes = receives_max * verbs_message_bytes;

// What a completion of a queue pair is of, and the number of the message or unit.
enum class Post : std::uint8_t { receive = 1, send = 2, data = 3 };
constexpr std::uint64_t post_id(Post kind, std::uint32_t index) {
  return static_cast<std::uint64_t>(kind) << 32 | index;
}

// Memory of our own that is registered.
class Mapping {
 public:
  static Result<Mapping> make(std::uint64_t bytes);
  Mapping() = default;
  ~Mapping();
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
  bool up = false;   // events say; one that is not is avoided where there is another
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
  std::deque<std::uint32_t> free_units;  // the one that is free for longest is used next
  std::uint32_t serial = 0;
  std::size_t keys = 0;  // which of the keys of the other side's memories, when that asks
  std::array<Ask, verbs_units_max> asks{};
  // Those whose place in `asks`, or whose answer's in the queue, is not free yet; at most one an ask.
  std::deque<VerbsMessage> deferred;

  [[nodiscard]] bool may_ask() const { return !free_units.empty() && sends_out < sends_max; }
};

struct Link : LinkBase {
  Connection* connection = nullptr;
  std::size_t next_lane = 0;
  // Of each rail: since a queue pair to this peer broke there, until when others are preferred.  Forgotten when a
  // greeting fails.
  std::array<Instant, verbs_lanes_max> rests_until{};
  std::size_t bounces = 0;  // slots of bounce memory
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
  // Of a dialled one with fewer lanes than both sides have rails: from then on no operation begins here, and when
  // those that have are done it is given up for another.
  std::optional<Instant> renew_at;
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
  void begin_dial(Link& link);
  void dial_failed(Link& link, std::string_view why);
  void fail_op(OpId id, Code code);
  void finish_op(OpId id, Code code);
  void fail_ops(const Link& link, bool begun_only);
  [[nodiscard]] std::optional<std::size_t> next_lane(const Link& link) const;
  [[nodiscard]] bool may_send(const Link& link) const;
  [[nodiscard]] std::uint64_t unit_bytes(const Link& link, const Op& op) const;
  bool schedule();
  bool ask(Link& link, Lane& lane, OpId id, std::uint32_t bytes);
  [[nodiscard]] bool renews(const Link& link) const;
  void renew();
  void pump();
  void pump_later();
  void measure(Link& link, std::uint64_t bytes);

  // Connections.
  void accept_all();
  [[nodiscard]] bool full() const;
  [[nodiscard]] bool make_room();
  Connection& add_connection(Fd fd);
  // `why`: of a dial that fails with it.
  void close(Connection& connection, std::string_view why = "the connection ended");
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
  [[nodiscard]] std::vector<std::size_t> rails_for(const Link& link) const;
  Status add_lane(Connection& connection, std::size_t rail);
  void drop_lane(Lane& lane);
  void drop_last_lane(Connection& connection);
  [[nodiscard]] VerbsSetup setup_of(const Connection& connection) const;

  // Queue pairs.  Each is false when the connection was closed meanwhile.
  void on_ready(Rail& rail);
  void on_rail_event(Rail& rail);
  void drain_lane(std::uint64_t id);
  bool on_completion(Lane& lane, const VerbsCompletion& completion);
  bool on_receive(Lane& lane, const VerbsCompletion& completion);
  bool answered(Lane& lane, std::uint32_t tag, Code code, bool by_imm, std::uint32_t bytes);
  bool asked(Lane& lane, const VerbsMessage& message);
  [[nodiscard]] static bool may_serve(const Lane& lane, const VerbsMessage& message);
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
  Links<Link> links_;
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

}  // namespace di::transfer::verbs
