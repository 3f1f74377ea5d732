#include "base/clock.h"

#include <chrono>

namespace di {

Instant MonotonicClock::now() const {
  return {std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()).count()};
}

std::int64_t wall_clock_ms() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace di
