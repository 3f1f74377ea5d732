#include "kv/miss_ratio.h"

#include <algorithm>
#include <cmath>

#include "base/assert.h"

namespace di::kv {

MissRatio::MissRatio(const Options& options) : options_(options), threshold_(values) {
  DI_ASSERT(options_.samples_max > 0 && options_.fade_references > 0);
  sums_.assign(options_.samples_max * 4 + 1, 0);
  owners_.assign(options_.samples_max * 4, 0);
  keys_.reserve(options_.samples_max + 1);
}

double MissRatio::rate() const {
  return static_cast<double>(threshold_) / static_cast<double>(values);
}

std::size_t MissRatio::bucket_of(double bytes) {
  if (bytes < 1) return 0;
  const double octave = std::log2(bytes);
  return std::min(buckets - 1, static_cast<std::size_t>(octave * octave_buckets));
}

void MissRatio::slot_add(std::uint64_t position, std::int64_t bytes) {
  total_bytes_ += static_cast<std::uint64_t>(bytes);
  for (std::uint64_t at = position + 1; at < sums_.size(); at += at & (~at + 1)) {
    sums_[at] += static_cast<std::uint64_t>(bytes);
  }
}

std::uint64_t MissRatio::bytes_since(std::uint64_t position) const {
  std::uint64_t before = 0;
  for (std::uint64_t at = position; at > 0; at -= at & (~at + 1)) before += sums_[at];
  return total_bytes_ - before;
}

void MissRatio::renumber() {
  std::vector<std::uint64_t> order;
  order.reserve(keys_.size());
  for (std::uint64_t position = 0; position < next_position_; ++position) {
    const auto key = keys_.find(owners_[position]);
    if (key != keys_.end() && key->second.position == position) order.push_back(owners_[position]);
  }
  std::fill(sums_.begin(), sums_.end(), 0);
  total_bytes_ = 0;
  next_position_ = 0;
  for (const std::uint64_t hash : order) {
    Key& key = keys_.at(hash);
    key.position = next_position_;
    owners_[next_position_++] = hash;
    slot_add(key.position, static_cast<std::int64_t>(key.bytes));
  }
}

void MissRatio::forget_largest() {
  threshold_ = std::max<std::uint64_t>(by_value_.rbegin()->first, 1);
  while (!by_value_.empty() && by_value_.rbegin()->first >= threshold_) {
    const auto key = keys_.find(by_value_.rbegin()->second);
    slot_add(key->second.position, -static_cast<std::int64_t>(key->second.bytes));
    keys_.erase(key);
    by_value_.erase(std::prev(by_value_.end()));
  }
}

void MissRatio::fade() {
  faded_ = expected() / 2;
  since_fade_ = 0;
  for (double& count : counts_) count /= 2;
  cold_ /= 2;
}

void MissRatio::follow(std::uint64_t hash, std::uint64_t bytes) {
  const double scale = 1 / rate();
  const auto [known, fresh] = keys_.try_emplace(hash);
  Key& key = known->second;
  if (!fresh) {
    // Bytes of everything used since, this one included: a cache of that size holds it.
    const double distance = static_cast<double>(bytes_since(key.position)) * scale;
    counts_[bucket_of(distance)] += scale;
    slot_add(key.position, -static_cast<std::int64_t>(key.bytes));
  } else {
    cold_ += scale;
    by_value_.emplace(value_of(hash), hash);
  }
  // Before the position is written: renumbering drops the place that it had.
  key.position = owners_.size();
  if (next_position_ == owners_.size()) renumber();
  key.bytes = bytes;
  key.position = next_position_;
  owners_[next_position_++] = hash;
  slot_add(key.position, static_cast<std::int64_t>(bytes));
  if (keys_.size() > options_.samples_max) forget_largest();
}

double MissRatio::at(std::uint64_t capacity_bytes) const {
  const double told = expected();
  if (told <= 0) return 1;
  double hits = 0;
  double all = cold_;
  const double capacity =
      std::log2(std::max<double>(1, static_cast<double>(capacity_bytes))) * octave_buckets;
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    all += counts_[bucket];
    // Within the bucket of the capacity, in proportion.
    const double share = std::clamp(capacity - static_cast<double>(bucket), 0.0, 1.0);
    hits += counts_[bucket] * share;
  }
  hits += told - all;
  return std::clamp(1 - hits / told, 0.0, 1.0);
}

std::vector<MissRatio::Point> MissRatio::curve() const {
  std::vector<Point> points;
  std::size_t first = buckets;
  std::size_t last = 0;
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    if (counts_[bucket] <= 0) continue;
    first = std::min(first, bucket);
    last = bucket;
  }
  if (first == buckets) return points;
  for (std::size_t octave = first / octave_buckets; octave <= last / octave_buckets + 1 && octave < 64;
       ++octave) {
    const std::uint64_t capacity = std::uint64_t{1} << octave;
    points.push_back({capacity, at(capacity)});
  }
  return points;
}

}  // namespace di::kv
