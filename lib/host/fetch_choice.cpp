// Fetch or compute: which blocks of a kv_fetch are worth their time (balance/arbiter.h), and what fetches
// took.
#include <algorithm>
#include <cmath>
#include <span>

#include "host/fetch.h"

namespace di::host {

bool Fetches::makes_sense(const wire::ComputeCost& compute, std::size_t blocks) const {
  for (const double us : {compute.base_us, compute.token_us, compute.context_us}) {
    if (!std::isfinite(us) || us < 0) return false;
  }
  return compute.chunk_tokens > 0 && compute.groups > 0 &&
         compute.tokens > blocks * pages_.layout().block_tokens();
}

bool Fetches::in_store(const wire::PlannedPage& page) const {
  return !page.columns.empty() &&
         std::all_of(page.columns.begin(), page.columns.end(), [&](const wire::Column& column) {
           return peers_.store_up(column.instance).has_value();
         });
}

std::vector<balance::HitRun> Fetches::runs_of(const Fetch& fetch, const PlanPages& pages) const {
  using balance::Place;
  const kv::Layout& layout = pages_.layout();
  std::vector<balance::HitRun> runs;
  const auto add_piece = [&](const Piece& piece) {
    const Page& page = pages_.at(piece.slot);
    const std::uint64_t bytes = layout.page_bytes(page.blocks);
    if (!fillings_.has(piece.slot))
      return runs.push_back({Place::arena, piece.count, bytes * piece.count / page.blocks});
    // Somebody brings it, and so much of it is still to come.
    runs.push_back({fillings_.place(piece.slot), piece.count,
                    bytes / layout.groups() * (layout.groups() - page.groups)});
  };
  for (const Piece& piece : fetch.pieces) add_piece(piece);
  for (std::uint32_t at = fetch.blocks; at < fetch.keys.size();) {
    if (const std::vector<Piece> pieces = pages_.cover(fetch.keys, at, true); !pieces.empty()) {
      for (const Piece& piece : pieces) add_piece(piece);
      at = pieces.back().at + pieces.back().count;
      continue;
    }
    const wire::PlannedPage* page = pages.find(fetch.keys[at]);
    if (page == nullptr || page->page_blocks > layout.page_blocks()) break;
    auto key = std::find(page->keys.begin(), page->keys.end(), fetch.keys[at]);
    std::uint32_t count = 0;
    for (; key != page->keys.end() && at < fetch.keys.size() && *key == fetch.keys[at]; ++key, ++at) ++count;
    runs.push_back({in_store(*page) || page->arenas.empty() ? Place::store : Place::remote_arena, count,
                    layout.page_bytes(page->page_blocks)});
  }
  return runs;
}

// What is never brought is never learnt to have become fast.
bool Fetches::probes(std::span<const balance::HitRun> runs, std::uint32_t keep, const Now& now) {
  bool probe = false;
  std::uint32_t end = 0;
  for (const balance::HitRun& run : runs) {
    end += run.blocks;
    if (end <= keep || run.place == balance::Place::arena) continue;
    Instant& at = probe_at_[static_cast<std::size_t>(run.place)];
    probe = probe || at <= now.liveness;
    if (at == instant_never || at <= now.liveness) at = now.liveness + limits_.probe_after;
  }
  if (probe) ++counters_.probes;
  return probe;
}

void Fetches::cut(FetchId id, Fetch& fetch, const PlanPages& pages, Lost rest, const Now& now) {
  // What failed meanwhile ends it in any case.
  if (!fetch.compute || fetch.failed_block != wire::block_none) return;
  const std::vector<balance::HitRun> runs = runs_of(fetch, pages);
  const bool all_here = std::all_of(runs.begin(), runs.end(), [](const balance::HitRun& run) {
    return run.place == balance::Place::arena;
  });
  if (all_here) return;
  const wire::ComputeCost& compute = *fetch.compute;
  const balance::Choice choice = balance::fetch_or_compute(
      {.total_tokens = compute.tokens,
       .block_tokens = pages_.layout().block_tokens(),
       .chunk_tokens = compute.chunk_tokens,
       .groups = compute.groups,
       .queue_us = static_cast<double>(compute.queue_us)},
      runs, fillings_.coming_bytes(),
      balance::StepCost(
          {.base_us = compute.base_us, .token_us = compute.token_us, .context_us = compute.context_us}),
      cost_);
  std::uint32_t most = 0;  // blocks of the runs
  std::uint32_t keep = 0;  // the choice, with the rest of its last page, which comes in any case
  for (const balance::HitRun& run : runs) {
    most += run.blocks;
    if (keep < choice.blocks) keep = most;
  }
  if (keep == most || probes(std::span(runs), keep, now)) return;
  ++counters_.fetches_cut;
  fetch.computed_blocks = most - keep;
  books_.lost[static_cast<std::size_t>(Lost::computed)] += fetch.computed_blocks;
  books_.lost[static_cast<std::size_t>(rest)] += fetch.keys.size() - most;
  fetch.keys.resize(keep);
  PinSet let_go;
  while (!fetch.pieces.empty() && fetch.pieces.back().at >= keep) {
    stop_waiting(id, fetch.pieces.back().slot);
    let_go.slots.insert(let_go.slots.begin(), fetch.pieces.back().slot);
    fetch.pieces.pop_back();
    fetch.pins.slots.pop_back();
  }
  fetch.blocks = fetch.pieces.empty() ? 0 : fetch.pieces.back().at + fetch.pieces.back().count;
  fillings_.unpin(let_go);
}

void Fetches::observe(const Fetch& fetch, const Now& now) {
  // Which of two places it waited for is not known.
  const auto& brought = fetch.bringing.bytes;
  if (fetch.bringing.shared ||
      std::count(brought.begin(), brought.end(), 0U) < std::ptrdiff_t{balance::places} - 1)
    return;
  for (const balance::Place place : {balance::Place::remote_arena, balance::Place::store}) {
    const std::size_t i = static_cast<std::size_t>(place);
    if (fetch.bringing.bytes[i] == 0) continue;
    const std::uint64_t bytes = fetch.bringing.queued[i] + fetch.bringing.bytes[i];
    const Duration took = now.liveness - fetch.bringing.since;
    // One that goes before it has everything tells only that it would have taken longer.
    if (fetch.state != FetchState::complete &&
        static_cast<double>(to_us(took)) < cost_.predict_us(place, bytes))
      continue;
    cost_.observe(place, bytes, took);
    probe_at_[i] = now.liveness + limits_.probe_after;
  }
}

}  // namespace di::host
