#include "balance/arbiter.h"

#include <algorithm>

#include "base/assert.h"

namespace di::balance {

namespace {

// Fetching and computing together.
double total_us(const Prompt& prompt, std::uint32_t blocks, double fetch_us, double compute_us,
                const StepCost& step) {
  if (prompt.groups <= 1 || fetch_us <= 0) return fetch_us + compute_us;
  const std::uint32_t cached = blocks * prompt.block_tokens;
  const std::uint32_t first_end = std::min(prompt.total_tokens, cached + prompt.chunk_tokens);
  const double first_us = step.predict_prompt_us(first_end, cached, prompt.chunk_tokens);
  const double together = std::max(fetch_us, first_us) + std::min(fetch_us, first_us) / prompt.groups;
  return together + std::max(0.0, compute_us - first_us);
}

Choice choice_of(const Prompt& prompt, std::uint32_t blocks, double fetch_us, const StepCost& step) {
  Choice choice;
  choice.blocks = blocks;
  choice.fetch_us = fetch_us;
  choice.compute_us =
      step.predict_prompt_us(prompt.total_tokens, blocks * prompt.block_tokens, prompt.chunk_tokens);
  const double waited = std::max(0.0, fetch_us - prompt.queue_us);
  choice.total_us = prompt.queue_us + total_us(prompt, blocks, waited, choice.compute_us, step);
  return choice;
}

}  // namespace

Choice fetch_or_compute(const Prompt& prompt, std::span<const HitRun> hit,
                        const std::array<std::uint64_t, places>& queued_bytes, const StepCost& step,
                        const FetchCost& fetch) {
  Choice best = choice_of(prompt, 0, 0, step);
  std::array<std::uint64_t, places> before{};  // of the runs in front, by place
  std::array<double, places> times{};
  std::uint32_t blocks = 0;
  for (const HitRun& run : hit) {
    const auto place = static_cast<std::size_t>(run.place);
    for (std::uint32_t i = 1; i <= run.blocks; ++i) {
      const std::uint64_t bytes =
          before[place] + run.bytes / run.blocks * i + run.bytes % run.blocks * i / run.blocks;
      times[place] = fetch.predict_us(run.place, queued_bytes[place] + bytes);
      ++blocks;
      DI_ASSERT(std::uint64_t{blocks} * prompt.block_tokens < prompt.total_tokens);
      const Choice here = choice_of(prompt, blocks, *std::max_element(times.begin(), times.end()), step);
      // Of equal ones the longer: what is fetched is not computed again by somebody else.
      if (here.total_us <= best.total_us) best = here;
    }
    before[place] += run.bytes;
  }
  return best;
}

Choice look_again(const Prompt& prompt, const Progress& progress, const StepCost& step,
                  const FetchCost& fetch) {
  const double elapsed = static_cast<double>(std::max<std::int64_t>(progress.elapsed.count(), 0)) / 1000;
  double left = 0;
  for (std::size_t i = 0; i < places; ++i) {
    const auto place = static_cast<Place>(i);
    const std::uint64_t arrived = std::min(progress.arrived_bytes[i], progress.wanted_bytes[i]);
    if (arrived == progress.wanted_bytes[i]) continue;
    const double whole = fetch.predict_us(place, progress.queued_bytes[i] + progress.wanted_bytes[i]);
    // How late it is: by now there should be more than what has arrived, at least an eighth of it.
    const std::uint64_t due = std::max(arrived, progress.wanted_bytes[i] / 8);
    const double late = std::max(1.0, elapsed / fetch.predict_us(place, progress.queued_bytes[i] + due));
    double expected = std::max(whole * late - elapsed, 0.0);
    if (elapsed > whole) expected = std::max(expected, elapsed);
    left = std::max(left, expected);
  }
  const Choice wait = choice_of(prompt, progress.wanted_blocks, left, step);
  const Choice go = choice_of(prompt, progress.ready_blocks, 0, step);
  return go.total_us < wait.total_us ? go : wait;
}

}  // namespace di::balance
