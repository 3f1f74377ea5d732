// host/fetch.h: bringing blocks into the arena: what a rank asks for (kv_fetch), what a router hints at
// (kv_prefetch), what a seat expects (kv_expect).
//
// A fetch, one per (holder, kind):
//   state     event                                     next
//   (none)    every block is in the arena or coming     filling or complete; kv_fetching
//   (none)    some are not                              planning; meta_plan
//   planning  meta_planned                              filling or complete; a read per new page; kv_fetching
//   planning  no answer in plan_wait, di-meta lost      the same with what the arena has
//   filling   a group of every page is verified         filling; index page, kv_ready
//   filling   the last group is                         complete
//   filling   a page fails, fetch_wait is over          filling or complete up to the failed block
//   any       released, client lost                     (none)
// Complete counts what is verified; kv.fetch_delay_ms holds back only what is shown.  A fetch keeps its
// pins until it is released, also of pages behind a failed block: a reader may still be copying.
//
// A read, one per page that comes from the store or from another host's arena; every fetch of its keys
// shares it.  Its source is here, and maps this arena, or it is remote, and reaches the slot through the
// data plane for as long as the transfer is exposed:
//   state       event                                            next
//   waiting     the source has room in its window                reading; exposed; kv_read or arena_read
//   waiting     nobody wants the page, the source is lost        (none)
//   reading     kv_read_done, more groups to come                reading; each group verified
//   reading     kv_read_done with the last group, all verified   (none); concealed
//   reading     kv_read_done with a failure, or wrong checksum   (none) when it is here and ended, else
//               in the last group                                cancelling
//   reading     wrong checksum, silent for read_wait, unwanted   cancelling; kv_read_cancel, page in
//                                                                quarantine
//   reading     the source is lost                               cancelling while it maps the arena or is
//                                                                exposed, else (none)
//   cancelling  remote: concealed                                (none)
//   cancelling  here: kv_read_cancelled, kv_read_done as above, or its process let go of the arena: (none);
//               the same store is back: kv_read_cancel again
//
// A lease lives as long as a read that was planned under it; it is renewed every third of its life, at
// most for lease_cap.
//
// Owner: the core of a di-kvd host.  Bounds: Limits; pages by the arena, entries by the index page.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/pages.h"
#include "host/port.h"
#include "kv/slots.h"
#include "wire/messages.h"

namespace di::host {

enum class FetchKind : std::uint8_t { fetch, prefetch, expect };

// Why a matched block was not there for its request.
enum class Lost : std::uint8_t { evicted, timeout, checksum, cancelled };

// Blocks of kv_fetch.  matched = fetched + lost + what is under way; fetched = swapped + unused + what
// is held.  `evicted` has the blocks that were nowhere any more and those that found no room.
struct Books {
  std::uint64_t matched = 0;
  std::uint64_t fetched = 0;
  std::array<std::uint64_t, 4> lost{};  // by Lost
  std::uint64_t swapped = 0;            // released by their client after everything was shown
  std::uint64_t unused = 0;
};

struct FetchCounters {
  std::uint64_t plans = 0;
  std::uint64_t plans_failed = 0;  // not answered, di-meta away
  std::uint64_t plans_malformed = 0;
  std::uint64_t reads = 0;
  std::uint64_t arena_reads = 0;  // of them, out of another host's arena
  std::uint64_t reads_failed = 0;
  std::uint64_t reads_corrupt = 0;  // wrong checksum here
  std::uint64_t reads_cancelled = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t prefetches = 0;
  std::uint64_t prefetched_blocks = 0;  // read because of a prefetch
  std::uint64_t arena_blocks = 0;       // of kv_fetch, found in the arena
};

class Fetches {
 public:
  struct Limits {
    std::size_t fetches_max = 4096;
    std::size_t keys_max = 65536;       // as in messages.def
    std::uint32_t reads_per_source = 8;  // outstanding; enough for one NVMe device at 1 MiB a page
    Duration fetch_delay{0};            // kv.fetch_delay_ms
    Duration plan_wait = seconds(1);
    Duration read_wait = seconds(10);   // silence of a store within a read
    Duration fetch_wait = seconds(30);  // without a deadline in kv_fetch
    Duration prefetch_hold = seconds(60);
    Duration lease_cap = seconds(120);
    std::uint32_t prefetch_share = 4;  // prefetches pin at most this part of the arena: 1/4
  };
  // Answers that the core needs about peers.
  class Peers {
   public:
    virtual ~Peers() = default;
    // The generation that is up; nothing when the instance is away.
    [[nodiscard]] virtual std::optional<Peer> store_up(const std::string& instance) const = 0;
    // Another host; not this one.
    [[nodiscard]] virtual std::optional<Peer> arena_up(const std::string& instance) const = 0;
    [[nodiscard]] virtual std::optional<Peer> meta_up() const = 0;
    [[nodiscard]] virtual bool attached(const Peer& peer) const = 0;
    // On another machine: it reaches this arena through the data plane only.
    [[nodiscard]] virtual bool remote(const Peer& peer) const = 0;
  };

  Fetches(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port, DataPort& data,
          const Peers& peers, Numbers& numbers, Outbox& out);

  // kv_fetch and kv_prefetch.  `deadline_ms` of the scope bounds a fetch.
  void begin(FetchKind kind, const Holder& holder, const wire::Scope& scope, std::vector<Key> keys,
             std::uint8_t priority, const Now& now);
  // `by_client`: the client says so itself, so what was complete counts as used.
  void release(FetchKind kind, const Holder& holder, bool by_client);
  // Pages that the holder may be reading; null when it has no fetch.
  [[nodiscard]] const PinSet* pins_of(const Holder& holder) const;
  // Unpins pages, some of which may be filling: a read that nobody wants any more is cancelled.
  void unpin(PinSet& pins);
  // The prefetch of a request, whichever router hinted at it: the request has come.
  void release_prefetch(const RequestId& request, std::uint16_t attempt);

  // `tag` is the request id's (tag_request).
  void planned(std::uint64_t tag, const wire::meta_planned& plan, const Now& now);
  void read_done(const Peer& source, const wire::kv_read_done& done, const Now& now);
  void read_cancelled(const Peer& source, const wire::kv_read_cancelled& cancelled);
  void meta_lost(const Now& now);
  // A store or another host.
  void source_lost(const Peer& source, const Now& now);
  void source_returned(const Peer& source);
  // That process can write no byte any more.
  void source_detached(const Peer& source, const Now& now);
  // The same of one transfer; false when it is not one of these.
  bool concealed(const Peer& source, std::uint64_t transfer);

  void on_time(const Now& now);
  // Starts the reads that windows have room for.  After every event.
  void pump(const Now& now);
  [[nodiscard]] Due next_due() const;

  // Slots of pages that a kv_fetch found in the arena, once: second sightings.
  [[nodiscard]] std::vector<std::uint32_t> take_sighted() { return std::exchange(sighted_, {}); }

  [[nodiscard]] const Books& books() const { return books_; }
  [[nodiscard]] const FetchCounters& counters() const { return counters_; }
  [[nodiscard]] std::size_t fetches(FetchKind kind) const;
  [[nodiscard]] std::size_t pins() const;
  [[nodiscard]] std::size_t plans() const { return plans_.size(); }
  [[nodiscard]] std::size_t leases() const { return leases_.size(); }
  [[nodiscard]] std::size_t reads() const { return reads_.size(); }
  [[nodiscard]] std::size_t entries() const;

  // Adds the pins held here, by slot; says what disagrees.
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;
  // Every holder with a fetch here.
  [[nodiscard]] std::vector<Holder> holders() const;

 private:
  using Name = std::pair<Holder, FetchKind>;
  using FetchId = std::uint64_t;
  enum class FetchState : std::uint8_t { planning, filling, complete };
  enum class ReadState : std::uint8_t { waiting, reading, cancelling };
  // Why a fetch has no page for its next block.
  enum class Gap : std::uint8_t { none, absent, no_room, unreachable };

  struct Fetch {
    Name name;
    wire::Scope scope;
    std::vector<Key> keys;
    std::uint8_t priority = 1;
    FetchState state = FetchState::planning;
    std::uint64_t plan = 0;  // tag of the outstanding plan
    std::vector<Piece> pieces;
    PinSet pins;
    std::uint32_t blocks = 0;  // end of the last piece
    std::uint32_t failed_block = wire::block_none;
    Lost failed_why = Lost::timeout;
    std::uint32_t active = 0;                           // pieces in front of the failed block
    std::array<std::uint32_t, kv::groups_max> ready{};  // active pieces whose group g is there
    std::uint32_t entry = 0;                            // of an answered kv_fetch
    std::uint32_t shown_groups = 0;
    std::uint32_t shown_failed = wire::block_none;
    Instant started;                   // product time
    Instant expires = instant_never;   // prefetch: product time
    Instant deadline = instant_never;  // fetch: liveness time, until it is complete

    [[nodiscard]] FetchKind kind() const { return name.second; }
    [[nodiscard]] std::uint32_t end() const { return std::min(blocks, failed_block); }
  };
  struct Plan {
    FetchId fetch = 0;
    Instant deadline;
  };
  struct Read {
    Peer source;
    bool arena = false;   // of another host; else a store
    bool remote = false;  // not on this machine
    wire::kv_read message;
    Key key;                  // of the page's first block
    std::uint64_t page = 0;   // of the plan
    std::uint64_t lease = 0;  // 0: none, or ended by the loss of di-meta
    ReadState state = ReadState::waiting;
    bool counted = false;  // in the window of its source
    Instant deadline = instant_never;
  };
  struct Lease {
    Duration every{};
    Instant renew_at;
    Instant cap;
    std::set<std::uint64_t> reads;  // transfers
  };
  struct Window {
    std::set<std::pair<std::uint8_t, std::uint64_t>> waiting;  // (priority, transfer)
    std::uint32_t outstanding = 0;
  };

  // Takes pieces from the arena and reads from `plan` until neither has the next key.  Returns why the
  // rest is missing.
  Gap extend(FetchId id, Fetch& fetch, const wire::meta_planned* plan, const Now& now);
  bool add_piece(FetchId id, Fetch& fetch, const Piece& piece);
  // none: the read waits for its window.
  Gap add_read(const Fetch& fetch, const wire::PlannedPage& page, const Key& parent,
               const wire::meta_planned& plan, const Now& now);
  // The plan came, or will not come (null, and `missing` says why): the fetch has what it will ever have.
  void settle_plan(FetchId id, const wire::meta_planned* plan, Gap missing, const Now& now);
  // kv_fetching; false when there is nothing to wait for and the fetch is over.
  bool answer(Fetch& fetch, bool no_room);
  void send_fetching(const Fetch& fetch, Code code);
  void count_ready(Fetch& fetch) const;
  // Shows what is to be shown by now.
  void advance(Fetch& fetch, const Now& now);
  [[nodiscard]] std::uint32_t groups_allowed(const Fetch& fetch, const Now& now) const;
  [[nodiscard]] std::uint32_t groups_verified(const Fetch& fetch) const;
  void fail_from(Fetch& fetch, std::uint32_t block, Lost why, const Now& now);
  void forget(FetchId id, bool by_client);

  void page_moved(std::uint32_t slot, std::uint32_t group, const Now& now);
  // The page of a read will not come: quarantine, and every fetch that waits for it hears.
  void page_failed(std::uint32_t slot, Lost why, const Now& now);
  // The source says, or its loss says, that it writes nothing more (or it never wrote).
  void end_read(std::uint64_t transfer);
  // It can write nothing more.
  void finish_read(std::uint64_t transfer);
  void cancel_read(std::uint64_t transfer, Read& read);
  void tell_read_failed(const Read& read, Code code);
  void release_leases(std::vector<std::uint64_t> leases);

  template <class M>
  void to_meta(const RequestId& request, const M& message) {
    if (const std::optional<Peer> meta = peers_.meta_up()) {
      out_.push_back(wire::Envelope::make(meta->instance, meta->generation, {request, 0, 0, 0}, message));
    }
  }
  template <class M>
  void to_source(const Read& read, const M& message) {
    out_.push_back(wire::Envelope::make(read.source.instance, read.source.generation, {}, message));
  }
  template <class M>
  void to_client(const Fetch& fetch, const M& message) {
    const Peer& client = fetch.name.first.client;
    out_.push_back(wire::Envelope::make(client.instance, client.generation,
                                        {fetch.scope.request, fetch.scope.attempt, fetch.scope.rank, 0},
                                        message));
  }

  const Limits limits_;
  Pages& pages_;
  kv::EntryPool& entries_;
  ArenaPort& port_;
  DataPort& data_;
  const Peers& peers_;
  Numbers& numbers_;
  Outbox& out_;
  std::map<FetchId, Fetch> fetches_;
  std::map<Name, FetchId> names_;
  std::set<std::tuple<RequestId, std::uint16_t, FetchId>> prefetches_;
  std::uint64_t prefetch_bytes_ = 0;  // pinned by prefetches
  FetchId next_fetch_ = 1;
  std::map<std::uint64_t, Plan> plans_;             // by tag
  std::map<std::uint64_t, Read> reads_;             // by transfer
  std::map<std::uint32_t, std::uint64_t> reading_;  // slot -> transfer
  struct Waiter {
    FetchId fetch = 0;
    std::uint32_t piece = 0;
  };
  std::map<std::uint32_t, std::vector<Waiter>> waiters_;  // by filling slot
  std::map<std::string, Window> windows_;                 // by source instance
  std::map<std::uint64_t, Lease> leases_;
  std::vector<std::uint32_t> sighted_;
  Books books_;
  FetchCounters counters_;
};

}  // namespace di::host
