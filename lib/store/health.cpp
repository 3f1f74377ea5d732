#include "store/health.h"

#include <algorithm>

namespace di::store {

std::string_view disk_state_name(DiskState state) {
  switch (state) {
    case DiskState::good:
      return "good";
    case DiskState::avoid:
      return "avoid";
    case DiskState::failed:
      return "failed";
  }
  return "?";
}

bool DiskHealth::too_many(std::deque<Instant>& times, std::uint64_t count, std::size_t max, Duration within,
                          Instant now) {
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(count, max + 1); ++i) times.push_back(now);
  while (!times.empty() && now - times.front() > within) times.pop_front();
  const bool over = times.size() > max;
  while (times.size() > max) times.pop_front();
  return over;
}

bool DiskHealth::slow(const Sample& sample) {
  const std::uint64_t ended = sample.ended - last_.ended;
  if (ended == 0) return sample.begun > sample.ended;
  if (ended < accesses_min) return false;
  const auto p99 = static_cast<double>(sample.p99_us);
  if (past_ >= past_min && p99 > slow_factor * past_us_ && sample.p99_us > slow_us_min) return true;
  // Slow intervals are no past: otherwise a disk that stays slow would be good again.
  past_ = std::min(past_ + 1, past_min);
  past_us_ = past_us_ == 0 ? p99 : past_us_ + (p99 - past_us_) / 32;
  return false;
}

std::uint64_t LastPercentile::p99(const Histogram& histogram) {
  std::array<std::uint64_t, Histogram::bucket_count> fresh{};
  std::uint64_t total = 0;
  for (int bucket = 0; bucket < Histogram::bucket_count; ++bucket) {
    const auto at = static_cast<std::size_t>(bucket);
    const std::uint64_t now = histogram.in_bucket(bucket);
    fresh[at] = now - before_[at];
    before_[at] = now;
    total += fresh[at];
  }
  // The smallest value that at most one in a hundred is above.
  std::uint64_t above = 0;
  for (int bucket = Histogram::bucket_count - 1; bucket >= 0; --bucket) {
    above += fresh[static_cast<std::size_t>(bucket)];
    if (above * 100 > total) return Histogram::upper_bound(bucket);
  }
  return 0;
}

DiskState DiskHealth::step(const Sample& sample, Instant now) {
  const bool is_slow = slow(sample);
  const bool counted = sample.ended > last_.ended;
  const bool errors = too_many(errors_, sample.errors - last_.errors, errors_max, errors_within, now);
  const bool corrupt = too_many(corrupt_, sample.corrupt - last_.corrupt, corrupt_max, corrupt_within, now);
  if (sample.no_space > last_.no_space) full_until_ = now + full_for;
  last_ = sample;
  if (is_slow) {
    if (slow_since_ == instant_never) slow_since_ = now;
    slow_last_ = now;
  } else if (counted) {
    slow_since_ = instant_never;
  }
  if (state_ == DiskState::failed) return state_;
  if (avoid_since_ == instant_never) {
    if (slow_since_ != instant_never && now - slow_since_ >= slow_for) avoid_since_ = now;
  } else if (now - slow_last_ >= slow_for) {
    avoid_since_ = instant_never;
    slow_since_ = instant_never;  // without accesses nothing else would have ended it
  }
  const bool given_up = avoid_since_ != instant_never && now - avoid_since_ >= failed_after;
  if (sample.cut_short || sample.removed || errors || corrupt || given_up) {
    state_ = DiskState::failed;
    reason_ = sample.cut_short ? "short"
              : sample.removed ? "removed"
              : errors         ? "errors"
              : corrupt        ? "corrupt"
                               : "slow";
  } else if (avoid_since_ != instant_never) {
    state_ = DiskState::avoid;
    reason_ = "slow";
  } else if (now < full_until_) {
    state_ = DiskState::avoid;
    reason_ = "full";
  } else {
    state_ = DiskState::good;
    reason_ = {};
  }
  return state_;
}

}  // namespace di::store
