// Stores that are asked again what they hold.
#include "tests/unit/directory/stripe_fixture.h"

namespace di::directory {
namespace {

class ReconcileTest : public StripeTest {
 protected:
  ReconcileTest() { start(6, {.placement = {{4, 2}, false}, .reconcile = seconds(3600)}); }
  // The next question, and when it comes.
  std::optional<Index::Question> ask(int from) {
    for (now = from; now < from + 8000; now += 10) {
      if (auto asked = index->reconcile(at_s(now))) return asked;
    }
    return std::nullopt;
  }
  // What the store's disk has, in two parts; what the answers say may be freed.
  std::vector<std::uint64_t> tell(const Holder& who, std::uint32_t asked) {
    std::vector<wire::meta_inventory> parts{{0, false, {}, asked}, {1, true, {}, asked}};
    for (const auto& [id, shard] : disks[who.instance])
      parts[parts[0].shards.size() < 2 ? 0 : 1].shards.push_back(shard);
    std::vector<std::uint64_t> unknown;
    for (const wire::meta_inventory& part : parts) {
      const auto ack = index->inventory(who, part, at_s(now));
      EXPECT_TRUE(ack);
      if (ack) unknown.insert(unknown.end(), ack->unknown.begin(), ack->unknown.end());
    }
    return unknown;
  }
  bool complete(const std::string& instance) const {
    for (const Index::Place& place : index->places()) {
      if (place.instance == instance) return place.complete;
    }
    return false;
  }
  int now = 0;
};

TEST_F(ReconcileTest, EachStoreIsAskedOnceAnHourOneAtATime) {
  for (int chain = 0; chain < 4; ++chain) put(chain, 0, 4);
  std::map<std::string, std::vector<int>> asked;
  now = 1;
  while (now < 4 * 3600) {
    const auto question = ask(now);
    ASSERT_TRUE(question);
    asked[question->store.instance].push_back(now);
    EXPECT_GT(index->next_due(), at_s(now)) << "nobody is asked before this one has told";
    EXPECT_FALSE(index->reconcile(at_s(now + 100)));
    EXPECT_TRUE(complete(question->store.instance));
    EXPECT_TRUE(tell(question->store, question->message.asked).empty());
  }
  ASSERT_EQ(asked.size(), 6U);
  std::set<int> firsts;
  for (const auto& [instance, times] : asked) {
    firsts.insert(times.front());
    EXPECT_GE(times.front(), 1800);
    EXPECT_LE(times.front(), 3610);
    for (std::size_t i = 1; i < times.size(); ++i) EXPECT_NEAR(times[i] - times[i - 1], 3600, 20) << instance;
  }
  EXPECT_EQ(firsts.size(), 6U) << "they came together and are not asked together";
  EXPECT_EQ(index->counters().reconciled_missing, 0U);
  EXPECT_EQ(index->counters().reconciled_unknown, 0U);
}

TEST_F(ReconcileTest, DifferencesAreCountedAndMended) {
  const auto first = put(1, 0, 4);
  const auto second = put(2, 0, 4);
  const auto question = ask(2);
  ASSERT_TRUE(question);
  auto& disk = disks[question->store.instance];
  const auto lost =
      std::find_if(disk.begin(), disk.end(), [&](const auto& d) { return d.first.first == first.stripe; });
  ASSERT_NE(lost, disk.end());
  disk.erase(lost);
  auto stray = disk.begin()->second;
  stray.stripe = 7;
  disk[{7, stray.column}] = stray;
  EXPECT_EQ(tell(question->store, question->message.asked), (std::vector<std::uint64_t>{7}));
  EXPECT_EQ(index->counters().reconciled_missing, 1U);
  EXPECT_EQ(index->counters().reconciled_unknown, 1U);
  EXPECT_EQ(index->stripes(), 2U);
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(index->repair_queue().waiting(), 1U) << "the lost one is made anew";
  EXPECT_EQ(second.code, 0);
  // Five stores are left for it: the sixth, where it was, is the one that has room for it.
  const auto repairs = index->repairs(at_s(now));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.stripe.stripe, first.stripe);
  EXPECT_EQ(repairs[0].message.targets.at(0).instance, question->store.instance);
}

TEST_F(ReconcileTest, AColumnThatWasThoughtToBeLostIsBack) {
  const auto opened = put(1, 0, 4);
  const wire::Column column = opened.columns[2];
  const auto kept = disks[column.instance].at({opened.stripe, column.column});
  failed(opened.stripe, column, Code::not_found, 2);
  step(2);
  disks[column.instance][{opened.stripe, column.column}] = kept;
  EXPECT_EQ(index->repair_queue().waiting(), 1U);
  for (int i = 0, from = 3; i < 6; ++i, from = now) {
    const auto question = ask(from);
    ASSERT_TRUE(question);
    EXPECT_TRUE(tell(question->store, question->message.asked).empty());
  }
  EXPECT_EQ(index->counters().reconciled_back, 1U);
  EXPECT_EQ(index->counters().reconciled_missing, 0U);
  EXPECT_EQ(index->repair_queue().waiting(), 0U);
  EXPECT_EQ(plan(1, 0, 8, now).stripes[0].columns.size(), 6U);
}

TEST_F(ReconcileTest, WhatIsCommittedAfterTheQuestionNeedNotBeShown) {
  put(1, 0, 4);
  const auto question = ask(2);
  ASSERT_TRUE(question);
  const auto before = disks;
  put(2, 0, 4, now);
  disks[question->store.instance] = before.at(question->store.instance);
  EXPECT_TRUE(tell(question->store, question->message.asked).empty());
  EXPECT_EQ(index->counters().reconciled_missing, 0U);
  EXPECT_EQ(hit(2, 8), 8U);
}

TEST_F(ReconcileTest, AnInventoryThatNobodyAskedForLosesNothing) {
  put(1, 0, 4);
  const auto question = ask(2);
  ASSERT_TRUE(question);
  // As after `kv fsck`: it began before the question, and is not its answer.
  ASSERT_TRUE(index->inventory(question->store, {0, true, {}, 0}, at_s(now)));
  EXPECT_EQ(index->counters().reconciled_missing, 0U);
  EXPECT_EQ(plan(1, 0, 8, now).stripes[0].columns.size(), 6U);
  EXPECT_FALSE(index->reconcile(at_s(now)));
  EXPECT_TRUE(tell(question->store, question->message.asked).empty());
  EXPECT_EQ(index->counters().reconciles_failed, 0U);
}

TEST_F(ReconcileTest, OneThatDoesNotTellIsAskedAgainAndTheOthersMeanwhile) {
  put(1, 0, 4);
  const auto first = ask(2);
  ASSERT_TRUE(first);
  const int at = now;
  const auto second = ask(now);
  ASSERT_TRUE(second);
  EXPECT_GE(now, at + 600);
  EXPECT_NE(second->store, first->store);
  EXPECT_EQ(index->counters().reconciles_failed, 1U);
  // Its late answer is none: it says nothing about what is missing.
  EXPECT_TRUE(index->inventory(first->store, {0, true, {}, first->message.asked}, at_s(now)));
  EXPECT_EQ(index->counters().reconciled_missing, 0U);
  index->lost(second->store, at_s(now));
  EXPECT_TRUE(ask(now)) << "the one that is lost is waited for by nobody";
}

// A volume that comes back may have what the directory gave up meanwhile.
TEST_F(ReconcileTest, AVolumeThatIsBackBringsItsStripes) {
  const auto opened = put(1, 0, 4);
  const auto fails = [&](int n) {
    index->volumes(store(n), {{{0, volume_failed, 1 << 20, 1 << 20}}}, at_s(2));
  };
  for (int n = 0; n < 5; ++n) fails(n);
  EXPECT_TRUE(index->drop_stripe(opened.stripe, at_s(2)));
  fails(5);
  index->test_check();
  for (int n = 0; n < 6; ++n) {
    index->volumes(store(n), {{{0, 0, 1 << 20, 1 << 20}}}, at_s(130));
    now = 130;
  }
  // kv_free did not reach it while it was closed; what was freed is on its way out all the same.
  EXPECT_EQ(index->stripes(), 0U);
  static_cast<void>(index->step(at_s(130)));
  for (int n = 0; n < 6; ++n) EXPECT_TRUE(tell(store(n), 0).empty());
  EXPECT_EQ(index->stripes(), 1U);
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(index->counters().reconciled_unknown, 0U);
}

}  // namespace
}  // namespace di::directory
