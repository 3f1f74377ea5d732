// transfer/tcp.h: the fabric over TCP.
//
// Bytes move on a thread of the fabric's own (transfer/mover.h), so that the daemon's loop is never held
// up by them; what is said to it and what it answers goes through mailboxes.  One connection per peer and
// direction: the dialler asks, the acceptor answers in order.  (A second connection gains nothing on
// two cores: spec/store.md 1.2.)  Frames are described in transfer/frame.h and di-wire(7).
//
// Refusals are answered with a code and end the operation with it: not_found (no such transfer), denied
// (other direction, a slot that the transfer does not open), stale, invalid (bounds).
//
// Owner: the loop thread.  Bounds: transfer/fabric.h; units of max_unit_bytes, window_bytes on the way to
// or from a peer, greetings_max connections that have not shown a ticket yet, of which the oldest goes when another comes.
#pragma once

#include <memory>
#include <string>

#include "loop/loop.h"
#include "transfer/budget.h"
#include "transfer/fabric.h"

namespace di::transfer {

struct TcpOptions {
  Peer self;                 // see set_self()
  std::string listen;        // "host:port", numeric, port 0 for any; empty: nobody connects here
  Region* region = nullptr;  // outlives the fabric; null: nothing can be exposed
  std::uint32_t max_unit_bytes = 1 << 20;
  std::uint64_t window_bytes = 8 << 20;
  Budget::Options budget;  // transfer.link_bytes_per_s is budget.bytes_per_s: what this side asks for
  std::size_t greetings_max = 32;
  // A connection on which operations are under way and nothing moves for this long is given up.
  Duration stall_max = seconds(10);
  Duration ticket_life = transfer::ticket_life;
  Duration dial_wait = transfer::dial_wait;
  Duration dial_pause_min = transfer::dial_pause_min;
  Duration dial_pause_max = transfer::dial_pause_max;
  Duration op_wait = transfer::op_wait;
};

class TcpFabric : public Fabric {
 public:
  // "tcp://host:port" of the listener, for other processes when the host is not a wildcard; or empty.
  [[nodiscard]] virtual std::string endpoint() const = 0;
  // The generation is known only after registration: before the first ticket is handed in or granted.
  virtual void set_self(const Peer& self) = 0;
};

// Errors: invalid (no numeric address), io (also: the port is taken).
[[nodiscard]] Result<std::unique_ptr<TcpFabric>> make_tcp_fabric(loop::Loop& loop, const TcpOptions& options);

}  // namespace di::transfer
