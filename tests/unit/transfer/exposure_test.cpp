#include "transfer/exposure.h"

#include <gtest/gtest.h>

namespace di::transfer {
namespace {

struct OneSlot final : Region {
  Bytes bytes = Bytes(4096);
  std::uint32_t generation = 1;
  Result<MutableByteView> resolve(const SlotName& name) override {
    if (name.generation != generation) return Error{Code::stale, 0, "generation"};
    return MutableByteView(bytes);
  }
};

struct ExposureTest : testing::Test {
  Exposures exposures;
  OneSlot region;
  Instant now{1'000'000'000};
  const Peer peer{"di-kvd.hosta", 1};

  std::optional<Refused> refused(TransferId transfer, Access access = Access::write,
                                 std::uint32_t generation = 1) {
    const Admission admission =
        exposures.check(peer, transfer, access, {{3, generation}, 0, 64}, region, now);
    return admission.refusal ? std::optional(admission.refusal->why) : std::nullopt;
  }
};

TEST_F(ExposureTest, a_closed_transfer_is_late_as_long_as_an_operation_may_take) {
  ASSERT_TRUE(exposures.open(peer, 7, Access::write, {{3, 1}}));
  EXPECT_EQ(refused(7), std::nullopt);
  EXPECT_TRUE(exposures.close(peer, 7, now));
  EXPECT_FALSE(exposures.close(peer, 7, now));
  EXPECT_EQ(refused(7), Refused::late);
  EXPECT_EQ(refused(7, Access::read), Refused::transfer);
  EXPECT_EQ(refused(8), Refused::transfer);
  now = now + late_wait;
  EXPECT_EQ(refused(7), Refused::transfer);
}

TEST_F(ExposureTest, a_slot_that_was_taken_back_before_the_transfer_is_closed_is_late) {
  ASSERT_TRUE(exposures.open(peer, 7, Access::write, {{3, 1}}));
  EXPECT_EQ(refused(7, Access::write, 2), Refused::stale);
  region.generation = 2;
  EXPECT_EQ(refused(7), Refused::late);
  EXPECT_EQ(refused(7, Access::write, 2), Refused::stale);  // never opened
}

TEST_F(ExposureTest, the_oldest_closed_transfers_are_forgotten) {
  for (TransferId transfer = 1; transfer <= closed_max + 2; ++transfer) {
    ASSERT_TRUE(exposures.open(peer, transfer, Access::write, {{3, 1}}));
    ASSERT_TRUE(exposures.close(peer, transfer, now));
  }
  EXPECT_EQ(refused(2), Refused::transfer);
  EXPECT_EQ(refused(3), Refused::late);
  EXPECT_EQ(refused(closed_max + 2), Refused::late);
}

TEST_F(ExposureTest, a_transfer_that_was_open_twice_is_late_after_its_second_end) {
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(exposures.open(peer, 7, Access::write, {{3, 1}}));
    EXPECT_EQ(refused(7), std::nullopt);
    ASSERT_TRUE(exposures.close(peer, 7, now));
    now = now + late_wait - seconds(1);
  }
  // The first end is forgotten here, the second is not.
  ASSERT_TRUE(exposures.open(peer, 9, Access::write, {{3, 1}}));
  ASSERT_TRUE(exposures.close(peer, 9, now));
  EXPECT_EQ(refused(7), Refused::late);
  now = now + seconds(1);
  EXPECT_EQ(refused(7), Refused::transfer);
}

}  // namespace
}  // namespace di::transfer
