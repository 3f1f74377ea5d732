// rank/fetch_watch.h: does a prefill rank go on waiting for the cached blocks of a request, or compute them?
//
// What to bring at all its di-kvd decides, when it knows where the blocks are (host/fetch.h); this is the look
// again while they come.
//
// A rank sees of a fetch when it was asked for and how many layer groups of all its blocks are there, not
// where they come from.  So it knows two kinds: those that are complete at once, which cost nothing, and
// those that are not, whose time it learns (balance::FetchCost).  While one comes, it is looked at (balance::
// look_again) after look_first, and then again and again: given up, its blocks are computed, and the request
// is as one whose fetch failed at the first block.  Waiting while the rank has other work costs nothing.
//
//   state     event                                             next
//   (none)    kv_fetching names blocks                          coming
//   coming    all groups are there                              (none); learnt from
//   coming    a look says so                                    given up
//   given up  all groups are there after all                    (none); learnt from
//   any       a block failed                                    (none)
//   any       the request ends                                  (none); what has taken longer than predicted
//   is
//                                                               learnt from as if it had just come
//
// Pure.  Owner: the core of a prefill rank.  Bound: one entry per request of the rank.
#pragma once

#include <cstdint>
#include <map>

#include "balance/arbiter.h"
#include "base/time.h"
#include "rank/batch.h"

namespace di::rank {

class FetchWatch {
 public:
  struct Options {
    bool enabled = false;  // kv.arbiter
    std::uint64_t block_bytes = 0;
    std::uint32_t groups = 1;
    std::uint32_t block_tokens = 1;
    std::uint32_t chunk_tokens = 512;
    bool overlap = true;
    balance::FetchCost::Shape guess =
        balance::FetchCost::guess[static_cast<std::size_t>(balance::Place::store)];
  };
  struct Counters {
    std::uint64_t at_once = 0;  // complete before they were looked at
    std::uint64_t waited = 0;   // complete while waited for
    std::uint64_t given_up = 0;
    std::uint64_t given_up_blocks = 0;
    std::uint64_t cut_blocks = 0;  // that di-kvd did not begin to bring
    std::uint64_t came_late = 0;   // complete after they were given up
  };

  explicit FetchWatch(const Options& options);

  // `asked`: when kv_fetch was sent; `tokens`: of the whole prompt.
  void begin(Handle handle, std::uint32_t blocks, std::uint32_t tokens, Instant asked, Instant now);
  void moved(Handle handle, std::uint32_t groups, Instant now);
  void cut(std::uint32_t cut_blocks) { counters_.cut_blocks += cut_blocks; }
  void failed(Handle handle) { entries_.erase(handle); }
  void end(Handle handle);

  // When to look at this one, if it still waits.
  [[nodiscard]] Instant next_look(Handle handle) const;
  // Looks; true: give it up.  `queue_us`: predicted work of the rank's other requests.
  [[nodiscard]] bool give_up(Handle handle, double queue_us, const balance::StepCost& step, Instant now);

  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] balance::FetchCost& cost() { return cost_; }
  [[nodiscard]] const balance::FetchCost& cost() const { return cost_; }

 private:
  struct Entry {
    std::uint32_t blocks = 0;
    std::uint32_t tokens = 0;
    std::uint32_t groups = 0;  // there
    Instant asked;
    Instant look_at;
    bool looked = false;
    bool given_up = false;
  };

  const Options options_;
  balance::FetchCost cost_;
  std::map<Handle, Entry> entries_;
  Instant latest_;  // that was told
  Counters counters_;
};

}  // namespace di::rank
