// transfer/exposure.h: which slots are open to whom, and which tickets are out.  What every fabric with a
// guard checks an access against.
//
// A transfer that is closed while its peer still sends (a fetch that nobody wants any more, a hand-over
// that is asked for again) gets frames that were on their way.  They are refused like any others, and counted
// apart: what names a transfer that was never open here is an error or an attack, what comes late is a race.
// So does what names a slot as it was opened when the slot has another user by now: its owner gives it up on its
// own thread, and says so to the one that serves the peers a moment later.
//
// Owner: the thread that serves the peers.  Bounds: kept by the fabric that opens and grants, which knows
// what it may refuse: exposures_max, exposed_slots_max, tickets_max; closed_max closed transfers, the oldest
// of which is forgotten first.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "transfer/fabric.h"

namespace di::transfer {

inline constexpr std::size_t exposures_max = 16384;
inline constexpr std::size_t exposed_slots_max = 1u << 20;
inline constexpr std::size_t tickets_max = 256;
inline constexpr std::size_t peers_max = 256;
inline constexpr std::size_t closed_max = 4096;
// The other side gives an operation up after op_wait: what comes after that has not been on its way.
inline constexpr Duration late_wait = op_wait;

// Why an access is refused: which counter, and what the peer is told.
enum class Refused : std::uint8_t { transfer, late, stale, bounds };
struct Refusal {
  Refused why = Refused::transfer;
  Code code = Code::denied;
};
struct Admission {
  std::optional<Refusal> refusal;
  MutableByteView bytes;  // without a refusal
};

class Exposures {
 public:
  // False when there is one of that name already.
  bool open(const Peer& to, TransferId transfer, Access access, const std::vector<SlotName>& slots);
  bool extend(const Peer& to, TransferId transfer, const std::vector<SlotName>& slots);
  bool close(const Peer& to, TransferId transfer, Instant now);
  [[nodiscard]] std::vector<TransferId> transfers_of(const Peer& to) const;

  [[nodiscard]] Admission check(const Peer& from, TransferId transfer, Access access, const Place& place,
                                Region& region, Instant now) const;
  [[nodiscard]] std::size_t count() const { return exposures_.size(); }

 private:
  using Name = std::pair<Peer, TransferId>;
  struct Exposure {
    Access access = Access::read;
    std::map<std::uint32_t, std::uint32_t> slots;  // slot -> generation
  };
  struct Closed {
    Access access = Access::read;
    Instant until;
  };
  std::map<Name, Exposure> exposures_;
  std::map<Name, Closed> closed_;
  std::deque<std::pair<Name, Instant>> closed_order_;  // with `until`: one that was open again is here twice
};

[[nodiscard]] std::uint64_t FabricCounters::*refusal_counter(Refused why);

// Tickets that were given out and not used.
class Tickets {
 public:
  struct Granted {
    Peer to;
    Ticket ticket;
    Instant until;
  };
  void add(const Peer& to, const Ticket& ticket, Instant until);
  // Once: it is gone afterwards.  None when unknown or over.
  [[nodiscard]] std::optional<Granted> use(const std::array<std::uint8_t, ticket_bytes>& secret, Instant now);
  // Each returns how many went.
  std::size_t expire(Instant now);
  std::size_t forget(const Peer& to);
  [[nodiscard]] std::size_t count() const { return granted_.size(); }

 private:
  std::map<std::array<std::uint8_t, ticket_bytes>, Granted> granted_;
};

// The pause after the n-th failed dial in a row, n from 1.
[[nodiscard]] Duration dial_pause(unsigned failures, Duration first, Duration longest);

}  // namespace di::transfer
