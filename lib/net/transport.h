// net/transport.h: multi-frame messages over connections; the seam between the peers' logic and
// ZeroMQ (net/zmq.h), or an in-process network (net/inproc.h) for tests and thread sanitizing.
//
// Owner: the thread of the Loop it was made with.  A connection has a number, unique in its
// transport and never reused.  Outgoing ones come from connect(); incoming ones appear with their
// first message.  Order is kept per connection and direction; nothing is delivered twice.
// Bounds: `transport_queue_max` messages queued per connection, `message_bytes_max` a frame.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/result.h"
#include "loop/loop.h"

namespace di::net {

// A peer that lets this many messages pile up does not read: it is treated as gone.  Several seconds
// of the busiest rank's token batches.
inline constexpr int transport_queue_max = 16384;
// The largest prefill_bind: 1 M token ids and their keys are below 8 MiB.
inline constexpr std::size_t message_bytes_max = 64 << 20;
inline constexpr std::size_t frames_max = 16;

using ConnectionId = std::uint64_t;

struct TransportCounters {
  std::uint64_t keys_refused = 0;        // callers whose key may not talk to us
  std::uint64_t handshakes_refused = 0;  // callers without CURVE, or with another server's key
  std::uint64_t handshakes_failed = 0;   // outgoing
  std::uint64_t dropped_refused = 0;     // messages on connections that were refused later
};

class Transport {
 public:
  struct Events {
    // `frames` and their bytes are valid during the call only.
    std::function<void(ConnectionId, std::span<const ByteView> frames)> message;
    // An outgoing connection is established and send() will accept.
    std::function<void(ConnectionId)> connected;
    // The other side is gone.  The connection is finished: no message comes after this, and sends
    // answer `unreachable`.  Not called for a connection closed by close().
    std::function<void(ConnectionId)> disconnected;
  };

  virtual ~Transport() = default;

  virtual void set_events(Events events) = 0;
  // Returns the address others connect to (TCP port 0 is resolved).  Once.  Errors: io with the address.
  virtual Result<std::string> bind(const std::string& address) = 0;
  // Keeps trying until connected or closed; a handshake that failed is tried again after a pause that
  // grows.  `server_key` is the public key that the other side has to prove (net/keys.h), empty on a
  // connection in the clear.  Errors: invalid for an address it cannot read, denied when keys are missing,
  // busy when there are no descriptors left for it.
  virtual Result<ConnectionId> connect(const std::string& address, const std::string& server_key) = 0;
  Result<ConnectionId> connect(const std::string& address) { return connect(address, {}); }
  virtual void close(ConnectionId connection) = 0;
  // Ends an incoming connection from this side: nothing more is delivered from it.
  virtual void refuse(ConnectionId connection) = 0;
  // The public key that the other side has proved; empty on a connection in the clear.
  [[nodiscard]] virtual std::string peer_key(ConnectionId connection) const = 0;
  [[nodiscard]] virtual const TransportCounters& counters() const = 0;
  // Never blocks.  Errors: unreachable when the connection is not (or no longer) there, busy when
  // its queue is full.
  virtual Status send(ConnectionId connection, std::span<const ByteView> frames) = 0;
};

}  // namespace di::net
