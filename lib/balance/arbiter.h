// balance/arbiter.h: fetch what is cached of a prompt, only the front of it, or nothing?
//
// A hit is a chain of blocks in runs by place.  Bringing its first x blocks takes F(x): every place works
// beside the others, so it is the longest of their times, each for its bytes and those queued in front of
// them.  Computing the rest takes C(x).  With layers that overlap, the first chunk computes while later
// layers come: of two stages with g equal pieces the sum is max + min / g.  The choice is the x with the
// least sum, looked for at every block, so with true costs it is never worse than all or nothing; with costs
// fitted from Fit::samples_documented samples, by 5 % at most.
//
// While it comes, look_again() asks once more with what is known by then.  A fetch that is late counts as
// late as it was so far, and one that has taken longer than it should in all counts as only half done; so it
// is given up when it has taken as long as it would have saved, and costs at most twice of what computing
// would.
//
// Pure, no state.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "balance/cost.h"
#include "base/time.h"

namespace di::balance {

// Consecutive blocks of a hit that come from one place.
struct HitRun {
  Place place = Place::store;
  std::uint32_t blocks = 0;
  std::uint64_t bytes = 0;
};

struct Prompt {
  std::uint32_t total_tokens = 0;  // above the hit's
  std::uint32_t block_tokens = 1;
  std::uint32_t chunk_tokens = 512;
  std::uint32_t groups = 1;  // layer groups that overlap; 1: nothing does
  double queue_us = 0;       // work of others that is done first, while blocks come
};

struct Choice {
  std::uint32_t blocks = 0;  // to be fetched, from the front
  double fetch_us = 0;
  double compute_us = 0;
  double total_us = 0;
};

// `queued_bytes`: by place, in front of this one.  The hit leaves at least one token to compute.
[[nodiscard]] Choice fetch_or_compute(const Prompt& prompt, std::span<const HitRun> hit,
                                      const std::array<std::uint64_t, places>& queued_bytes,
                                      const StepCost& step, const FetchCost& fetch);

struct Progress {
  Duration elapsed{};
  std::array<std::uint64_t, places> wanted_bytes{};  // of the whole fetch
  std::array<std::uint64_t, places> queued_bytes{};  // as they were in front of it when it began
  std::array<std::uint64_t, places> arrived_bytes{};
  std::uint32_t wanted_blocks = 0;
  std::uint32_t ready_blocks = 0;  // usable now
};

// The choice between waiting (blocks == wanted_blocks) and going on with what is there (ready_blocks);
// fetch_us is what is still expected to pass.
[[nodiscard]] Choice look_again(const Prompt& prompt, const Progress& progress, const StepCost& step,
                                const FetchCost& fetch);

}  // namespace di::balance
