#include "balance/cost.h"

#include <gtest/gtest.h>

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
  StepCost cost;
  const double before = cost.predict_us(1, 0);
  cost.observe(1, 0, before * 1e6);
  EXPECT_LT(cost.predict_us(1, 0), before * 1.5);
}

}  // namespace
}  // namespace di::balance
