// How old stripes are, by whom it is known, and what is remembered of those that are gone.
#include "tests/unit/directory/stripe_fixture.h"

namespace di::directory {
namespace {

constexpr kv::Evictor::Life cap_300{.ttl = seconds(0), .cap = seconds(300)};

class LifeTest : public StripeTest {
 protected:
  // Start `run` of di-meta when the first one is `later_s` old; the machine's clock begins anew with it.
  void begin(std::uint64_t run, int later_s) {
    began[run] = static_cast<std::uint32_t>(1000 + later_s);
    const auto kept = disks;
    start(0, {.run = run,
              .run_starts = began,
              .wall_ahead_s = later_s,
              .stripe_life = cap_300,
              .lease = {.ttl = seconds(1), .cap = seconds(1)},
              .placement = {{4, 2}, false},
              .adopt_grace = seconds(1),
              .record_changes = true});
    disks = kept;
  }
  void all_come(int s, std::uint32_t generation = 1) {
    for (int n = 0; n < 6; ++n) comes(n, s, generation);
  }
  std::vector<StripeRow> rows() {
    std::vector<StripeRow> out;
    for (StripeChange& change : index->take_changes(100)) {
      if (change.row) out.push_back(*std::move(change.row));
    }
    return out;
  }
  std::size_t columns_on_disks() const {
    std::size_t sum = 0;
    for (const auto& [instance, disk] : disks) sum += disk.size();
    return sum;
  }
  std::map<std::uint64_t, std::uint32_t> began{{0, 1}};
};

TEST_F(LifeTest, TheCapOfALifeGoesOnOverARestart) {
  disks.clear();
  begin(1, 0);
  all_come(0);
  put(1, 0, 4, 1);
  const auto kept = rows();
  ASSERT_EQ(kept.size(), 1U);
  EXPECT_EQ(kept[0].born_s, 1001U);
  begin(2, 200);
  EXPECT_TRUE(index->restore(kept[0], at_s(0)));
  all_come(0);
  step(99);
  EXPECT_EQ(hit(1, 8), 8U);
  // A use does not make it younger, and neither does another row of it.
  ASSERT_NE(plan(1, 0, 8, 99).lease, 0U);
  failed(kept[0].id, kept[0].columns[2], Code::corrupt, 99);
  const auto changed = rows();
  ASSERT_EQ(changed.size(), 1U);
  EXPECT_EQ(changed[0].born_s, 1001U);
  step(103);
  EXPECT_EQ(index->stripes(), 0U);
  step(150);
  EXPECT_EQ(columns_on_disks(), 0U);
  EXPECT_EQ(index->counters().stripes_expired, 1U);
}

TEST_F(LifeTest, ARowPastTheCapIsTakenOutAndItsColumnsAreFreed) {
  disks.clear();
  begin(1, 0);
  all_come(0);
  put(1, 0, 4, 1);
  const auto kept = rows();
  begin(2, 320);
  EXPECT_FALSE(index->restore(kept.at(0), at_s(0)));
  const auto changes = index->take_changes(10);
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_EQ(changes[0].id, kept[0].id);
  EXPECT_FALSE(changes[0].row);
  all_come(0);
  step(2);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(columns_on_disks(), 0U);
}

// It expired while its stores were away; the di-meta that was to free it is gone, and so is the row.
TEST_F(LifeTest, WhatExpiredWhileItsStoresWereAwayDoesNotComeBackYoung) {
  disks.clear();
  begin(1, 0);
  all_come(0);
  put(1, 0, 4, 1);
  for (int n = 0; n < 6; ++n) index->lost(store(n), at_s(2));
  step(302);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(columns_on_disks(), 6U);
  begin(2, 310);
  all_come(0, 2);
  step(2);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(columns_on_disks(), 0U);
}

TEST_F(LifeTest, WhatOnlyStoresKnowIsAsOldAsItsNumberCanBe) {
  disks.clear();
  begin(1, 0);
  all_come(0);
  put(1, 0, 4, 1);
  put(2, 0, 4, 100);
  put(3, 0, 4, 150);
  const auto kept = rows();
  ASSERT_EQ(kept.size(), 3U);
  // Without any row all three count from the start of their run; with one, what follows it counts from that.
  begin(2, 200);
  all_come(0);
  EXPECT_EQ(index->counters().stripes_adopted, 3U);
  step(99);
  EXPECT_EQ(index->stripes(), 3U);
  step(102);
  EXPECT_EQ(index->stripes(), 0U);

  began.erase(2);
  disks.clear();
  begin(1, 0);
  all_come(0);
  put(1, 0, 4, 1);
  put(2, 0, 4, 100);
  put(3, 0, 4, 150);
  const auto again = rows();
  begin(2, 200);
  EXPECT_TRUE(index->restore(again.at(1), at_s(0)));
  all_come(0);
  step(102);
  EXPECT_EQ(hit(1, 8), 0U);
  EXPECT_EQ(hit(2, 8), 8U);
  EXPECT_EQ(hit(3, 8), 8U);
  step(202);
  EXPECT_EQ(index->stripes(), 0U);
}

// A catalogue that begins anew knows nothing: what is there counts from then.
TEST_F(LifeTest, WithoutACatalogueLifeBeginsAnew) {
  disks.clear();
  begin(7, 0);
  all_come(0);
  put(1, 0, 4, 1);
  began = {{0, 1400}};
  begin(1, 400);
  all_come(0);
  EXPECT_EQ(hit(1, 8), 8U);
  step(299);
  EXPECT_EQ(index->stripes(), 1U);
  step(302);
  EXPECT_EQ(index->stripes(), 0U);
}

// Rows that a catalogue of before has, without a time.
TEST_F(LifeTest, ARowWithoutATimeIsAsOldAsItsNumberCanBe) {
  disks.clear();
  began = {{0, 900}};
  begin(1, 0);
  all_come(0);
  put(1, 0, 4, 1);
  auto kept = rows();
  kept.at(0).born_s = 0;
  began = {{0, 1100}};  // the migration
  begin(2, 200);
  EXPECT_TRUE(index->restore(kept[0], at_s(0)));
  all_come(0);
  step(199);
  EXPECT_EQ(index->stripes(), 1U);
  step(202);
  EXPECT_EQ(index->stripes(), 0U);
}

// ---- What is to be written ---------------------------------------------------------------------

TEST_F(StripeTest, WhatTheCatalogueNeverHeardOfIsNotTakenOutOfIt) {
  start(6, {.placement = {{4, 2}, false}, .record_changes = true});
  const auto first = put(1, 0, 4);
  ASSERT_EQ(index->take_changes(10).size(), 1U);
  // Now nobody takes any.
  for (int chain = 2; chain < 100; ++chain) {
    EXPECT_TRUE(index->drop_stripe(put(chain, 0, 4).stripe, at_s(2)));
    step(2);
  }
  EXPECT_EQ(index->changes(), 0U);
  EXPECT_TRUE(index->drop_stripe(first.stripe, at_s(2)));
  EXPECT_EQ(index->changes(), 1U);
  const auto changes = index->take_changes(10);
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_EQ(changes[0].id, first.stripe);
  EXPECT_FALSE(changes[0].row);
}

TEST_F(StripeTest, AStripeThatComesBackBeforeItsEndIsWrittenStillHasARow) {
  start(1, {.placement = {{1, 0}, false}, .record_changes = true});
  const auto first = put(1, 0, 1);
  ASSERT_EQ(index->take_changes(10).size(), 1U);
  index->volumes(store(0), {{{0, volume_failed, 1 << 20, 1 << 20}}}, at_s(2));
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->changes(), 1U);
  comes(0, 3, 2);
  EXPECT_EQ(index->stripes(), 1U);
  EXPECT_TRUE(index->drop_stripe(first.stripe, at_s(4)));
  const auto changes = index->take_changes(10);
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_FALSE(changes[0].row);
}

// ---- Numbers -----------------------------------------------------------------------------------

TEST_F(StripeTest, ANumberNearTheEndOfThemAllIsNobodys) {
  const auto opened = put(1, 0, 4);
  const auto& disk = disks[opened.columns[0].instance];
  wire::ShardRecord stray = disk.begin()->second;
  stray.pages = pages(9, 0, 4);
  const int n = number_of(opened.columns[0]);
  for (const std::uint64_t id : {stripe_id_max, (runs_ahead_max + 2) << 32}) {
    stray.stripe = id;
    disks[store(n).instance][{id, stray.column}] = stray;
  }
  stray.stripe = (std::uint64_t{5000} << 32) + 7;  // of a catalogue that was lost
  stray.pages = pages(8, 0, 4);
  disks[store(n).instance][{stray.stripe, stray.column}] = stray;
  comes(n, 200, 2);
  EXPECT_EQ(index->counters().stripes_adopted, 1U);
  step(201);
  EXPECT_EQ(disks[store(n).instance].count({stripe_id_max, stray.column}), 0U);
  EXPECT_EQ(put(2, 0, 4, 202).stripe, stray.stripe + 1);
  StripeRow row;
  row.id = stripe_id_max;
  row.pages = pages(7, 0, 1);
  row.columns = {{store(0).instance, 0, 0}};
  EXPECT_FALSE(index->restore(row, at_s(203)));
}

// ---- A volume that fails -----------------------------------------------------------------------

TEST_F(StripeTest, WhatOnlyAFailedVolumeHadCountsAgainstNobody) {
  start(2, {.placement = {{1, 0}, false}});
  tenant = 7;
  std::vector<int> of(2);
  for (int chain = 1; chain <= 20; ++chain)
    ++of[static_cast<std::size_t>(number_of(put(chain, 0, 1).columns[0]))];
  ASSERT_GT(of[0], 0);
  ASSERT_GT(of[1], 0);
  const auto one = static_cast<std::uint64_t>(of[1]);
  index->volumes(store(0), {{{0, volume_failed, std::uint64_t{1} << 40, 0}}}, at_s(2));
  EXPECT_EQ(held(),
            (std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>>{{7, {one * page_bytes, one}}}));
  EXPECT_EQ(index->stripes(), one);
  EXPECT_EQ(index->pending_frees(), 0U) << "what it has is of use should it be opened anew";
  // Said again, nothing more happens.
  index->volumes(store(0), {{{0, volume_failed, std::uint64_t{1} << 40, 0}}}, at_s(3));
  EXPECT_EQ(index->stripes(), one);
  // It can still say what it has, when it is asked and when it comes anew: neither freed nor taken.
  wire::meta_inventory message{0, true, {}};
  for (const auto& [id, shard] : disks[store(0).instance]) message.shards.push_back(shard);
  for (const bool anew : {false, true}) {
    if (anew) {
      ASSERT_TRUE(index->store_up(store(0), at_s(200), {"h0", "", ""}));
      index->volumes(store(0), {{{0, volume_failed, std::uint64_t{1} << 40, 0}}}, at_s(200));
    }
    const auto ack = index->inventory(store(0), message, at_s(200));
    ASSERT_TRUE(ack);
    EXPECT_TRUE(ack->unknown.empty()) << anew;
    EXPECT_EQ(index->pending_frees(), 0U) << anew;
    EXPECT_EQ(index->stripes(), one) << anew;
  }
  index->volumes(store(0), {{{0, 0, std::uint64_t{1} << 40, 0}}}, at_s(201));
  ASSERT_TRUE(index->inventory(store(0), message, at_s(202)));
  EXPECT_EQ(index->stripes(), 20U);
  EXPECT_EQ(held()[7].second, 20U);
}

// Its pages came back as old as the run, and were freed at once.
TEST_F(LifeTest, WhatComesBackWithItsVolumeIsAsOldAsItWas) {
  start(1,
        {.run = 1, .run_starts = {{0, 1}, {1, 1000}}, .stripe_life = cap_300, .placement = {{1, 0}, false}});
  put(1, 0, 1, 400);
  index->volumes(store(0), {{{0, volume_failed, std::uint64_t{1} << 40, 0}}}, at_s(401));
  EXPECT_EQ(index->stripes(), 0U);
  index->volumes(store(0), {{{0, 0, std::uint64_t{1} << 40, 0}}}, at_s(402));
  wire::meta_inventory told{0, true, {}};
  for (const auto& [id, shard] : disks[store(0).instance]) told.shards.push_back(shard);
  const auto ack = index->inventory(store(0), told, at_s(403));
  ASSERT_TRUE(ack);
  EXPECT_TRUE(ack->unknown.empty());
  EXPECT_EQ(index->stripes(), 1U);
}

// Its writer was told that the column is written before di-meta was told that the volume has failed.
TEST_F(StripeTest, AColumnOnAVolumeThatFailedMeanwhileCountsAgainstNobody) {
  start(1, {.placement = {{1, 0}, false}});
  tenant = 7;
  const auto offered = pages(1, 0, 1);
  const auto opened = open(offered, 1);
  ASSERT_EQ(opened.code, 0);
  index->volumes(store(0), {{{0, volume_failed, std::uint64_t{1} << 40, 0}}}, at_s(2));
  EXPECT_EQ(write(opened, offered, {}, 2), 0);
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(held()[7].second, 0U);
  EXPECT_EQ(index->pending_frees(), 0U);
}

// ---- Repairs without a place -------------------------------------------------------------------

TEST_F(StripeTest, StripesWithoutAPlaceDoNotKeepOutThoseThatHaveOne) {
  start(6, {.placement = {{4, 2}, false}, .repair_after = seconds(10), .repairs = {.waiting_max = 4}});
  for (int chain = 1; chain <= 12; ++chain) put(chain, 0, 4);
  // A page alone is three columns: there is a place for a fourth.
  const auto small = put(20, 0, 1);
  const int gone = number_of(small.columns[0]);
  index->lost(store(gone), at_s(2));
  bool made = false;
  int s = 12;
  for (; s < 60 && !made; ++s) {
    step(s);
    for (const Index::Repair& repair : index->repairs(at_s(s))) {
      EXPECT_EQ(repair.message.stripe.stripe, small.stripe);
      finish(repair, s);
      made = true;
    }
    index->test_check();
  }
  EXPECT_TRUE(made);
  // And as soon as a store comes.
  comes(6, s);
  std::set<std::uint64_t> repaired;
  for (const int until = s + 20; s < until; ++s) {  // its budget lets one begin at a time
    step(s);
    for (const Index::Repair& repair : index->repairs(at_s(s))) {
      repaired.insert(repair.message.stripe.stripe);
      finish(repair, s);
    }
  }
  EXPECT_EQ(repaired.size(), 12U);
}

}  // namespace
}  // namespace di::directory
