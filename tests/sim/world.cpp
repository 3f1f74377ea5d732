#include "tests/sim/world.h"

#include <algorithm>
#include <cstdio>

namespace di::sim {

namespace {

int rank_of(const Member& m) {
  if (m.program == "di-router") return 0;
  if (m.program == "di-prefill" || m.program == "di-decode") return 1;
  if (m.program == "di-kvd") return m.role == "store" ? 3 : 2;
  return 4;
}

}  // namespace

// ---- time ------------------------------------------------------------------------------------------------

void World::add(Instant when, int process, std::uint64_t life, std::function<void()> run) {
  events_.emplace(std::pair(std::max(when, now()), sequence_++), Event{process, life, std::move(run)});
}

bool World::step() {
  if (!failure_.empty() || events_.empty()) return false;
  const auto first = events_.begin();
  const auto [when, number] = first->first;
  Event event = std::move(first->second);
  events_.erase(first);
  if (when > now()) {
    clock.advance(when - now());
    turns_ = 0;
  }
  if (event.process >= 0) {
    const Place& place = places_[static_cast<std::size_t>(event.process)];
    if (place.life != event.life) return true;
    if (place.frozen_until > now()) {
      // In the order in which it would have come.
      events_.emplace(std::pair(place.frozen_until, number), std::move(event));
      return true;
    }
  }
  if (++turns_ > turns_max) fail("a busy loop: " + std::to_string(turns_max) + " events at one instant");
  if (++carried_out_ > events_max) fail("the simulation does not end");
  event.run();
  if (event.process >= 0) settle(static_cast<std::size_t>(event.process));
  return failure_.empty();
}

void World::settle(std::size_t process) {
  if (places_[process].node == nullptr) return;
  const Instant due = places_[process].node->turn();
  Place& place = places_[process];
  if (place.node == nullptr || due == place.due) return;
  place.due = due;
  const std::uint64_t timer = ++place.due_number;
  if (due == instant_never) return;
  at(process, due, [this, process, timer] {
    Place& woken = places_[process];
    if (woken.due_number != timer) return;
    woken.due = instant_never;
    woken.node->on_time();
  });
}

// ---- processes -------------------------------------------------------------------------------------------

std::size_t World::add_process(Member member, Start start) {
  Place place;
  place.member = std::move(member);
  place.start = std::move(start);
  places_.push_back(std::move(place));
  return places_.size() - 1;
}

std::size_t World::find(const std::string& instance) const {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].member.instance == instance) return i;
  }
  DI_PANIC("no process " + instance);
}

void World::start(std::size_t process) {
  Place& place = places_[process];
  if (place.node != nullptr || place.boot != 0) return;
  place.boot = rng.next() | 1;
  place.member.generation = 0;
  if (process == meta_) {
    // The directory registers itself.
    place.node = place.start(place.member);
    place.member = registrar_(place.member, place.boot);
    place.registered = true;
    reach_out(process);
    settle(process);
    return;
  }
  enroll(process);
}

void World::enroll(std::size_t process) {
  try_enroll(process, places_[process].life);
}

void World::try_enroll(std::size_t process, std::uint64_t life) {
  Place& place = places_[process];
  if (place.life != life || place.registered || place.boot == 0) return;
  after(milliseconds(200), [this, process, life] { try_enroll(process, life); });
  if (!alive(meta_)) return;
  after(meta_, random_time(microseconds(50), milliseconds(5)), [this, process, life] {
    Place& applicant = places_[process];
    if (applicant.life != life || applicant.registered) return;
    const Member admitted = registrar_(applicant.member, applicant.boot);
    if (admitted.generation == 0) return;
    after(process, random_time(microseconds(50), milliseconds(5)), [this, process, admitted] {
      Place& registered = places_[process];
      if (registered.registered) return;
      registered.registered = true;
      registered.member = admitted;
      registered.node = registered.start(admitted);
      say(admitted.instance + " starts, generation " + std::to_string(admitted.generation));
      reach_out(process);
    });
  });
}

void World::reach_out(std::size_t process) {
  for (std::size_t other = 0; other < places_.size(); ++other) {
    if (other == process || !linked(process, other)) continue;
    connect_soon(pair_of(process, other), random_time(microseconds(100), milliseconds(20)));
  }
}

void World::kill(std::size_t process) {
  Place& place = places_[process];
  if (place.boot == 0) return;
  say(place.member.instance + " is killed");
  place.node.reset();
  place.boot = 0;
  place.registered = false;
  place.frozen_until = {};
  place.due = instant_never;
  ++place.due_number;
  ++place.life;
  for (auto& [pair, link] : links_) {
    if (pair.first != process && pair.second != process) continue;
    link.broken = true;
    link.side[pair.first == process ? 0 : 1].up = false;
    const std::size_t other = pair.first == process ? pair.second : pair.first;
    const Pair key = pair;
    after(other, random_time(Duration(0), milliseconds(30)),
          [this, other, key, epoch = link.epoch] { lose(other, key, epoch); });
  }
  for (auto& [id, socket] : sockets_) {
    if (!socket.open || (socket.client != process && socket.host != process)) continue;
    socket.open = false;
    const std::uint64_t number = id;
    if (socket.client == process && alive(socket.host)) {
      after(socket.host, random_time(Duration(0), milliseconds(20)), [this, number] {
        const Socket& gone = sockets_.at(number);
        if (gone.seen && places_[gone.host].life == gone.host_life)
          places_[gone.host].node->on_client(gone.client_member, false);
      });
    } else if (socket.host == process && alive(socket.client)) {
      after(socket.client, random_time(Duration(0), milliseconds(20)), [this, number] {
        const Socket& gone = sockets_.at(number);
        if (places_[gone.client].life == gone.client_life)
          places_[gone.client].node->on_arena(number, 0, nullptr);
      });
    }
  }
}

void World::freeze(std::size_t process, Duration length) {
  Place& place = places_[process];
  if (place.node == nullptr || frozen(process)) return;
  say(place.member.instance + " is stopped for " + std::to_string(to_ms(length)) + " ms");
  place.frozen_until = now() + length;
  if (length <= seconds(3)) return;
  // The others find it silent; it learns that when it goes on.
  after(seconds(3), [this, process, life = place.life, length] {
    if (places_[process].life != life) return;
    for (std::size_t other = 0; other < places_.size(); ++other) {
      if (other != process && linked(process, other))
        cut(process, other, std::min<Duration>(length - seconds(3), milliseconds(500)));
    }
  });
}

// ---- connections -----------------------------------------------------------------------------------------

bool World::linked(std::size_t a, std::size_t b) const {
  const Member& x =
      rank_of(places_[a].member) <= rank_of(places_[b].member) ? places_[a].member : places_[b].member;
  const Member& y = &x == &places_[a].member ? places_[b].member : places_[a].member;
  if (rank_of(y) == 4) return rank_of(x) != 4;
  switch (rank_of(x)) {
    case 0:
      return rank_of(y) == 1 || rank_of(y) == 2;
    case 1:
      return rank_of(y) == 2 && x.host == y.host;
    case 2:
      return true;
    default:
      return false;
  }
}

void World::connect_soon(Pair pair, Duration wait) {
  Link& link = links_[pair];
  if (link.connecting) return;
  link.connecting = true;
  after(wait, [this, pair] {
    links_[pair].connecting = false;
    connect(pair);
  });
}

void World::connect(Pair pair) {
  Link& link = links_[pair];
  const std::size_t ends[2] = {pair.first, pair.second};
  if (!link.broken) return;
  for (const std::size_t end : ends) {
    if (!places_[end].registered) return;  // it reaches out when it comes
  }
  if (link.side[0].up || link.side[1].up || frozen(pair.first) || frozen(pair.second)) {
    return connect_soon(pair, milliseconds(100));
  }
  ++link.epoch;
  link.broken = false;
  for (int i = 0; i < 2; ++i) {
    const std::size_t end = ends[i];
    const Member peer = places_[ends[1 - i]].member;
    const Instant when = now() + random_time(microseconds(50), milliseconds(3));
    link.side[i].last_arrival = when;
    at(end, when, [this, pair, i, end, peer, epoch = link.epoch] {
      Link& here = links_[pair];
      if (here.epoch != epoch || here.broken) return;
      here.side[i].up = true;
      here.side[i].peer = peer;
      places_[end].node->on_peer_up(peer);
    });
  }
}

void World::lose(std::size_t process, Pair pair, std::uint64_t epoch) {
  Link& link = links_[pair];
  if (link.epoch != epoch) return;
  Side& side = link.side[pair.first == process ? 0 : 1];
  connect_soon(pair, random_time(milliseconds(100), milliseconds(300)));
  if (!side.up) return;
  side.up = false;
  if (trace_) say(places_[process].member.instance + " loses " + side.peer.instance);
  const Member peer = side.peer;
  places_[process].node->on_peer_lost(peer);
}

void World::cut(std::size_t a, std::size_t b, Duration notice) {
  const Pair pair = pair_of(a, b);
  Link& link = links_[pair];
  if (link.broken) return;
  if (trace_) say("cut between " + places_[a].member.instance + " and " + places_[b].member.instance);
  link.broken = true;
  for (const std::size_t end : {a, b}) {
    after(end, random_time(Duration(0), notice),
          [this, end, pair, epoch = link.epoch] { lose(end, pair, epoch); });
  }
}

bool World::up(std::size_t a, std::size_t b) const {
  const auto found = links_.find(pair_of(a, b));
  return found != links_.end() && !found->second.broken && found->second.side[0].up &&
         found->second.side[1].up;
}

bool World::all_up() const {
  for (std::size_t a = 0; a < places_.size(); ++a) {
    for (std::size_t b = a + 1; b < places_.size(); ++b) {
      if (linked(a, b) && !up(a, b)) return false;
    }
  }
  return true;
}

bool World::send(std::size_t from, const wire::Envelope& message) {
  const std::size_t to = find(message.peer);
  const Pair pair = pair_of(from, to);
  Link& link = links_[pair];
  const int mine = pair.first == from ? 0 : 1;
  if (!link.side[mine].up || link.broken) return false;
  if (message.peer_generation != 0 && message.peer_generation != link.side[mine].peer.generation)
    return false;
  if (drops && drops(message.number)) {
    say("lost: " + std::string(wire::message_name(message.number)) + " " +
        message.scope.request.text().substr(0, 4));
    return true;
  }
  Side& theirs = link.side[1 - mine];
  // Mostly quick, now and then slow enough for others to overtake.
  const Duration latency = rng.chance(0.05) ? random_time(milliseconds(3), milliseconds(80))
                                            : random_time(microseconds(20), milliseconds(2));
  theirs.last_arrival = std::max(theirs.last_arrival, now() + latency);
  wire::Envelope arrived = message;
  arrived.peer = places_[from].member.instance;
  arrived.peer_generation = places_[from].member.generation;
  at(to, theirs.last_arrival, [this, to, pair, mine, epoch = link.epoch, arrived = std::move(arrived)] {
    const Link& here = links_[pair];
    if (here.epoch != epoch || !here.side[1 - mine].up) return;
    if (trace_) {
      say(arrived.peer + " -> " + places_[to].member.instance + " " +
          std::string(wire::message_name(arrived.number)) + " " + arrived.scope.request.text().substr(0, 4) +
          "/" + std::to_string(arrived.scope.attempt));
    }
    places_[to].node->on_message(arrived);
    if (watch) watch(pair.first == to ? pair.second : pair.first, to, arrived.number, true);
  });
  // Later, as an event: the sender is in the middle of its turn.
  if (watch)
    after(Duration(0), [this, from, to, number = message.number] { watch(from, to, number, false); });
  return true;
}

// ---- arena sockets ---------------------------------------------------------------------------------------

std::uint64_t World::attach(std::size_t client, std::size_t host) {
  if (!alive(host)) return 0;
  const std::uint64_t number = next_socket_++;
  sockets_.emplace(number, Socket{client, places_[client].life, places_[client].member, host,
                                  places_[host].life, true, false});
  after(host, random_time(microseconds(50), milliseconds(2)), [this, number] {
    Socket& socket = sockets_.at(number);
    if (!socket.open) return;
    socket.seen = true;
    Node& owner = *places_[socket.host].node;
    owner.on_client(socket.client_member, true);
    if (places_[socket.client].life != socket.client_life) return;
    after(socket.client, random_time(microseconds(50), milliseconds(2)), [this, number] {
      const Socket& mapped = sockets_.at(number);
      if (!mapped.open || places_[mapped.host].life != mapped.host_life) return;
      kv::ArenaOwner* arena = places_[mapped.host].node->arena();
      auto client_side = kv::ArenaClient::map(arena->fd(), arena->bytes());
      if (!client_side) return fail("map: " + client_side.error().message);
      places_[mapped.client].node->on_arena(number, arena->generation(), *client_side);
    });
  });
  return number;
}

void World::detach(std::uint64_t number) {
  const auto found = sockets_.find(number);
  if (found == sockets_.end() || !found->second.open) return;
  found->second.open = false;
  if (places_[found->second.host].life != found->second.host_life) return;
  after(found->second.host, random_time(Duration(0), milliseconds(2)), [this, number] {
    const Socket& gone = sockets_.at(number);
    if (gone.seen) places_[gone.host].node->on_client(gone.client_member, false);
  });
}

// ---- for everybody ---------------------------------------------------------------------------------------

void World::fail(std::string what) {
  if (failure_.empty())
    failure_ = "at " + std::to_string(to_us(now() - Instant{1'000'000'000})) + " us: " + std::move(what);
}

void World::say(const std::string& text) const {
  if (trace_)
    std::printf("%10.3f %s\n", static_cast<double>(to_us(now() - Instant{1'000'000'000})) / 1000,
                text.c_str());
}

}  // namespace di::sim
