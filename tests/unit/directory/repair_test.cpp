#include "directory/repair.h"

#include <gtest/gtest.h>

namespace di::directory {
namespace {

const Holder host{"di-kvd.host0", 1};

Instant at_ms(int ms) {
  return Instant{} + seconds(100) + milliseconds(ms);
}

class RepairTest : public testing::Test {
 protected:
  ~RepairTest() override { queue.test_check(); }
  void start(std::uint64_t stripe, int ms, std::uint64_t bytes = 0) {
    queue.start(stripe, {host, 1, {{0, {0, 0}, 0}}, {}, {}, 0}, bytes, at_ms(ms));
  }
  RepairQueue queue{{.waiting_max = 4, .running_max = 2, .bytes_per_s = 1000}};
};

TEST_F(RepairTest, LeastRedundancyThenThoseInUseThenTheLongestWaiting) {
  EXPECT_TRUE(queue.want(1, {1, false}));
  EXPECT_TRUE(queue.want(2, {0, true}));
  EXPECT_TRUE(queue.want(3, {0, false}));
  EXPECT_TRUE(queue.want(4, {1, false}));
  EXPECT_FALSE(queue.want(5, {0, false}));  // full
  EXPECT_EQ(queue.waiting_at(0), 2U);
  EXPECT_TRUE(queue.want(4, {0, false}));  // another column of it went
  EXPECT_EQ(queue.next(at_ms(0)), 3U);
  queue.drop(3);
  EXPECT_EQ(queue.next(at_ms(0)), 4U);
  queue.drop(4);
  EXPECT_EQ(queue.next(at_ms(0)), 2U);
  queue.drop(2);
  EXPECT_EQ(queue.next(at_ms(0)), 1U);
}

TEST_F(RepairTest, WhatIsOnlyCrossCheckedComesLastUntilItLosesSomething) {
  EXPECT_TRUE(queue.want(1, {.cross_check = true}));
  EXPECT_TRUE(queue.want(2, {3, true}));
  EXPECT_TRUE(queue.cross_checks(1));
  EXPECT_FALSE(queue.cross_checks(2));
  EXPECT_FALSE(queue.cross_checks(3));
  EXPECT_EQ(queue.waiting_at(0), 0U);
  EXPECT_EQ(queue.next(at_ms(0)), 2U);
  start(2, 0);
  EXPECT_EQ(queue.next(at_ms(0)), 1U);
  start(1, 0);
  EXPECT_TRUE(queue.cross_checks(1));
  static_cast<void>(queue.finish(1, false, at_ms(0)));
  EXPECT_FALSE(queue.has(1));
  EXPECT_TRUE(queue.want(1, {.cross_check = true}));
  EXPECT_TRUE(queue.want(1, {0, false}));
  EXPECT_FALSE(queue.cross_checks(1));
  EXPECT_EQ(queue.waiting_at(0), 1U);
}

TEST_F(RepairTest, RateIsKept) {
  for (std::uint64_t stripe = 1; stripe <= 3; ++stripe) EXPECT_TRUE(queue.want(stripe, {}));
  EXPECT_EQ(queue.next(at_ms(0)), 1U);
  start(1, 0, 500);  // half a second's
  EXPECT_FALSE(queue.next(at_ms(499)));
  EXPECT_EQ(queue.next_due(), at_ms(500));
  EXPECT_EQ(queue.next(at_ms(500)), 2U);
  start(2, 500);
  EXPECT_FALSE(queue.next(at_ms(600)));  // two are running
  static_cast<void>(queue.finish(1, false, at_ms(600)));
  EXPECT_EQ(queue.next(at_ms(600)), 3U);
}

// A host refuses what is above its own bound, and a refusal costs the stripe a pause.
TEST_F(RepairTest, NoMoreThanTheHostsTake) {
  RepairQueue many{{.running_max = 16, .per_host_max = 2, .bytes_per_s = 1000}};
  for (std::uint64_t stripe = 1; stripe <= 6; ++stripe) EXPECT_TRUE(many.want(stripe, {}));
  many.set_hosts(1);
  for (const std::uint64_t stripe : {1U, 2U}) {
    ASSERT_EQ(many.next(at_ms(0)), stripe);
    many.start(stripe, {host, 1, {{0, {0, 0}, 0}}, at_ms(9000), {}, 0}, 0, at_ms(0));
  }
  EXPECT_FALSE(many.next(at_ms(0)));
  EXPECT_GT(many.next_due(), at_ms(0));  // the end of one of them is what it waits for
  many.set_hosts(2);
  EXPECT_EQ(many.next(at_ms(0)), 3U);
  many.set_hosts(1);
  static_cast<void>(many.finish(1, false, at_ms(1)));
  EXPECT_EQ(many.next(at_ms(1)), 3U);
  many.test_check();
}

TEST_F(RepairTest, PausesDoubleAndEndWhenHurried) {
  EXPECT_TRUE(queue.want(1, {}));
  int now = 0;
  for (const int pause : {1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000}) {
    ASSERT_EQ(queue.next(at_ms(now)), 1U);
    start(1, now);
    EXPECT_TRUE(queue.want(1, {}));  // it is running already
    EXPECT_EQ(queue.waiting(), 0U);
    static_cast<void>(queue.finish(1, true, at_ms(now)));
    EXPECT_FALSE(queue.next(at_ms(now + pause - 1)));
    EXPECT_EQ(queue.next_due(), at_ms(now + pause));
    now += pause;
  }
  start(1, now);
  static_cast<void>(queue.finish(1, true, at_ms(now)));
  queue.hurry();
  EXPECT_EQ(queue.next(at_ms(now)), 1U);
}

TEST_F(RepairTest, HalfOfTheQueueIsForThoseThatHaveAPlace) {
  for (std::uint64_t stripe = 1; stripe <= 4; ++stripe) EXPECT_TRUE(queue.want(stripe, {}));
  for (const bool kept : {true, true, false, false}) {
    const auto next = queue.next(at_ms(0));
    ASSERT_TRUE(next);
    EXPECT_EQ(queue.put_off(*next, at_ms(0)), kept);
    queue.test_check();
  }
  EXPECT_EQ(queue.waiting(), 2U);
  EXPECT_TRUE(queue.want(5, {}));
  EXPECT_EQ(queue.next(at_ms(0)), 5U);
}

TEST_F(RepairTest, HostsThatSayNothingAreGivenUp) {
  EXPECT_TRUE(queue.want(1, {}));
  start(1, 0);
  EXPECT_EQ(queue.running_of(host), (std::vector<std::uint64_t>{1}));
  EXPECT_TRUE(queue.running_of({"di-kvd.host0", 2}).empty());
  EXPECT_FALSE(queue.overdue(at_ms(119'999)));
  EXPECT_EQ(queue.next_due(), at_ms(120'000));
  EXPECT_EQ(queue.overdue(at_ms(120'000)), 1U);
}

TEST(RepairQueue, NoRateIsNoRepair) {
  RepairQueue queue(RepairQueue::Options{});
  EXPECT_TRUE(queue.want(1, {}));
  EXPECT_FALSE(queue.next(at_ms(0)));
  EXPECT_EQ(queue.next_due(), instant_never);
}

}  // namespace
}  // namespace di::directory
