#include "kv/write_budget.h"

#include <gtest/gtest.h>

namespace di::kv {
namespace {

constexpr std::uint64_t gib = std::uint64_t{1} << 30;
constexpr Duration day = seconds(86400);

bool take(WriteBudget& budget, std::uint64_t bytes, Instant now) {
  if (!budget.allows(bytes, now)) return false;
  budget.wrote(bytes, now);
  return true;
}

// A disk of 1 TiB that endures one write of all of it a day for 1,000 days.
constexpr WriteBudget::Options terabyte{
    .endurance_bytes = 1024 * gib * 1000, .days = 1000, .amplification = 1, .written_bytes = 0};

TEST(WriteBudget, a_day_of_writes_fits_and_the_rest_is_vetoed_and_counted) {
  Instant now{};
  WriteBudget budget(terabyte, now);
  EXPECT_EQ(budget.budget_bytes_per_day(), 1024 * gib);
  int written = 0;
  for (int i = 0; i < 2000; ++i) written += take(budget, gib, now) ? 1 : 0;
  EXPECT_EQ(written, 1024);
  EXPECT_EQ(budget.vetoes(), 976u);
  EXPECT_EQ(budget.vetoed_bytes(), 976 * gib);
  EXPECT_EQ(budget.written_bytes(), 1024 * gib);
  EXPECT_EQ(budget.left_today_bytes(now), 0u);
  now = now + day / 4;
  EXPECT_NEAR(static_cast<double>(budget.left_today_bytes(now)), static_cast<double>(256 * gib), 1e6);
  EXPECT_TRUE(take(budget, 200 * gib, now));
  EXPECT_FALSE(take(budget, 200 * gib, now));
  now = now + 100 * day;  // it does not save up more than a day
  EXPECT_EQ(budget.left_today_bytes(now), 1024 * gib);
}

TEST(WriteBudget, over_its_days_no_more_is_written_than_the_disk_endures) {
  Instant now{};
  WriteBudget budget({.endurance_bytes = 100 * gib, .days = 10, .amplification = 2, .written_bytes = 0}, now);
  for (int hour = 0; hour < 240; ++hour, now = now + seconds(3600)) {
    for (int i = 0; i < 100; ++i) (void)take(budget, gib / 10, now);
  }
  // The first day's bucket begins full.
  EXPECT_LE(budget.written_bytes(), 100 * gib / 2 * 11 / 10);
  EXPECT_GT(budget.written_bytes(), 100 * gib / 2 * 95 / 100);
  EXPECT_GT(budget.vetoes(), 0u);
}

TEST(WriteBudget, days_of_life_follow_the_pace) {
  Instant now{};
  WriteBudget::Options options = terabyte;
  options.written_bytes = 1024 * gib * 500;
  WriteBudget budget(options, now);
  EXPECT_EQ(budget.days_of_life(now), WriteBudget::days_max);
  for (int hour = 0; hour < 24 * 20; ++hour) {
    now = now + seconds(3600);
    ASSERT_TRUE(take(budget, 1024 * gib / 48, now));  // half a disk a day
  }
  EXPECT_NEAR(budget.pace_bytes_per_day(now) / (512.0 * static_cast<double>(gib)), 1, 0.05);
  EXPECT_NEAR(budget.days_of_life(now), 980, 50);
  now = now + 10 * day;  // it rests
  EXPECT_GT(budget.days_of_life(now), 10000);
}

TEST(WriteBudget, without_an_endurance_nothing_is_vetoed) {
  WriteBudget budget({}, Instant{});
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(take(budget, gib, Instant{}));
  EXPECT_EQ(budget.days_of_life(Instant{}), WriteBudget::days_max);
  EXPECT_GT(budget.pace_bytes_per_day(Instant{}), 0);
}

TEST(WriteBudget, what_is_written_without_leave_is_a_debt_of_at_most_a_day) {
  Instant now{};
  WriteBudget budget(terabyte, now);
  budget.wrote(1536 * gib, now);
  EXPECT_EQ(budget.vetoes(), 0u);
  EXPECT_EQ(budget.written_bytes(), 1536 * gib);
  EXPECT_EQ(budget.spent_bytes(now), 1536 * gib);
  EXPECT_FALSE(budget.allows(1, now + day / 4));
  EXPECT_TRUE(budget.allows(1, now + day / 4 * 3));
  budget.wrote(100 * 1024 * gib, now);
  EXPECT_EQ(budget.spent_bytes(now), 2048 * gib);
  EXPECT_FALSE(budget.allows(gib, now + day));
  EXPECT_TRUE(budget.allows(gib, now + day + day / 100));
}

TEST(WriteBudget, a_new_start_gives_no_new_day) {
  Instant now{};
  WriteBudget before(terabyte, now);
  before.wrote(1000 * gib, now);
  WriteBudget::Options options = terabyte;
  options.written_bytes = before.written_bytes();
  options.spent_bytes = before.spent_bytes(now);
  WriteBudget after(options, now + seconds(5));
  EXPECT_EQ(after.left_today_bytes(now + seconds(5)), 24 * gib);
  EXPECT_EQ(after.written_bytes(), 1000 * gib);
}

}  // namespace
}  // namespace di::kv
