// The index with several columns in a stripe.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/crypto.h"
#include "directory/index.h"

namespace di::directory {
namespace {

const Holder host0{"di-kvd.host0", 1};
const Holder host1{"di-kvd.host1", 1};
constexpr std::uint64_t page_bytes = 4096;

Instant at_s(int s) {
  return Instant{} + seconds(1000 + s);
}

Key key(int chain, int block) {
  Key out;
  out.raw = sha256(as_bytes(std::to_string(chain) + "/" + std::to_string(block)));
  return out;
}

std::vector<Key> keys(int chain, int first, int count) {
  std::vector<Key> out;
  for (int i = 0; i < count; ++i) out.push_back(key(chain, first + i));
  return out;
}

// Pages of two blocks each, `first` counts pages.
std::vector<wire::PutPage> pages(int chain, int first, int count, std::uint64_t bytes = page_bytes) {
  std::vector<wire::PutPage> out;
  for (int p = first; p < first + count; ++p) {
    out.push_back({key(chain, 2 * p - 1), keys(chain, 2 * p, 2), {1, 2}, bytes});
  }
  return out;
}

std::uint16_t code_of(Code c) {
  return static_cast<std::uint16_t>(c);
}

class StripeTest : public testing::Test {
 protected:
  StripeTest() { start(6, {.placement = {{4, 2}, false}}); }
  ~StripeTest() override { index->test_check(); }

  void start(int stores, Index::Options options) {
    options.repairs.bytes_per_s = 1'000'000'000;
    index.emplace(options, at_s(0));
    EXPECT_TRUE(index->host_up(host0));
    EXPECT_TRUE(index->host_up(host1));
    disks.clear();
    for (int n = 0; n < stores; ++n) comes(n, 0);
  }
  static Holder store(int n, std::uint32_t generation = 1) {
    return {"di-kvd.store" + std::to_string(n), generation};
  }
  wire::meta_inventory_ack comes(int n, int s, std::uint32_t generation = 1) {
    const Holder who = store(n, generation);
    EXPECT_TRUE(index->store_up(who, at_s(s), {"h" + std::to_string(n), "", ""}));
    index->volumes(who, {{{0, 0, std::uint64_t{1} << 40, std::uint64_t{1} << 40}}}, at_s(s));
    wire::meta_inventory message{0, true, {}};
    for (const auto& [id, shard] : disks[who.instance]) message.shards.push_back(shard);
    const auto ack = index->inventory(who, message, at_s(s));
    EXPECT_TRUE(ack);
    for (const std::uint64_t id : ack->unknown) free_all(who.instance, id);
    return ack.value_or(wire::meta_inventory_ack{});
  }
  void free_all(const std::string& instance, std::uint64_t id) {
    std::erase_if(disks[instance], [&](const auto& d) { return d.first.first == id; });
  }
  std::uint32_t hit(int chain, int count) { return index->match({Key{}, keys(chain, 0, count)}).hit_blocks; }
  wire::meta_planned plan(int chain, int first, int count, int s = 1) {
    return index->plan(host0, RequestId{}, {keys(chain, first, count)}, at_s(s));
  }
  wire::meta_put_opened open(const std::vector<wire::PutPage>& offered, int s = 1,
                             const Holder& host = host0) {
    return index->put_open(host, {Key{}, offered, tenant}, at_s(s));
  }
  // As a host does: writes every column but the failed ones, then commits.
  std::uint16_t write(const wire::meta_put_opened& opened, const std::vector<wire::PutPage>& offered,
                      std::vector<std::uint32_t> failed = {}, int s = 1, const Holder& host = host0) {
    const std::vector<wire::PutPage> mine(offered.begin() + opened.first,
                                          offered.begin() + opened.first + opened.pages);
    const StripeForm form = StripeForm::of_put({opened.data_columns, opened.parity_columns}, mine);
    const wire::StripeCode code{opened.data_columns, opened.parity_columns,
                                std::vector<std::uint32_t>(form.code_crcs(2), 7)};
    for (const wire::Column& column : opened.columns) {
      if (std::count(failed.begin(), failed.end(), column.column) > 0) continue;
      disks[column.instance][{opened.stripe, column.column}] = {
          opened.stripe, column.volume, column.column, 1, Key{}, mine, code, tenant};
    }
    wire::meta_put_commit commit{opened.stripe, {}, code};
    for (const std::uint32_t column : failed) {
      commit.failed_columns.push_back({static_cast<std::uint16_t>(column), code_of(Code::no_space)});
    }
    return index->put_commit(host, commit, at_s(s)).code;
  }
  wire::meta_put_opened put(int chain, int first, int count, int s = 1) {
    const auto offered = pages(chain, first, count);
    const auto opened = open(offered, s);
    EXPECT_EQ(opened.code, 0);
    EXPECT_EQ(write(opened, offered, {}, s), 0);
    return opened;
  }
  static int number_of(const wire::Column& column) { return column.instance.back() - '0'; }
  // Runs step() and what it frees.
  void step(int s) {
    for (const Index::Free& free : index->step(at_s(s))) {
      for (std::size_t i = 0; i < free.message.stripes.size(); ++i) {
        if (free.message.columns.empty()) {
          free_all(free.store, free.message.stripes[i]);
        } else {
          disks[free.store].erase({free.message.stripes[i], free.message.columns[i]});
        }
      }
    }
  }
  // Somebody read it there and it was not what it should be.
  void failed(std::uint64_t stripe, const wire::Column& column, Code code, int s,
              std::uint32_t generation = 1) {
    index->read_failed(
        {stripe << 8, column.column, code_of(code), column.instance, generation, column.volume}, at_s(s));
  }
  // As a host does: writes the targets and answers.
  void finish(const Index::Repair& repair, int s) {
    wire::meta_repaired answer{repair.message.stripe.stripe, 0, {}};
    for (const wire::Column& column : repair.message.targets) {
      disks[column.instance][{answer.stripe, column.column}] = {answer.stripe,
                                                                column.volume,
                                                                column.column,
                                                                1,
                                                                Key{},
                                                                repair.message.pages,
                                                                repair.message.stripe.code,
                                                                repair.message.tenant};
      answer.written.push_back(column.column);
    }
    index->repaired(repair.host, answer, at_s(s));
  }

  std::optional<Index::Place> place_of(int n) const {
    for (const Index::Place& place : index->places()) {
      if (place.instance == store(n).instance) return place;
    }
    return std::nullopt;
  }

  // Bytes and stripes of each tenant that has some.
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> held() const {
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> out;
    for (const kv::Evictor::TenantRow& row : index->evictor().tenants()) {
      if (row.items > 0) out[row.tenant] = {row.bytes, row.items};
    }
    return out;
  }

  std::uint64_t tenant = 0;  // who puts
  std::optional<Index> index;
  // instance -> (stripe, column) -> header
  std::map<std::string, std::map<std::pair<std::uint64_t, std::uint16_t>, wire::ShardRecord>> disks;
};

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
  index->repaired(repairs[0].host, {opened.stripe, code_of(Code::io), {4}}, at_s(2));
  index->test_check();
}

TEST_F(StripeTest, FailedRepairsAreTriedAgainLaterByTheNextHost) {
  start(7, {.placement = {{4, 2}, false}});
  const auto offered = pages(1, 0, 4);
  write(open(offered), offered, {1});
  auto repairs = index->repairs(at_s(1));
  ASSERT_EQ(repairs.size(), 1U);
  const Holder first = repairs[0].host;
  index->repaired(first, {repairs[0].message.stripe.stripe, code_of(Code::busy), {}}, at_s(2));
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_TRUE(index->repairs(at_s(2)).empty());
  EXPECT_EQ(index->next_due(), at_s(3));
  repairs = index->repairs(at_s(3));
  // The target may have been written: it is free again after its grace.
  for (int s = 3; repairs.empty() && s < 200; ++s) {
    step(s);
    repairs = index->repairs(at_s(s));
  }
  ASSERT_EQ(repairs.size(), 1U);
  EXPECT_NE(repairs[0].host, first);
  index->lost(repairs[0].host, at_s(200));  // and that one dies
  EXPECT_EQ(index->repair_queue().running(), 0U);
  EXPECT_EQ(index->repair_queue().waiting(), 1U);
  EXPECT_EQ(index->counters().repairs_failed, 2U);
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
        index->repaired(repair.host, {repair.message.stripe.stripe, code_of(Code::no_space), {}}, at_s(s));
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
  step(200);
  EXPECT_EQ(hit(1, 8), 8U);
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

// ---- cross-check

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
    return index->repaired(repair.host, {repair.message.stripe.stripe, code_of(code), {}}, at_s(s));
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

// ---- Tenants

TEST_F(StripeTest, AStripeKeepsItsTenantThroughCatalogueInventoryAndRepair) {
  const Index::Options options{
      .placement = {{4, 2}, false}, .repair_after = seconds(10), .record_changes = true};
  start(7, options);
  tenant = 7;
  const auto first = put(1, 0, 4);
  tenant = 0x8000000000000009;
  put(2, 0, 4);
  put(2, 4, 4);
  const auto before = held();
  EXPECT_EQ(before, (std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>>{
                        {7, {6 * page_bytes, 1}}, {tenant, {12 * page_bytes, 2}}}));
  std::vector<StripeRow> rows;
  for (StripeChange& change : index->take_changes(10)) rows.push_back(*std::move(change.row));
  ASSERT_EQ(rows.size(), 3U);
  const auto kept = disks;
  // What a store has lost is made anew with the tenant in its header.
  const int gone = number_of(first.columns.front());
  index->lost(store(gone), at_s(2));
  step(20);
  const auto repairs = index->repairs(at_s(20));
  ASSERT_FALSE(repairs.empty());
  for (const Index::Repair& repair : repairs) {
    EXPECT_EQ(repair.message.tenant, repair.message.stripe.stripe == first.stripe ? 7U : tenant);
  }
  // The catalogue alone, then the inventories as well, then the inventories alone.
  for (const bool catalogue : {true, false}) {
    Index::Options again = options;
    again.run = 2;
    start(0, again);
    disks = kept;
    if (catalogue) {
      for (const StripeRow& row : rows) EXPECT_TRUE(index->restore(row, at_s(3)));
      EXPECT_EQ(held(), before);
    }
    for (int n = 0; n < 7; ++n) comes(n, 4);
    EXPECT_EQ(held(), before);
    EXPECT_EQ(index->stripes(), 3U);
    EXPECT_EQ(index->counters().columns_duplicate, 0U);
  }
  // What says something else about a stripe is no column of it.
  auto& [instance, disk] = *disks.begin();
  disk.begin()->second.tenant = 8;
  const std::uint64_t counted = index->counters().stripes_missing;
  comes(instance.back() - '0', 200, 2);
  EXPECT_EQ(index->counters().stripes_missing, counted + 1);
  EXPECT_EQ(held(), before);
}

// What is above a quota is said to the writer and counted, whoever else has room.
TEST_F(StripeTest, APutAboveTheQuotaOfItsTenantIsRefused) {
  const auto row = [&](std::uint64_t number) { return index->evictor().tenant(number); };
  const auto stored = [&] {
    std::uint64_t bytes = 0;
    for (const Index::Place& place : index->places()) bytes += place.store ? place.bytes : 0;
    return bytes;
  };
  Index::Options options{.tenants = {{7, {.quota_bytes = 13 * page_bytes}}}, .placement = {{4, 2}, false}};
  start(6, options);
  tenant = 7;
  put(1, 0, 4);
  const auto second = open(pages(1, 4, 4));
  EXPECT_EQ(second.code, 0);
  EXPECT_EQ(row(7).bytes, 12 * page_bytes);  // what is being written counts
  EXPECT_EQ(open(pages(1, 4, 4)).stripe, second.stripe);
  EXPECT_EQ(row(7).bytes, 12 * page_bytes);
  EXPECT_EQ(stored(), 12 * page_bytes);
  // Known pages in front of the refused ones are named.
  const auto refused = open(pages(1, 0, 1));
  EXPECT_EQ(refused.code, code_of(Code::exists));
  auto offered = pages(1, 0, 4);
  for (const wire::PutPage& page : pages(1, 8, 2)) offered.push_back(page);
  offered[4].parent = offered[3].keys.back();
  EXPECT_EQ(open(offered).code, code_of(Code::over_quota));
  EXPECT_EQ(open(offered).first, 4);
  EXPECT_EQ(row(7).refused, 2U);
  EXPECT_EQ(index->counters().puts_over_quota, 2U);
  EXPECT_EQ(stored(), 12 * page_bytes);
  EXPECT_EQ(index->open_puts(), 1U);
  // Nobody else is held up by it, and no pages are either.
  tenant = 8;
  put(2, 0, 4);
  put(3, 0, 4);
  EXPECT_EQ(row(8).bytes, 12 * page_bytes);
  EXPECT_EQ(row(8).refused, 0U);
  tenant = 7;
  index->put_abort(host0, {second.stripe}, at_s(2));
  EXPECT_EQ(row(7).bytes, 6 * page_bytes);
  put(1, 8, 2, 3);
  EXPECT_EQ(row(7).bytes, 10 * page_bytes);
  EXPECT_EQ(hit(1, 8), 8U);

  // After a restart with half the quota it keeps what it has, and gets nothing more.
  options.tenants[7].quota_bytes = 6 * page_bytes;
  options.run = 2;
  const auto kept = disks;
  start(0, options);
  disks = kept;
  for (int n = 0; n < 6; ++n) comes(n, 4);
  EXPECT_EQ(row(7).bytes, 10 * page_bytes);
  EXPECT_EQ(row(8).bytes, 12 * page_bytes);
  EXPECT_EQ(hit(1, 8), 8U);
  EXPECT_EQ(open(pages(4, 0, 1), 5).code, code_of(Code::over_quota));
}

TEST_F(StripeTest, OrTheTenantsOwnOldestStripesMakeRoom) {
  const auto row = [&](std::uint64_t number) { return index->evictor().tenant(number); };
  start(6, {.tenants = {{7, {.quota_bytes = 13 * page_bytes, .over = kv::Evictor::OverQuota::evict_own}}},
            .placement = {{4, 2}, false}});
  tenant = 8;
  put(9, 0, 4, 1);  // older than all, and another's
  tenant = 7;
  put(1, 0, 4, 2);
  put(2, 0, 4, 3);
  put(3, 0, 4, 4);
  EXPECT_EQ(row(7).bytes, 12 * page_bytes);
  EXPECT_EQ(row(7).evicted, 1U);
  EXPECT_EQ(row(7).refused, 0U);
  EXPECT_EQ(hit(1, 8), 0U);
  EXPECT_EQ(hit(2, 8), 8U);
  EXPECT_EQ(hit(9, 8), 8U);
  step(4);
  for (const auto& [instance, disk] : disks) EXPECT_EQ(disk.size(), 3U) << instance;  // the fourth was freed
  put(4, 0, 4, 5);
  put(4, 4, 4, 6);
  EXPECT_EQ(row(7).evicted, 3U);
  EXPECT_EQ(hit(4, 16), 16U);
  // A chain does not eat its own beginning.
  EXPECT_EQ(open(pages(4, 8, 4), 7).code, code_of(Code::over_quota));
  EXPECT_EQ(row(7).refused, 1U);
  EXPECT_EQ(hit(4, 16), 16U);
  EXPECT_EQ(hit(9, 8), 8U);
  EXPECT_EQ(row(8).evicted, 0U);
}

TEST_F(StripeTest, TooManyTenantsToTellApartCountAsNobodys) {
  const std::size_t told_apart = kv::Evictor::Options{}.tenants_max - 1;  // and nobody
  std::vector<wire::meta_put_opened> opened;
  for (tenant = 1; tenant <= told_apart + 2; ++tenant) {
    opened.push_back(open(pages(static_cast<int>(tenant), 0, 1)));
    ASSERT_EQ(opened.back().code, 0) << tenant;
  }
  EXPECT_EQ(index->counters().tenants_full, 2U);
  EXPECT_EQ(held().size(), told_apart + 1);
  EXPECT_EQ(held().at(0).second, 2U);
  EXPECT_EQ(index->evictor().items(), told_apart + 2);
}

// ---- Reconciliation

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
  for (int n = 0; n < 6; ++n) index->volumes(store(n), {{{0, volume_failed, 1 << 20, 1 << 20}}}, at_s(2));
  EXPECT_EQ(hit(1, 8), 0U);
  EXPECT_TRUE(index->drop_stripe(opened.stripe, at_s(2)));
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
