#include "base/histogram.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace di {
namespace {

TEST(Histogram, EveryValueLiesBetweenItsBucketsBounds) {
  constexpr std::uint64_t seed = 1;
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int i = 0; i < 100000; ++i) {
    const std::uint64_t value = rng.next() >> rng.below(64);
    const int bucket = Histogram::bucket_of(value);
    ASSERT_GE(bucket, 0);
    ASSERT_LT(bucket, Histogram::bucket_count);
    ASSERT_LE(value, Histogram::upper_bound(bucket));
    if (bucket > 0) {
      const std::uint64_t below = Histogram::upper_bound(bucket - 1);
      ASSERT_GT(value, below);
      ASSERT_LE(Histogram::upper_bound(bucket) - below, below / 8 + 1) << "at most 1/8 wide";
    }
  }
  EXPECT_EQ(Histogram::bucket_of(UINT64_MAX), Histogram::bucket_count - 1);
  EXPECT_EQ(Histogram::upper_bound(Histogram::bucket_count - 1), UINT64_MAX);
}

TEST(Histogram, QuantilesAreWithinABucketOfTheTruth) {
  Histogram histogram;
  EXPECT_EQ(histogram.quantile(0.5), 0u);
  for (std::uint64_t v = 1; v <= 1000; ++v) histogram.record(v);
  EXPECT_EQ(histogram.count(), 1000u);
  EXPECT_EQ(histogram.sum(), 500500u);
  EXPECT_EQ(histogram.max(), 1000u);
  EXPECT_GE(histogram.quantile(0.5), 500u);
  EXPECT_LE(histogram.quantile(0.5), 563u);
  EXPECT_EQ(histogram.quantile(1), 1000u);
}

}  // namespace
}  // namespace di
