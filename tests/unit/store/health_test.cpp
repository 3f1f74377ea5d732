#include "store/health.h"

#include <gtest/gtest.h>

namespace di::store {
namespace {

struct Watched {
  DiskState tick(std::uint64_t accesses, std::uint64_t p99_us) {
    sample.begun += accesses;
    sample.ended += accesses;
    sample.p99_us = p99_us;
    return step();
  }
  DiskState step() {
    now = now + DiskHealth::interval;
    return health.step(sample, now);
  }
  // Enough of a past.
  Watched() {
    for (int i = 0; i < 100; ++i) tick(200, 8000);
  }
  DiskHealth health;
  DiskHealth::Sample sample;
  Instant now{1'000'000'000};
};

TEST(DiskHealth, disk_that_does_its_work_is_good) {
  Watched disk;
  for (int i = 0; i < 5000; ++i)
    ASSERT_EQ(disk.tick(100, 4000 + static_cast<std::uint64_t>(i) % 9000), DiskState::good);
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(disk.tick(0, 0), DiskState::good);
  EXPECT_TRUE(disk.health.reason().empty());
}

TEST(DiskHealth, few_errors_over_a_long_time_are_forgiven) {
  Watched disk;
  for (int i = 0; i < 50; ++i) {
    ++disk.sample.errors;
    for (int second = 0; second < 160; ++second) ASSERT_EQ(disk.tick(100, 8000), DiskState::good) << i;
  }
}

TEST(DiskHealth, many_errors_in_a_short_time_fail_it_for_good) {
  Watched disk;
  for (std::size_t i = 0; i < DiskHealth::errors_max; ++i) {
    ++disk.sample.errors;
    ASSERT_EQ(disk.tick(100, 8000), DiskState::good);
  }
  ++disk.sample.errors;
  EXPECT_EQ(disk.tick(100, 8000), DiskState::failed);
  EXPECT_EQ(disk.health.reason(), "errors");
  for (int i = 0; i < 10000; ++i) ASSERT_EQ(disk.tick(100, 8000), DiskState::failed);
}

TEST(DiskHealth, many_errors_at_once_fail_it) {
  Watched disk;
  disk.sample.errors += 1000;
  EXPECT_EQ(disk.tick(1000, 8000), DiskState::failed);
}

TEST(DiskHealth, wrong_checksums_fail_it_above_ten_an_hour) {
  Watched disk;
  for (std::size_t i = 0; i < DiskHealth::corrupt_max; ++i) {
    ++disk.sample.corrupt;
    for (int second = 0; second < 60; ++second) ASSERT_EQ(disk.tick(100, 8000), DiskState::good);
  }
  ++disk.sample.corrupt;
  EXPECT_EQ(disk.tick(100, 8000), DiskState::failed);
  EXPECT_EQ(disk.health.reason(), "corrupt");
}

TEST(DiskHealth, disk_that_was_cut_short_fails_for_good) {
  Watched disk;
  disk.sample.cut_short = true;
  EXPECT_EQ(disk.tick(100, 8000), DiskState::failed);
  EXPECT_EQ(disk.health.reason(), "short");
  disk.sample.cut_short = false;
  EXPECT_EQ(disk.tick(100, 8000), DiskState::failed);
}

TEST(DiskHealth, disk_whose_file_was_removed_fails_for_good) {
  Watched disk;
  disk.sample.removed = true;
  EXPECT_EQ(disk.tick(100, 8000), DiskState::failed);
  EXPECT_EQ(disk.health.reason(), "removed");
}

TEST(DiskHealth, disk_that_is_opened_anew_has_no_past_errors) {
  Watched disk;
  disk.sample.errors += 1000;
  disk.sample.corrupt += 1000;
  disk.sample.no_space += 1;
  disk.health = DiskHealth(disk.sample);
  EXPECT_EQ(disk.tick(100, 8000), DiskState::good);
  EXPECT_EQ(disk.tick(0, 0), DiskState::good);
}

// F09.
TEST(DiskHealth, full_disk_is_tried_again) {
  Watched disk;
  ++disk.sample.no_space;
  EXPECT_EQ(disk.tick(100, 8000), DiskState::avoid);
  EXPECT_EQ(disk.health.reason(), "full");
  for (int i = 0; i < 9; ++i) EXPECT_EQ(disk.tick(100, 8000), DiskState::avoid);
  EXPECT_EQ(disk.tick(100, 8000), DiskState::good);
}

TEST(DiskHealth, slow_disk_is_avoided_after_a_minute_and_comes_back) {
  Watched disk;
  int ticks = 0;
  while (disk.tick(50, 60000) == DiskState::good) ++ticks;
  EXPECT_EQ(ticks, 60);
  EXPECT_EQ(disk.health.reason(), "slow");
  for (int i = 0; i < 59; ++i) ASSERT_EQ(disk.tick(50, 9000), DiskState::avoid);
  EXPECT_EQ(disk.tick(50, 9000), DiskState::good);
}

// Nobody writes to a disk that is avoided: without accesses its slow minute went on for ever.
TEST(DiskHealth, slow_disk_that_nobody_asks_is_not_avoided_again_at_once) {
  Watched disk;
  while (disk.tick(50, 60000) == DiskState::good) continue;
  while (disk.tick(0, 0) == DiskState::avoid) continue;
  for (int i = 0; i < 30; ++i) ASSERT_EQ(disk.tick(0, 0), DiskState::good);
}

TEST(DiskHealth, one_quick_interval_interrupts_a_slow_minute) {
  Watched disk;
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < 50; ++i) ASSERT_EQ(disk.tick(50, 60000), DiskState::good);
    disk.tick(50, 8000);
  }
}

TEST(DiskHealth, disk_that_stays_slow_fails) {
  Watched disk;
  int ticks = 0;
  while (disk.tick(50, 60000) != DiskState::failed) ++ticks;
  EXPECT_EQ(ticks, 660);
  EXPECT_EQ(disk.health.reason(), "slow");
}

TEST(DiskHealth, disk_that_answers_nothing_is_slow) {
  Watched disk;
  disk.sample.begun += 3;
  int ticks = 0;
  while (disk.step() == DiskState::good) ++ticks;
  EXPECT_EQ(ticks, 60);
}

TEST(DiskHealth, slow_against_its_own_past_only) {
  // A slow kind of disk is what it is; a quick one may be five times as slow and still quick.
  DiskHealth health;
  DiskHealth::Sample sample;
  Instant now{1};
  for (int i = 0; i < 2000; ++i) {
    sample.begun = sample.ended += 50;
    sample.p99_us = i < 1000 ? 300000 : 900000;
    now = now + DiskHealth::interval;
    ASSERT_EQ(health.step(sample, now), DiskState::good) << i;
  }
  DiskHealth quick;
  sample = {};
  for (int i = 0; i < 2000; ++i) {
    sample.begun = sample.ended += 50;
    sample.p99_us = i < 1000 ? 100 : 15000;
    now = now + DiskHealth::interval;
    ASSERT_EQ(quick.step(sample, now), DiskState::good) << i;
  }
}

}  // namespace
}  // namespace di::store
