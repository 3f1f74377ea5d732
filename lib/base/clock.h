// base/clock.h: the one seam to time.  Every daemon takes its clock from here; with
// `clock.manual = true` product timers run on a ManualClock while liveness stays on MonotonicClock.
#pragma once

#include <atomic>

#include "base/assert.h"
#include "base/time.h"

namespace di {

class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual Instant now() const = 0;
};

class MonotonicClock final : public Clock {
 public:
  [[nodiscard]] Instant now() const override;
};

// Starts at 1 s so that "an hour ago" and zero are never confused.  Any thread may read it.
class ManualClock final : public Clock {
 public:
  [[nodiscard]] Instant now() const override { return {ns_.load(std::memory_order_acquire)}; }
  void advance(Duration by) {
    DI_ASSERT(by.count() >= 0);
    ns_.fetch_add(by.count(), std::memory_order_acq_rel);
  }

 private:
  std::atomic<std::int64_t> ns_{1'000'000'000};
};

// Milliseconds since the Unix epoch, for log lines and records only; never for intervals.
[[nodiscard]] std::int64_t wall_clock_ms();

}  // namespace di
