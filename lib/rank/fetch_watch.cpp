#include "rank/fetch_watch.h"

#include <algorithm>

namespace di::rank {

namespace {

constexpr auto store = balance::Place::store;
constexpr auto store_index = static_cast<std::size_t>(store);

// kv_ready follows kv_fetching when everything is in the arena.
constexpr Duration look_first = milliseconds(1);
constexpr Duration look_least = milliseconds(1);
constexpr Duration look_most = milliseconds(500);

std::array<balance::FetchCost::Shape, balance::places> shapes(const balance::FetchCost::Shape& guess) {
  std::array<balance::FetchCost::Shape, balance::places> all = balance::FetchCost::guess;
  all[store_index] = guess;
  return all;
}

}  // namespace

FetchWatch::FetchWatch(const Options& options) : options_(options), cost_(shapes(options.guess)) {}

void FetchWatch::begin(Handle handle, std::uint32_t blocks, std::uint32_t tokens, Instant asked,
                       Instant now) {
  latest_ = now;
  Entry entry;
  entry.blocks = blocks;
  entry.tokens = tokens;
  entry.asked = asked;
  entry.look_at = now + look_first;
  entries_.insert_or_assign(handle, entry);
}

void FetchWatch::moved(Handle handle, std::uint32_t groups, Instant now) {
  latest_ = now;
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return;
  Entry& entry = found->second;
  entry.groups = std::max(entry.groups, groups);
  if (entry.groups < options_.groups) return;
  if (entry.looked || now >= entry.look_at) {
    cost_.observe(store, entry.blocks * options_.block_bytes, now - entry.asked);
    ++(entry.given_up ? counters_.came_late : counters_.waited);
  } else {
    ++counters_.at_once;
  }
  entries_.erase(found);
}

void FetchWatch::end(Handle handle) {
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return;
  const Entry& entry = found->second;
  const std::uint64_t bytes = entry.blocks * options_.block_bytes;
  const Duration took = latest_ - entry.asked;
  if (static_cast<double>(to_us(took)) > cost_.predict_us(store, bytes)) cost_.observe(store, bytes, took);
  entries_.erase(found);
}

Instant FetchWatch::next_look(Handle handle) const {
  const auto found = entries_.find(handle);
  const bool looks = options_.enabled && found != entries_.end() && !found->second.given_up;
  return looks ? found->second.look_at : instant_never;
}

bool FetchWatch::give_up(Handle handle, double queue_us, const balance::StepCost& step, Instant now) {
  latest_ = now;
  Entry& entry = entries_.at(handle);
  entry.looked = true;
  const balance::Prompt prompt{.total_tokens = entry.tokens,
                               .block_tokens = options_.block_tokens,
                               .chunk_tokens = options_.chunk_tokens,
                               .groups = options_.overlap ? options_.groups : 1,
                               .queue_us = queue_us};
  balance::Progress progress;
  progress.elapsed = now - entry.asked;
  progress.wanted_blocks = entry.blocks;
  progress.wanted_bytes[store_index] = entry.blocks * options_.block_bytes;
  progress.arrived_bytes[store_index] = progress.wanted_bytes[store_index] / options_.groups * entry.groups;
  const balance::Choice choice = balance::look_again(prompt, progress, step, cost_);
  if (choice.blocks < entry.blocks) {
    entry.given_up = true;
    ++counters_.given_up;
    counters_.given_up_blocks += entry.blocks;
    return true;
  }
  const auto left = Duration(static_cast<std::int64_t>(std::min(choice.fetch_us, 1e9) * 1000 / 4));
  entry.look_at = now + std::clamp(left, look_least, look_most);
  return false;
}

}  // namespace di::rank
