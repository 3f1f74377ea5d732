#include "net/peer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/assert.h"
#include "base/log.h"

namespace di::net {

namespace {

// Who connects to whom: the smaller number connects.
int order_of(const Member& m) {
  if (m.program == "di-router") return 0;
  if (m.program == "di-prefill" || m.program == "di-decode" || m.program == "di-vision") return 1;
  if (m.program == "di-eplb") return 2;
  if (m.program == "di-kvd") return m.role == "store" ? 4 : 3;
  return 5;  // di-meta
}

constexpr std::string_view broken = "connection broken";

// In spans of silence after which a peer is lost: so long is nobody at the bootstrap address before that is said,
// and between two times that it is said.
constexpr int bootstrap_late_factor = 3;
constexpr int bootstrap_again_factor = 20;

bool is_rank(const Member& m) {
  return order_of(m) == 1;
}
bool is_host(const Member& m) {
  return order_of(m) == 3;
}
bool is_meta(const Member& m) {
  return m.program == "di-meta";
}

}  // namespace

bool linked(const Member& a, const Member& b) {
  if (a.id == b.id) return false;
  if (is_meta(a) || is_meta(b)) return is_meta(a) != is_meta(b);
  const Member& lower = order_of(a) <= order_of(b) ? a : b;
  const Member& upper = order_of(a) <= order_of(b) ? b : a;
  switch (order_of(lower)) {
    case 0:
      return is_rank(upper) || is_host(upper);
    case 1:
      return is_host(upper) && lower.host == upper.host;
    case 3:
      return true;  // host to host, host to store
    default:
      return false;
  }
}

bool connects(const Member& a, const Member& b) {
  if (order_of(a) != order_of(b)) return order_of(a) < order_of(b);
  return a.id < b.id;
}

struct Endpoint::Impl {
  // A connection, whoever opened it.
  struct Link {
    ConnectionId id = 0;
    bool outgoing = false;
    bool bootstrap = false;
    bool established = false;  // outgoing: send() may be called
    bool up = false;           // both said hello
    bool dead = false;         // incoming: given up; everything on it is answered `stale`
    PeerId peer = 0;           // outgoing: expected; incoming: from its hello; 0: unknown
    std::uint32_t generation = 0;
    std::string instance;  // incoming: from its hello
    Instant last_heard;
  };
  struct Known {
    Member member;
    bool listed = false;
    ConnectionId link = 0;  // 0: none
    bool up = false;
    bool leaving = false;  // it said so since it came up
    Instant retry_at;      // no new connection before
    Duration pause = reconnect_after;
  };

  Impl(Endpoint& owner, loop::Loop& l, Transport& t, Options o)
      : endpoint(owner),
        loop(l),
        transport(t),
        options(std::move(o)),
        alive(std::make_shared<bool>(true)),
        tick(l, loop::TimerKind::liveness, "heartbeat", [this] { beat(); }),
        retry(l, loop::TimerKind::liveness, "reconnect", [this] { connect_members(); }),
        bootstrap_again(l, loop::TimerKind::liveness, "bootstrap again", [this] { open_bootstrap(); }),
        bootstrap_late(l, loop::TimerKind::liveness, "no di-meta", [this] { bootstrap_is_late(); }) {
    transport.set_events({.message = [this](ConnectionId c, std::span<const ByteView> f) { message(c, f); },
                          .connected = [this](ConnectionId c) { connected(c); },
                          .disconnected = [this](ConnectionId c) { disconnected(c); }});
    last_tick = loop.monotonic_now();
    tick.start_every(options.heartbeat / 2);
  }
  ~Impl() {
    *alive = false;
    for (const auto& [id, link] : links) {
      if (link.outgoing) transport.close(id);
    }
    transport.set_events({});
  }

  // ---- sending

  Status transmit(ConnectionId connection, std::uint16_t number, std::uint32_t destination_generation,
                  ByteView body, const SendOptions& send_options) {
    wire::Header header;
    header.number = number;
    header.cluster = cluster;
    header.sender = self.id;
    header.sender_generation = self.generation;
    header.destination_generation = destination_generation;
    header.request = send_options.request;
    header.attempt = send_options.attempt;
    header.rank = send_options.rank;
    header.deadline_ms = send_options.deadline_ms;
    const auto head = wire::header_encode(header, body);
    std::vector<ByteView> frames{head, body};
    frames.insert(frames.end(), send_options.payload.begin(), send_options.payload.end());
    DI_ASSERT(frames.size() <= frames_max);
    Status status = transport.send(connection, frames);
    if (status.ok()) {
      ++counters.sent;
    } else {
      ++counters.send_failed;
    }
    return status;
  }
  template <class M>
  Status transmit(ConnectionId connection, std::uint32_t destination_generation, const M& message) {
    const Bytes body = wire::body_encode(message);
    return transmit(connection, M::number, destination_generation, body, {});
  }

  Status send(PeerId to, std::uint16_t number, ByteView body, const SendOptions& send_options) {
    const auto found = known.find(to);
    if (found == known.end() || !found->second.up) {
      ++counters.send_failed;
      return Error{Code::unreachable, 0, "peer " + std::to_string(to) + " is not up"};
    }
    const Known& peer = found->second;
    Status status = transmit(peer.link, number, peer.member.generation, body, send_options);
    if (!status.ok()) {
      // A later turn: the caller is in the middle of something.
      const std::uint32_t generation = peer.member.generation;
      const std::string_view reason = status.error().code == Code::busy ? "does not read" : broken;
      loop.post("peer lost", [this, alive_now = alive, to, generation, reason] {
        if (*alive_now) lose(to, generation, reason);
      });
    }
    return status;
  }

  void say_hello(const Link& link) {
    // The other side may be registered and still not know us: it answers when it does.
    static_cast<void>(transmit(link.id, link.generation, wire::peer_hello{self.instance}));
  }
  void say_stale(ConnectionId connection, const wire::Header& header) {
    ++counters.dropped_stale;
    // Never an answer to an answer.
    if (header.number == wire::peer_stale::number) return;
    static_cast<void>(
        transmit(connection, header.sender_generation, wire::peer_stale{header.number, self.generation}));
  }

  // ---- connections

  void connected(ConnectionId connection) {
    const auto found = links.find(connection);
    if (found == links.end()) return;
    Link& link = found->second;
    link.established = true;
    link.last_heard = loop.monotonic_now();
    if (link.bootstrap) {
      if (bootstrap_connected) bootstrap_connected(From{0, 0, connection});
      return;
    }
    if (self.id != 0) say_hello(link);
  }

  void disconnected(ConnectionId connection) {
    const auto found = links.find(connection);
    if (found == links.end()) return;
    drop(connection, broken);
  }

  // Ends a connection: closes ours, marks theirs.  The peer on it is lost.
  void drop(ConnectionId connection, std::string_view reason) {
    const auto found = links.find(connection);
    if (found == links.end()) return;
    const Link link = found->second;
    transport.close(connection);
    links.erase(found);
    if (link.bootstrap) {
      // Whoever breaks off may be a di-meta that ends; whoever is there and will not have us is none.
      if (link.established && !link.up && reason != broken) {
        complain_of_bootstrap("who answers does not take us: is that di-meta?");
      }
      put_off_bootstrap();
      if (link.up) bootstrap_late.start_after(bootstrap_late_factor * options.lost_after);
    }
    const auto peer = known.find(link.peer);
    if (peer == known.end() || peer->second.link != connection) return;
    peer->second.link = 0;
    const Instant again = put_off(peer->second);
    if (!retry.armed() || retry.at() > again) retry.start_at(again);
    if (link.up)
      lost(peer->second, reason);
    else
      forget_unlisted(link.peer);
  }

  // Puts off the next connection; the pauses grow until the peer comes up.
  Instant put_off(Known& peer) {
    peer.retry_at = loop.monotonic_now() + peer.pause;
    peer.pause = std::min(peer.pause * 2, reconnect_after_max);
    return peer.retry_at;
  }

  void lost(Known& peer, std::string_view reason) {
    DI_ASSERT(peer.up);
    peer.up = false;
    ++counters.peers_lost;
    const PeerId id = peer.member.id;
    const std::uint32_t generation = peer.member.generation;
    // Whoever said that it drains or leaves and closes its connection has stopped; nobody has to look.
    const bool said = peer.leaving || peer.member.state != 0 || !peer.listed;
    if (said && reason == broken) ++counters.peers_left;
    // Nor does anybody who stops: its peers stop beside it.
    if (reason == broken && (said || leaving)) {
      log_info("net", "peer left", {{"peer", peer.member.instance}, {"generation", generation}});
    } else {
      log_warn("net", "peer lost",
               {{"peer", peer.member.instance}, {"generation", generation}, {"reason", reason}});
    }
    forget_unlisted(id);
    if (peer_lost) peer_lost(id, generation);
  }
  void forget_unlisted(PeerId id) {
    const auto found = known.find(id);
    if (found != known.end() && !found->second.listed && !found->second.up) known.erase(found);
  }

  void lose(PeerId id, std::uint32_t generation, std::string_view reason) {
    const auto found = known.find(id);
    if (found == known.end() || !found->second.up || found->second.member.generation != generation) return;
    const ConnectionId connection = found->second.link;
    const auto link = links.find(connection);
    DI_ASSERT(link != links.end());
    if (link->second.outgoing) {
      drop(connection, reason);
      return;
    }
    // Theirs: it stays open until they close it, and learns now that it is void.
    found->second.link = 0;
    link->second.up = false;
    link->second.dead = true;
    static_cast<void>(transmit(connection, generation, wire::peer_stale{0, self.generation}));
    lost(found->second, reason);
  }

  void come_up(Link& link, Known& peer) {
    link.up = true;
    link.peer = peer.member.id;
    link.generation = peer.member.generation;
    link.last_heard = loop.monotonic_now();
    peer.link = link.id;
    peer.up = true;
    peer.leaving = false;
    peer.pause = reconnect_after;
    if (link.bootstrap) {
      bootstrap_pause = reconnect_after;
      bootstrap_complained = false;
      bootstrap_reason.clear();
      bootstrap_late.cancel();
    }
    log_info("net", "peer up", {{"peer", peer.member.instance}, {"generation", peer.member.generation}});
    if (peer_up) {
      const Member member = peer.member;  // the handler may change the list
      peer_up(member);
    }
  }

  void open_bootstrap() {
    if (bootstrap_address.empty()) return;
    Result<ConnectionId> connection = transport.connect(bootstrap_address, options.bootstrap_key);
    if (!connection) {
      complain_of_bootstrap(connection.error().message);
      put_off_bootstrap();
      return;
    }
    Link& link = links[*connection];
    link.id = *connection;
    link.outgoing = true;
    link.bootstrap = true;
  }

  void put_off_bootstrap() {
    bootstrap_again.start_after(bootstrap_pause);
    bootstrap_pause = std::min(bootstrap_pause * 2, reconnect_after_max);
  }
  // At once the first time, and then seldom until it is up.
  void complain_of_bootstrap(std::string_view reason) {
    bootstrap_reason = reason;
    if (!bootstrap_complained) say_no_bootstrap();
  }
  // A transport goes on trying to connect by itself, and says nothing of an address where nobody listens.
  void bootstrap_is_late() {
    // A di-meta that cannot register us yet answers: silence would have ended that connection.
    const bool answers = std::any_of(links.begin(), links.end(), [](const auto& link) {
      return link.second.bootstrap && link.second.established;
    });
    if (answers && bootstrap_reason.empty()) {
      bootstrap_late.start_after(bootstrap_late_factor * options.lost_after);
    } else {
      say_no_bootstrap();
    }
  }
  void say_no_bootstrap() {
    if (leaving) return;
    bootstrap_complained = true;
    log_warn("net", "no di-meta at its address",
             {{"address", bootstrap_address},
              {"reason", bootstrap_reason.empty() ? "nobody answers" : bootstrap_reason}});
    bootstrap_reason.clear();
    bootstrap_late.start_after(bootstrap_again_factor * options.lost_after);
  }

  void connect_members() {
    if (self.id == 0) return;
    const Instant now = loop.monotonic_now();
    Instant next = instant_never;
    for (auto& [id, peer] : known) {
      if (!peer.listed || peer.link != 0 || !wants_connection(peer.member)) continue;
      if (peer.retry_at > now) {
        next = std::min(next, peer.retry_at);
        continue;
      }
      Result<ConnectionId> connection = open_member(peer.member);
      if (!connection) {
        log_warn("net", "cannot connect", {{"peer", peer.member.instance}, {"error", connection.error()}});
        peer.pause = reconnect_after_max;
        next = std::min(next, put_off(peer));
        continue;
      }
      Link& link = links[*connection];
      link.id = *connection;
      link.outgoing = true;
      link.peer = id;
      link.generation = peer.member.generation;
      peer.link = *connection;
    }
    if (next != instant_never) retry.start_at(next);
  }
  Result<ConnectionId> open_member(const Member& member) {
    if (options.may_be && !member.public_key.empty() && !options.may_be(member.public_key, member.instance)) {
      return Error{Code::denied, 0, "our net.public_keys does not have its key under this name"};
    }
    return transport.connect(member.control, member.public_key);
  }
  bool wants_connection(const Member& member) const {
    // di-meta is reached by the bootstrap connection.
    return !is_meta(member) && options.linked(self, member) && connects(self, member);
  }

  // ---- membership

  void set_members(const std::vector<Member>& members) {
    for (auto& [id, peer] : known) peer.listed = false;
    std::vector<std::pair<PeerId, std::uint32_t>> replaced;
    for (const Member& member : members) {
      if (member.id == self.id || member.id == 0) continue;
      if (known.size() >= peers_max && !known.contains(member.id)) continue;
      const auto found = known.find(member.id);
      if (found != known.end() && found->second.member.generation > member.generation) {
        found->second.listed = true;  // a list older than what the peer itself said
        continue;
      }
      if (found != known.end() && found->second.member.generation != member.generation) {
        replaced.emplace_back(member.id, found->second.member.generation);
      }
    }
    for (const auto& [id, generation] : replaced) {
      lose(id, generation, "replaced by a new generation");
      // A connection that has not come up is for the old generation too.
      const auto found = known.find(id);
      if (found == known.end()) continue;
      if (found->second.link != 0) drop(found->second.link, "replaced by a new generation");
      known.erase(id);
    }
    for (const Member& member : members) {
      if (member.id == self.id || member.id == 0) continue;
      if (known.size() >= peers_max && !known.contains(member.id)) continue;
      Known& peer = known[member.id];
      if (peer.member.generation > member.generation) continue;
      peer.member = member;
      peer.listed = true;
    }
    // Members that left: a connection that is up stays until it breaks.
    std::vector<PeerId> gone;
    for (const auto& [id, peer] : known) {
      if (!peer.listed && !peer.up) gone.push_back(id);
    }
    for (const PeerId id : gone) {
      const ConnectionId connection = known[id].link;
      known.erase(id);
      if (connection != 0) drop(connection, "not a member");
    }
    // Callers that said hello before we knew them.
    std::vector<ConnectionId> waiting;
    for (const auto& [id, link] : links) {
      if (!link.outgoing && !link.up && !link.dead && link.peer != 0) waiting.push_back(id);
    }
    for (const ConnectionId id : waiting) welcome(id);
    connect_members();
  }

  // ---- receiving

  void message(ConnectionId connection, std::span<const ByteView> frames) {
    if (frames.size() < 2) {
      ++counters.dropped_malformed;
      return;
    }
    wire::Decoded<wire::Header> decoded = wire::header_decode(frames[0], frames[1]);
    if (!decoded) {
      ++counters.dropped_malformed;
      log_warn("net", "message refused", {{"fault", wire::fault_name(decoded.fault())}});
      return;
    }
    const wire::Header header = *decoded;
    if (cluster != 0 && header.cluster != 0 && header.cluster != cluster && !introduces(connection, header)) {
      ++counters.dropped_malformed;
      log_warn("net", "message refused", {{"fault", wire::fault_name(wire::Fault::cluster)}});
      return;
    }
    Link& link = links[connection];
    if (link.id == 0) {
      link.id = connection;
      link.last_heard = loop.monotonic_now();
    }
    if (header.destination_generation != 0 && header.destination_generation != self.generation) {
      say_stale(connection, header);
      return;
    }
    if (link.dead) {
      say_stale(connection, header);
      return;
    }
    if (header.number == wire::peer_hello::number) {
      hello(link, header, frames[1]);
      return;
    }
    if (header.number == wire::peer_stale::number) {
      ++counters.received;
      // We talk to somebody who is not who we think, or who takes us for somebody else.
      if (link.outgoing) {
        drop(connection, "stale");
      } else if (link.up) {
        lose(link.peer, link.generation, "stale");
      }
      return;
    }
    if (!link.up) {
      const bool unregistered = options.accept_unregistered || link.bootstrap;
      if (!unregistered) {
        ++counters.dropped_unknown;
        say_stale(connection, header);
        return;
      }
      link.last_heard = loop.monotonic_now();
      dispatch({From{0, 0, connection}, header, frames[1], frames.subspan(2)});
      return;
    }
    if (header.sender != link.peer || header.sender_generation != link.generation ||
        header.destination_generation == 0) {
      say_stale(connection, header);
      return;
    }
    link.last_heard = loop.monotonic_now();
    if (header.number == wire::peer_heartbeat::number) return;
    if (header.number == wire::peer_leaving::number) {
      ++counters.received;
      known.at(link.peer).leaving = true;
      return;
    }
    dispatch({From{link.peer, link.generation, connection}, header, frames[1], frames.subspan(2)});
  }

  // A registration and its answer pass whatever the cluster: who is of another one has to hear so.
  bool introduces(ConnectionId connection, const wire::Header& header) const {
    if (header.number == wire::meta_register::number) return options.accept_unregistered;
    const auto link = links.find(connection);
    return header.number == wire::meta_registered::number && link != links.end() && link->second.bootstrap;
  }

  void dispatch(const Incoming& in) {
    ++counters.received;
    if (in.header.number == wire::peer_unsupported::number) {
      log_warn("net", "peer does not know a message", {{"from", in.from.id}});
      return;
    }
    const auto handler = handlers.find(in.header.number);
    if (handler == handlers.end()) {
      ++counters.dropped_unsupported;
      log_warn("net", "message without a handler",
               {{"message", wire::message_name(in.header.number)}, {"from", in.from.id}});
      static_cast<void>(
          transmit(in.from.connection, in.from.generation, wire::peer_unsupported{in.header.number}));
      return;
    }
    handler->second(in);
  }

  void hello(Link& link, const wire::Header& header, ByteView body) {
    wire::Decoded<wire::peer_hello> message = wire::body_decode<wire::peer_hello>(body);
    if (!message || header.sender == 0 || header.sender_generation == 0) {
      ++counters.dropped_malformed;
      return;
    }
    ++counters.received;
    link.last_heard = loop.monotonic_now();
    if (link.up) {
      // Said again because our answer was not there yet.
      if (header.sender != link.peer || header.sender_generation != link.generation)
        say_stale(link.id, header);
      return;
    }
    if (link.outgoing) {
      answered(link, header, message->instance);
      return;
    }
    link.peer = header.sender;
    link.generation = header.sender_generation;
    link.instance = message->instance;
    welcome(link.id);
  }

  // The server's hello on a connection of ours.
  void answered(Link& link, const wire::Header& header, const std::string& instance) {
    if (link.bootstrap) {
      if (self.id == 0) return;
      const auto found = known.find(header.sender);
      if (found != known.end() && found->second.member.generation != header.sender_generation) {
        lose(header.sender, found->second.member.generation, "replaced by a new generation");
        known.erase(header.sender);
      }
      Known& peer = known[header.sender];
      if (peer.member.id == 0) {
        peer.member.id = header.sender;
        peer.member.generation = header.sender_generation;
        peer.member.instance = instance;
        peer.member.program = "di-meta";
        peer.member.control = bootstrap_address;
      }
      come_up(link, peer);
      return;
    }
    const auto found = known.find(link.peer);
    if (found == known.end() || header.sender != link.peer || header.sender_generation != link.generation ||
        found->second.member.instance != instance) {
      drop(link.id, "another instance answered");
      return;
    }
    come_up(link, found->second);
  }

  // A caller that said hello: answered when the membership knows it, kept waiting otherwise.
  void welcome(ConnectionId connection) {
    const auto found = links.find(connection);
    if (found == links.end() || self.id == 0) return;
    Link& link = found->second;
    const auto peer = known.find(link.peer);
    if (peer == known.end() || peer->second.member.generation < link.generation) return;  // our list is older
    const Member& member = peer->second.member;
    bool wanted = member.generation == link.generation && options.linked(self, member);
    if (wanted && (link.instance != member.instance || !owns(transport.peer_key(connection), member))) {
      ++counters.names_refused;
      log_warn("net", "name refused", {{"said", link.instance}, {"key", transport.peer_key(connection)}});
      wanted = false;
    }
    if (!wanted) {
      link.dead = true;
      static_cast<void>(
          transmit(connection, link.generation, wire::peer_stale{wire::peer_hello::number, self.generation}));
      return;
    }
    // It gave up an earlier connection that we still took for good.
    if (peer->second.up) lose(link.peer, link.generation, "connected again");
    const auto again = links.find(connection);
    const auto still = known.find(again == links.end() ? 0 : again->second.peer);
    if (again == links.end() || still == known.end()) return;
    say_hello(again->second);
    come_up(again->second, still->second);
  }

  // ---- keys

  // Whether the holder of `key` may be the member; nothing is known of callers in the clear.
  bool owns(const std::string& key, const Member& member) const {
    if (key.empty()) return true;
    return (member.public_key.empty() || member.public_key == key) &&
           (!options.may_be || options.may_be(key, member.instance));
  }

  void recheck_keys() {
    if (!options.may_be) return;
    std::vector<ConnectionId> revoked;
    for (const auto& [id, link] : links) {
      const std::string key = transport.peer_key(id);
      if (key.empty() || link.bootstrap) continue;  // meta.public_key is no matter of the list
      const auto peer = known.find(link.peer);
      const std::string_view instance = link.outgoing && peer != known.end()
                                            ? std::string_view(peer->second.member.instance)
                                            : std::string_view(link.instance);
      if (!options.may_be(key, instance)) revoked.push_back(id);
    }
    for (const ConnectionId id : revoked) {
      const auto found = links.find(id);
      if (found == links.end()) continue;
      ++counters.keys_revoked;
      log_warn("net", "key no longer allowed",
               {{"instance", found->second.instance}, {"key", transport.peer_key(id)}});
      if (found->second.outgoing) {
        drop(id, "key no longer allowed");
        continue;
      }
      if (found->second.up) lose(found->second.peer, found->second.generation, "key no longer allowed");
      transport.refuse(id);
      links.erase(id);
    }
    // Others may be allowed only now.
    for (auto& [id, peer] : known) peer.retry_at = {};
    connect_members();
  }

  // ---- liveness

  void beat() {
    const Instant now = loop.monotonic_now();
    // After a stop of our own (a debugger, a suspended machine) what the peers sent meanwhile is
    // still unread: their time starts again.
    const bool frozen = now - last_tick > options.lost_after / 2;
    last_tick = now;
    const bool send_now = (++ticks % 2) == 0;
    std::vector<ConnectionId> silent;
    std::vector<ConnectionId> all;
    for (auto& [id, link] : links) {
      if (frozen) link.last_heard = now;
      const bool awaited = link.up || (link.outgoing && link.established);
      if (awaited && now - link.last_heard > options.lost_after) silent.push_back(id);
      all.push_back(id);
    }
    for (const ConnectionId id : silent) {
      const auto found = links.find(id);
      if (found == links.end()) continue;
      if (found->second.outgoing) {
        drop(id, "silent");
      } else {
        lose(found->second.peer, found->second.generation, "silent");
      }
    }
    if (!send_now) return;
    for (const ConnectionId id : all) {
      const auto found = links.find(id);
      if (found == links.end()) continue;
      const Link& link = found->second;
      if (link.up) {
        const Status status = transmit(id, link.generation, wire::peer_heartbeat{ticks});
        // The disconnect event follows a broken connection; a full queue is ours to notice.
        if (!status.ok() && status.error().code == Code::busy)
          lose(link.peer, link.generation, "does not read");
      } else if (link.outgoing && link.established && !link.bootstrap && self.id != 0) {
        say_hello(link);
      }
    }
  }

  Endpoint& endpoint;
  loop::Loop& loop;
  Transport& transport;
  const Options options;
  std::shared_ptr<bool> alive;
  Member self;
  std::uint32_t cluster = 0;
  std::map<ConnectionId, Link> links;
  std::map<PeerId, Known> known;
  std::map<std::uint16_t, std::function<void(const Incoming&)>> handlers;
  std::function<void(const Member&)> peer_up;
  std::function<void(PeerId, std::uint32_t)> peer_lost;
  bool leaving = false;  // leave() was called
  std::string bootstrap_address;
  std::function<void(const From&)> bootstrap_connected;
  Duration bootstrap_pause = reconnect_after;  // as those of the members
  bool bootstrap_complained = false;
  std::string bootstrap_reason;  // what was found there since that was said last
  EndpointCounters counters;
  Instant last_tick;
  std::uint64_t ticks = 0;
  loop::Timer tick;
  loop::Timer retry;
  loop::Timer bootstrap_again;
  loop::Timer bootstrap_late;
};

Endpoint::Endpoint(loop::Loop& loop, Transport& transport, Options options)
    : impl_(std::make_unique<Impl>(*this, loop, transport, std::move(options))) {}
Endpoint::~Endpoint() = default;

void Endpoint::set_handler(std::uint16_t number, std::function<void(const Incoming&)> handler) {
  const bool fresh = impl_->handlers.emplace(number, std::move(handler)).second;
  DI_ASSERT(fresh);
}

void Endpoint::malformed(const Incoming& in, wire::Fault fault) {
  ++impl_->counters.dropped_malformed;
  log_warn("net", "message refused",
           {{"fault", wire::fault_name(fault)},
            {"message", wire::message_name(in.header.number)},
            {"from", in.from.id}});
}

void Endpoint::on_peer_up(std::function<void(const Member&)> handler) {
  impl_->peer_up = std::move(handler);
}

void Endpoint::on_peer_lost(std::function<void(PeerId, std::uint32_t)> handler) {
  impl_->peer_lost = std::move(handler);
}

Result<std::string> Endpoint::bind(const std::string& address) {
  return impl_->transport.bind(address);
}

void Endpoint::identify(Member self, std::uint32_t cluster) {
  DI_ASSERT(self.id != 0 && self.generation != 0);
  DI_ASSERT(impl_->self.id == 0 || (impl_->self.id == self.id && impl_->self.generation == self.generation));
  impl_->self = std::move(self);
  impl_->cluster = cluster;
}

const Member& Endpoint::self() const {
  return impl_->self;
}

void Endpoint::set_members(const std::vector<Member>& members) {
  impl_->set_members(members);
}

Status Endpoint::may_register(const From& from, const Member& self) {
  const std::string key = impl_->transport.peer_key(from.connection);
  const auto& may_be = impl_->options.may_be;
  std::string reason;
  if (!key.empty() && !self.public_key.empty() && self.public_key != key) {
    reason = "the public key that it publishes is not the one that it holds";
  } else if (!key.empty() && may_be && !may_be(key, self.instance)) {
    reason = "net.public_keys does not have its key under this name";
  } else if (!self.public_key.empty() && may_be && !may_be(self.public_key, self.instance)) {
    reason = "net.public_keys does not have the public key that it publishes under this name";
  }
  if (reason.empty()) return {};
  ++impl_->counters.names_refused;
  return Error{Code::denied, 0, reason};
}

void Endpoint::leave() {
  impl_->leaving = true;
  for (const auto& [id, peer] : impl_->known) {
    // One that cannot be told will take it for a death: no harm is done.
    if (peer.up) static_cast<void>(impl_->transmit(peer.link, peer.member.generation, wire::peer_leaving{}));
  }
}

void Endpoint::recheck_keys() {
  impl_->recheck_keys();
}

void Endpoint::set_bootstrap(const std::string& address, std::function<void(const From&)> connected) {
  DI_ASSERT(impl_->bootstrap_address.empty());
  impl_->bootstrap_address = address;
  impl_->bootstrap_connected = std::move(connected);
  impl_->bootstrap_late.start_after(bootstrap_late_factor * impl_->options.lost_after);
  impl_->open_bootstrap();
}

void Endpoint::greet_bootstrap() {
  DI_ASSERT(impl_->self.id != 0);
  for (const auto& [id, link] : impl_->links) {
    if (link.bootstrap && link.established && !link.up) impl_->say_hello(link);
  }
}

Status Endpoint::send_body(PeerId to, std::uint16_t number, ByteView body, const SendOptions& options) {
  return impl_->send(to, number, body, options);
}

Status Endpoint::reply_body(const From& to, std::uint16_t number, ByteView body, const SendOptions& options) {
  return impl_->transmit(to.connection, number, to.generation, body, options);
}

bool Endpoint::up(PeerId id) const {
  const auto found = impl_->known.find(id);
  return found != impl_->known.end() && found->second.up;
}

const Member* Endpoint::peer(PeerId id) const {
  const auto found = impl_->known.find(id);
  return found == impl_->known.end() ? nullptr : &found->second.member;
}

const Member* Endpoint::peer_by_name(std::string_view instance) const {
  for (const auto& [id, peer] : impl_->known) {
    if (peer.member.instance == instance) return &peer.member;
  }
  return nullptr;
}

std::vector<const Member*> Endpoint::peers_up() const {
  std::vector<const Member*> all;
  for (const auto& [id, peer] : impl_->known) {
    if (peer.up) all.push_back(&peer.member);
  }
  return all;
}

const EndpointCounters& Endpoint::counters() const {
  return impl_->counters;
}

void Endpoint::lose(PeerId id, std::string_view reason) {
  const auto found = impl_->known.find(id);
  if (found != impl_->known.end()) impl_->lose(id, found->second.member.generation, reason);
}

}  // namespace di::net
