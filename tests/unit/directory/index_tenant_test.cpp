// Tenants of stripes, and their quotas.
#include "tests/unit/directory/stripe_fixture.h"

namespace di::directory {
namespace {

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

}  // namespace
}  // namespace di::directory
