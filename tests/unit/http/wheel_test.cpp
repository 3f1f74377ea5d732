#include "http/wheel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/rng.h"

namespace di::http {
namespace {

std::vector<std::uint32_t> expired(DeadlineWheel& wheel, Instant now) {
  std::vector<std::uint32_t> due;
  wheel.expire(now, due);
  std::sort(due.begin(), due.end());
  return due;
}

using Due = std::vector<std::uint32_t>;
const Instant start{1'000'000'000};

TEST(DeadlineWheel, PassesOnceAndNeverEarly) {
  DeadlineWheel wheel(start);
  wheel.set(3, start + seconds(1));
  EXPECT_EQ(expired(wheel, start + milliseconds(999)), Due{});
  EXPECT_EQ(expired(wheel, start + milliseconds(1000)), Due{3});
  EXPECT_EQ(expired(wheel, start + seconds(5)), Due{});
}

TEST(DeadlineWheel, MovesLaterAndEarlierAndAway) {
  DeadlineWheel wheel(start);
  wheel.set(1, start + seconds(1));
  wheel.set(1, start + seconds(3));
  wheel.set(2, start + seconds(3));
  wheel.set(2, start + seconds(1));
  wheel.set(3, start + seconds(1));
  wheel.set(3, instant_never);
  EXPECT_EQ(expired(wheel, start + seconds(2)), Due{2});
  EXPECT_EQ(expired(wheel, start + seconds(4)), Due{1});
}

TEST(DeadlineWheel, BeyondOneTurnOfTheWheel) {
  DeadlineWheel wheel(start);
  wheel.set(0, start + seconds(1000));
  for (int s = 1; s < 1000; s += 7) EXPECT_EQ(expired(wheel, start + seconds(s)), Due{});
  EXPECT_EQ(expired(wheel, start + seconds(1000)), Due{0});
}

TEST(DeadlineWheel, ALongSleepMissesNothing) {
  DeadlineWheel wheel(start);
  wheel.set(0, start + seconds(10));
  wheel.set(1, start + seconds(5000));
  EXPECT_EQ(expired(wheel, start + seconds(4000)), Due{0});
  EXPECT_EQ(expired(wheel, start + seconds(6000)), Due{1});
}

// Against a map, over random settings and steps of time.
TEST(DeadlineWheel, AgreesWithAMap) {
  constexpr std::uint64_t seed = 99;
  SCOPED_TRACE("seed=" + std::to_string(seed));
  Rng rng(seed);
  DeadlineWheel wheel(start);
  std::map<std::uint32_t, Instant> truth;
  Instant now = start;
  for (int round = 0; round < 20000; ++round) {
    const auto index = static_cast<std::uint32_t>(rng.below(50));
    if (rng.chance(0.2)) {
      wheel.set(index, instant_never);
      truth.erase(index);
    } else {
      const Instant at = now + milliseconds(rng.below(rng.chance(0.1) ? 300'000 : 3000));
      wheel.set(index, at);
      truth[index] = at;
    }
    now = now + milliseconds(rng.below(rng.chance(0.01) ? 200'000 : 60));
    for (const std::uint32_t due : expired(wheel, now)) {
      ASSERT_TRUE(truth.contains(due));
      ASSERT_LE(truth[due], now);
      truth.erase(due);
    }
    for (const auto& [left, at] : truth)
      ASSERT_GT(at + wheel_tick * 2, now) << "late by more than a tick: " << left;
  }
}

}  // namespace
}  // namespace di::http
