// host/fetch.h: bringing blocks into the arena: what a rank asks for (kv_fetch), what a router hints at
// (kv_prefetch), what a seat expects (kv_expect).
//
// A fetch, one per (holder, kind):
//   state     event                                     next
//   (none)    every block is in the arena or coming     filling or complete; kv_fetching
//   (none)    some are not                              planning; meta_plan
//   planning  meta_planned                              filling or complete; a read per new page; kv_fetching
//             (of what balance/arbiter.h says is sooner brought than computed, if the rank says what that costs)
//   planning  no answer in plan_wait, di-meta lost      the same with what the arena has
//   filling   a group of every page is verified         filling; index page, kv_ready
//   filling   the last group is                         complete
//   filling   a page fails, fetch_wait is over          filling or complete up to the failed block
//   any       released, client lost                     (none)
// Complete counts what is verified; kv.fetch_delay_ms holds back only what is shown.  A fetch keeps its
// pins until it is released, also of pages behind a failed block: a reader may still be copying.
//
// What comes, comes as fillings (host/filling.h), which every fetch of their keys shares: a fetch waits for those
// that its pages are.
//
// Owner: the core of a di-kvd host.  Bounds: Limits; pages by the arena, entries by the index page.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "balance/arbiter.h"
#include "host/filling.h"
#include "host/lease.h"
#include "host/pages.h"
#include "host/port.h"
#include "kv/slots.h"
#include "wire/messages.h"

namespace di::host {

enum class FetchKind : std::uint8_t { fetch, prefetch, expect };

// Blocks of kv_fetch.  matched = fetched + lost + what is under way; fetched = swapped + unused + what
// is held.  `evicted` has the blocks that were nowhere any more and those that found no room, `computed` those
// that would have taken longer to come.
struct Books {
  std::uint64_t matched = 0;
  std::uint64_t fetched = 0;
  std::array<std::uint64_t, 5> lost{};  // by Lost
  std::uint64_t swapped = 0;            // released by their client after everything was shown
  std::uint64_t unused = 0;
};

struct FetchCounters {
  std::uint64_t plans = 0;
  std::uint64_t plans_failed = 0;  // not answered, di-meta away
  std::uint64_t prefetches = 0;
  std::uint64_t prefetched_blocks = 0;  // read because of a prefetch
  std::uint64_t arena_blocks = 0;       // of kv_fetch, found in the arena
  std::uint64_t fetches_cut = 0;        // of which some blocks were sooner computed
  std::uint64_t probes = 0;             // that would have been, and were not
};

class Fetches {
 public:
  struct Limits {
    std::size_t fetches_max = 4096;
    std::size_t keys_max = 65536;        // as in messages.def
    std::uint32_t reads_per_source = 8;  // outstanding; enough for one NVMe device at 1 MiB a page
    Duration fetch_delay{0};             // kv.fetch_delay_ms
    Duration plan_wait = seconds(1);
    Duration read_wait = seconds(10);   // silence of a store within a read
    Duration fetch_wait = seconds(30);  // without a deadline in kv_fetch
    Duration prefetch_hold = seconds(60);
    Duration lease_cap = seconds(120);
    // between two fetches that are not cut, to see whether a place is fast again
    Duration probe_after = seconds(10);
    std::uint32_t prefetch_share = 4;  // prefetches pin at most this part of the arena: 1/4
  };
  Fetches(const Limits& limits, Pages& pages, kv::EntryPool& entries, ArenaPort& port, const Peers& peers,
          Fillings& fillings, Leases& leases, Numbers& numbers, Outbox& out);

  // What is wanted, and how.
  struct Want {
    FetchKind kind = FetchKind::fetch;
    std::vector<Key> keys;
    std::uint8_t priority = 0;
    std::vector<wire::ComputeCost> compute{};  // of kv_fetch
  };
  // `deadline_ms` of the scope bounds a fetch.
  void begin(const Holder& holder, const wire::Scope& scope, Want want, const Now& now);
  // `by_client`: the client says so itself, so what was complete counts as used.
  void release(FetchKind kind, const Holder& holder, bool by_client, const Now& now);
  // Pages that the holder may be reading; null when it has no fetch.
  [[nodiscard]] const PinSet* pins_of(const Holder& holder) const;
  // Another client fetches for the same request.
  [[nodiscard]] bool another_fetches(const Holder& holder) const;
  // The prefetch of a request, whichever router hinted at it: the request has come.
  void release_prefetch(const RequestId& request, std::uint16_t attempt, const Now& now);

  // `tag` is the request id's (tag_request).
  void planned(std::uint64_t tag, const wire::meta_planned& plan, const Now& now);
  void meta_lost(const Now& now);
  // Of every page that comes; before anything else is asked of this.
  void filling_progress(const Fillings::Progress& progress, const Now& now);

  void on_time(const Now& now);
  [[nodiscard]] Due next_due() const;

  // Slots of pages that a kv_fetch found in the arena, once: second sightings.
  [[nodiscard]] std::vector<std::uint32_t> take_sighted() { return std::exchange(sighted_, {}); }

  // What fetches took here, for the choice between them and computing; outlives the process.
  [[nodiscard]] const balance::FetchCost& cost() const { return cost_; }
  Status restore_cost(std::string_view text) { return cost_.restore(text); }

  [[nodiscard]] const Books& books() const { return books_; }
  [[nodiscard]] const FetchCounters& counters() const { return counters_; }
  [[nodiscard]] std::size_t fetches(FetchKind kind) const;
  [[nodiscard]] std::size_t pins() const;
  [[nodiscard]] std::size_t plans() const { return plans_.size(); }
  [[nodiscard]] std::size_t entries() const;

  // Adds the pins held here, by slot; says what disagrees.
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;
  // Every holder with a fetch here.
  [[nodiscard]] std::vector<Holder> holders() const;

 private:
  using Name = std::pair<Holder, FetchKind>;
  using FetchId = std::uint64_t;
  enum class FetchState : std::uint8_t { planning, filling, complete };

  // What a fetch reads itself, for balance::FetchCost.
  struct Bringing {
    std::array<std::uint64_t, balance::places> bytes{};
    std::array<std::uint64_t, balance::places> queued{};  // in front of them
    Instant since;                                        // liveness time
    bool shared = false;                                  // others read some of it: its time says nothing
  };
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
    std::optional<wire::ComputeCost> compute;
    std::uint32_t computed_blocks = 0;  // cut off: sooner computed
    Bringing bringing;
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
  // Pages of a plan by the keys that they hold.
  struct PlanPages {
    explicit PlanPages(const wire::meta_planned* plan);
    const wire::PlannedPage* find(const Key& key) const;
    std::unordered_map<Key, const wire::PlannedPage*> by_key;  // looked up only
  };
  // Takes pieces from the arena and reads from `plan` until neither has the next key.  Returns why the
  // rest is missing.
  Gap extend(FetchId id, Fetch& fetch, const wire::meta_planned* plan, const PlanPages& pages);
  // What a rank says of `blocks` that it wants can be reckoned with.
  [[nodiscard]] bool makes_sense(const wire::ComputeCost& compute, std::size_t blocks) const;
  // Cuts off what is sooner computed than brought from where `pages` say; what it has of it is let go.  `rest`:
  // why there is nothing behind that.
  void cut(FetchId id, Fetch& fetch, const PlanPages& pages, Lost rest, const Now& now);
  // All the same nothing is cut: of some place behind `keep` nothing has been learnt for probe_after.
  [[nodiscard]] bool probes(std::span<const balance::HitRun> runs, std::uint32_t keep, const Now& now);
  // What it has, and what extend() would add, in runs by place.
  [[nodiscard]] std::vector<balance::HitRun> runs_of(const Fetch& fetch, const PlanPages& pages) const;
  [[nodiscard]] bool in_store(const wire::PlannedPage& page) const;
  void stop_waiting(FetchId id, std::uint32_t slot);
  // It has everything that it brought itself, or goes before that.
  void observe(const Fetch& fetch, const Now& now);
  bool add_piece(FetchId id, Fetch& fetch, const Piece& piece);
  // none: it is coming.
  Gap add_filling(FetchId id, Fetch& fetch, const wire::PlannedPage& page, const Key& parent,
                  std::uint64_t lease, Fillings::Stripes& stripes);
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
  void forget(FetchId id, bool by_client, const Now& now);

  // Of a page that a fetch waits for: a group is there, or it will not come.
  void page_moved(std::uint32_t slot, std::uint32_t group, const Now& now);
  void page_failed(std::uint32_t slot, Lost why, const Now& now);
  // Bytes that prefetches may pin in all.
  [[nodiscard]] std::uint64_t prefetch_bytes_max() const {
    return pages_.bytes_total() / limits_.prefetch_share;
  }

  template <class M>
  void to_meta(const RequestId& request, const M& message) {
    if (const std::optional<Peer> meta = peers_.meta_up()) {
      out_.push_back(wire::Envelope::make(meta->instance, meta->generation, {request, 0, 0, 0}, message));
    }
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
  const Peers& peers_;
  Fillings& fillings_;
  Leases& leases_;
  Numbers& numbers_;
  Outbox& out_;
  std::map<FetchId, Fetch> fetches_;
  std::map<Name, FetchId> names_;
  std::set<std::tuple<RequestId, std::uint16_t, FetchId>> prefetches_;
  std::uint64_t prefetch_bytes_ = 0;  // pinned by prefetches
  FetchId next_fetch_ = 1;
  std::map<std::uint64_t, Plan> plans_;  // by tag
  struct Waiter {
    FetchId fetch = 0;
    std::uint32_t piece = 0;
  };
  std::map<std::uint32_t, std::vector<Waiter>> waiters_;  // by filling slot
  balance::FetchCost cost_;
  // liveness time
  std::array<Instant, balance::places> probe_at_{instant_never, instant_never, instant_never};
  std::vector<std::uint32_t> sighted_;
  Books books_;
  FetchCounters counters_;
};

}  // namespace di::host
