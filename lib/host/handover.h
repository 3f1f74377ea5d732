// host/handover.h: from a prefill rank's pages to a decode rank's seat.  Both sides of it: A, the host
// of the prefill rank, and B, the host of the seat; inside one host they are the same object, which
// sends the same messages to itself and moves no bytes.
//
// A source (A), one per request and attempt:
//   state    event                                        next
//   (none)   kv_push: pages will seal as chunks compute   opening; handover_open
//   (none)   kv_handover, everything is sealed            opening, final; handover_open
//   (none)   kv_handover, something is not                (none); kv_handed invalid: no seat helps
//   opening  handover_opened: ok                          pushing
//   pushing  pages that B lacks are sealed                pushing; handover_pages, in batches
//   pushing  handover_slots: ok                           pushing; the pages go there
//   pushing  pages have arrived                           pushing; handover_pushed
//   pushing  final, and all pages and the tail are there  sealed; handover_sealed
//   opening, pushing  kv_handover                         the same, final
//   sealed   handover_ack                                 (none); kv_handed with its code
//   sealed   say_again without an answer                  sealed; handover_sealed again
//   (none)   kv_handover again, of one that went well     (none); kv_handed again
//   any      a code, a push failed, the end of the hold,  (none); kv_handed with it when final, else
//            B lost                                       silently
//   any, not final  kv_release, the rank lost             (none)
//   any      a kv_push or kv_handover for another seat    the first is replaced, silently
// The source's pins are its own: once it is final, kv_release and the death of the rank leave them
// (path.md: the source keeps the bytes until the ack or the end of the hold).
//
// A link that is too slow.  A final hand-over waits while the bytes that B still lacks will have gone,
// at the rate that the link shows, within push_wait; when they will not, or nothing has arrived for
// push_wait, it ends with kv_handed timeout, and the router looks for another way.
//
// A seat (B), one per decode client, request and attempt:
//   state    event                                        next
//   (none)   kv_expect, room for what is missing          waiting; kv_expected
//   (none)   kv_expect, no room                           (none); kv_expected busy, or invalid: never
//   (none)   kv_expect, of a name that is in use          (none); kv_expected exists
//   waiting  handover_open                                opened; handover_opened with a transfer number
//                                                         and the blocks that are not here
//   opened   handover_open again (lost answer, re-target) opened anew
//   opened   handover_pages                               opened; slots are taken and exposed to A;
//                                                         handover_slots
//   opened   handover_pushed                              opened; the pages are verified and sealed
//   opened   a page is not what A said                    waiting; handover_ack corrupt
//   opened   handover_sealed: every block here, tail good seated; kv_seated, then handover_ack
//   opened   handover_sealed otherwise                    waiting; handover_ack with a code
//   opened   A lost                                       waiting
//   seated   handover_sealed again                        seated; handover_ack
//   (none)   handover_sealed again, of one that was seated  (none); handover_ack
//   waiting, opened  the end of the hold                  (none)
//   any      kv_release, decode client lost               (none)
// Slots that A may still be writing when a seat lets go of them are in quarantine until the data plane
// says concealed.
//
// The room of a seat is counted, not taken, until pages come for it: inside one arena the writer's grant
// is the room.  Seats are counted against each other and against what is pinned, all or nothing.
//
// A message can be lost by itself.  Who waits for an answer therefore asks again, and what went well is
// remembered when it is gone: to begin it anew would undo it.
//
// Owner: the core of a di-kvd host.  Bounds: sources_max; seats by the entries of the index page;
// offer_pages_max pages of a source offered and not yet there; answers_max of the past of each side.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/pages.h"
#include "host/port.h"
#include "host/push.h"
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
  std::uint64_t pages_taken = 0;    // by a seat, for pages of another arena
  std::uint64_t pages_corrupt = 0;  // not what A said, tails included
  std::uint64_t gave_up = 0;        // push_wait
  std::uint64_t lapsed = 0;         // holds that ended, on either side
};

class Handovers {
 public:
  struct Limits {
    std::size_t sources_max = 4096;
    std::size_t keys_max = 65536;
    Duration hold = seconds(60);       // kv.hold
    Duration push_wait = seconds(10);  // kv.handover_wait
    std::size_t offer_pages_max = 64;
    Duration say_again = seconds(2);  // far above any round trip
    std::size_t answers_max = 4096;
  };

  class Peers {
   public:
    virtual ~Peers() = default;
    [[nodiscard]] virtual Peer self() const = 0;
    // The generation of a host that is up; this one always is.
    [[nodiscard]] virtual std::optional<Peer> host_up(const std::string& instance) const = 0;
  };

  Handovers(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port, DataPort& data,
            Pushes& pushes, const Peers& peers, Numbers& numbers, Outbox& out);

  // A.
  void push(const Holder& holder, const wire::Scope& scope, const wire::kv_push& message, const Now& now);
  // The caller has checked that the holder may name the tail.
  void hand_over(const Holder& holder, const wire::Scope& scope, const wire::kv_handover& message,
                 const Now& now);
  void opened(const Peer& b, const wire::Scope& scope, const wire::handover_opened& message, const Now& now);
  void slots(const Peer& b, const wire::Scope& scope, const wire::handover_slots& message, const Now& now);
  void acknowledged(const Peer& b, const wire::Scope& scope, const wire::handover_ack& message);
  void progressed(const Pushes::Progress& progress, const Now& now);
  // Pages may have been sealed: a source may have waited for one.
  void page_sealed(const Now& now);
  // A rank has sealed a page for that request: a seat of it here needs so much less room.
  void page_sealed_for(const Holder& holder, std::uint64_t bytes);
  // The rank is gone, or the request: what it has not finished is not handed over.
  void release_source(const Holder& holder);

  // B.
  // True when the seat is there now: its missing blocks are worth a plan.  `made_here`: its prefill is on this host.
  bool expect(const Holder& holder, const wire::Scope& scope, const wire::kv_expect& message, bool made_here,
              const Now& now);
  // Returns the seat's holder when it is opened: what it fetched by itself is not needed any more.
  std::optional<Holder> open(const Peer& a, const wire::Scope& scope, const wire::handover_open& message);
  void pages(const Peer& a, const wire::Scope& scope, const wire::handover_pages& message);
  void pushed(const Peer& a, const wire::Scope& scope, const wire::handover_pushed& message);
  void sealed(const Peer& a, const wire::Scope& scope, const wire::handover_sealed& message);
  // The data plane: A can write nothing more under this transfer.
  void concealed(const Peer& a, std::uint64_t transfer);
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
  // Transfers whose slots are in quarantine.
  [[nodiscard]] std::size_t closing() const { return closing_.size(); }
  [[nodiscard]] const HandoverCounters& counters() const { return counters_; }
  // Of seats, and of sources that are not final.
  [[nodiscard]] std::vector<Holder> holders() const;
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;

 private:
  enum class SourceState : std::uint8_t { opening, pushing, sealed };
  enum class SeatState : std::uint8_t { waiting, opened, seated };
  using Name = std::pair<RequestId, std::uint16_t>;  // request and attempt
  using Transfer = std::pair<Peer, std::uint64_t>;   // A and B's number

  struct Source {
    Holder holder;
    wire::Scope scope;
    SourceState state = SourceState::opening;
    bool final = false;  // kv_handover came: token and tail are known
    Peer b;
    PinSet pins;
    std::string decode;  // seat numbers are unique within one decode instance only
    std::vector<Key> keys;
    bool has_tail = false;
    wire::handover_sealed message;                  // what will be said when B has everything
    std::uint32_t tail_slot = 0;                    // here; when final
    std::deque<std::uint32_t> missing;              // blocks that B lacks and nobody has offered
    std::deque<std::uint32_t> offered;              // slots here that wait for handover_slots
    std::map<Pushes::PushId, wire::SlotRef> pages;  // under way, and where to
    std::vector<wire::SlotRef> arrived;             // to be told
    std::optional<wire::SlotRef> tail_target;       // at B; none inside one arena
    Pushes::PushId tail_push = 0;
    bool tail_there = false;
    Instant hold_until;                // product time
    Instant moved_at;                  // liveness time of the last page that arrived, or of being final
    Instant check_at = instant_never;  // the rule of slow links
    Instant again_at = instant_never;  // sealed: says so again

    [[nodiscard]] bool pushes_over() const {
      return missing.empty() && offered.empty() && pages.empty() && (!has_tail || tail_there);
    }
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
    bool exposed = false;
    std::optional<std::uint32_t> tail_slot;  // taken here for a tail from another arena
    std::vector<std::uint32_t> filling;      // taken here, not yet verified; the tail is not among them
    PinSet pins;
    Instant hold_until;
  };

  // What went well and is gone, the newest answers_max.
  template <class What>
  struct Past {
    std::set<What> known;
    std::deque<What> order;

    void add(const What& what, std::size_t max) {
      if (!known.insert(what).second) return;
      order.push_back(what);
      if (order.size() <= max) return;
      known.erase(order.front());
      order.pop_front();
    }
  };
  using Handed = std::tuple<Holder, std::string, std::uint64_t>;  // whose, decode instance, seat

  // The source that a message of B is about, or null.
  [[nodiscard]] Source* source_of(const Peer& b, const wire::Scope& scope, std::uint64_t seat);
  // A new source, opening; null and refused when it cannot be.
  Source* begin(const Holder& holder, const wire::Scope& scope, std::uint64_t seat, const std::string& decode,
                const std::string& host, const std::vector<Key>& keys, bool tail, const Now& now);
  // Offers what is sealed, tells what has arrived, and ends the pushing when all has.
  void advance(Source& source, const Now& now);
  void offer(Source& source);
  [[nodiscard]] bool too_slow(const Source& source, const Now& now) const;
  // kv_handed with the code when it was final.
  void end_source(const Name& name, Code code);
  void drop_source(std::map<Name, Source>::iterator source);

  // Of blocks that are not here.
  [[nodiscard]] std::uint64_t room_for(const std::vector<Key>& keys) const;
  void need_less(Seat& seat, std::uint64_t bytes);
  void drop_seat(std::map<Holder, Seat>::iterator seat);
  // Back to waiting: what A may be writing goes into quarantine.
  void reopen(Seat& seat);
  // Room in the arena for pages of A, out of what the seat has reserved, and exposed to it.
  Result<std::vector<std::uint32_t>> take(Seat& seat, std::span<const std::uint32_t> blocks);
  // Every segment against the announced checksums; sealed when they match.
  [[nodiscard]] bool verify(std::uint32_t slot);
  [[nodiscard]] std::map<Holder, Seat>::iterator find_seat(const std::string& decode, std::uint64_t seat,
                                                           const wire::Scope& scope);
  // By the transfer that A names; end() when it is over.
  [[nodiscard]] std::map<Holder, Seat>::iterator find_transfer(const Peer& a, std::uint64_t seat,
                                                               std::uint64_t transfer,
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
  DataPort& data_;
  Pushes& pushes_;
  const Peers& peers_;
  Numbers& numbers_;
  Outbox& out_;
  std::map<Name, Source> sources_;
  std::map<Pushes::PushId, Name> by_push_;
  std::map<Holder, Seat> seats_;
  std::map<std::pair<std::string, std::uint64_t>, Holder> seat_names_;  // (decode instance, seat)
  std::multimap<Name, Holder> seats_of_;                                // by request
  std::map<Transfer, std::vector<std::uint32_t>> closing_;              // slots in quarantine
  Past<Handed> handed_;
  Past<Transfer> seated_;
  std::uint64_t reserved_bytes_ = 0;
  HandoverCounters counters_;
};

}  // namespace di::host
