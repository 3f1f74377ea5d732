#include "http/wheel.h"

#include <algorithm>

namespace di::http {

void DeadlineWheel::set(std::uint32_t index, Instant at) {
  if (index >= entries_.size()) entries_.resize(index + 1);
  entries_[index].at = at;
  if (at != instant_never) list(index);
}

void DeadlineWheel::list(std::uint32_t index) {
  Entry& entry = entries_[index];
  const std::int64_t ceiling = (entry.at.ns + wheel_tick.count() - 1) / wheel_tick.count();
  const std::int64_t tick = std::clamp(ceiling, tick_ + 1, tick_ + bucket_count - 1);
  if (entry.listed_tick != 0 && entry.listed_tick <= tick) return;
  entry.listed_tick = tick;
  buckets_[static_cast<std::size_t>(tick % bucket_count)].push_back(index);
}

void DeadlineWheel::expire(Instant now, std::vector<std::uint32_t>& due) {
  const std::int64_t until = now.ns / wheel_tick.count();
  const std::int64_t last = std::min(until, tick_ + bucket_count);
  passing_.clear();
  for (std::int64_t tick = tick_ + 1; tick <= last; ++tick) {
    auto& bucket = buckets_[static_cast<std::size_t>(tick % bucket_count)];
    for (const std::uint32_t index : bucket) {
      if (entries_[index].listed_tick != tick) continue;  // stale: the deadline had moved earlier
      entries_[index].listed_tick = 0;
      passing_.push_back(index);
    }
    bucket.clear();
  }
  tick_ = std::max(tick_, until);
  for (const std::uint32_t index : passing_) {
    Entry& entry = entries_[index];
    if (entry.at == instant_never) continue;
    if (entry.at <= now) {
      entry.at = instant_never;
      due.push_back(index);
    } else {
      list(index);
    }
  }
}

}  // namespace di::http
