// host/handover.h: from a prefill rank's pages to a decode rank's seat.  Both sides of it: A, the host
// of the prefill rank, and B, the host of the seat; inside one host they are the same object, which
// sends the same messages to itself.
//
// A source (A), one per request and attempt:
//   state    event                                        next
//   (none)   kv_handover, everything is sealed            opening; handover_open
//   (none)   kv_handover, something is not                (none); kv_handed invalid: no seat helps
//   opening  handover_opened: ok                          sealed; handover_sealed
//   opening  handover_opened: a code, or blocks missing   (none); kv_handed with it
//   sealed   handover_ack                                 (none); kv_handed with its code
//   any      the end of the hold, B lost                  (none); kv_handed timeout, unreachable
//   any      a second kv_handover                         the first is replaced, silently
// The source's pins are its own: kv_release and the death of the rank leave them (path.md: the source
// keeps the bytes until the ack or the end of the hold).
//
// A seat (B), one per decode client, request and attempt:
//   state    event                                        next
//   (none)   kv_expect, room for what is missing          waiting; kv_expected
//   (none)   kv_expect, no room                           (none); kv_expected busy
//   waiting  handover_open, all blocks are sealed here    opened; handover_opened with a transfer number
//   waiting  handover_open, some are not, or the tail     waiting; handover_opened unsupported: pushing
//            is in another arena                          bytes between arenas is not in this version
//   opened   handover_open again (lost answer, re-target) opened anew
//   opened   handover_sealed, tail verified               seated; kv_seated, then handover_ack
//   opened   handover_sealed, tail wrong                  waiting; handover_ack corrupt
//   opened   A lost                                       waiting
//   seated   handover_sealed again                        seated; handover_ack
//   waiting, opened  the end of the hold                  (none)
//   any      kv_release, decode client lost               (none)
//
// The room of a seat is counted, not taken: inside one arena the writer's grant is the room.  Seats are
// counted against each other and against what is pinned, all or nothing.
//
// Owner: the core of a di-kvd host.  Bounds: sources_max; seats by the entries of the index page.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/pages.h"
#include "host/port.h"
#include "kv/slots.h"
#include "wire/messages.h"

namespace di::host {

struct HandoverCounters {
  std::uint64_t sources = 0;
  std::uint64_t acknowledged = 0;
  std::uint64_t failed = 0;  // kv_handed with a code
  std::uint64_t replaced = 0;
  std::uint64_t seats = 0;
  std::uint64_t seats_refused = 0;
  std::uint64_t seated = 0;
  std::uint64_t tails_corrupt = 0;
  std::uint64_t lapsed = 0;  // holds that ended, on either side
};

class Handovers {
 public:
  struct Limits {
    std::size_t sources_max = 4096;
    std::size_t keys_max = 65536;
    Duration hold = seconds(60);  // kv.hold
  };

  class Peers {
   public:
    virtual ~Peers() = default;
    [[nodiscard]] virtual Peer self() const = 0;
    // The generation of a host that is up; this one always is.
    [[nodiscard]] virtual std::optional<Peer> host_up(const std::string& instance) const = 0;
  };

  Handovers(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port, const Peers& peers,
            Outbox& out);

  // A.  The caller has checked that the holder may name the tail.
  void hand_over(const Holder& holder, const wire::Scope& scope, const wire::kv_handover& message,
                 const Now& now);
  void opened(const Peer& b, const wire::Scope& scope, const wire::handover_opened& message);
  void acknowledged(const Peer& b, const wire::Scope& scope, const wire::handover_ack& message);

  // B.
  // True when the seat is there now: its missing blocks are worth a plan.
  bool expect(const Holder& holder, const wire::Scope& scope, const wire::kv_expect& message, const Now& now);
  // Returns the seat's holder when it is opened: what it fetched by itself is not needed any more.
  std::optional<Holder> open(const Peer& a, const wire::Scope& scope, const wire::handover_open& message);
  void sealed(const Peer& a, const wire::Scope& scope, const wire::handover_sealed& message);
  void release_seat(const Holder& holder);
  // Pages that the holder may be reading; null when it has no seat.
  [[nodiscard]] const PinSet* pins_of(const Holder& holder) const;

  void host_lost(const Peer& host);
  void on_time(const Now& now);
  [[nodiscard]] Due next_due() const;

  [[nodiscard]] std::size_t sources() const { return sources_.size(); }
  [[nodiscard]] std::size_t seats() const { return seats_.size(); }
  [[nodiscard]] std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  [[nodiscard]] std::size_t pins() const;
  [[nodiscard]] const HandoverCounters& counters() const { return counters_; }
  [[nodiscard]] std::vector<Holder> holders() const;
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;

 private:
  enum class SourceState : std::uint8_t { opening, sealed };
  enum class SeatState : std::uint8_t { waiting, opened, seated };
  using Name = std::pair<RequestId, std::uint16_t>;  // request and attempt

  struct Source {
    Holder holder;
    wire::Scope scope;
    SourceState state = SourceState::opening;
    Peer b;
    PinSet pins;
    std::string decode;             // seat numbers are unique within one decode instance only
    wire::handover_sealed message;  // what will be said when B is ready
    Instant hold_until;
  };
  struct Seat {
    wire::Scope scope;
    std::uint64_t seat = 0;
    SeatState state = SeatState::waiting;
    std::vector<Key> keys;
    bool tail = false;
    std::uint32_t entry = 0;
    std::uint64_t reserved_bytes = 0;
    Peer a;
    std::uint64_t transfer = 0;
    std::vector<Piece> pieces;
    PinSet pins;
    Instant hold_until;
  };

  void end_source(const Name& name, Code code);
  void drop_seat(std::map<Holder, Seat>::iterator seat);
  void reopen(Seat& seat);
  [[nodiscard]] std::map<Holder, Seat>::iterator find_seat(const std::string& decode, std::uint64_t seat,
                                                           const wire::Scope& scope);
  template <class M>
  void send(const Peer& to, const wire::Scope& scope, const M& message) {
    out_.push_back(wire::Envelope::make(to.instance, to.generation,
                                        {scope.request, scope.attempt, scope.rank, 0}, message));
  }

  const Limits limits_;
  Pages& pages_;
  kv::EntryPool& entries_;
  ArenaPort& port_;
  const Peers& peers_;
  Outbox& out_;
  std::map<Name, Source> sources_;
  std::map<Holder, Seat> seats_;
  std::map<std::pair<std::string, std::uint64_t>, Holder> seat_names_;  // (decode instance, seat)
  std::uint64_t reserved_bytes_ = 0;
  std::uint64_t next_transfer_ = 1;
  HandoverCounters counters_;
};

}  // namespace di::host
