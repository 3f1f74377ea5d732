// base/histogram.h: counts of non-negative integers in buckets of at most 1/8 relative width.
//
// Any thread records and reads (relaxed atomics: a reader may see a count a moment before its sum).
// Bound: 496 buckets of 8 bytes cover all of uint64.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace di {

class Histogram {
 public:
  static constexpr int bucket_count = 496;

  void record(std::uint64_t value) {
    buckets_[static_cast<std::size_t>(bucket_of(value))].fetch_add(1, std::memory_order_relaxed);
    count_.fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
    std::uint64_t seen = max_.load(std::memory_order_relaxed);
    while (value > seen && !max_.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }

  [[nodiscard]] std::uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t sum() const { return sum_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t max() const { return max_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t in_bucket(int bucket) const {
    return buckets_[static_cast<std::size_t>(bucket)].load(std::memory_order_relaxed);
  }

  // Upper bound of the bucket that holds the q-quantile (0 <= q <= 1); 0 when empty.
  [[nodiscard]] std::uint64_t quantile(double q) const {
    const std::uint64_t total = count();
    if (total == 0) return 0;
    const double rank = q * static_cast<double>(total);
    double seen = 0;
    for (int b = 0; b < bucket_count; ++b) {
      seen += static_cast<double>(in_bucket(b));
      if (seen > 0 && seen >= rank) return upper_bound(b) < max() ? upper_bound(b) : max();
    }
    return max();
  }

  // 0..7 have a bucket each; above, each octave has eight.
  [[nodiscard]] static int bucket_of(std::uint64_t value) {
    if (value < 8) return static_cast<int>(value);
    const int octave = 63 - std::countl_zero(value);  // >= 3
    return (octave - 2) * 8 + static_cast<int>((value >> (octave - 3)) & 7);
  }
  // Largest value that falls into `bucket`.
  [[nodiscard]] static std::uint64_t upper_bound(int bucket) {
    if (bucket < 8) return static_cast<std::uint64_t>(bucket);
    const int octave = bucket / 8 + 2;
    const std::uint64_t step = std::uint64_t{1} << (octave - 3);
    return (static_cast<std::uint64_t>(bucket % 8) + 8) * step + (step - 1);
  }

 private:
  std::array<std::atomic<std::uint64_t>, bucket_count> buckets_{};
  std::atomic<std::uint64_t> count_{0};
  std::atomic<std::uint64_t> sum_{0};
  std::atomic<std::uint64_t> max_{0};
};

}  // namespace di
