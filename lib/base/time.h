// base/time.h: durations and instants.  An Instant is on one Clock's time line, never on the wall.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>

namespace di {

using Duration = std::chrono::nanoseconds;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Instant {
  std::int64_t ns = 0;  // since the clock's origin

  friend auto operator<=>(Instant, Instant) = default;
  friend Instant operator+(Instant at, Duration d) { return {at.ns + d.count()}; }
  friend Instant operator-(Instant at, Duration d) { return {at.ns - d.count()}; }
  friend Duration operator-(Instant a, Instant b) { return Duration(a.ns - b.ns); }
};

inline constexpr Instant instant_never{INT64_MAX};

[[nodiscard]] inline std::int64_t to_us(Duration d) {
  return std::chrono::duration_cast<microseconds>(d).count();
}
[[nodiscard]] inline std::int64_t to_ms(Duration d) {
  return std::chrono::duration_cast<milliseconds>(d).count();
}

[[nodiscard]] inline double to_s(Duration d) {
  return std::chrono::duration<double>(d).count();
}

}  // namespace di
