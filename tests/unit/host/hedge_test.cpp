// Which column is not asked for, and when one is late.
#include "host/hedge.h"

#include <gtest/gtest.h>

#include "tests/support/hedge_model.h"

namespace di::host {
namespace {

std::vector<Hedge::Source> sources(std::uint32_t count) {
  std::vector<Hedge::Source> all;
  for (std::uint32_t i = 0; i < count; ++i) all.emplace_back("store" + std::to_string(i), std::uint16_t{0});
  return all;
}
constexpr std::uint64_t column = 1 << 20;

void feed(Hedge& hedge, const Hedge::Source& source, Duration took, int times = 8) {
  for (int i = 0; i < times; ++i) hedge.came(source, column, took);
}

TEST(Hedge, NothingIsKnownInTheBeginning) {
  Hedge hedge{{}};
  const auto all = sources(4);
  EXPECT_FALSE(hedge.skip(all[0], all));
  EXPECT_EQ(hedge.late_after(column, all), Hedge::duration_never);
  feed(hedge, all[0], seconds(1));
  EXPECT_FALSE(hedge.skip(all[0], all));  // slow compared with what?
  EXPECT_EQ(hedge.late_after(column, all), Hedge::duration_never);
}

TEST(Hedge, AMemberThatIsThreeTimesSlowerIsSkippedAndAskedNowAndThen) {
  Hedge hedge{{}};
  const auto all = sources(6);
  for (std::size_t i = 0; i < 5; ++i) feed(hedge, all[i], milliseconds(1));
  feed(hedge, all[5], microseconds(2900));
  EXPECT_FALSE(hedge.skip(all[5], all));
  feed(hedge, all[5], milliseconds(10), 20);
  int skipped = 0;
  for (int i = 0; i < 64; ++i) skipped += hedge.skip(all[5], all) ? 1 : 0;
  EXPECT_EQ(skipped, 63);
  EXPECT_EQ(hedge.counters().skips, 63u);
  EXPECT_EQ(hedge.counters().probes, 1u);
  EXPECT_FALSE(hedge.skip(all[0], all));
  feed(hedge, all[5], milliseconds(1), 20);  // it is well again
  EXPECT_FALSE(hedge.skip(all[5], all));
}

TEST(Hedge, AReadIsLateByTheMedianAndByWhatIsUsual) {
  Hedge hedge{{}};
  const auto all = sources(5);
  for (const auto& source : all) feed(hedge, source, milliseconds(1), 40);
  EXPECT_NEAR(to_s(hedge.late_after(column, all)), 0.0025, 1e-5);
  // A short column is late sooner, but not in proportion: its start costs as much.
  EXPECT_NEAR(to_s(hedge.late_after(64 << 10, all)), 0.0025 * 320 / 1280, 1e-5);
  // One in ten is six times slower, everywhere: that is usual here.
  for (int i = 0; i < 400; ++i) {
    for (const auto& source : all)
      hedge.came(source, column, i % 10 == 0 ? milliseconds(6) : milliseconds(1));
  }
  EXPECT_GT(to_s(hedge.late_after(column, all)), 0.0028);
}

TEST(Hedge, AReadThatWasGivenUpCountsAsAtLeastSoSlow) {
  Hedge hedge{{}};
  const auto all = sources(4);
  for (const auto& source : all) feed(hedge, source, milliseconds(1));
  for (int i = 0; i < 20; ++i) hedge.gave_up(all[3], column, microseconds(500));
  EXPECT_FALSE(hedge.skip(all[3], all));
  for (int i = 0; i < 20; ++i) hedge.gave_up(all[3], column, milliseconds(4));
  EXPECT_TRUE(hedge.skip(all[3], all));
}

TEST(Hedge, ExtraReadsHaveABudget) {
  Hedge hedge{{}};
  const auto all = sources(1);
  std::uint32_t allowed = 0;
  while (hedge.hedge(1)) ++allowed;
  EXPECT_EQ(allowed, 4u);  // the burst
  for (int i = 0; i < 100; ++i) hedge.asked(all[0]);
  while (hedge.hedge(1)) ++allowed;
  EXPECT_EQ(allowed, 9u);
  EXPECT_EQ(hedge.counters().hedges_refused, 2u);
  EXPECT_FALSE(hedge.hedge(2));
}

TEST(Hedge, SourcesAreBounded) {
  Hedge::Limits limits;
  limits.sources_max = 3;
  Hedge hedge{limits};
  for (const auto& source : sources(10)) feed(hedge, source, milliseconds(1));
  EXPECT_EQ(hedge.sources(), 3u);
}

// Issue: one node 10x slow: p99 of stripes at most twice the healthy one, at most 5 % extra reads.
TEST(Hedge, ASlowNodeDoesNotMakeStripesSlow) {
  constexpr std::uint32_t stripes = 8'000;
  for (const std::uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    const test::HedgeResult healthy = test::hedge_model({.rules = false}, stripes, seed);
    const test::HedgeResult bare = test::hedge_model({.slow_node_ratio = 10, .rules = false}, stripes, seed);
    const test::HedgeResult slow = test::hedge_model({.slow_node_ratio = 10}, stripes, seed);
    EXPECT_GT(bare.quantile(0.99), 4 * healthy.quantile(0.99));  // or there is nothing to show
    EXPECT_LE(slow.quantile(0.99), 2 * healthy.quantile(0.99));
    EXPECT_LE(slow.extra_share(), 0.05);
    EXPECT_LE(slow.parity_most, 2u);
    EXPECT_GT(slow.counters.skips, 0u);

    const test::HedgeResult noise =
        test::hedge_model({.slow_read_chance = 0.01, .slow_read_ratio = 20}, stripes, seed);
    EXPECT_LE(noise.quantile(0.99), 2 * healthy.quantile(0.99));
    EXPECT_LE(noise.extra_share(), 0.05);

    // Nothing wrong: hardly anything extra, and not slower.
    const test::HedgeResult well = test::hedge_model({}, stripes, seed);
    EXPECT_LE(well.quantile(0.99), healthy.quantile(0.99) * 1.05);
    EXPECT_LE(well.extra_share(), 0.05);

    // It becomes well again, and is used again.
    const test::HedgeResult passing =
        test::hedge_model({.slow_node_ratio = 10, .slow_until = 2000}, stripes, seed);
    EXPECT_LT(passing.counters.skips, 3500u);
    EXPECT_LE(passing.quantile(0.99, 4000), healthy.quantile(0.99) * 1.15);
  }
}

}  // namespace
}  // namespace di::host
