#include "transfer/loopback.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/rng.h"
#include "transfer/exposure.h"

namespace di::transfer {

class LoopbackFabric;

// The network: what is under way, by time, and who is there.
struct LoopbackNet::State {
  explicit State(const LoopbackOptions& given) : options(given), faults(given.faults), rng(given.seed) {}

  struct Frame {
    Peer from;
    Peer to;
    std::uint64_t connection = 0;
    std::uint64_t sequence = 0;
    Bytes payload;
    bool flipped = false;
    unsigned resends = 0;
    std::function<void(LoopbackFabric&, Frame&)> deliver;
  };
  // One direction between two processes.
  struct Path {
    bool cut = false;
    bool flip_next = false;
    Instant free_at;
  };
  // One direction of a connection: frames are delivered in the order in which they were sent.
  struct Stream {
    std::uint64_t next_sent = 0;
    std::uint64_t next_delivered = 0;
    std::map<std::uint64_t, std::shared_ptr<Frame>> held;
  };

  void at(Instant when, std::function<void()> what) {
    queue.emplace(std::pair{std::max(when, now), next_event++}, std::move(what));
  }
  [[nodiscard]] LoopbackFabric* find(const Peer& peer) {
    const auto found = fabrics.find(peer);
    return found == fabrics.end() ? nullptr : found->second;
  }
  [[nodiscard]] Duration delay() {
    const auto spread = static_cast<std::uint64_t>((faults.delay_max - faults.delay_min).count());
    return faults.delay_min + Duration(static_cast<std::int64_t>(rng.below(spread + 1)));
  }

  void open(std::uint64_t connection, const Peer& one, const Peer& other) {
    streams[{connection, one}];
    streams[{connection, other}];
  }
  // For both sides; whoever ends it tells the other.
  void end(std::uint64_t connection, const Peer& by, const Peer& other);
  void send(Frame&& frame);
  void transmit(const std::shared_ptr<Frame>& frame);
  void arrive(const std::shared_ptr<Frame>& frame);
  void deliver(Frame& frame);

  const LoopbackOptions options;
  LoopbackFaults faults;
  Rng rng;
  Instant now;
  std::uint64_t next_event = 0;
  std::map<std::pair<Instant, std::uint64_t>, std::function<void()>> queue;
  std::map<std::pair<Peer, Peer>, Path> paths;               // from, to
  std::map<std::pair<std::uint64_t, Peer>, Stream> streams;  // connection, from
  std::map<Peer, LoopbackFabric*> fabrics;
  std::uint64_t next_connection = 1;
};

class LoopbackFabric final : public Fabric {
 public:
  using Frame = LoopbackNet::State::Frame;

  LoopbackFabric(LoopbackNet::State& net, Peer self, Region* region)
      : net_(net), self_(std::move(self)), region_(region), budget_(net.options.budget) {
    const bool fresh = net_.fabrics.emplace(self_, this).second;
    DI_ASSERT(fresh);
  }
  ~LoopbackFabric() override {
    net_.fabrics.erase(self_);
    for (const auto& [peer, link] : links_) {
      if (link.connection != 0) net_.end(link.connection, self_, peer);
    }
    for (const auto& [connection, incoming] : incoming_) net_.end(connection, self_, incoming.peer);
  }
  LoopbackFabric(const LoopbackFabric&) = delete;
  LoopbackFabric& operator=(const LoopbackFabric&) = delete;

  void set_events(Events events) override { events_ = std::move(events); }

  Status expose(const Peer& to, TransferId transfer, Access access, std::vector<SlotName> slots) override {
    if (region_ == nullptr) return Error{Code::invalid, 0, "no memory to open to a peer"};
    if (exposures_.count() + concealing_.size() >= exposures_max) {
      return Error{Code::busy, 0, "too much is open to peers"};
    }
    if (concealing_.contains({to, transfer}) || !exposures_.open(to, transfer, access, slots)) {
      return Error{Code::exists, 0, "the transfer is open already"};
    }
    return {};
  }
  Status extend(const Peer& to, TransferId transfer, std::vector<SlotName> slots) override {
    if (!exposures_.extend(to, transfer, slots)) return Error{Code::not_found, 0, "no such transfer"};
    return {};
  }
  void conceal(const Peer& to, TransferId transfer) override {
    if (concealing_.contains({to, transfer})) return;
    exposures_.close(to, transfer, net_.now);
    tell_concealed(to, transfer);
  }
  Result<Ticket> grant(const Peer& to, bool seal) override {
    tickets_.expire(net_.now);
    if (tickets_.count() >= tickets_max) return Error{Code::busy, 0, "too many tickets are out"};
    Ticket ticket;
    for (auto& byte : ticket.secret) byte = static_cast<std::uint8_t>(net_.rng.next());
    ticket.seal = seal;
    if (seal) {
      for (auto& byte : ticket.key) byte = static_cast<std::uint8_t>(net_.rng.next());
    }
    tickets_.add(to, ticket, net_.now + ticket_life);
    return ticket;
  }

  void ticket(const Peer& peer, const std::string&, const Ticket& ticket) override {
    const auto found = links_.find(peer);
    if (found == links_.end() || found->second.way != Way::asked) return;
    Link& link = found->second;
    ++counters_.dials;
    link.way = Way::greeting;
    link.connection = net_.next_connection++;
    link.sealed = ticket.seal;
    net_.open(link.connection, self_, peer);
    send(peer, link.connection, {},
         [ticket](LoopbackFabric& owner, Frame& frame) { owner.on_hello(frame, ticket); });
  }
  void ticket_refused(const Peer& peer) override {
    const auto found = links_.find(peer);
    if (found != links_.end() && found->second.way == Way::asked) dial_failed(peer);
  }

  Result<OpId> write(const Peer& peer, TransferId transfer, const Place& to, ByteView from,
                     Class cls) override {
    // A write only reads from it.
    return submit({peer, true, transfer, to, const_cast<std::byte*>(from.data()), cls}, from.size());
  }
  Result<OpId> read(const Peer& peer, TransferId transfer, const Place& from, MutableByteView into,
                    Class cls) override {
    return submit({peer, false, transfer, from, into.data(), cls}, into.size());
  }
  void cancel(OpId op) override { end_op(op, Code::cancelled); }

  void peer_lost(const Peer& peer) override {
    tickets_.forget(peer);
    if (const auto found = links_.find(peer); found != links_.end()) {
      const std::uint64_t connection = std::exchange(found->second.connection, 0);
      if (connection != 0) net_.end(connection, self_, peer);
      end_ops(peer, false);
      links_.erase(peer);
    }
    std::erase_if(incoming_, [&](const auto& entry) {
      if (entry.second.peer != peer) return false;
      net_.end(entry.first, self_, peer);
      return true;
    });
    for (const TransferId transfer : exposures_.transfers_of(peer)) {
      exposures_.close(peer, transfer, net_.now);
      tell_concealed(peer, transfer);
    }
  }

  Region* view(const Peer&) override { return nullptr; }
  LinkState link(const Peer& peer) const override {
    LinkState state;
    for (const auto& [id, op] : ops_) {
      if (op.what.peer == peer && !op.ended) state.queued_bytes += op.what.place.bytes - op.acked;
    }
    if (const auto found = links_.find(peer); found != links_.end()) {
      state.bytes_per_s = found->second.bytes_per_s;
    }
    return state;
  }
  FabricGauges gauges() const override {
    std::size_t connections = incoming_.size();
    for (const auto& [peer, link] : links_) connections += link.connection != 0 ? 1 : 0;
    return {connections, ops_.size(), exposures_.count() + concealing_.size(), tickets_.count()};
  }
  FabricCounters counters() const override { return counters_; }
  void see_arrivals() const override {}  // one thread

  void on_end(std::uint64_t connection) {
    if (incoming_.erase(connection) != 0) return;
    for (const auto& [peer, link] : links_) {
      if (link.connection != connection) continue;
      connection_ended(Peer(peer));
      return;
    }
  }

 private:
  // See transfer/links.h; connecting and greeting are one here.
  enum class Way : std::uint8_t { idle, asked, greeting, up, pause };
  struct What {
    Peer peer;
    bool write = false;
    TransferId transfer = 0;
    Place place;
    std::byte* local = nullptr;  // a write only reads from it
    Class cls = Class::fetch;
  };
  struct Op {
    What what;
    std::uint64_t next = 0;
    std::uint64_t acked = 0;
    Instant until;
    bool ended = false;  // done() is under way
  };
  struct Unit {
    OpId op = 0;
    std::uint64_t offset = 0;
    std::uint32_t bytes = 0;
  };
  struct Link {
    Way way = Way::idle;
    std::uint64_t connection = 0;
    bool sealed = false;
    unsigned failures = 0;
    Instant until;
    Instant wanted_at;
    std::array<std::deque<OpId>, classes> waiting;
    std::map<std::uint64_t, Unit> under_way;
    std::uint64_t under_way_bytes = 0;
    std::uint64_t next_number = 1;
    Instant moved_at;
    Instant busy_from;
    double bytes_per_s = 0;
  };
  struct Incoming {
    Peer peer;
    bool sealed = false;
  };

  // Runs `what` at that time if this fabric is there then.
  void later(Instant when, std::function<void(LoopbackFabric&)> what) {
    net_.at(when, [&net = net_, self = self_, what = std::move(what)] {
      if (LoopbackFabric* fabric = net.find(self)) what(*fabric);
    });
  }
  void send(const Peer& to, std::uint64_t connection, Bytes payload,
            std::function<void(LoopbackFabric&, Frame&)> deliver) {
    Frame frame;
    frame.from = self_;
    frame.to = to;
    frame.connection = connection;
    frame.payload = std::move(payload);
    frame.deliver = std::move(deliver);
    net_.send(std::move(frame));
  }
  void tell_concealed(const Peer& to, TransferId transfer) {
    concealing_.insert({to, transfer});
    later(net_.now, [to, transfer](LoopbackFabric& fabric) {
      fabric.concealing_.erase({to, transfer});
      if (fabric.events_.concealed) fabric.events_.concealed(to, transfer);
    });
  }

  // ---- initiator

  Result<OpId> submit(What&& what, std::size_t local_bytes) {
    const std::uint64_t bytes = what.place.bytes;
    if (bytes == 0 || bytes != local_bytes) return Error{Code::invalid, 0, "an operation of no or two sizes"};
    const Peer peer = what.peer;
    std::size_t count = 0;
    std::uint64_t queued = 0;
    for (const auto& [id, op] : ops_) {
      if (op.what.peer != peer) continue;
      ++count;
      queued += op.what.place.bytes;
    }
    if (count >= ops_max || (count > 0 && queued + bytes > queue_bytes_max)) {
      return Error{Code::busy, 0, "the peer's queue is full"};
    }
    if (!links_.contains(peer) && links_.size() >= peers_max) return Error{Code::busy, 0, "too many peers"};
    const OpId id = next_op_++;
    const auto cls = static_cast<std::size_t>(what.cls);
    ops_.emplace(id, Op{std::move(what), 0, 0, net_.now + op_wait, false});
    if (ops_.size() == 1) watch_ops();
    Link& link = links_[peer];
    link.wanted_at = net_.now;
    if (link.way != Way::up && link.failures > 0) {
      end_op(id, Code::unreachable);
      return id;
    }
    link.waiting[cls].push_back(id);
    if (link.way == Way::idle) begin_dial(peer);
    if (link.way == Way::up) pump_later();
    return id;
  }

  void watch_ops() {
    if (watching_ops_ || ops_.empty()) return;
    watching_ops_ = true;
    later(ops_.begin()->second.until, [](LoopbackFabric& fabric) {
      fabric.watching_ops_ = false;
      for (const auto& [id, op] : std::map(fabric.ops_)) {
        if (op.until > fabric.net_.now) break;
        fabric.end_op(id, Code::timeout);
      }
      fabric.watch_ops();
    });
  }

  void end_op(OpId id, Code code) {
    const auto found = ops_.find(id);
    if (found == ops_.end() || found->second.ended) return;
    Op& op = found->second;
    op.ended = true;
    if (const auto link = links_.find(op.what.peer); link != links_.end()) {
      std::erase(link->second.waiting[static_cast<std::size_t>(op.what.cls)], id);
    }
    if (code == Code::cancelled) {
      ++counters_.ops_cancelled;
    } else if (code != Code::ok) {
      ++counters_.ops_failed;
    }
    later(net_.now, [id, code](LoopbackFabric& fabric) {
      fabric.ops_.erase(id);
      if (fabric.events_.done) fabric.events_.done(id, code);
    });
  }
  void end_ops(const Peer& peer, bool begun_only) {
    for (auto& [id, op] : ops_) {
      if (op.what.peer == peer && (!begun_only || op.next > 0)) end_op(id, Code::unreachable);
    }
  }

  void begin_dial(const Peer& peer) {
    Link& link = links_.at(peer);
    link.way = Way::asked;
    const Instant until = net_.now + dial_wait;
    link.until = until;
    later(net_.now, [peer](LoopbackFabric& fabric) {
      if (fabric.events_.want_ticket) {
        fabric.events_.want_ticket(peer);
      } else {
        fabric.ticket_refused(peer);
      }
    });
    later(until, [peer, until](LoopbackFabric& fabric) {
      const auto found = fabric.links_.find(peer);
      if (found == fabric.links_.end() || found->second.until != until) return;
      if (found->second.way == Way::asked || found->second.way == Way::greeting) fabric.dial_failed(peer);
    });
  }

  void dial_failed(const Peer& peer) {
    Link& link = links_.at(peer);
    ++counters_.dials_failed;
    ++link.failures;
    link.way = Way::pause;
    const Instant until = net_.now + dial_pause(link.failures, dial_pause_min, dial_pause_max);
    link.until = until;
    const std::uint64_t connection = std::exchange(link.connection, 0);
    if (connection != 0) net_.end(connection, self_, peer);
    end_ops(peer, false);
    later(until, [peer, until](LoopbackFabric& fabric) {
      const auto found = fabric.links_.find(peer);
      if (found == fabric.links_.end() || found->second.until != until) return;
      if (found->second.way != Way::pause) return;
      if (found->second.wanted_at + dial_interest > fabric.net_.now) {
        fabric.begin_dial(peer);
      } else {
        fabric.links_.erase(peer);
      }
    });
  }

  void connection_ended(const Peer& peer) {
    Link& link = links_.at(peer);
    link.connection = 0;
    if (link.way != Way::up) {
      dial_failed(peer);
      return;
    }
    link.way = Way::idle;
    link.under_way.clear();
    link.under_way_bytes = 0;
    end_ops(peer, true);
    for (const auto& waiting : link.waiting) {
      if (waiting.empty()) continue;
      begin_dial(peer);
      return;
    }
  }

  void pump_later() {
    if (std::exchange(pumping_, true)) return;
    later(net_.now, [](LoopbackFabric& fabric) {
      fabric.pumping_ = false;
      while (fabric.schedule()) {
      }
      const Instant at = fabric.budget_.ready_at(fabric.net_.now);
      if (at <= fabric.net_.now || std::exchange(fabric.pumping_, true)) return;
      fabric.later(at, [](LoopbackFabric& then) {
        then.pumping_ = false;
        then.pump_later();
      });
    });
  }

  [[nodiscard]] bool may_send(const Link& link) const {
    return link.under_way.empty() ||
           link.under_way_bytes + net_.options.max_unit_bytes <= net_.options.window_bytes;
  }

  bool schedule() {
    Budget::Heads heads{};
    std::array<const Peer*, classes> chosen{};
    for (std::size_t cls = 0; cls < classes; ++cls) {
      // The peers take turns, each class by itself.
      auto from = links_.upper_bound(last_[cls]);
      for (std::size_t i = 0; i < links_.size() && chosen[cls] == nullptr; ++i, ++from) {
        if (from == links_.end()) from = links_.begin();
        const Link& link = from->second;
        if (link.way != Way::up || link.waiting[cls].empty()) continue;
        heads[cls].backlog = true;
        if (!may_send(link)) continue;
        const Op& op = ops_.at(link.waiting[cls].front());
        heads[cls].bytes =
            std::min<std::uint64_t>(net_.options.max_unit_bytes, op.what.place.bytes - op.next);
        chosen[cls] = &from->first;
      }
    }
    const std::optional<Class> taken = budget_.take(heads, net_.now);
    if (!taken) return false;
    const auto cls = static_cast<std::size_t>(*taken);
    const Peer peer = *chosen[cls];
    last_[cls] = peer;
    Link& link = links_.at(peer);
    const OpId id = link.waiting[cls].front();
    Op& op = ops_.at(id);
    const auto bytes = static_cast<std::uint32_t>(heads[cls].bytes);
    const std::uint64_t number = link.next_number++;
    if (link.under_way.empty()) {
      link.moved_at = link.busy_from = net_.now;
      watch_stall(peer);
    }
    link.under_way[number] = {id, op.next, bytes};
    link.under_way_bytes += bytes;
    Place place{op.what.place.slot, op.what.place.offset + op.next, bytes};
    const TransferId transfer = op.what.transfer;
    if (op.what.write) {
      const std::byte* from = op.what.local + op.next;
      send(peer, link.connection, Bytes(from, from + bytes),
           [number, transfer, place](LoopbackFabric& owner, Frame& frame) {
             owner.on_request(frame, number, Access::write, transfer, place);
           });
    } else {
      send(peer, link.connection, {}, [number, transfer, place](LoopbackFabric& owner, Frame& frame) {
        owner.on_request(frame, number, Access::read, transfer, place);
      });
    }
    op.next += bytes;
    if (op.next == op.what.place.bytes) link.waiting[cls].pop_front();
    return true;
  }

  void watch_stall(const Peer& peer) {
    const Link& link = links_.at(peer);
    later(link.moved_at + net_.options.stall_max,
          [peer, connection = link.connection](LoopbackFabric& fabric) {
            const auto found = fabric.links_.find(peer);
            if (found == fabric.links_.end() || found->second.connection != connection) return;
            if (found->second.under_way.empty()) return;
            if (found->second.moved_at + fabric.net_.options.stall_max > fabric.net_.now) {
              fabric.watch_stall(peer);
              return;
            }
            fabric.net_.end(connection, fabric.self_, peer);
            fabric.connection_ended(peer);
          });
  }

  void on_welcome(Frame& frame) {
    const auto found = links_.find(frame.from);
    if (found == links_.end() || found->second.connection != frame.connection) return;
    found->second.way = Way::up;
    found->second.failures = 0;
    pump_later();
  }

  void on_answer(Frame& frame, std::uint64_t number, Code code) {
    const auto found = links_.find(frame.from);
    if (found == links_.end() || found->second.connection != frame.connection) return;
    Link& link = found->second;
    if (frame.flipped && link.sealed) {
      ++counters_.refused_seal;
      net_.end(frame.connection, self_, frame.from);
      connection_ended(Peer(frame.from));
      return;
    }
    const auto at = link.under_way.find(number);
    DI_ASSERT(at != link.under_way.end());
    const Unit unit = at->second;
    link.under_way.erase(at);
    link.under_way_bytes -= unit.bytes;
    link.moved_at = net_.now;
    if (code == Code::ok) measure(link, unit.bytes);
    pump_later();
    const auto op = ops_.find(unit.op);
    if (op == ops_.end() || op->second.ended) return;
    if (code != Code::ok) {
      end_op(unit.op, code);
      return;
    }
    if (!op->second.what.write) {
      std::copy(frame.payload.begin(), frame.payload.end(), op->second.what.local + unit.offset);
    }
    (op->second.what.write ? counters_.written_bytes : counters_.read_bytes) += unit.bytes;
    op->second.acked += unit.bytes;
    if (op->second.acked == op->second.what.place.bytes) end_op(unit.op, Code::ok);
  }

  void measure(Link& link, std::uint64_t bytes) {
    const double busy_s = std::max(static_cast<double>((net_.now - link.busy_from).count()), 1.0) * 1e-9;
    link.busy_from = net_.now;
    const double rate = static_cast<double>(bytes) / busy_s;
    // The past weighs 1/e after half a second.
    link.bytes_per_s = link.bytes_per_s == 0
                           ? rate
                           : link.bytes_per_s + (1 - std::exp(-busy_s / 0.5)) * (rate - link.bytes_per_s);
  }

  // ---- owner

  void on_hello(Frame& frame, const Ticket& shown) {
    tickets_.expire(net_.now);
    const auto granted = tickets_.use(shown.secret, net_.now);
    if (!granted || granted->to != frame.from || granted->ticket.seal != shown.seal) {
      ++counters_.refused_ticket;
      net_.end(frame.connection, self_, frame.from);
      return;
    }
    if (shown.seal && granted->ticket.key != shown.key) {
      ++counters_.refused_seal;
      net_.end(frame.connection, self_, frame.from);
      return;
    }
    std::erase_if(incoming_, [&](const auto& entry) {
      if (entry.second.peer != frame.from) return false;
      net_.end(entry.first, self_, frame.from);
      return true;
    });
    incoming_[frame.connection] = {frame.from, shown.seal};
    send(frame.from, frame.connection, {},
         [](LoopbackFabric& dialler, Frame& welcome) { dialler.on_welcome(welcome); });
  }

  void on_request(Frame& frame, std::uint64_t number, Access access, TransferId transfer,
                  const Place& place) {
    const auto found = incoming_.find(frame.connection);
    if (found == incoming_.end()) return;
    if (frame.flipped && found->second.sealed) {
      ++counters_.refused_seal;
      incoming_.erase(found);
      net_.end(frame.connection, self_, frame.from);
      return;
    }
    Admission admission{Refusal{Refused::transfer, Code::not_found}, {}};
    if (region_ != nullptr)
      admission = exposures_.check(frame.from, transfer, access, place, *region_, net_.now);
    Code code = Code::ok;
    Bytes payload;
    if (admission.refusal) {
      ++(counters_.*refusal_counter(admission.refusal->why));
      code = admission.refusal->code;
    } else if (access == Access::write) {
      std::copy(frame.payload.begin(), frame.payload.end(), admission.bytes.begin());
      counters_.received_bytes += place.bytes;
    } else {
      payload.assign(admission.bytes.begin(), admission.bytes.end());
      counters_.served_bytes += place.bytes;
    }
    send(frame.from, frame.connection, std::move(payload),
         [number, code](LoopbackFabric& dialler, Frame& answer) { dialler.on_answer(answer, number, code); });
  }

  LoopbackNet::State& net_;
  const Peer self_;
  Region* const region_;
  Events events_;
  FabricCounters counters_;
  Budget budget_;
  Exposures exposures_;
  std::set<std::pair<Peer, TransferId>> concealing_;
  Tickets tickets_;
  std::map<OpId, Op> ops_;
  OpId next_op_ = 1;
  std::map<Peer, Link> links_;
  std::array<Peer, classes> last_;
  std::map<std::uint64_t, Incoming> incoming_;
  bool pumping_ = false;
  bool watching_ops_ = false;
};

// ---- the network

void LoopbackNet::State::end(std::uint64_t connection, const Peer& by, const Peer& other) {
  streams.erase({connection, by});
  streams.erase({connection, other});
  at(now + delay(), [this, connection, by, other] {
    if (paths[{by, other}].cut) return;
    if (LoopbackFabric* fabric = find(other)) fabric->on_end(connection);
  });
}

void LoopbackNet::State::send(Frame&& given) {
  const auto stream = streams.find({given.connection, given.from});
  if (stream == streams.end()) return;  // ended, and the end is on its way here
  auto frame = std::make_shared<Frame>(std::move(given));
  frame->sequence = stream->second.next_sent++;
  Path& path = paths[{frame->from, frame->to}];
  if (!frame->payload.empty()) {
    const bool flip = std::exchange(path.flip_next, false);
    if (rng.chance(faults.flip) || flip) {
      frame->payload[rng.below(frame->payload.size())] ^= static_cast<std::byte>(1u << rng.below(8));
      frame->flipped = true;
    }
  }
  if (rng.chance(faults.reset)) {
    at(now, [this, from = frame->from, connection = frame->connection] {
      if (LoopbackFabric* fabric = find(from)) fabric->on_end(connection);
    });
    end(frame->connection, frame->from, frame->to);
    return;
  }
  transmit(frame);
}

void LoopbackNet::State::transmit(const std::shared_ptr<Frame>& frame) {
  Path& path = paths[{frame->from, frame->to}];
  if (path.cut || rng.chance(faults.loss)) {
    if (frame->resends++ < faults.resends_max) {
      at(now + faults.resend, [this, frame] { transmit(frame); });
      return;
    }
    if (!streams.contains({frame->connection, frame->from})) return;
    end(frame->connection, frame->from, frame->to);
    if (LoopbackFabric* fabric = find(frame->from)) fabric->on_end(frame->connection);
    return;
  }
  Instant leaves = now;
  if (faults.bytes_per_s != 0) {
    constexpr std::uint64_t header_bytes = 64;
    const double s =
        static_cast<double>(header_bytes + frame->payload.size()) / static_cast<double>(faults.bytes_per_s);
    leaves = std::max(now, path.free_at) + Duration(static_cast<std::int64_t>(s * 1e9));
    path.free_at = leaves;
  }
  at(leaves + delay(), [this, frame] { arrive(frame); });
}

void LoopbackNet::State::arrive(const std::shared_ptr<Frame>& frame) {
  const std::pair key{frame->connection, frame->from};
  auto stream = streams.find(key);
  if (stream == streams.end()) return;
  if (faults.reorder) {
    // Frames say what they belong to, so any order will do; what was held back goes first.
    stream->second.next_delivered = std::max(stream->second.next_delivered, frame->sequence + 1);
    auto held = std::exchange(stream->second.held, {});
    for (auto& [sequence, each] : held) deliver(*each);
    deliver(*frame);
    return;
  }
  stream->second.held[frame->sequence] = frame;
  while (true) {
    stream = streams.find(key);  // a delivery may have ended it
    if (stream == streams.end() || stream->second.held.empty()) return;
    const auto first = stream->second.held.begin();
    if (first->first > stream->second.next_delivered) return;
    const std::shared_ptr<Frame> next = first->second;
    stream->second.held.erase(first);
    stream->second.next_delivered = std::max(stream->second.next_delivered, next->sequence + 1);
    deliver(*next);
  }
}

void LoopbackNet::State::deliver(Frame& frame) {
  if (LoopbackFabric* fabric = find(frame.to)) {
    frame.deliver(*fabric, frame);
    return;
  }
  // Nobody there: what a kernel answers for a dead process.
  end(frame.connection, frame.to, frame.from);
}

LoopbackNet::LoopbackNet(const LoopbackOptions& options) : state_(std::make_unique<State>(options)) {}

LoopbackNet::~LoopbackNet() {
  DI_ASSERT(state_->fabrics.empty());
}

std::unique_ptr<Fabric> LoopbackNet::attach(const Peer& self, Region* region) {
  return std::make_unique<LoopbackFabric>(*state_, self, region);
}

void LoopbackNet::advance(Instant to) {
  while (!state_->queue.empty() && state_->queue.begin()->first.first <= to) {
    const auto first = state_->queue.begin();
    state_->now = std::max(state_->now, first->first.first);
    const std::function<void()> what = std::move(first->second);
    state_->queue.erase(first);
    what();
  }
  state_->now = std::max(state_->now, to);
}

Instant LoopbackNet::next_due() const {
  return state_->queue.empty() ? instant_never : state_->queue.begin()->first.first;
}

Instant LoopbackNet::now() const {
  return state_->now;
}

void LoopbackNet::set_faults(const LoopbackFaults& faults) {
  state_->faults = faults;
}

void LoopbackNet::cut(const Peer& from, const Peer& to) {
  state_->paths[{from, to}].cut = true;
}

void LoopbackNet::mend(const Peer& from, const Peer& to) {
  state_->paths[{from, to}].cut = false;
}

void LoopbackNet::reset(const Peer& one, const Peer& other) {
  std::set<std::uint64_t> connections;
  for (const auto& [key, stream] : state_->streams) {
    if (key.second == one && state_->streams.contains({key.first, other})) connections.insert(key.first);
  }
  for (const std::uint64_t connection : connections) {
    state_->end(connection, one, other);
    state_->end(connection, other, one);
  }
}

void LoopbackNet::flip_next(const Peer& from, const Peer& to) {
  state_->paths[{from, to}].flip_next = true;
}

}  // namespace di::transfer
