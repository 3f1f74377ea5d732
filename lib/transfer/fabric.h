// transfer/fabric.h: bytes between the arenas of different processes, one-sided: the initiator names a
// place in the other's memory and reads or writes it, the owner's core takes no part in it.
//
// Owner side.  Memory is a Region of slots.  Nothing in it can be reached until expose() opens some of
// its slots to one peer under a transfer number that the owner chose; conceal() closes them again, and
// its answer `concealed` says that no byte of the transfer will be read or written from then on: until
// it has come, the slots are in quarantine.  Every access is checked against peer, transfer, slot,
// generation, bounds and direction by the owner's side of the connection; what does not match is refused
// and counted, and the connection goes on.
//
// Initiator side.  write() and read() are queued and answered by one done() each, with the first thing
// that went wrong: a later success never hides it.  Several segments are under way at a time; a peer
// whose queue is full is answered busy.  Between operations of different classes a link is shared as
// transfer/budget.h says.
//
// Connections.  The first operation for a peer that has no connection raises want_ticket: the shell asks
// the peer over the control channel (data_open) and hands in what came back.  A ticket opens one
// connection, once, within ticket_life, for the peer it was given to.  With `seal` every frame is
// AES-256-GCM under the ticket's key.  A failed dial is followed by a pause that doubles up to
// dial_pause_max; operations that wait for longer than dial_wait end as unreachable, at once for a peer
// whose last dial failed.  Such a peer is tried again after each pause (want_ticket) as long as somebody
// asked for it within dial_interest, so that no operation has to find out that it is back.  An operation
// that is not done within op_wait ends as timeout.
//
// Owner: the loop thread, where every event is called too, never from inside a call.  Bounds: peers_max,
// ops_max and queue_bytes_max a peer, exposures_max, exposed_slots_max, tickets_max (see exposure.h).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "base/time.h"
#include "wire/envelope.h"

namespace di::transfer {

using wire::Peer;

inline constexpr Duration ticket_life = seconds(5);
inline constexpr Duration dial_wait = seconds(3);
inline constexpr Duration dial_pause_min = milliseconds(200);
inline constexpr Duration dial_pause_max = seconds(10);
inline constexpr Duration dial_interest = seconds(60);
inline constexpr Duration op_wait = seconds(30);
inline constexpr std::size_t ops_max = 4096;                  // a peer
inline constexpr std::uint64_t queue_bytes_max = 1ull << 30;  // a peer; one operation may be larger
inline constexpr std::size_t ticket_bytes = 16;
inline constexpr std::size_t seal_key_bytes = 32;

// What an operation is for; the link's budget is divided by it.
enum class Class : std::uint8_t { handover, fetch, writeback };
inline constexpr std::size_t classes = 3;

enum class Access : std::uint8_t { read, write };  // by the peer

using TransferId = std::uint64_t;  // unique among the owner's exposures to one peer
using OpId = std::uint64_t;        // never 0, never reused

struct SlotName {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;

  friend auto operator<=>(const SlotName&, const SlotName&) = default;
};

// A stretch of one slot's payload.
struct Place {
  SlotName slot;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Memory that a peer can be let into.
class Region {
 public:
  virtual ~Region() = default;
  // The payload of a slot, while it has that generation.  Called on any thread.  Errors: stale, invalid.
  [[nodiscard]] virtual Result<MutableByteView> resolve(const SlotName& slot) = 0;
};

// What opens a connection; travels over the control channel only.
struct Ticket {
  std::array<std::uint8_t, ticket_bytes> secret{};
  bool seal = false;
  std::array<std::uint8_t, seal_key_bytes> key{};  // zeros without seal
};

struct FabricCounters {
  std::uint64_t written_bytes = 0;  // acknowledged by the owner
  std::uint64_t read_bytes = 0;
  std::uint64_t received_bytes = 0;  // written here by others
  std::uint64_t served_bytes = 0;    // read here by others
  std::uint64_t ops_failed = 0;
  std::uint64_t ops_cancelled = 0;
  std::uint64_t dials = 0;
  std::uint64_t dials_failed = 0;
  std::uint64_t refused_ticket = 0;    // unknown, used, expired, of another peer
  std::uint64_t refused_transfer = 0;  // not exposed to this peer, or in the other direction
  std::uint64_t refused_late = 0;      // concealed, or taken back, while it was on its way
  std::uint64_t refused_stale = 0;     // slot generation
  std::uint64_t refused_bounds = 0;
  std::uint64_t refused_seal = 0;         // a frame whose tag is wrong; ends the connection
  std::uint64_t malformed = 0;            // ends the connection
  std::uint64_t refused_connections = 0;  // too many, or no ticket shown in time
};

struct FabricGauges {
  std::size_t connections = 0;
  std::size_t ops = 0;  // accepted, not yet done
  std::size_t exposures = 0;
  std::size_t tickets = 0;
};

// How a link does, for the rule that gives up a hand-over (see host/handover.h).
struct LinkState {
  std::uint64_t queued_bytes = 0;  // accepted and not acknowledged
  double bytes_per_s = 0;          // moving average over busy time; 0: nothing measured yet
};

class Fabric {
 public:
  struct Events {
    std::function<void(const Peer& peer)> want_ticket;
    std::function<void(OpId op, Code code)> done;
    std::function<void(const Peer& peer, TransferId transfer)> concealed;
  };

  virtual ~Fabric() = default;
  virtual void set_events(Events events) = 0;

  // Owner.  Errors: busy (exposures_max), exists.  More slots may be added to a transfer with extend().
  virtual Status expose(const Peer& to, TransferId transfer, Access access, std::vector<SlotName> slots) = 0;
  // Errors: not_found.
  virtual Status extend(const Peer& to, TransferId transfer, std::vector<SlotName> slots) = 0;
  // `concealed` follows, from a later turn of the loop, once per exposure, however often this is called
  // meanwhile; the next turn for one that is not exposed.
  virtual void conceal(const Peer& to, TransferId transfer) = 0;
  // A ticket for `to`.  Errors: busy (tickets_max).
  virtual Result<Ticket> grant(const Peer& to, bool seal) = 0;

  // Initiator.  The answer to want_ticket: where to connect and with what.
  virtual void ticket(const Peer& peer, const std::string& endpoint, const Ticket& ticket) = 0;
  // The other answer to want_ticket.
  virtual void ticket_refused(const Peer& peer) = 0;
  // `from` stays unchanged and `into` untouched until done().  Errors: busy, invalid (sizes differ, empty).
  virtual Result<OpId> write(const Peer& peer, TransferId transfer, const Place& to, ByteView from,
                             Class cls) = 0;
  virtual Result<OpId> read(const Peer& peer, TransferId transfer, const Place& from, MutableByteView into,
                            Class cls) = 0;
  // done(cancelled) follows, or what it had become by then; after it the local bytes are not in use.
  virtual void cancel(OpId op) = 0;

  // The peer's process is gone: its operations end as unreachable, its exposures are concealed (with the
  // event), its tickets and connections are void.
  virtual void peer_lost(const Peer& peer) = 0;

  // Owner.  A peer has said, on whatever channel, that it has written something here: its bytes are visible
  // to the calling thread from now on.
  virtual void see_arrivals() const = 0;
  // The peer's memory as this process maps it; null when it does not.
  [[nodiscard]] virtual Region* view(const Peer& peer) = 0;
  [[nodiscard]] virtual LinkState link(const Peer& peer) const = 0;
  [[nodiscard]] virtual FabricGauges gauges() const = 0;
  [[nodiscard]] virtual FabricCounters counters() const = 0;
};

}  // namespace di::transfer
