// store/health.h: when a disk is to be let alone.
//
// Pure: `step` gets the figures of one interval and the time, and says in which state the disk is.
//
//   state   from        when                                                      puts        reads
//   good                                                                          yes         yes
//   avoid   good        full: the device had no room for a write; for full_for    refused     yes
//           good        slow: for slow_for every interval with accesses was slow  refused     yes
//   good    avoid       full_for over; no slow interval for slow_for
//   failed  any         more than errors_max errors in errors_within              refused     while they
//           any         more than corrupt_max wrong checksums in corrupt_within               succeed
//           avoid       slow for failed_after
//           any         the file or device is shorter than the volume, or was removed
//   failed stays until the volume is opened anew.
//
// An interval is slow when its 99th percentile is slow_factor times what it was in the disk's own past, and
// not below slow_us_min; or when something is under way and nothing ended.
// Owner: whoever calls it, one thread.  Bounds: errors_max + corrupt_max times that are kept.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string_view>

#include "base/histogram.h"
#include "base/time.h"

namespace di::store {

enum class DiskState : std::uint8_t { good = 0, avoid = 1, failed = 2 };
[[nodiscard]] std::string_view disk_state_name(DiskState state);

class DiskHealth {
 public:
  static constexpr Duration interval = seconds(1);
  // A drive that is well reports none in its life; a few may be one bad place.
  static constexpr std::size_t errors_max = 4;
  static constexpr Duration errors_within = seconds(600);
  static constexpr std::size_t corrupt_max = 10;
  static constexpr Duration corrupt_within = seconds(3600);
  static constexpr Duration full_for = seconds(10);
  static constexpr double slow_factor = 5;
  // Below this a drive is not what anybody waits for.
  static constexpr std::uint64_t slow_us_min = 20000;
  static constexpr Duration slow_for = seconds(60);
  static constexpr Duration failed_after = seconds(600);
  // Intervals with fewer accesses say nothing about a percentile.
  static constexpr std::uint64_t accesses_min = 16;
  // Intervals until there is a past to compare with.
  static constexpr std::uint32_t past_min = 30;

  // Totals since the store began, and the percentile of the interval.
  struct Sample {
    std::uint64_t errors = 0;  // reads, writes and flushes
    std::uint64_t no_space = 0;
    std::uint64_t corrupt = 0;
    std::uint64_t begun = 0;
    std::uint64_t ended = 0;
    std::uint64_t p99_us = 0;
    bool cut_short = false;  // the disk is shorter than it was
    bool removed = false;    // it is of files, and one has no name any more
  };
  DiskHealth() = default;
  // Of a disk that is opened anew: what was counted until then is over.
  explicit DiskHealth(const Sample& past) : last_(past) {}
  // Once each interval, and at once when the disk is found to be shorter.
  DiskState step(const Sample& sample, Instant now);

  [[nodiscard]] DiskState state() const { return state_; }
  // Why it is not good: "errors", "corrupt", "short", "removed", "slow", "full"; empty when it is.
  [[nodiscard]] std::string_view reason() const { return reason_; }
  // What the 99th percentile used to be.
  [[nodiscard]] double past_p99_us() const { return past_us_; }

 private:
  // Notes `count` events now and says whether there were more than `max` within `within`.
  static bool too_many(std::deque<Instant>& times, std::uint64_t count, std::size_t max, Duration within,
                       Instant now);
  [[nodiscard]] bool slow(const Sample& sample);

  DiskState state_ = DiskState::good;
  std::string_view reason_;
  Sample last_;
  std::deque<Instant> errors_;
  std::deque<Instant> corrupt_;
  Instant full_until_{0};
  Instant slow_since_ = instant_never;  // first slow interval of a run of them
  Instant slow_last_{0};
  Instant avoid_since_ = instant_never;  // for slowness
  double past_us_ = 0;
  std::uint32_t past_ = 0;
};

// The 99th percentile of what was recorded since the last question.
class LastPercentile {
 public:
  [[nodiscard]] std::uint64_t p99(const Histogram& histogram);

 private:
  std::array<std::uint64_t, Histogram::bucket_count> before_{};
};

}  // namespace di::store
