// The index with several columns in a stripe.
#include "tests/unit/directory/stripe_fixture.h"

namespace di::directory {
namespace {

TEST_F(StripeTest, PutTakesTheRunOfPagesThatNobodyHas) {
  const auto offered = pages(1, 0, 8);
  const auto opened = open(offered);
  EXPECT_EQ(opened.code, 0);
  EXPECT_EQ(opened.first, 0);
  EXPECT_EQ(opened.pages, 4);
  EXPECT_EQ(opened.data_columns, 4);
  EXPECT_EQ(opened.parity_columns, 2);
  ASSERT_EQ(opened.columns.size(), 6U);
  std::set<std::string> nodes;
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(opened.columns[i].column, i);
    nodes.insert(opened.columns[i].instance);
  }
  EXPECT_EQ(nodes.size(), 6U);
  EXPECT_EQ(open(offered).stripe, opened.stripe);  // the answer was lost
  EXPECT_EQ(open(offered, 1, host1).code, code_of(Code::busy));
  EXPECT_EQ(hit(1, 16), 0U);
  EXPECT_EQ(write(opened, offered), 0);
  EXPECT_EQ(hit(1, 16), 8U);
  const auto rest = open(offered);
  EXPECT_EQ(rest.first, 4);
  EXPECT_EQ(rest.pages, 4);
  EXPECT_EQ(write(rest, offered), 0);
  EXPECT_EQ(hit(1, 16), 16U);
  EXPECT_EQ(open(offered).code, code_of(Code::exists));
  EXPECT_EQ(index->stripes(), 2U);
  EXPECT_EQ(index->blocks(), 16U);
}

TEST_F(StripeTest, RunEndsBeforeWhatOthersHave) {
  put(1, 2, 1);  // page 2
  const auto offered = pages(1, 0, 6);
  const auto opened = open(offered);
  EXPECT_EQ(opened.first, 0);
  EXPECT_EQ(opened.pages, 2);  // pages 0 and 1
  const auto other = open(pages(1, 1, 4), 1, host1);
  EXPECT_EQ(other.code, code_of(Code::busy));  // page 1 is being written
  EXPECT_EQ(write(opened, offered), 0);
  const auto next = open(offered);
  EXPECT_EQ(next.first, 3);
  EXPECT_EQ(next.pages, 3);
}

TEST_F(StripeTest, ShortStripesSplitLongPages) {
  const auto offered = pages(1, 0, 1, 1 << 20);
  const auto opened = open(offered);
  ASSERT_EQ(opened.columns.size(), 6U);  // four parts of the one page, two of parity
  EXPECT_EQ(opened.columns[3].column, 3);
  EXPECT_EQ(opened.columns[4].column, 4);
  EXPECT_EQ(write(opened, offered), 0);
  const auto planned = plan(1, 0, 2);
  ASSERT_EQ(planned.pages.size(), 1U);
  EXPECT_EQ(planned.pages[0].columns.size(), 4U);
  ASSERT_EQ(planned.stripes.size(), 1U);
  EXPECT_EQ(planned.stripes[0].columns.size(), 6U);
  EXPECT_EQ(planned.stripes[0].code.crcs.size(), 12U);
  // Three parts and a parity column are enough.
  index->lost(store(number_of(opened.columns[0])), at_s(1));
  index->lost(store(number_of(opened.columns[4])), at_s(1));
  EXPECT_EQ(hit(1, 2), 2U);
  EXPECT_EQ(plan(1, 0, 2).pages[0].columns.size(), 3U);
  index->lost(store(number_of(opened.columns[1])), at_s(1));
  EXPECT_EQ(hit(1, 2), 0U);
}

TEST_F(StripeTest, PlanHasWhatItTakesToRebuild) {
  const auto opened = put(1, 0, 4);
  auto planned = plan(1, 0, 8);
  ASSERT_EQ(planned.pages.size(), 4U);
  ASSERT_EQ(planned.stripes.size(), 1U);  // once
  EXPECT_EQ(planned.stripes[0].stripe, opened.stripe);
  EXPECT_EQ(planned.stripes[0].page_blocks, (std::vector<std::uint32_t>{2, 2, 2, 2}));
  EXPECT_EQ(planned.stripes[0].crcs, (std::vector<std::uint32_t>{1, 2, 1, 2, 1, 2, 1, 2}));
  EXPECT_EQ(planned.stripes[0].columns, opened.columns);
  for (std::size_t p = 0; p < 4; ++p) EXPECT_EQ(planned.pages[p].columns, (std::vector{opened.columns[p]}));
  index->lost(store(number_of(opened.columns[1])), at_s(1));
  planned = plan(1, 0, 8);
  EXPECT_TRUE(planned.pages[1].columns.empty());  // must be rebuilt
  EXPECT_EQ(planned.stripes[0].columns.size(), 5U);
}

TEST_F(StripeTest, TwoStoresOfSixMayGoAndTheThirdIsACleanMiss) {
  const auto opened = put(1, 0, 4);
  EXPECT_EQ(index->redundancy().degraded + index->redundancy().unreadable, 0u);
  index->lost(store(number_of(opened.columns[1])), at_s(1));
  index->lost(store(number_of(opened.columns[5])), at_s(1));
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(index->redundancy().degraded, 1u);
  EXPECT_EQ(index->redundancy().unreadable, 0u);
  index->lost(store(number_of(opened.columns[2])), at_s(1));
  EXPECT_EQ(index->redundancy().degraded, 0u);
  EXPECT_EQ(index->redundancy().unreadable, 1u);
  EXPECT_EQ(hit(1, 8), 2U);  // page 0 is whole on its own store; 1 cannot be rebuilt any more
  EXPECT_EQ(index->match({Key{}, keys(1, 6, 2)}).hit_blocks, 2U);
  comes(number_of(opened.columns[5]), 2, 2);
  EXPECT_EQ(hit(1, 8), 8U);
}

TEST_F(StripeTest, DegradedCommitIsPublishedAndRepaired) {
  start(7, {.placement = {{4, 2}, false}});
  const auto offered = pages(1, 0, 4);
  const auto opened = open(offered);
  EXPECT_EQ(write(opened, offered, {1, 4}), 0);
  EXPECT_EQ(index->counters().puts_degraded, 1U);
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(index->repair_queue().waiting(), 1U);
  EXPECT_LE(index->next_due(), at_s(1));
  const auto repairs = index->repairs(at_s(1));
  ASSERT_EQ(repairs.size(), 1U);
  const wire::meta_repair& order = repairs[0].message;
  EXPECT_EQ(order.pages, offered);
  EXPECT_EQ(order.stripe.columns.size(), 4U);
  ASSERT_EQ(order.targets.size(), 2U);
  EXPECT_EQ(order.targets[0].column, 1);
  EXPECT_EQ(order.targets[1].column, 4);
  std::set<std::string> nodes{order.targets[0].instance, order.targets[1].instance};
  for (const wire::Column& column : order.stripe.columns) nodes.insert(column.instance);
  EXPECT_EQ(nodes.size(), 6U);
  EXPECT_EQ(index->leases(), 1U);
  EXPECT_TRUE(index->repairs(at_s(1)).empty());
  finish(repairs[0], 2);
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_EQ(plan(1, 0, 8).stripes[0].columns.size(), 6U);
  EXPECT_EQ(index->counters().columns_repaired, 2U);
}

TEST_F(StripeTest, CommitWithMoreFailuresThanParityIsRefusedAndFreed) {
  const auto offered = pages(1, 0, 4);
  const auto opened = open(offered);
  EXPECT_EQ(write(opened, offered, {0, 1, 5}), code_of(Code::no_space));
  EXPECT_EQ(hit(1, 8), 0U);
  step(31);
  for (const auto& [instance, disk] : disks) EXPECT_TRUE(disk.empty()) << instance;
  EXPECT_EQ(index->pending_frees(), 0U);
}

TEST_F(StripeTest, CommitWithAnotherCodeIsInvalid) {
  const auto offered = pages(1, 0, 4);
  const auto opened = open(offered);
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}, {4, 2, {1, 2, 3}}}, at_s(1)).code,
            code_of(Code::invalid));
  EXPECT_EQ(index->open_puts(), 0U);
  EXPECT_EQ(hit(1, 8), 0U);
}

TEST_F(StripeTest, MalformedRunsAreInvalid) {
  auto gap = pages(1, 0, 2);
  gap[1] = pages(1, 2, 1)[0];  // not below the first
  EXPECT_EQ(open(gap).code, code_of(Code::invalid));
  auto segments = pages(1, 0, 2);
  segments[1].crcs.push_back(3);
  EXPECT_EQ(open(segments).code, code_of(Code::invalid));
  EXPECT_EQ(open(pages(1, 0, 11)).code, code_of(Code::invalid));
}

TEST_F(StripeTest, CorruptColumnIsFreedAndMadeAnew) {
  start(7, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  failed(opened.stripe, opened.columns[2], Code::corrupt, 2);
  EXPECT_EQ(hit(1, 8), 8U);
  // Six others hold the rest or nothing; the one that still has to free it is no target.
  auto repairs = index->repairs(at_s(2));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_NE(repairs[0].message.targets.at(0).instance, opened.columns[2].instance);
  finish(repairs[0], 2);
  step(2);
  EXPECT_FALSE(disks[opened.columns[2].instance].contains({opened.stripe, 2}));
  std::size_t columns = 0;
  for (const auto& [instance, disk] : disks) columns += disk.size();
  EXPECT_EQ(columns, 6U);
}

// It was read before it was made anew elsewhere, or is still to be freed where it was: the new one is
// another.
TEST_F(StripeTest, AReportOfTheColumnThatWasThereBeforeChangesNothing) {
  start(7, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  failed(opened.stripe, opened.columns[2], Code::corrupt, 2);
  auto repairs = index->repairs(at_s(2));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(index->counters().reports_late, 0U);
  failed(opened.stripe, opened.columns[2], Code::corrupt, 2);  // by another reader
  finish(repairs[0], 2);
  failed(opened.stripe, opened.columns[2], Code::corrupt, 2);
  // The store was asked after the column was freed there.
  failed(opened.stripe, opened.columns[2], Code::not_found, 2);
  EXPECT_TRUE(index->repairs(at_s(3)).empty());
  EXPECT_EQ(index->counters().columns_corrupt, 1U);
  EXPECT_EQ(index->counters().columns_not_found, 0U);
  EXPECT_EQ(index->counters().reports_late, 3U);
  const auto columns = plan(1, 0, 8).stripes[0].columns;
  EXPECT_EQ(columns.size(), 6U);
  EXPECT_NE(std::find(columns.begin(), columns.end(), repairs[0].message.targets[0]), columns.end());
}

TEST_F(StripeTest, AReportFromBeforeTheStoreToldAgainWhatItHoldsChangesNothing) {
  const auto opened = put(1, 0, 4);
  const wire::Column& column = opened.columns[2];
  index->lost(store(number_of(column)), at_s(2));
  // Before it is back it is still the one that was read.
  failed(opened.stripe, opened.columns[2], Code::io, 2);
  EXPECT_EQ(index->counters().columns_io, 1U);
  comes(number_of(column), 3, 2);
  failed(opened.stripe, column, Code::not_found, 3);
  wire::Column volume = column;
  volume.volume = 1;
  failed(opened.stripe, volume, Code::not_found, 3, 2);
  EXPECT_EQ(index->counters().reports_late, 2U);
  EXPECT_EQ(plan(1, 0, 8).stripes[0].columns, opened.columns);
  failed(opened.stripe, column, Code::not_found, 3, 2);
  EXPECT_EQ(plan(1, 0, 8).stripes[0].columns.size(), 5U);
}

TEST_F(StripeTest, RepairOntoTheSameNodeWaitsForItsFree) {
  const auto opened = put(1, 0, 4);
  failed(opened.stripe, opened.columns[2], Code::corrupt, 2);
  EXPECT_TRUE(index->repairs(at_s(2)).empty());  // six nodes for six columns
  step(2);
  const auto repairs = index->repairs(at_s(4));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets.at(0).instance, opened.columns[2].instance);
  finish(repairs[0], 4);
  EXPECT_EQ(plan(1, 0, 8).stripes[0].columns, opened.columns);
}

TEST_F(StripeTest, TooManyLostColumnsEndTheStripe) {
  const auto opened = put(1, 0, 4);
  for (const std::uint16_t column : std::vector<std::uint16_t>{0, 3, 4}) {
    failed(opened.stripe, opened.columns[column], Code::corrupt, 2);
  }
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->counters().stripes_lost, 1U);
  step(2);
  for (const auto& [instance, disk] : disks) EXPECT_TRUE(disk.empty()) << instance;
}

TEST_F(StripeTest, StoreThatIsAwayTooLongIsRepairedAround) {
  start(8, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  const auto opened = put(1, 0, 4);
  const int gone = number_of(opened.columns[1]);
  index->lost(store(gone), at_s(2));
  step(61);
  EXPECT_TRUE(index->repairs(at_s(61)).empty());  // it may come back
  step(62);
  const auto repairs = index->repairs(at_s(62));
  ASSERT_EQ(repairs.size(), 1U);
  ASSERT_EQ(repairs[0].message.targets.size(), 1U);
  EXPECT_NE(number_of(repairs[0].message.targets[0]), gone);
  // It is shown as long as something of the cache is nowhere else.
  ASSERT_TRUE(place_of(gone));
  EXPECT_FALSE(place_of(gone)->up);
  EXPECT_EQ(place_of(gone)->away_since, at_s(2));
  EXPECT_EQ(place_of(gone)->volumes.size(), 1U);
  finish(repairs[0], 63);
  EXPECT_FALSE(place_of(gone));
  EXPECT_EQ(plan(1, 0, 8, 63).stripes[0].columns.size(), 6U);
  // What it still has when it returns is a second copy.
  comes(gone, 130, 2);
  EXPECT_TRUE(place_of(gone));
  step(131);
  EXPECT_TRUE(disks[store(gone).instance].empty());
  EXPECT_EQ(index->pending_frees(), 0U);
}

// A row of figures that does not change says nothing of what has to happen.
TEST_F(StripeTest, WhatRepairsWaitForIsSaid) {
  start(6, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  const auto opened = put(1, 0, 4);
  const auto waits_for = [&](int s) { return index->repairs_wait_for(index->redundancy(), at_s(s)); };
  const auto name = [&](int column) { return opened.columns[static_cast<std::size_t>(column)].instance; };
  const auto lose = [&](int column, int s) {
    index->lost(store(number_of(opened.columns[static_cast<std::size_t>(column)])), at_s(s));
  };
  EXPECT_EQ(waits_for(2), "");
  lose(0, 2);
  EXPECT_EQ(waits_for(12), "stores that are away: " + name(0) + " (given up in 50 s)");
  step(62);
  EXPECT_TRUE(index->repairs(at_s(62)).empty());
  EXPECT_EQ(waits_for(62), "4+2 wants 6 store nodes, 5 take columns");
  // Too many: nothing can be made until some are back.
  lose(1, 63);
  lose(2, 63);
  step(64);
  EXPECT_TRUE(index->repairs(at_s(64)).empty());
  EXPECT_EQ(index->redundancy().unreadable, 1U);
  const std::string text = waits_for(64);
  for (int column = 0; column < 3; ++column) EXPECT_NE(text.find(name(column)), std::string::npos) << text;
  EXPECT_EQ(text.find(name(0) + " (given up"), std::string::npos) << "it is given up already: " << text;
  EXPECT_NE(text.find(name(1) + " (given up in 59 s)"), std::string::npos) << text;
  for (int column = 0; column < 3; ++column)
    comes(number_of(opened.columns[static_cast<std::size_t>(column)]), 65, 2);
  step(66);
  static_cast<void>(index->repairs(at_s(66)));
  EXPECT_EQ(waits_for(66), "");
  // A node that is emptied where there is none in its place.
  ASSERT_TRUE(index->store_leaves(name(3), true, at_s(67)));
  step(67);
  EXPECT_TRUE(index->repairs(at_s(67)).empty());
  EXPECT_EQ(waits_for(67), "4+2 wants 6 store nodes, 5 take columns");
  index->lost(host0, at_s(68));
  index->lost(host1, at_s(68));
  EXPECT_EQ(waits_for(68), "a di-kvd host, which makes the columns; 4+2 wants 6 store nodes, 5 take columns");
}

TEST_F(StripeTest, RepairsThatAreOffSaySo) {
  start(7, {.placement = {{4, 2}, false}, .repair = RepairPolicy::off, .repair_after = seconds(60)});
  const auto opened = put(1, 0, 4);
  index->lost(store(number_of(opened.columns[0])), at_s(2));
  step(62);
  EXPECT_EQ(index->repairs_wait_for(index->redundancy(), at_s(62)), "repairs to be switched on");
}

// The operator knows better than the clock.
TEST_F(StripeTest, StoreThatIsGivenUpIsRepairedAroundAtOnce) {
  start(8, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  std::vector<wire::meta_put_opened> all;
  for (int chain = 1; chain <= 4; ++chain) all.push_back(put(chain, 0, 4));
  const int gone = number_of(all[0].columns[1]);
  const std::uint64_t had = disks[store(gone).instance].size();
  EXPECT_EQ(index->store_gone("di-kvd.nobody", at_s(2)).error().code, Code::not_found);
  EXPECT_EQ(index->store_gone(store(gone).instance, at_s(2)).error().code, Code::busy);
  index->lost(store(gone), at_s(2));
  const auto given = index->store_gone(store(gone).instance, at_s(3));
  ASSERT_TRUE(given);
  EXPECT_EQ(given->columns, had);
  EXPECT_EQ(given->stripes, 0U);
  EXPECT_FALSE(place_of(gone));
  index->test_check();
  for (int s = 3; s < 20; ++s) {
    step(s);
    for (const Index::Repair& repair : index->repairs(at_s(s))) finish(repair, s);
  }
  for (int chain = 1; chain <= 4; ++chain) EXPECT_EQ(plan(chain, 0, 8, 20).stripes[0].columns.size(), 6U);
  EXPECT_EQ(index->repair_queue().waiting(), 0U);
  EXPECT_EQ(index->pending_frees(), 0U) << "nothing waits for it";
  // It comes all the same: what it has is of no use any more.
  comes(gone, 130, 2);
  step(131);
  EXPECT_TRUE(disks[store(gone).instance].empty());
  EXPECT_TRUE(place_of(gone));
  // With another volume, and without the one that it had: that is no failure of a volume any more.
  EXPECT_EQ(place_of(gone)->volumes.size(), 1U);
  index->volumes(store(gone, 2), {{{1, 2, 0, 0}, {2, 0, 1 << 20, 1 << 20}}}, at_s(132));
  ASSERT_EQ(place_of(gone)->volumes.size(), 2U);
  EXPECT_EQ(place_of(gone)->volumes[0].volume, 1U);
  EXPECT_EQ(place_of(gone)->volumes[0].state, 2U);
}

TEST_F(StripeTest, StoreThatIsGivenUpTakesAlongWhatHasTooLittleElsewhereUntilItComesBack) {
  start(7, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  // Somebody reads of it: what is to be freed waits for that, also of a store that is given up meanwhile.
  ASSERT_FALSE(plan(1, 0, 8).stripes.empty());
  failed(opened.stripe, opened.columns[0], Code::corrupt, 1);
  step(1);
  EXPECT_EQ(index->pending_frees(), 1U);
  std::uint64_t stripes = 0;
  for (int column = 0; column < 3; ++column) {
    const int gone = number_of(opened.columns[static_cast<std::size_t>(column)]);
    index->lost(store(gone), at_s(2));
    const auto given = index->store_gone(store(gone).instance, at_s(3));
    ASSERT_TRUE(given);
    EXPECT_EQ(given->columns, column == 0 ? 0U : 1U);
    stripes += given->stripes;
  }
  EXPECT_EQ(stripes, 1U);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->store_gone(store(number_of(opened.columns[0])).instance, at_s(4))->columns, 0U) << "again";
  index->test_check();
  // The others were not told yet to free what they have.
  for (int n = 0; n < 7; ++n) comes(n, 4, 2);
  index->test_check();
  index->lost(host0, at_s(5));  // with its lease
  for (int s = 5; s < 200; ++s) step(s);
  EXPECT_EQ(index->pending_frees(), 0U);
}

// Readers of a stripe that overlap for ever would keep the place of its column from being free: its repair may have no
// other.
TEST_F(StripeTest, WhatWasLostIsFreedWhenTheReadersOfBeforeHaveEnded) {
  const auto opened = put(1, 0, 4);
  ASSERT_EQ(opened.columns.size(), 6U);  // on every store there is
  std::uint64_t lease = plan(1, 0, 8).lease;
  failed(opened.stripe, opened.columns[0], Code::corrupt, 1);
  step(1);
  EXPECT_TRUE(index->repairs(at_s(1)).empty());
  const std::uint64_t next = plan(1, 0, 8).lease;
  index->release(host0, {{lease}});
  lease = next;
  step(2);
  index->test_check();
  EXPECT_EQ(index->pending_frees(), 0U);
  const auto repairs = index->repairs(at_s(20));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets, (std::vector<wire::Column>{opened.columns[0]}));
  finish(repairs[0], 20);
  index->release(host0, {{lease}});
}

// A store that did not answer refused nothing: no stripe has to go for it.
TEST_F(StripeTest, RoomIsMadeWhereARepairWasRefused) {
  for (const bool answered : {false, true}) {
    start(8, {.placement = {{4, 2}, false}});
    std::vector<wire::meta_put_opened> opened;
    for (int chain = 1; chain <= 20; ++chain) opened.push_back(put(chain, 0, 4));
    failed(opened[0].stripe, opened[0].columns[0], Code::not_found, 2);
    step(2);
    const auto repairs = index->repairs(at_s(2));
    ASSERT_EQ(repairs.size(), 1U);
    const std::uint16_t column = repairs[0].message.targets.at(0).column;
    wire::meta_repaired answer{opened[0].stripe, code_of(Code::no_space), {}, {}};
    if (!answered) answer.unanswered.push_back(column);
    index->repaired(repairs[0].host, answer, at_s(3));
    EXPECT_EQ(index->counters().stripes_evicted > 0, answered);
  }
}

TEST_F(StripeTest, ForgottenStoreHasNothingToFree) {
  start(7, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  const auto opened = put(1, 0, 4);
  const int gone = number_of(opened.columns[0]);
  index->lost(store(gone), at_s(2));
  step(62);
  for (const Index::Repair& repair : index->repairs(at_s(62))) finish(repair, 63);
  EXPECT_EQ(index->pending_frees(), 1U);
  index->store_forgotten("di-kvd.nobody");
  index->store_forgotten(store(number_of(opened.columns[1])).instance);  // it is up
  EXPECT_EQ(index->pending_frees(), 1U);
  index->store_forgotten(store(gone).instance);
  EXPECT_EQ(index->pending_frees(), 0U);
  // It comes all the same.
  comes(gone, 130, 2);
  step(131);
  EXPECT_TRUE(disks[store(gone).instance].empty());
}

// What waits beyond half of the queue is looked at again without a pause, too.
TEST_F(StripeTest, FirstHostStartsWhatWaitedForOne) {
  start(8, {.placement = {{4, 2}, false}, .repairs = {.waiting_max = 2}});
  index->lost(host0, at_s(1));
  std::vector<wire::meta_put_opened> opened;
  for (int chain = 1; chain <= 2; ++chain) {
    const auto offered = pages(chain, 0, 4);
    opened.push_back(open(offered, 1, host1));
    ASSERT_EQ(write(opened.back(), offered, {}, 1, host1), 0);
  }
  index->lost(host1, at_s(2));
  for (const auto& put : opened) failed(put.stripe, put.columns[0], Code::not_found, 3);
  step(3);
  EXPECT_TRUE(index->repairs(at_s(3)).empty());
  EXPECT_EQ(index->repair_queue().waiting(), 1U) << "the other is looked at again";
  ASSERT_TRUE(index->host_up(host1));
  EXPECT_LE(index->next_due(), at_s(4));
  step(4);
  std::size_t started = 0;
  for (int s = 4; s < 6; ++s) started += index->repairs(at_s(s)).size();
  EXPECT_EQ(started, 2U);
}

// G02: a store that is away for a moment causes no work.
TEST_F(StripeTest, RepairOfAStoreThatCameBackInTimeIsDropped) {
  start(8, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  index->repair_now(at_s(0));
  const auto opened = put(1, 0, 4);
  const int away = number_of(opened.columns[1]);
  index->lost(store(away), at_s(2));
  step(62);
  EXPECT_EQ(index->repair_queue().waiting(), 1U);
  comes(away, 63, 2);
  EXPECT_TRUE(index->repairs(at_s(63)).empty());
  EXPECT_EQ(index->repair_queue().waiting(), 0U);
  EXPECT_EQ(index->counters().repairs_unneeded, 1U);
}

// G02: nine of ten go one after the other, and come back one after the other.
TEST_F(StripeTest, StoresThatGoAndComeBackOneByOneCauseNoWork) {
  start(10, {.placement = {{4, 2}, false}, .repair_after = seconds(60)});
  std::vector<wire::meta_put_opened> opened;
  for (int chain = 1; chain <= 20; ++chain) opened.push_back(put(chain, 0, 4));
  const auto at_rest = [&](int s) {
    step(s);
    return index->repairs(at_s(s)).empty() && index->repair_queue().waiting() == 0;
  };
  for (int n = 1; n < 10; ++n) {
    index->lost(store(n), at_s(2 + n));
    EXPECT_TRUE(at_rest(2 + n)) << n;
  }
  EXPECT_NE(open(pages(99, 0, 4), 12).code, 0);  // there is no place for it
  for (int n = 1; n < 10; ++n) {
    comes(n, 20 + n, 2);
    EXPECT_TRUE(at_rest(20 + n)) << n;
  }
  EXPECT_TRUE(at_rest(200));
  for (int chain = 1; chain <= 20; ++chain) {
    EXPECT_EQ(plan(chain, 0, 8, 200).stripes.at(0).columns,
              opened[static_cast<std::size_t>(chain - 1)].columns);
  }
  EXPECT_EQ(index->counters().repairs_started, 0U);
  EXPECT_EQ(index->pending_frees(), 0U);
  EXPECT_EQ(open(pages(99, 0, 4), 201).code, 0);
}

TEST_F(StripeTest, WorstStripesFirstThenThoseInUse) {
  start(9, {.placement = {{4, 2}, false}, .repair_hot = seconds(100)});
  const auto cold = put(1, 0, 4, 1);
  const auto hot = put(2, 0, 4, 300);
  const auto worst = put(3, 0, 4, 1);
  for (const auto* opened : {&cold, &hot, &worst}) {
    failed(opened->stripe, opened->columns[0], Code::not_found, 301);
  }
  failed(worst.stripe, worst.columns[1], Code::not_found, 301);
  std::vector<std::uint64_t> order;
  for (int s = 302; s < 305; ++s) {  // the budget lets one start at a time
    for (const Index::Repair& repair : index->repairs(at_s(s))) order.push_back(repair.message.stripe.stripe);
  }
  EXPECT_EQ(order, (std::vector<std::uint64_t>{worst.stripe, hot.stripe, cold.stripe}));
}

// What is freed of the old column must not take the new one with it.
TEST_F(StripeTest, AColumnIsMadeAnewOnAnotherVolumeOfItsStore) {
  const auto tell = [&](std::uint16_t failed) {
    wire::meta_volumes volumes;
    for (std::uint16_t v = 0; v < 2; ++v) {
      volumes.volumes.push_back({v, v == failed ? volume_failed : std::uint8_t{0}, 1 << 30, 1 << 30});
    }
    index->volumes(store(0), volumes, at_s(1));
  };
  tell(2);
  const auto opened = put(1, 0, 4);
  const auto there = std::find_if(opened.columns.begin(), opened.columns.end(),
                                  [&](const wire::Column& column) { return number_of(column) == 0; });
  ASSERT_NE(there, opened.columns.end());
  tell(there->volume);
  step(1);
  const auto repairs = index->repairs(at_s(1));
  ASSERT_EQ(repairs.size(), 1U);
  ASSERT_EQ(repairs[0].message.targets.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets[0].instance, store(0).instance);
  EXPECT_NE(repairs[0].message.targets[0].volume, there->volume);
  finish(repairs[0], 2);
  index->test_check();
  step(500);
  EXPECT_EQ(disks[store(0).instance].count({opened.stripe, there->column}), 1U);
  EXPECT_EQ(hit(1, 8), 8U);
}

// In a lab a node may get two columns of a stripe.
TEST_F(StripeTest, OfTwoColumnsThatAreMadeAnewOnAStoreOneMayFail) {
  start(7, {.placement = {{4, 2}, true}});
  const auto offered = pages(1, 0, 4);
  const auto opened = open(offered);
  ASSERT_EQ(write(opened, offered, {1, 4}), 0);
  std::set<int> slow;
  for (const wire::Column& column : opened.columns) slow.insert(number_of(column));
  ASSERT_EQ(slow.size(), 6U);
  for (const int n : slow) index->volumes(store(n), {{{0, 1, 1 << 30, 1 << 30}}}, at_s(1));
  const auto repairs = index->repairs(at_s(1));
  ASSERT_EQ(repairs.size(), 1U);
  ASSERT_EQ(repairs[0].message.targets.size(), 2U);
  for (const wire::Column& target : repairs[0].message.targets)
    EXPECT_FALSE(slow.contains(number_of(target)));
  index->repaired(repairs[0].host, {opened.stripe, code_of(Code::io), {4}, {}}, at_s(2));
  index->test_check();
}

TEST_F(StripeTest, FailedRepairsAreTriedAgainLaterByTheNextHost) {
  start(7, {.placement = {{4, 2}, false}});
  const auto offered = pages(1, 0, 4);
  write(open(offered), offered, {1});
  auto repairs = index->repairs(at_s(1));
  ASSERT_EQ(repairs.size(), 1U);
  const Holder first = repairs[0].host;
  index->repaired(first, {repairs[0].message.stripe.stripe, code_of(Code::busy), {}, {}}, at_s(2));
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_TRUE(index->repairs(at_s(2)).empty());
  EXPECT_EQ(index->next_due(), at_s(3));
  EXPECT_EQ(index->pending_frees(), 0U);  // no store was asked for anything
  repairs = index->repairs(at_s(3));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_NE(repairs[0].host, first);
  index->lost(repairs[0].host, at_s(200));  // and that one dies
  EXPECT_EQ(index->repair_queue().running(), 0U);
  EXPECT_EQ(index->repair_queue().waiting(), 1U);
  EXPECT_EQ(index->counters().repairs_failed, 2U);
}

// A new store was asked for columns before its hosts had found it, and each waited for a grace in vain.
TEST_F(StripeTest, OnlyWhatMayHaveBeenWrittenIsFreedAfterARepair) {
  enum class Left { unasked, unanswered, lost };
  for (const Left left : {Left::unasked, Left::unanswered, Left::lost}) {
    SCOPED_TRACE(static_cast<int>(left));
    start(7, {.placement = {{4, 2}, false}});
    const auto offered = pages(1, 0, 4);
    write(open(offered), offered, {1});
    const auto repairs = index->repairs(at_s(1));
    ASSERT_EQ(repairs.size(), 1U);
    const Holder target = store(number_of(repairs[0].message.targets.at(0)));
    if (left == Left::lost) index->lost(target, at_s(2));
    std::vector<std::uint32_t> unanswered;
    if (left != Left::unasked) unanswered.push_back(1);
    index->repaired(repairs[0].host,
                    {repairs[0].message.stripe.stripe, code_of(Code::unreachable), {}, unanswered}, at_s(2));
    // What is lost says itself what it has when it is back.
    EXPECT_EQ(index->pending_frees(), left == Left::unanswered ? 1U : 0U);
    index->test_check();
  }
}

// A host refuses a repair of more columns than parity makes up for.
TEST_F(StripeTest, MoreStoresLeaveThanAStripeCanLose) {
  start(10, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  for (int column = 0; column < 4; ++column) {
    ASSERT_TRUE(index->store_leaves(
        store(number_of(opened.columns[static_cast<std::size_t>(column)])).instance, true, at_s(2)));
  }
  std::size_t made = 0;
  for (int s = 2; s < 200; ++s) {
    step(s);
    for (const Index::Repair& repair : index->repairs(at_s(s))) {
      EXPECT_LE(repair.message.targets.size(), 2U);
      made += repair.message.targets.size();
      finish(repair, s);
    }
  }
  EXPECT_EQ(made, 4U);
}

TEST_F(StripeTest, StoreThatLeavesIsEmptied) {
  start(8, {.placement = {{4, 2}, false}});
  std::vector<wire::meta_put_opened> all;
  for (int chain = 1; chain <= 10; ++chain) all.push_back(put(chain, 0, 4));
  const int leaving = number_of(all[0].columns[0]);
  EXPECT_FALSE(index->store_leaves("di-kvd.nobody", true, at_s(2)));
  ASSERT_TRUE(index->store_leaves(store(leaving).instance, true, at_s(2)));
  for (int s = 2; s < 200; ++s) {
    step(s);
    for (const Index::Repair& repair : index->repairs(at_s(s))) {
      for (const wire::Column& column : repair.message.targets) EXPECT_NE(number_of(column), leaving);
      finish(repair, s);
    }
  }
  EXPECT_TRUE(disks[store(leaving).instance].empty());
  for (const Index::Place& place : index->places()) {
    if (place.instance == store(leaving).instance) {
      EXPECT_EQ(place.pages, 0U);
      EXPECT_EQ(place.bytes, 0U);
      EXPECT_TRUE(place.leaves);
    }
  }
  for (int chain = 1; chain <= 10; ++chain) EXPECT_EQ(plan(chain, 0, 8, 200).stripes[0].columns.size(), 6U);
  const auto later = put(20, 0, 4, 201);
  for (const wire::Column& column : later.columns) EXPECT_NE(number_of(column), leaving);
}

// As a cache's stores are, of one that has room the classes may be taken; and nobody puts anything meanwhile.
TEST_F(StripeTest, RoomForWhatAStoreThatLeavesHasIsMadeOnTheFullOnes) {
  start(3, {.placement = {{1, 0}, false}});
  for (int chain = 1; chain <= 60; ++chain) put(chain, 0, 1);
  const int leaving = 0;
  const std::size_t had = disks[store(leaving).instance].size();
  std::map<std::string, std::size_t> places;
  for (const int n : {1, 2}) places[store(n).instance] = disks[store(n).instance].size();
  ASSERT_TRUE(had > 0);
  ASSERT_TRUE(index->store_leaves(store(leaving).instance, true, at_s(2)));
  for (int s = 2; s < 400; ++s) {
    for (const Index::Repair& repair : index->repairs(at_s(s))) {
      const std::string& to = repair.message.targets.at(0).instance;
      if (disks[to].size() < places.at(to)) {
        finish(repair, s);
      } else {
        const std::size_t before = index->stripes() + index->pending_frees();
        index->repaired(repair.host, {repair.message.stripe.stripe, code_of(Code::no_space), {}, {}},
                        at_s(s));
        // what goes, and nothing that was not written
        EXPECT_EQ(index->stripes() + index->pending_frees(), before);
      }
    }
    step(s);
  }
  EXPECT_TRUE(disks[store(leaving).instance].empty());
  EXPECT_EQ(index->stripes(), disks[store(1).instance].size() + disks[store(2).instance].size());
  EXPECT_GT(index->stripes(), 60U - 2 * had);
}

TEST_F(StripeTest, WhatWasBeingWrittenWhenAStoreWasToldToLeaveGoesToo) {
  start(7, {.placement = {{4, 2}, false}});
  const auto offered = pages(1, 0, 4);
  const auto opened = open(offered);
  ASSERT_EQ(opened.code, 0);
  const int leaving = number_of(opened.columns[2]);
  ASSERT_TRUE(index->store_leaves(store(leaving).instance, true, at_s(2)));
  step(3);  // nothing of it is there
  ASSERT_EQ(write(opened, offered, {}, 4), 0);
  const auto repairs = index->repairs(at_s(4));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets.at(0).column, opened.columns[2].column);
  finish(repairs[0], 5);
  step(200);
  EXPECT_TRUE(disks[store(leaving).instance].empty());
}

TEST_F(StripeTest, AStoreThatIsToLeaveAndBringsStripesIsEmptiedToo) {
  start(2, {.placement = {{1, 0}, false}});
  const auto opened = put(1, 0, 1);
  const int leaving = number_of(opened.columns[0]);
  const auto kept = disks;
  start(0, {.run = 2, .placement = {{1, 0}, false}});
  disks = kept;
  index->restore_leaving(store(leaving).instance, at_s(0));
  comes(1 - leaving, 1);
  step(1);
  comes(leaving, 2);
  EXPECT_EQ(hit(1, 2), 2U);
  step(2);
  const auto repairs = index->repairs(at_s(2));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(number_of(repairs[0].message.targets.at(0)), 1 - leaving);
}

// What is brought back is not what made the stripe wait for repair.
TEST_F(StripeTest, AStoreThatComesBackEndsNoDrain) {
  start(7, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  const int leaving = number_of(opened.columns[0]);
  const int away = number_of(opened.columns[1]);
  const auto kept = disks;
  index->lost(store(away), at_s(2));
  ASSERT_TRUE(index->store_gone(store(away).instance, at_s(2)).ok());
  ASSERT_TRUE(index->store_leaves(store(leaving).instance, true, at_s(2)));
  disks[store(away).instance] = kept.at(store(away).instance);
  comes(away, 3, 2);
  step(3);
  const auto repairs = index->repairs(at_s(4));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets.at(0).column, opened.columns[0].column);
}

TEST_F(StripeTest, AStripeThatBecomesHotIsRepairedAndADrainMovesColdOnesToo) {
  start(8, {.placement = {{4, 2}, false},
            .repair = RepairPolicy::hot,
            .repair_after = seconds(60),
            .repair_hot = seconds(3600)});
  const auto opened = put(1, 0, 4);
  put(2, 0, 4);
  index->lost(store(number_of(opened.columns[0])), at_s(2));
  step(5000);
  EXPECT_TRUE(index->repairs(at_s(5000)).empty());  // nobody has used them for more than an hour
  plan(1, 0, 8, 5001);
  ASSERT_EQ(index->repairs(at_s(5002)).size(), 1U);
  ASSERT_TRUE(index->store_leaves(store(number_of(opened.columns[1])).instance, true, at_s(5003)));
  step(5003);
  EXPECT_FALSE(index->repairs(at_s(5004)).empty());
}

TEST_F(StripeTest, AdoptedColumnByColumn) {
  const auto opened = put(1, 0, 4);
  auto kept = disks;
  start(0, {.run = 2, .placement = {{4, 2}, false}});
  disks = kept;
  // Two never come back.
  const std::vector<int> away{number_of(opened.columns[2]), number_of(opened.columns[4])};
  int here = 0;
  for (int n = 0; n < 6; ++n) {
    if (std::count(away.begin(), away.end(), n) > 0) continue;
    EXPECT_EQ(hit(1, 8) == 8U, here >= 4) << here;
    EXPECT_TRUE(comes(n, 1).unknown.empty());
    ++here;
  }
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(index->counters().stripes_adopted, 1U);
  const auto waits_for = [&](int s) { return index->repairs_wait_for(index->redundancy(), at_s(s)); };
  EXPECT_EQ(waits_for(20),
            "what stores may still bring of stripes found since the start: 1 (decided in 100 s)");
  step(200);
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(waits_for(200), "4+2 wants 6 store nodes, 4 take columns");
}

TEST_F(StripeTest, TooFewColumnsAreFreedAfterTheGraceOnly) {
  put(1, 0, 4);
  auto kept = disks;
  start(0, {.run = 2, .placement = {{4, 2}, false}});
  disks = kept;
  for (int n = 0; n < 3; ++n) EXPECT_TRUE(comes(n, 1).unknown.empty());
  step(119);
  EXPECT_EQ(index->stripes(), 1U);
  ASSERT_TRUE(index->store_up(store(3), at_s(119)));  // it has not told yet
  step(120);
  EXPECT_EQ(index->stripes(), 1U);
  index->lost(store(3), at_s(121));
  step(180);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->counters().stripes_incomplete, 1U);
  for (int n = 0; n < 3; ++n) EXPECT_TRUE(disks[store(n).instance].empty());
}

// F18: six files, of which two are the same column.
TEST_F(StripeTest, SecondCopyOfAColumnDoesNotHideThatAnotherIsMissing) {
  start(7, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  int spare = 0;
  for (int n = 0; n < 7; ++n) {
    if (std::none_of(opened.columns.begin(), opened.columns.end(),
                     [&](const auto& c) { return number_of(c) == n; })) {
      spare = n;
    }
  }
  auto kept = disks;
  kept[store(spare).instance][{opened.stripe, 1}] = kept[opened.columns[1].instance].at({opened.stripe, 1});
  kept[opened.columns[4].instance].clear();
  start(0, {.run = 2, .placement = {{4, 2}, false}});
  disks = kept;
  for (int n = 0; n < 7; ++n) comes(n, 1);
  EXPECT_EQ(index->counters().columns_duplicate, 1U);
  EXPECT_EQ(plan(1, 0, 8).stripes[0].columns.size(), 5U);
  for (int s = 2; s < 300; ++s) {
    step(s);
    for (const Index::Repair& repair : index->repairs(at_s(s))) {
      ASSERT_EQ(repair.message.targets.size(), 1U);
      EXPECT_EQ(repair.message.targets[0].column, 4);
      finish(repair, s);
    }
  }
  EXPECT_EQ(plan(1, 0, 8, 300).stripes[0].columns.size(), 6U);
  std::map<std::uint16_t, int> copies;
  for (const auto& [instance, disk] : disks) {
    for (const auto& [id, shard] : disk) ++copies[id.second];
  }
  EXPECT_EQ(copies.size(), 6U);
  for (const auto& [column, count] : copies) EXPECT_EQ(count, 1) << column;
}

TEST_F(StripeTest, FailedVolumeIsRepairedAtOnce) {
  start(7, {.placement = {{4, 2}, false}});
  const auto opened = put(1, 0, 4);
  index->volumes(store(number_of(opened.columns[3])), {{{0, 2, 1000, 0}}}, at_s(2));
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_TRUE(plan(1, 6, 2).pages.at(0).columns.empty());
  step(2);
  const auto repairs = index->repairs(at_s(2));
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_EQ(repairs[0].message.targets.at(0).column, 3);
}

TEST_F(StripeTest, SlowVolumeTakesNoNewColumns) {
  start(7, {.placement = {{4, 2}, false}});
  const auto first = put(1, 0, 4);
  const int slow = number_of(first.columns[0]);
  index->volumes(store(slow), {{{0, 1, 1000, 500}}}, at_s(2));
  for (int chain = 2; chain < 20; ++chain) {
    const auto opened = put(chain, 0, 4, 3);
    for (const wire::Column& column : opened.columns) EXPECT_NE(number_of(column), slow);
  }
  EXPECT_EQ(plan(1, 0, 8, 3).stripes[0].columns.size(), 6U);  // it still can be read
}

TEST_F(StripeTest, SeveralColumnsOnANodeOfALaboratory) {
  start(2, {.placement = {{2, 1}, true}});
  const auto offered = pages(1, 0, 2);
  const auto opened = open(offered);
  ASSERT_EQ(opened.columns.size(), 3U);
  EXPECT_EQ(write(opened, offered), 0);
  // One of the two columns of that node is damaged: the other stays.
  std::map<std::string, int> on;
  for (const wire::Column& column : opened.columns) ++on[column.instance];
  const auto both = std::find_if(on.begin(), on.end(), [](const auto& o) { return o.second == 2; });
  ASSERT_NE(both, on.end());
  const auto damaged = std::find_if(opened.columns.begin(), opened.columns.end(),
                                    [&](const auto& c) { return c.instance == both->first; });
  failed(opened.stripe, *damaged, Code::corrupt, 2);
  step(2);
  EXPECT_EQ(disks[both->first].size(), 1U);
  EXPECT_EQ(hit(1, 4), 4U);
}

TEST_F(StripeTest, FullVolumesMakeRoomBeforeTheyAreFull) {
  start(6, {.placement = {{4, 2}, false}});
  for (int n = 0; n < 6; ++n) {
    index->volumes(store(n), {{{0, 0, 100 * page_bytes, 100 * page_bytes}}}, at_s(1));
  }
  for (int chain = 1; chain <= 150; ++chain) {
    put(chain, 0, 4, 1);
    step(1);
    for (const auto& [instance, disk] : disks) ASSERT_LE(disk.size(), 93U);
  }
  EXPECT_GT(index->counters().stripes_evicted, 40U);
  EXPECT_EQ(hit(150, 8), 8U);
  EXPECT_EQ(hit(1, 8), 0U);
}

// What was on it counts against nobody: the other volume of its store has room.
TEST_F(StripeTest, AFailedVolumeTakesNoRoomOfTheOthers) {
  start(6, {.placement = {{4, 2}, false}});
  const auto volumes = [&](std::uint8_t second) {
    for (int n = 0; n < 6; ++n) {
      index->volumes(store(n),
                     {{{0, 0, 100 * page_bytes, 100 * page_bytes},
                       {1, n == 0 ? second : std::uint8_t{0}, 100 * page_bytes, 100 * page_bytes}}},
                     at_s(1));
    }
  };
  volumes(0);
  for (int chain = 1; chain <= 150; ++chain) put(chain, 0, 4, 1);  // three quarters of every volume
  ASSERT_EQ(index->counters().stripes_evicted, 0U);
  volumes(volume_failed);
  for (int chain = 151; chain <= 160; ++chain) put(chain, 0, 4, 1);
  EXPECT_EQ(index->counters().stripes_evicted, 0U);
  EXPECT_EQ(hit(1, 8), 8U);
}

TEST_F(StripeTest, NothingIsEvictedWhileStoresBringWhatTheyHave) {
  for (int chain = 1; chain <= 30; ++chain) put(chain, 0, 4);
  const auto kept = disks;
  start(0, {.run = 2, .placement = {{4, 2}, false}});  // without a catalogue
  disks = kept;
  for (int n = 0; n < 6; ++n) {
    ASSERT_TRUE(index->store_up(store(n), at_s(1)));
    index->volumes(store(n), {{{0, 0, 100 * page_bytes, 70 * page_bytes}}}, at_s(1));
    wire::meta_inventory message{0, true, {}};
    for (const auto& [id, shard] : disks[store(n).instance]) message.shards.push_back(shard);
    ASSERT_TRUE(index->inventory(store(n), message, at_s(1)));
    step(1);
  }
  EXPECT_EQ(index->counters().stripes_evicted, 0U);
  EXPECT_EQ(index->stripes(), 30U);
  put(40, 0, 4, 2);
  EXPECT_EQ(index->evictor().capacity_bytes(), 600 * page_bytes);
  // Half of it is on probation, as before anything was known.
  EXPECT_EQ(index->evictor().small_share_bytes(), 300 * page_bytes);
}

// G06: what was restored is no proof; nobody confirms the dead.
TEST_F(StripeTest, RestoredStripesAreMatchedBeforeTheInventoriesAreIn) {
  start(6, {.placement = {{4, 2}, false}, .record_changes = true});
  const auto kept = put(1, 0, 4);
  const auto stale = put(2, 0, 4);
  std::vector<StripeRow> rows;
  for (StripeChange& change : index->take_changes(10)) rows.push_back(*std::move(change.row));
  EXPECT_EQ(rows.size(), 2U);
  EXPECT_EQ(index->changes(), 0U);
  index->drop_stripe(stale.stripe, at_s(2));
  const auto gone = index->take_changes(10);  // this batch is not written any more
  ASSERT_EQ(gone.size(), 1U);
  EXPECT_FALSE(gone[0].row.has_value());
  auto disks_now = disks;
  for (auto& [instance, disk] : disks_now) {
    std::erase_if(disk, [&](const auto& d) { return d.first.first == stale.stripe; });
  }
  start(0, {.run = 2, .placement = {{4, 2}, false}, .record_changes = true});
  disks = disks_now;
  for (const StripeRow& row : rows) EXPECT_TRUE(index->restore(row, at_s(3)));
  EXPECT_FALSE(index->restore(rows[0], at_s(3)));
  EXPECT_EQ(hit(1, 8), 0U);  // nobody is there
  for (int n = 0; n < 6; ++n) ASSERT_TRUE(index->store_up(store(n), at_s(3)));
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(plan(1, 0, 8, 3).stripes[0].columns.size(), 6U);
  for (int n = 0; n < 6; ++n) comes(n, 4);
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(hit(2, 8), 0U);  // no store confirmed it
  EXPECT_EQ(index->stripes(), 1U);
  EXPECT_GT(put(3, 0, 4, 5).stripe, kept.stripe);
  EXPECT_GE(index->changes(), 2U);
}

}  // namespace
}  // namespace di::directory
