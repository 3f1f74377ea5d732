// transfer/verbs_fabric.h: the fabric over RDMA (transfer/verbs.h).
//
// Who moves the bytes.  One-sided accesses cannot check a slot's generation where they arrive, so the owner
// of the exposed memory makes all of them, and the other side asks: a 48-byte message
// (transfer/verbs_message.h) names transfer, slot, generation and a stretch of the asker's registered memory;
// the owner checks it as transfer/tcp.h does and posts an RDMA READ out of that memory for a write, an RDMA
// WRITE with an immediate into it for a read. So:
//   - The owner's memory is never opened to a queue pair: those that answer have no remote rights and their
//   side
//     tells no key.  Exposure, generation, bounds and direction hold as over TCP, whatever the peer does.
//   - `concealed` comes when the owner's own requests of the transfer have completed; nothing has to be
//   reset.
//   - The asker's memory *is* open, all that was registered, to each peer that it asked and for as long as
//   that
//     connection lasts: the keys are told to a peer that was reached with a ticket, on a connection of its
//     own. A peer is a daemon of the same fleet; one that is broken could write beyond what it was asked for.
//     Memory windows would close that, at a bind for each unit; there are none here.
//   - Memory of the asker that is not registered is copied by way of a registered buffer (bounce_bytes), which
//     all links share: none takes more of it than it leaves, so a peer that does not answer cannot have it all.
//
// Cancel, and every other early end: no further unit is asked for, and done() waits for the units under way,
// which are at most window_bytes; a peer that does not answer them within cancel_wait loses its connection.
// Destroyed queue pairs are drained: only then is the local memory given back.
//
// Rails.  The set-up names the rail of each queue pair, and both sides leave out those whose port is down.  One
// that goes down later is not asked on as long as there is another; what was under way there ends with the
// connection when its retries are exhausted, and the next one does without the rail on which that happened, for
// rail_rest, or until a greeting without it fails: the other side may have no more than that one.  A connection
// that had to leave one out is given up for another after rail_rest, between operations.
//
// Connections.  A small TCP connection to `listen` shows the ticket, carries the set-up of the queue pairs,
// one a rail, and stays open: its end is how the death of a process shows at once; a network that is gone
// shows as an exhausted retry of a queue pair, in half a second.  As over TCP there is one connection per
// peer and direction of asking, so two queue pairs a rail where both sides ask.  Sealing needs bytes to pass
// the processor: a ticket with `seal` is refused (unsupported), on both sides.  The set-up is in clear.
//
// Never run on hardware; what the tests run on is tests/support/softverbs.
//
// Owner: the loop thread.  Bounds: transfer/fabric.h; units of max_unit_bytes; units_max under way a peer and
// rail, window_bytes a peer; bounce_bytes; greetings_max connections without a ticket.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "loop/loop.h"
#include "transfer/budget.h"
#include "transfer/fabric.h"
#include "transfer/verbs.h"

namespace di::transfer {

// The low bits of a tag.
inline constexpr std::uint32_t verbs_units_max = 64;

struct VerbsFabricOptions {
  Peer self;                     // see set_self()
  std::string listen;            // "host:port", numeric, port 0 for any; empty: nobody connects here
  Region* region = nullptr;      // outlives the fabric; null: nothing can be exposed
  std::vector<VerbsPort> rails;  // at least one; units go by turns.  The i-th connects to the peer's i-th
  // Registered at once, in regions of at most verbs_region_bytes_max; outlives the fabric.  The region's
  // slots are in it, or they cannot be reached.
  struct Memory {
    MutableByteView bytes;
    int dmabuf = -1;  // memory of a GPU, see VerbsRail::add_memory
    std::uint64_t dmabuf_offset = 0;
  };
  std::vector<Memory> memory;
  std::uint64_t bounce_bytes = 32 << 20;
  std::uint32_t max_unit_bytes = 1 << 20;
  std::uint64_t window_bytes = 8 << 20;
  Budget::Options budget;  // see transfer/tcp.h
  std::size_t greetings_max = 32;
  Duration stall_max = seconds(10);
  Duration rail_rest = seconds(60);
  Duration cancel_wait = seconds(2);
  Duration ticket_life = transfer::ticket_life;
  Duration dial_wait = transfer::dial_wait;
  Duration dial_pause_min = transfer::dial_pause_min;
  Duration dial_pause_max = transfer::dial_pause_max;
  Duration op_wait = transfer::op_wait;
};

class VerbsFabric : public Fabric {
 public:
  // As TcpFabric's.
  [[nodiscard]] virtual std::string endpoint() const = 0;
  virtual void set_self(const Peer& self) = 0;
};

// Errors: invalid, not_found (no such device), io (also: no port is up), no_space (locked memory), unsupported.
[[nodiscard]] Result<std::unique_ptr<VerbsFabric>> make_verbs_fabric(loop::Loop& loop,
                                                                     const VerbsFabricOptions& options);

}  // namespace di::transfer
