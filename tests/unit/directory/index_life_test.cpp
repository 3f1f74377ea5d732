// How old stripes are, and by whom it is known.
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

}  // namespace
}  // namespace di::directory
