#include "balance/cost.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "base/rng.h"

namespace di::balance {
namespace {

TEST(StepCost, GrowsWithTokensAndContext) {
  const StepCost cost;
  EXPECT_GT(cost.predict_us(2, 0), cost.predict_us(1, 0));
  EXPECT_GT(cost.predict_us(1, 4096), cost.predict_us(1, 0));
  EXPECT_DOUBLE_EQ(cost.predict_prompt_us(100, 0, 100), cost.predict_us(100, 50));
  EXPECT_GT(cost.predict_prompt_us(100, 0, 10), cost.predict_prompt_us(100, 0, 100));
  EXPECT_LT(cost.predict_prompt_us(100, 90, 100), cost.predict_prompt_us(100, 0, 100));
}

TEST(StepCost, FollowsAMachineOfAnotherSpeed) {
  StepCost cost;
  const StepCost truth(StepCost::Shape{3000, 4000, 200});  // ten times slower
  for (int i = 0; i < 200; ++i) cost.observe(32, 500, truth.predict_us(32, 500));
  EXPECT_NEAR(cost.predict_us(64, 500) / truth.predict_us(64, 500), 1, 0.02);
}

TEST(StepCost, OneOutlierMovesItLittle) {
  for (const int samples : {0, 1, 100}) {
    StepCost cost;
    for (int i = 0; i < samples; ++i) cost.observe(1, 0, 700);
    const double before = cost.predict_us(1, 0);
    cost.observe(1, 0, before * 1e6);
    EXPECT_LT(cost.predict_us(1, 0), before * 1.5);
    cost.observe(1, 0, before / 1e6);
    EXPECT_GT(cost.predict_us(1, 0), before / 1.5);
  }
}

TEST(StepCost, NonsenseIsNoSample) {
  StepCost cost;
  const double before = cost.predict_us(100, 1000);
  cost.observe(0, 0, 100);
  cost.observe(10, 0, 0);
  cost.observe(10, 0, -5);
  cost.observe(10, 0, std::numeric_limits<double>::quiet_NaN());
  cost.observe(10, std::numeric_limits<double>::quiet_NaN(), 100);
  cost.observe(10, 0, std::numeric_limits<double>::infinity());
  EXPECT_EQ(cost.predict_us(100, 1000), before);
}

struct Machine {
  StepCost::Shape shape;
  double predict(double tokens, double context) const {
    return shape.base_us + shape.token_us * tokens + shape.context_us * tokens * context / 1024;
  }
};

// Up to thirty times slower or faster than the guess, each term on its own by another factor of four.
Machine any_machine(Rng& rng) {
  const double scale = std::exp((rng.uniform() * 2 - 1) * std::log(30));
  const auto part = [&] { return scale * std::exp((rng.uniform() * 2 - 1) * std::log(4)); };
  return {{300 * part(), 400 * part(), 20 * part()}};
}

TEST(StepCost, FindsTheThreeTermsOfAnyMachine) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    Rng rng(seed);
    const Machine machine = any_machine(rng);
    StepCost cost;
    for (int i = 0; i < Fit<3>::samples_documented; ++i) {
      const auto tokens = static_cast<std::uint32_t>(std::pow(512, rng.uniform()));
      const auto context = static_cast<double>(rng.below(30000));
      cost.observe(tokens, context, machine.predict(tokens, context) * (1 + 0.1 * (rng.uniform() - 0.5)));
    }
    for (int i = 0; i < 50; ++i) {
      const auto tokens = static_cast<std::uint32_t>(1 + rng.below(512));
      const auto context = static_cast<double>(rng.below(30000));
      EXPECT_NEAR(cost.predict_us(tokens, context) / machine.predict(tokens, context), 1, 0.06)
          << tokens << " tokens, context " << context;
    }
    EXPECT_LT(cost.residual(), 0.1);
  }
}

// A decode rank sees one kind of step for hours; then prompts come.
TEST(StepCost, WhatIsNotSeenIsNotForgotten) {
  StepCost cost;
  for (int i = 0; i < 100000; ++i) cost.observe(16, 2000, 300 + 400 * 16 + 20 * 16 * 2000 / 1024.0);
  EXPECT_NEAR(cost.token_us() / 400, 1, 0.01);
  EXPECT_NEAR(cost.base_us() / 300, 1, 0.01);
  // One sample of another kind does not throw it about.
  cost.observe(512, 100, 1.3 * cost.predict_us(512, 100));
  EXPECT_NEAR(cost.predict_us(16, 2000) / (300 + 6400 + 625), 1, 0.3);
  EXPECT_GT(cost.token_us(), 300);
  EXPECT_LT(cost.token_us(), 600);
}

TEST(StepCost, FollowsAChangeOfTheMachine) {
  StepCost cost;
  Rng rng(5);
  for (const double slower : {1.0, 10.0, 0.5}) {
    const Machine machine{{300 * slower, 400 * slower, 20 * slower}};
    for (int i = 0; i < Fit<3>::samples_documented; ++i) {
      const auto tokens = static_cast<std::uint32_t>(1 + rng.below(512));
      const auto context = static_cast<double>(rng.below(8000));
      cost.observe(tokens, context, machine.predict(tokens, context));
    }
    EXPECT_NEAR(cost.predict_us(256, 3000) / machine.predict(256, 3000), 1, 0.02) << slower;
  }
}

TEST(StepCost, OutlivesItsProcess) {
  StepCost cost(StepCost::Shape{1000, 50, 3});
  Rng rng(6);
  for (int i = 0; i < 100; ++i) {
    const auto tokens = static_cast<std::uint32_t>(1 + rng.below(512));
    cost.observe(tokens, 1000, 2000 + 70 * tokens);
  }
  StepCost again;
  ASSERT_TRUE(again.restore(cost.to_text()));
  EXPECT_NEAR(again.predict_us(100, 5000) / cost.predict_us(100, 5000), 1, 1e-6);
  const double before = again.predict_us(7, 7);
  for (const char* text :
       {"", "step", "step 1 2", "step 1 2 x", "step 1 2 3 4", "step 1 2 -3", "step 1 nan 3", "fetch 1 2 3"}) {
    EXPECT_FALSE(again.restore(text)) << text;
  }
  EXPECT_EQ(again.predict_us(7, 7), before);
}

TEST(FetchCost, EachPlaceHasItsOwn) {
  FetchCost cost;
  EXPECT_LT(cost.predict_us(Place::arena, 1 << 20), cost.predict_us(Place::remote_arena, 1 << 20));
  EXPECT_LT(cost.predict_us(Place::remote_arena, 1 << 20), cost.predict_us(Place::store, 1 << 20));
  Rng rng(7);
  for (int i = 0; i < Fit<2>::samples_documented; ++i) {
    const std::uint64_t bytes = rng.below(std::uint64_t{64} << 20);
    cost.observe(Place::store, bytes,
                 Duration(static_cast<std::int64_t>(5e6 + 4e6 * static_cast<double>(bytes) / 1048576)));
  }
  EXPECT_NEAR(cost.base_us(Place::store) / 5000, 1, 0.05);
  EXPECT_NEAR(cost.mib_us(Place::store) / 4000, 1, 0.02);
  EXPECT_NEAR(cost.mib_us(Place::remote_arena), 870, 1e-6);
  EXPECT_EQ(cost.samples(Place::arena), 0u);

  FetchCost again;
  ASSERT_TRUE(again.restore(cost.to_text()));
  EXPECT_NEAR(again.predict_us(Place::store, 9 << 20) / cost.predict_us(Place::store, 9 << 20), 1, 1e-6);
  EXPECT_FALSE(again.restore("arena 1 2\nremote_arena 3 4\n"));
  EXPECT_FALSE(again.restore(cost.to_text() + "x"));
}

}  // namespace
}  // namespace di::balance
