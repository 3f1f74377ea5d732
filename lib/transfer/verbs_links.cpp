// Links to peers, and the operations that go over them.
#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "transfer/address.h"
#include "transfer/verbs_state.h"

namespace di::transfer::verbs {

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
  Link* link = links_.find(to);
  if (link == nullptr) {
    link = links_.add(to);
    if (link == nullptr) return Error{Code::busy, 0, "too many peers"};
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
  if (link->failed()) {
    fail_op(id, Code::unreachable);
    return id;
  }
  link->waiting[static_cast<std::size_t>(cls)].push_back(id);
  if (link->phase == LinkPhase::idle) begin_dial(*link);
  if (link->phase == LinkPhase::up) {
    link->rate.begin(now());
    pump_later();
  }
  return id;
}

void Verbs::begin_dial(Link& link) {
  link.phase = LinkPhase::asked;
  link.until = now() + options_.dial_wait;
  arm_sweep();
  later([this, peer = link.peer] {
    const Link* asked = links_.find(peer);
    if (asked == nullptr || asked->phase != LinkPhase::asked) return;
    if (events_.want_ticket) {
      events_.want_ticket(peer);
    } else {
      ticket_refused(peer);
    }
  });
}

void Verbs::dial_failed(Link& link, std::string_view why) {
  ++counters_.dials_failed;
  // The other side may be up on those alone that were left out: the next dial offers all.
  if (link.phase == LinkPhase::greeting) link.rests_until.fill(Instant{});
  link.dial_failed(now(), options_.dial_pause_min, options_.dial_pause_max, why);
  arm_sweep();
  if (Connection* connection = link.connection) {
    link.connection = nullptr;
    connection->link = nullptr;
    close(*connection);
  }
  fail_ops(link, false);
}

void Verbs::ticket_refused(const Peer& peer) {
  Link* link = links_.find(peer);
  if (link != nullptr && link->phase == LinkPhase::asked) dial_failed(*link, {});
}

void Verbs::ticket(const Peer& peer, const std::string& endpoint, const Ticket& ticket) {
  Link* link = links_.find(peer);
  if (link == nullptr || link->phase != LinkPhase::asked) return;  // the answer comes too late
  ++counters_.dials;
  Result<Fd> fd =
      ticket.seal ? Result<Fd>(Error{Code::unsupported, 0, "verbs cannot seal"}) : data_connect(endpoint);
  if (!fd) {
    dial_failed(*link, fd.error().message);
    return;
  }
  Connection& connection = add_connection(*std::move(fd));
  connection.dialled = true;
  connection.connected = false;
  connection.link = link;
  connection.peer = peer;
  link->connection = &connection;
  link->ticket = ticket;
  link->phase = LinkPhase::connecting;
  arm(connection);
}

// The first thing that goes wrong with an operation; it ends when the device is through with it.
void Verbs::fail_op(OpId id, Code code) {
  Op& op = ops_.at(id);
  if (op.ending) return;
  if (Link* link = links_.find(op.peer); link != nullptr && op.next < op.place.bytes) {
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
  if (Link* link = links_.find(at->second.peer); link != nullptr && link->rate.busy()) measure(*link, 0);
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

// Of its connection's, by turns: which the next unit goes on.
std::optional<std::size_t> Verbs::next_lane(const Link& link) const {
  const std::vector<std::unique_ptr<Lane>>& lanes = link.connection->lanes;
  const auto is_up = [this](const std::unique_ptr<Lane>& lane) { return rails_[lane->rail]->up; };
  const bool some_up = std::any_of(lanes.begin(), lanes.end(), is_up);
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::size_t at = (link.next_lane + i) % lanes.size();
    if (lanes[at]->may_ask() && (!some_up || is_up(lanes[at]))) return at;
  }
  return std::nullopt;
}

bool Verbs::may_send(const Link& link) const {
  if (link.phase != LinkPhase::up || !next_lane(link)) return false;
  return link.under_way_bytes == 0 || link.under_way_bytes + options_.max_unit_bytes <= options_.window_bytes;
}

// Of the next unit; 0 when it needs to be copied and there is no room for that.
std::uint64_t Verbs::unit_bytes(const Link& link, const Op& op) const {
  const std::uint64_t bytes = std::min<std::uint64_t>(options_.max_unit_bytes, op.place.bytes - op.next);
  const std::optional<Spot> spot = find_memory(op.local + op.next);
  if (spot) return std::min(bytes, spot->left);
  // Not more of it than is left for the others: they need not wait for a peer that does not answer.
  return link.bounces < free_bounce_.size() ? bytes : 0;
}

// Asks for one unit; false when none may go.
bool Verbs::schedule() {
  const auto turn = links_.turn([this](const Link& link, OpId op) -> std::uint64_t {
    const Op& head = ops_.at(op);
    return may_send(link) && (head.next > 0 || !renews(link)) ? unit_bytes(link, head) : 0;
  });
  const std::optional<Class> taken = budget_.take(turn.heads, now());
  if (!taken) return false;
  const auto cls = static_cast<std::size_t>(*taken);
  Link& link = links_.take(turn, *taken);
  const OpId id = link.waiting[cls].front();
  const std::size_t lane = *next_lane(link);
  link.next_lane = lane + 1;
  ask(link, *link.connection->lanes[lane], id, static_cast<std::uint32_t>(turn.heads[cls].bytes));
  return true;
}

bool Verbs::ask(Link& link, Lane& lane, OpId id, std::uint32_t bytes) {
  Op& op = ops_.at(id);
  std::byte* local = op.local + op.next;
  const std::uint32_t index = lane.free_units.front();
  lane.free_units.pop_front();
  Unit& unit = lane.units[index];
  unit = {true, ++lane.serial * verbs_units_max + index, id, bytes, op.next, {}};
  VerbsMessage message;
  if (const std::optional<Spot> spot = find_memory(local)) {
    message.memory = spot->chunk;
    message.memory_offset = spot->offset;
  } else {
    unit.bounce = free_bounce_.back();
    free_bounce_.pop_back();
    ++link.bounces;
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
  renew();
  const Instant ready = budget_.ready_at(now());
  if (ready > now()) {
    const bool waits = std::any_of(links_.all().begin(), links_.all().end(), [](const Link* link) {
      return link->phase == LinkPhase::up && link->waits();
    });
    if (waits) budget_timer_.start_at(ready);
  }
}

// Another connection would have a rail that this one does without, as far as is known here.
bool Verbs::renews(const Link& link) const {
  if (link.phase != LinkPhase::up || !link.connection->renew_at || *link.connection->renew_at > now())
    return false;
  return rails_for(link).size() > link.connection->lanes.size();
}

// Operations that had begun are through with the connection; those that wait go over the next.
void Verbs::renew() {
  for (Link* link : links_.all()) {
    if (!link->waits() || link->under_way_bytes > 0 || !renews(*link)) continue;
    const bool begun = std::any_of(link->waiting.begin(), link->waiting.end(), [this](const auto& waiting) {
      return !waiting.empty() && ops_.at(waiting.front()).next > 0;
    });
    if (!begun) close(*link->connection);
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
  const bool goes_on = link.phase == LinkPhase::up && (link.waits() || link.under_way_bytes > 0);
  const std::optional<double> rate = link.rate.moved(bytes, goes_on, now());
  if (!rate) return;
  if (const auto peer = peers_.find(link.peer); peer != peers_.end()) peer->second.bytes_per_s = *rate;
}

}  // namespace di::transfer::verbs
