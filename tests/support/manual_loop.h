// tests/support/manual_loop.h: a loop in the test's own time, for what talks over real sockets.
//
// Product time stands until advance(); liveness time runs.  A test looks at its end of a socket between the turns, and
// no descriptor tells the loop of it: turn_until() keeps it turning.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "base/clock.h"
#include "loop/loop.h"

namespace di::loop {

inline constexpr Duration patience = seconds(10);  // until a test gives up, never how long it takes

// False when `patience` passed first.
inline bool turn_until(Loop& loop, const std::function<bool()>& done) {
  return loop.run_until(
      [&] {
        loop.post("spin", [] {});
        return done();
      },
      patience);
}

class ManualLoopTest : public testing::Test {
 protected:
  bool until(const std::function<bool()>& done) { return turn_until(loop_, done); }
  // With all that becomes due on the way.
  void advance(Duration by) {
    bool done = false;
    loop_.advance(by, [&] { done = true; });
    ASSERT_TRUE(until([&] { return done; }));
  }

  ManualClock clock_;
  Loop loop_{{.name = "test", .manual = &clock_, .stall = seconds(60)}};
};

}  // namespace di::loop
