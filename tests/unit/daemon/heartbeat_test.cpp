#include "daemon/heartbeat.h"

#include <gtest/gtest.h>

namespace di::daemon {
namespace {

TEST(Heartbeat, a_loop_that_is_silent_for_too_long_is_named_until_it_moves) {
  ManualClock clock;
  Heartbeats beats(clock);
  Heartbeats::Beat& scrub = beats.add("scrub", seconds(10));
  Heartbeats::Beat& repair = beats.add("repair", seconds(60));
  EXPECT_EQ(beats.late(), "");
  clock.advance(seconds(10));
  EXPECT_EQ(beats.late(), "");
  clock.advance(milliseconds(1));
  EXPECT_EQ(beats.late(), "scrub");
  EXPECT_TRUE(beats.is_late("scrub"));
  EXPECT_FALSE(beats.is_late("repair"));
  EXPECT_FALSE(beats.is_late("nobody"));
  clock.advance(seconds(60));
  EXPECT_EQ(beats.late(), "scrub repair");
  scrub();
  EXPECT_EQ(beats.late(), "repair");
  repair();
  EXPECT_EQ(beats.late(), "");
}

}  // namespace
}  // namespace di::daemon
