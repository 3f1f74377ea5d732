// The TCP connection that introduces two sides to each other: one frame each way.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "transfer/address.h"
#include "transfer/verbs_state.h"

namespace di::transfer::verbs {

namespace {

constexpr std::size_t turn_bytes = 4 << 20;

void warn_of(const Connection& connection, const Error& error) {
  log_warn("fabric", "no queue pair", {{"peer", connection.peer.instance}, {"why", error}});
}

}  // namespace

Status Verbs::open_listener() {
  Result<DataListener> listener = data_listen(options_.listen);
  if (!listener) return listener.error();
  if (!listener->fd.valid()) return {};
  listener_ = std::move(listener->fd);
  endpoint_ = std::move(listener->endpoint);
  listener_watch_ = std::make_unique<loop::Watch>(loop_, listener_.get(), "verbs-listener");
  listener_watch_->on_readable([this] { accept_all(); });
  return {};
}

void Verbs::accept_all() {
  while (true) {
    Result<Fd> fd = data_accept(listener_.get());
    if (!fd) {
      // The listener stays readable, so it is left alone until the sweep.
      accepting_ = false;
      listener_watch_->on_readable(nullptr);
      arm_sweep();
    }
    if (!fd || !fd->valid()) return;
    if (!make_room()) {
      ++counters_.refused_connections;
      continue;
    }
    Connection& connection = add_connection(*std::move(fd));
    connection.until = now() + options_.ticket_life;
    ++greetings_;
    arm_sweep();
    arm(connection);
  }
}

bool Verbs::full() const {
  return greetings_ >= options_.greetings_max || connections_.size() >= connections_max;
}

// As in transfer/mover.cpp.
bool Verbs::make_room() {
  while (full()) {
    const auto found = std::find_if(connections_.begin(), connections_.end(), [](const auto& entry) {
      return !entry.second->dialled && !entry.second->granted;
    });
    if (found == connections_.end()) return false;
    Connection& oldest = *found->second;
    receive(oldest);
    if (oldest.closed || oldest.granted) continue;
    ++counters_.refused_connections;
    close(oldest);
  }
  return true;
}

Connection& Verbs::add_connection(Fd fd) {
  const std::uint64_t id = next_id_++;
  auto [at, fresh] = connections_.emplace(id, std::make_unique<Connection>(id, std::move(fd), drain_));
  DI_ASSERT(fresh);
  Connection& connection = *at->second;
  connection.watch = std::make_unique<loop::Watch>(loop_, connection.stream.fd(), "verbs-peer");
  return connection;
}

void Verbs::close(Connection& connection, std::string_view why) {
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
  link->bounces = 0;
  link->rate.forget();
  if (const auto peer = peers_.find(link->peer); peer != peers_.end()) peer->second.bytes_per_s = 0;
  if (link->connection != &connection) return;
  link->connection = nullptr;
  if (link->phase != LinkPhase::up) {
    dial_failed(*link, why);
    return;
  }
  link->phase = LinkPhase::idle;
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
  if (error != 0) return close(connection, errno_error("connect", error).message);
  connection.connected = true;
  connection.link->phase = LinkPhase::greeting;
  for (const std::size_t rail : rails_for(*connection.link)) {
    if (const Status made = add_lane(connection, rail); !made.ok()) warn_of(connection, made.error());
  }
  if (connection.lanes.empty()) {
    return close(connection, "no rail is up");
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
  close(connection, "a malformed answer");
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
  for (std::size_t i = 0; i < setup->lanes.size(); ++i) {
    const auto& [rail, address] = setup->lanes[i];
    if (rail >= rails_.size() || !rails_[rail]->up) continue;
    Status made = add_lane(connection, rail);
    if (made.ok()) {
      connection.lanes.back()->keys = i;
      made = connection.lanes.back()->qp->connect(address);
      if (!made.ok()) drop_last_lane(connection);
    }
    if (!made.ok()) warn_of(connection, made.error());
  }
  if (connection.lanes.empty()) {
    warn_of(connection, Error{Code::unreachable, 0, "no rail is up here and there"});
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
  if (!setup || !setup->memories.empty()) return malformed(connection);
  if (setup->peer != connection.peer) {
    close(connection, "another process has the address by now");
    return false;
  }
  std::size_t answered = 0;
  for (auto at = connection.lanes.begin(); at != connection.lanes.end();) {
    Lane& lane = **at;
    const auto theirs = std::find_if(setup->lanes.begin(), setup->lanes.end(),
                                     [&](const VerbsLane& each) { return each.rail == lane.rail; });
    bool joined = false;
    if (theirs != setup->lanes.end()) {
      ++answered;
      const Status status = lane.qp->connect(theirs->address);
      joined = status.ok();
      if (!joined) warn_of(connection, status.error());
    }
    if (joined) {
      ++at;
    } else {
      drop_lane(lane);
      at = connection.lanes.erase(at);
    }
  }
  if (answered != setup->lanes.size()) return malformed(connection);  // to what was not offered
  if (connection.lanes.empty()) {
    close(connection, "no queue pair");
    return false;
  }
  if (connection.lanes.size() < std::min<std::size_t>(rails_.size(), setup->rails)) {
    connection.renew_at = now() + options_.rail_rest;
  }
  connection.greeted = true;
  Link& link = *connection.link;
  link.connected(now());
  pump_later();
  return true;
}

// For a dial: those that are up, and of them, if there are any, those that do not rest.
std::vector<std::size_t> Verbs::rails_for(const Link& link) const {
  std::vector<std::size_t> up;
  std::vector<std::size_t> rested;
  for (std::size_t i = 0; i < rails_.size(); ++i) {
    if (!rails_[i]->up) continue;
    up.push_back(i);
    if (link.rests_until[i] <= now()) rested.push_back(i);
  }
  return rested.empty() ? up : rested;
}

Status Verbs::add_lane(Connection& connection, std::size_t at) {
  Rail& rail = *rails_[at];
  if (rail.free_blocks.empty()) return Error{Code::busy, 0, "too many queue pairs"};
  auto made = std::make_unique<Lane>();
  Lane& lane = *made;
  lane.id = next_id_++;
  lane.connection = &connection;
  lane.rail = at;
  Result<std::unique_ptr<VerbsQueuePair>> qp =
      VerbsQueuePair::make(*rail.verbs, {lane.id, sends_max, receives_max, connection.dialled});
  if (!qp) return qp.error();
  lane.qp = *std::move(qp);
  lane.block = rail.free_blocks.back();
  rail.free_blocks.pop_back();
  for (std::uint32_t unit = 0; unit < verbs_units_max; ++unit) lane.free_units.push_back(unit);
  lanes_[lane.id] = &lane;
  connection.lanes.push_back(std::move(made));
  for (std::uint32_t index = 0; index < receives_max; ++index) {
    const Status posted = lane.qp->receive(post_id(Post::receive, index), message_place(lane, index));
    if (posted.ok()) continue;
    drop_last_lane(connection);
    return posted;
  }
  return {};
}

void Verbs::drop_last_lane(Connection& connection) {
  drop_lane(*connection.lanes.back());
  connection.lanes.pop_back();
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
  setup.rails = static_cast<std::uint8_t>(rails_.size());
  for (const std::unique_ptr<Lane>& lane : connection.lanes)
    setup.lanes.push_back({static_cast<std::uint8_t>(lane->rail), lane->qp->address()});
  if (!connection.dialled) return setup;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    VerbsMemory memory{reinterpret_cast<std::uint64_t>(chunks_[i].at), chunks_[i].bytes, {}};
    for (const std::unique_ptr<Lane>& lane : connection.lanes)
      memory.keys.push_back(rails_[lane->rail]->keys[i].remote);
    setup.memories.push_back(std::move(memory));
  }
  return setup;
}

}  // namespace di::transfer::verbs
