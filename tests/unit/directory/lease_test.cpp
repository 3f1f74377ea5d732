#include "directory/lease.h"

#include <gtest/gtest.h>

namespace di::directory {
namespace {

const Holder host0{"di-kvd.host0", 1};
const Holder host1{"di-kvd.host1", 1};
const RequestId request{};

Instant at_s(int s) {
  return Instant{} + seconds(s);
}

TEST(Lease, ExpiresUnlessRenewedAndNeverBeyondItsCap) {
  LeaseTable table({});
  const std::uint64_t lease = table.take(host0, request, {7}, at_s(0));
  ASSERT_NE(lease, 0U);
  EXPECT_EQ(table.next_due(), at_s(10));
  EXPECT_EQ(table.expire(at_s(9)), 0U);
  EXPECT_TRUE(table.renew(host0, lease, at_s(9)));
  EXPECT_EQ(table.expire(at_s(18)), 0U);
  EXPECT_TRUE(table.holds(7));
  for (int s = 18; s < 120; s += 5) {
    EXPECT_EQ(table.expire(at_s(s)), 0U) << s;
    EXPECT_TRUE(table.renew(host0, lease, at_s(s)));
  }
  EXPECT_EQ(table.next_due(), at_s(120));
  EXPECT_EQ(table.expire(at_s(120)), 1U);
  EXPECT_FALSE(table.holds(7));
  EXPECT_FALSE(table.renew(host0, lease, at_s(120)));
  EXPECT_EQ(table.next_due(), instant_never);
}

TEST(Lease, IsItsHoldersAlone) {
  LeaseTable table({});
  const std::uint64_t lease = table.take(host0, request, {7}, at_s(0));
  EXPECT_FALSE(table.renew(host1, lease, at_s(1)));
  EXPECT_FALSE(table.release(host1, lease));
  EXPECT_FALSE(table.release({"di-kvd.host0", 2}, lease));
  EXPECT_TRUE(table.holds(7));
  EXPECT_TRUE(table.release(host0, lease));
  EXPECT_FALSE(table.release(host0, lease));
  EXPECT_FALSE(table.holds(7));
}

TEST(Lease, TwoLeasesHoldAStripeUntilBothEnd) {
  LeaseTable table({});
  const std::uint64_t first = table.take(host0, request, {7, 8, 7}, at_s(0));
  const std::uint64_t second = table.take(host1, request, {7}, at_s(0));
  EXPECT_NE(first, second);
  table.release(host0, first);
  EXPECT_TRUE(table.holds(7));
  EXPECT_FALSE(table.holds(8));
  table.release(host1, second);
  EXPECT_FALSE(table.holds(7));
  EXPECT_EQ(table.count(), 0U);
}

TEST(Lease, WhatIsWatchedIsToldWhenItsLastLeaseEnds) {
  LeaseTable table({});
  const std::uint64_t first = table.take(host0, request, {7, 8}, at_s(0));
  static_cast<void>(table.take(host1, request, {7}, at_s(5)));
  table.watch(7, table.next());
  table.release(host0, first);
  EXPECT_TRUE(table.take_let_go().empty());
  EXPECT_EQ(table.next_due(), at_s(15));
  EXPECT_EQ(table.expire(at_s(15)), 1U);
  EXPECT_EQ(table.next_due(), Instant{});
  EXPECT_EQ(table.take_let_go(), std::vector<std::uint64_t>{7});
  EXPECT_EQ(table.next_due(), instant_never);
  // Watched once, told once.
  table.release(host0, table.take(host0, request, {7}, at_s(16)));
  EXPECT_TRUE(table.take_let_go().empty());
}

TEST(Lease, OnlyLeasesOfBeforeKeepWhatIsWatched) {
  LeaseTable table({});
  const std::uint64_t first = table.take(host0, request, {7, 7}, at_s(0));
  const std::uint64_t before = table.next();
  const std::uint64_t second = table.take(host0, request, {7}, at_s(0));
  EXPECT_FALSE(table.holds(7, first));
  EXPECT_TRUE(table.holds(7, before));
  table.watch(7, table.next());  // by somebody who waits for the second, too
  table.watch(7, before);
  table.release(host0, first);
  EXPECT_EQ(table.take_let_go(), std::vector<std::uint64_t>{7});
  EXPECT_FALSE(table.holds(7, before));
  EXPECT_TRUE(table.holds(7));
  table.watch(7, table.next());
  table.release(host0, second);
  EXPECT_EQ(table.take_let_go(), std::vector<std::uint64_t>{7});
  EXPECT_FALSE(table.holds(7));
}

TEST(Lease, LossOfTheHolderFreesOnlyItsGeneration) {
  LeaseTable table({});
  static_cast<void>(table.take(host0, request, {1}, at_s(0)));
  static_cast<void>(table.take({"di-kvd.host0", 2}, request, {2}, at_s(0)));
  static_cast<void>(table.take(host0, request, {3}, at_s(0)));
  EXPECT_EQ(table.release_holder(host0), 2U);
  EXPECT_FALSE(table.holds(1));
  EXPECT_TRUE(table.holds(2));
  EXPECT_FALSE(table.holds(3));
}

TEST(Lease, TableIsBounded) {
  LeaseTable table({.leases_max = 2});
  static_cast<void>(table.take(host0, request, {1}, at_s(0)));
  static_cast<void>(table.take(host0, request, {2}, at_s(0)));
  EXPECT_EQ(table.take(host0, request, {3}, at_s(0)), 0U);
  EXPECT_FALSE(table.holds(3));
  EXPECT_EQ(table.expire(at_s(10)), 2U);
  EXPECT_NE(table.take(host0, request, {3}, at_s(10)), 0U);
}

}  // namespace
}  // namespace di::directory
