// net/peer.h: who this instance talks to.  An Endpoint turns a Transport into messages between
// registered instances: addressed by instance number, checked against generations, with one event
// when a peer comes and one when it goes.
//
// Owner: loop thread.  A pair of instances that talk shares one connection; which pairs do, and
// which side connects, is `linked` and `connects` below.  A connection opens with peer_hello both
// ways; from then each side sends a heartbeat every second.  A peer is lost when its connection
// breaks, when nothing came for three seconds of monotonic time, when it does not read, when it is
// told or tells that a generation is stale, or when the membership has a newer generation of it.
// Loss ends the connection; a peer that still lives says hello on a new one and is up again.  For
// the core that means: peer_up(p) and peer_lost(id, generation) strictly alternate for an instance,
// every message from it comes between the two, and after a loss whatever was promised in either
// direction is void.
//
// A message for another generation than ours, or from another than the peer's, is dropped, counted
// and answered `stale`: a DEALER delivers what it queued for a killed process to the process that
// next binds the same path.
//
// Where connections carry keys (net/zmq.h), an instance may say hello and register only under a name that
// `may_be` grants to the key that it has proved.  Members whose own key is not granted their name are not
// connected to.
//
// Bounds: `peers_max` peers and as many connections that have not said hello; a message
// `message_bytes_max`; queues by the transport.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "loop/loop.h"
#include "net/transport.h"
#include "wire/codec.h"
#include "wire/header.h"
#include "wire/ids.h"
#include "wire/messages.h"

namespace di::net {

inline constexpr std::size_t peers_max = 4096;
inline constexpr Duration heartbeat_every = seconds(1);
inline constexpr Duration peer_lost_after = seconds(3);
// Pause before a broken connection to a member that is still listed, or to di-meta, is tried again.  It doubles
// while the other side does not come up.
inline constexpr Duration reconnect_after = milliseconds(100);
inline constexpr Duration reconnect_after_max = seconds(1);

using PeerId = std::uint32_t;  // the instance number that di-meta hands out; 0: not registered
using wire::Member;

// Whether two instances talk directly: everyone with di-meta; routers with ranks and host di-kvds;
// ranks with the di-kvd of their host label; host di-kvds with each other and with the stores.
[[nodiscard]] bool linked(const Member& a, const Member& b);
// Of a linked pair, whether `a` is the one that connects.  Exactly one side does.
[[nodiscard]] bool connects(const Member& a, const Member& b);

struct SendOptions {
  RequestId request{};
  std::uint16_t attempt = 0;
  std::uint16_t rank = 0;
  std::uint32_t deadline_ms = 0;        // remaining; 0: none
  std::span<const ByteView> payload{};  // raw frames after the body
};

// Where a message came from.  `id` is 0 for a sender that is not registered yet (di-meta only).
struct From {
  PeerId id = 0;
  std::uint32_t generation = 0;
  ConnectionId connection = 0;
};

// Valid during the call of the handler only.
struct Incoming {
  From from;
  const wire::Header& header;
  ByteView body;
  std::span<const ByteView> payload;
};

struct EndpointCounters {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  std::uint64_t dropped_stale = 0;        // generation mismatch, ours or theirs
  std::uint64_t dropped_malformed = 0;    // header or body refused
  std::uint64_t dropped_unsupported = 0;  // no handler for the number
  std::uint64_t dropped_unknown = 0;      // from a connection that has not said hello
  std::uint64_t send_failed = 0;
  std::uint64_t peers_lost = 0;
  std::uint64_t peers_left = 0;     // of them, those that had said so
  std::uint64_t names_refused = 0;  // a name that is not its key's, in a hello or a registration
  std::uint64_t keys_revoked = 0;   // connections ended because a key is not allowed any more
};

class Endpoint {
 public:
  struct Options {
    bool accept_unregistered = false;  // true in di-meta: messages with sender 0 reach their handler
    std::function<bool(const Member&, const Member&)> linked = net::linked;
    // Whether the holder of `public_key` may be `instance`; with an empty name, whether it may talk at
    // all.  Null where no connection carries keys.
    std::function<bool(std::string_view public_key, std::string_view instance)> may_be{};
    // The key of the instance at the bootstrap address; empty: in the clear.
    std::string bootstrap_key{};
    // Shorter in tests.
    Duration heartbeat = heartbeat_every;
    Duration lost_after = peer_lost_after;
  };

  // `transport` outlives the endpoint and belongs to the same loop.
  Endpoint(loop::Loop& loop, Transport& transport, Options options);
  Endpoint(loop::Loop& loop, Transport& transport) : Endpoint(loop, transport, Options{}) {}
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Handlers are set before messages arrive.  A body that does not decode is dropped and counted;
  // a number without a handler is answered `peer_unsupported`.
  template <class M>
  void on(std::function<void(const Incoming&, M)> handler) {
    set_handler(M::number, [this, handler = std::move(handler)](const Incoming& in) {
      wire::Decoded<M> message = wire::body_decode<M>(in.body);
      if (!message) {
        malformed(in, message.fault());
        return;
      }
      handler(in, std::move(*message));
    });
  }
  void on_peer_up(std::function<void(const Member&)> handler);
  void on_peer_lost(std::function<void(PeerId id, std::uint32_t generation)> handler);

  // Returns the address to advertise.
  Result<std::string> bind(const std::string& address);

  // Who we are: after registration (di-meta: at start).  `cluster` is the number that every message
  // carries and that is compared.
  void identify(Member self, std::uint32_t cluster);
  [[nodiscard]] const Member& self() const;

  // The members of the fleet.  Connects to new ones that we are linked to and are to connect to.  A
  // member with a new generation loses its old one; one that is missing is dropped when its
  // connection breaks (a di-meta that just restarted does not know everybody yet).
  void set_members(const std::vector<Member>& members);

  // Tells every peer that is up that we stop, so that nobody takes it for a death.
  void leave();

  // A connection to an address whose instance is not known yet (meta.endpoint).  `connected` is
  // called each time it is established and sends with reply(); when the other side says hello it is
  // a peer like any other.
  void set_bootstrap(const std::string& address, std::function<void(const From&)> connected);
  // Says hello on the bootstrap connection: we have an identity now.
  void greet_bootstrap();

  // Whether a registration of `self` may come from there.  Errors: denied, with the reason to send.
  Status may_register(const From& from, const Member& self);
  // What `may_be` answers has changed: connections of keys that it does not grant any more end now.
  void recheck_keys();

  // Never blocks and never keeps a message for later.  Errors: unreachable when the peer is not up.
  // A peer whose queue is full is lost in the next turn.
  template <class M>
  Status send(PeerId to, const M& message, const SendOptions& options = {}) {
    const Bytes body = wire::body_encode(message);
    return send_body(to, M::number, body, options);
  }
  // On the connection a message came from, whether or not its sender is registered.
  template <class M>
  Status reply(const From& to, const M& message, const SendOptions& options = {}) {
    const Bytes body = wire::body_encode(message);
    return reply_body(to, M::number, body, options);
  }
  Status send_body(PeerId to, std::uint16_t number, ByteView body, const SendOptions& options);
  Status reply_body(const From& to, std::uint16_t number, ByteView body, const SendOptions& options);

  [[nodiscard]] bool up(PeerId id) const;
  // A member or a peer that is up, or null.  Valid until the next turn.
  [[nodiscard]] const Member* peer(PeerId id) const;
  [[nodiscard]] const Member* peer_by_name(std::string_view instance) const;
  [[nodiscard]] std::vector<const Member*> peers_up() const;
  [[nodiscard]] const EndpointCounters& counters() const;

  // Drops a peer as lost: the caller has a better reason (an arena socket that closed).
  void lose(PeerId id, std::string_view reason);

 private:
  struct Impl;
  void set_handler(std::uint16_t number, std::function<void(const Incoming&)> handler);
  void malformed(const Incoming& in, wire::Fault fault);
  std::unique_ptr<Impl> impl_;
};

}  // namespace di::net
