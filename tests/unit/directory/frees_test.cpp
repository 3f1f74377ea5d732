#include "directory/frees.h"

#include <gtest/gtest.h>

namespace di::directory {
namespace {

const Holder host{"di-kvd.host0", 1};

Instant at_s(int s) {
  return Instant{} + seconds(s);
}

struct FreesTest : testing::Test {
  ~FreesTest() override { frees.test_check(); }
  std::uint64_t lease(std::uint64_t stripe) { return leases.take(host, RequestId{}, {stripe}, at_s(0)); }
  std::size_t taken(int s) {
    frees.test_check();
    return frees.take(leases, at_s(s)).size();
  }

  LeaseTable leases{{}};
  Frees frees;
};

TEST_F(FreesTest, OfTwoTimesForAColumnTheLaterCounts) {
  frees.store_ready(1, at_s(0));
  frees.schedule(leases, 1, 7, 0, 100, at_s(1));
  frees.schedule(leases, 1, 7, 0, 100, at_s(5));
  frees.schedule(leases, 1, 7, 0, 100, at_s(2));
  EXPECT_EQ(frees.bytes(1), 100U);
  EXPECT_EQ(frees.next_due(), at_s(5));
  EXPECT_EQ(taken(4), 0U);
  EXPECT_EQ(taken(5), 1U);
  EXPECT_EQ(frees.count(), 0U);
}

// While it waits for its store, or for a lease, too.
TEST_F(FreesTest, TheLaterTimeCountsOfWhatWaitsToo) {
  frees.schedule(leases, 1, 7, 0, 100, at_s(1));
  frees.schedule(leases, 1, 7, 0, 100, at_s(5));
  EXPECT_EQ(frees.next_due(), instant_never);
  frees.store_ready(1, at_s(2));
  EXPECT_EQ(frees.next_due(), at_s(5));

  const std::uint64_t held = lease(8);
  frees.schedule(leases, 1, 8, 0, 100, at_s(1));
  EXPECT_EQ(taken(2), 0U);
  frees.schedule(leases, 1, 8, 0, 100, at_s(9));
  leases.release(host, held);
  EXPECT_EQ(taken(8), 1U);  // the one of stripe 7
  EXPECT_EQ(taken(9), 1U);
}

TEST_F(FreesTest, LeasesOfLaterDoNotKeepIt) {
  frees.store_ready(1, at_s(0));
  const std::uint64_t first = lease(7);
  frees.schedule(leases, 1, 7, 0, 100, at_s(0));
  const std::uint64_t second = lease(7);
  frees.schedule(leases, 1, 7, 1, 100, at_s(0));
  const std::uint64_t third = lease(7);
  EXPECT_EQ(taken(0), 0U);
  leases.release(host, first);
  EXPECT_EQ(leases.next_due(), Instant{});
  EXPECT_EQ(taken(0), 1U);
  leases.release(host, second);
  EXPECT_EQ(taken(0), 1U);
  EXPECT_TRUE(leases.holds(7));
  leases.release(host, third);
  EXPECT_TRUE(leases.take_let_go().empty()) << "nobody waits for it";
}

}  // namespace
}  // namespace di::directory
