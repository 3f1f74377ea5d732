#include "drop_log.h"

#include <gtest/gtest.h>

namespace di::kvd {
namespace {

using News = DropLog::News;

// Over its quota a tenant had a line a page; of what was given up nobody heard.
TEST(DropLog, TheFirstIsToldAtOnceAndThenWhatCameTogether) {
  DropLog log;
  host::WritebackCounters counters;
  std::map<std::uint64_t, std::uint64_t> over_quota;
  Instant now{};
  now = now + seconds(1);
  counters.dropped_evicted = 9;
  EXPECT_FALSE(log.look(counters, over_quota, now));
  counters.dropped_quota = 1;
  over_quota[7] = 1;
  EXPECT_EQ(log.look(counters, over_quota, now), (News{0, 0, {{7, 1}}}));
  EXPECT_FALSE(log.look(counters, over_quota, now + drop_line_every)) << "it was told";
  counters.dropped_quota = 6;
  over_quota[7] = 3;
  over_quota[8] = 3;
  counters.dropped_failed = 17;
  counters.dropped_full = 2;
  EXPECT_FALSE(log.look(counters, over_quota, now + drop_line_every - milliseconds(1))) << "too soon";
  now = now + drop_line_every;
  EXPECT_EQ(log.look(counters, over_quota, now), (News{17, 2, {{7, 2}, {8, 3}}}));
  counters.dropped_failed = 18;
  EXPECT_EQ(log.look(counters, over_quota, now + seconds(60)), (News{1, 0, {}}));
}

}  // namespace
}  // namespace di::kvd
