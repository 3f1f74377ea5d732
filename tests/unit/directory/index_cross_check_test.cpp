// Stripes that are read to see whether they were encoded right.
#include "tests/unit/directory/stripe_fixture.h"

namespace di::directory {
namespace {

class CrossCheckTest : public StripeTest {
 protected:
  void begin(int stores, Index::Options options = {}) {
    options.placement = {{4, 2}, false};
    options.cross_check = seconds(60);
    start(stores, options);
  }
  // The one that is due, if any.
  std::optional<Index::Repair> asked(int s) {
    auto repairs = index->repairs(at_s(s));
    EXPECT_LE(repairs.size(), 1U);
    if (repairs.empty()) return std::nullopt;
    EXPECT_TRUE(repairs[0].message.targets.empty());
    return std::move(repairs[0]);
  }
  Index::RepairEnd answer(const Index::Repair& repair, Code code, int s) {
    return index->repaired(repair.host, {repair.message.stripe.stripe, code_of(code), {}, {}}, at_s(s));
  }
};

TEST_F(CrossCheckTest, OneStripeInAWhileIsReadAndWhatIsWrongGoes) {
  begin(6);
  std::map<std::uint64_t, int> chains;
  for (int chain = 1; chain <= 3; ++chain) chains[put(chain, 0, 4).stripe] = chain;
  EXPECT_EQ(index->next_due(), at_s(60));
  EXPECT_FALSE(asked(59));
  auto check = asked(60);
  ASSERT_TRUE(check);
  EXPECT_EQ(check->message.stripe.columns.size(), 6U);
  EXPECT_EQ(index->leases(), 1U);
  EXPECT_EQ(answer(*check, Code::ok, 61), Index::RepairEnd::right);
  EXPECT_EQ(answer(*check, Code::corrupt, 61), Index::RepairEnd::unknown);  // said twice
  EXPECT_EQ(index->stripes(), 3U);
  EXPECT_EQ(index->leases(), 0U);
  // Whoever cannot read it says nothing about it.
  check = asked(120);
  ASSERT_TRUE(check);
  EXPECT_EQ(answer(*check, Code::unreachable, 121), Index::RepairEnd::undecided);
  EXPECT_EQ(index->stripes(), 3U);
  EXPECT_FALSE(asked(179));  // and is not asked again
  check = asked(180);
  ASSERT_TRUE(check);
  const std::uint64_t wrong = check->message.stripe.stripe;
  EXPECT_EQ(hit(chains.at(wrong), 8), 8U);
  EXPECT_EQ(answer(*check, Code::corrupt, 181), Index::RepairEnd::wrong);
  EXPECT_EQ(hit(chains.at(wrong), 8), 0U);
  EXPECT_EQ(index->stripes(), 2U);
  step(181);
  for (const auto& [instance, disk] : disks) {
    for (const auto& [id, shard] : disk) EXPECT_NE(id.first, wrong) << instance;
  }
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_EQ(index->counters().cross_checks_right, 1U);
  EXPECT_EQ(index->counters().cross_checks_undecided, 1U);
  EXPECT_EQ(index->counters().cross_checks_wrong, 1U);
  EXPECT_EQ(index->counters().repairs_started, 0U);
  EXPECT_EQ(index->counters().repairs_failed, 0U);
}

// It would be tried again for ever: every column matches its checksum, and none can be made.
TEST_F(CrossCheckTest, AStripeThatARepairFindsToBeWrongGoesToo) {
  start(7, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  const auto opened = put(1, 0, 4);
  index->lost(store(number_of(opened.columns[0])), at_s(2));
  step(62);
  const auto repairs = index->repairs(at_s(62));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(answer(repairs[0], Code::corrupt, 63), Index::RepairEnd::wrong);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_EQ(hit(1, 8), 0U);
  step(200);
  EXPECT_TRUE(index->repairs(at_s(200)).empty());
  EXPECT_EQ(index->counters().repairs_failed, 1U);
}

TEST_F(CrossCheckTest, ThereIsOneAtATimeAndNobodyIsWaitedForForEver) {
  begin(6);
  put(1, 0, 4);
  put(2, 0, 4);
  const auto silent = asked(60);
  ASSERT_TRUE(silent);
  EXPECT_FALSE(asked(120));
  step(180);  // repair_answer_max
  EXPECT_EQ(index->counters().cross_checks_undecided, 1U);
  const auto mortal = asked(180);
  ASSERT_TRUE(mortal);
  index->lost(mortal->host, at_s(181));
  EXPECT_EQ(index->counters().cross_checks_undecided, 2U);
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_TRUE(asked(240));
}

TEST_F(CrossCheckTest, EachStripeHasItsTurn) {
  begin(6);
  std::map<std::uint64_t, int> turns;
  for (int chain = 1; chain <= 8; ++chain) turns[put(chain, 0, 4).stripe] = 0;
  for (int i = 1; i <= 240; ++i) {
    const auto check = asked(60 * i);
    ASSERT_TRUE(check) << i;
    ++turns[check->message.stripe.stripe];
    EXPECT_EQ(answer(*check, Code::ok, 60 * i), Index::RepairEnd::right);
  }
  EXPECT_EQ(turns.size(), 8U);
  for (const auto& [stripe, count] : turns) EXPECT_NEAR(count, 30, 20) << stripe;  // each by lot
}

TEST_F(CrossCheckTest, WhatHasLostSomethingIsRepairedAndNotChecked) {
  begin(7);
  const auto opened = put(1, 0, 4);
  index->lost(store(number_of(opened.columns[0])), at_s(2));
  EXPECT_FALSE(asked(60));
  comes(number_of(opened.columns[0]), 61, 2);
  // With no host it waits, and is a repair as soon as there is something to repair.
  index->lost(host0, at_s(62));
  index->lost(host1, at_s(62));
  EXPECT_FALSE(asked(120));
  EXPECT_EQ(index->repair_queue().waiting(), 0U);
  EXPECT_TRUE(index->repair_queue().cross_checks(opened.stripe));
  failed(opened.stripe, opened.columns[1], Code::corrupt, 121);
  EXPECT_FALSE(index->repair_queue().cross_checks(opened.stripe));
  EXPECT_EQ(index->repair_queue().waiting(), 1U);
  EXPECT_TRUE(index->host_up({host0.instance, 2}));
  const auto repairs = index->repairs(at_s(130));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets.size(), 1U);
}

TEST_F(CrossCheckTest, WithoutRepairOrParityThereIsNone) {
  begin(6, {.repair = RepairPolicy::off});
  const std::uint64_t whole = put(1, 0, 4).stripe;
  EXPECT_FALSE(asked(60));
  EXPECT_FALSE(index->repair_queue().has(whole));
  start(6, {.placement = {{1, 0}, false}, .cross_check = seconds(60)});
  const std::uint64_t alone = put(1, 0, 1).stripe;
  EXPECT_FALSE(asked(60));
  EXPECT_FALSE(index->repair_queue().has(alone));
}

}  // namespace
}  // namespace di::directory
