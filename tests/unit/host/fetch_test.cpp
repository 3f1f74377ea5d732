// kv_fetch, kv_prefetch: plans, reads, readiness, failures, leases, the books.
#include "host/fetch.h"

#include <limits>

#include "tests/unit/host/world.h"

namespace di::host {
namespace {

class FetchTest : public World {
 protected:
  FetchTest() { usual_peers(); }
  explicit FetchTest(std::uint64_t units) : World(units) { usual_peers(); }

  wire::Scope scope(std::uint32_t number, std::uint32_t deadline_ms = 0) const {
    return {test_request(number), 1, 2, deadline_ms};
  }
  // Answers the outstanding plan with these pages.
  void answer_plan(std::vector<wire::PlannedPage> pages, std::uint64_t lease = 77) {
    wire::Scope asked;
    ASSERT_TRUE(heard<wire::meta_plan>(meta, &asked));
    say(meta, asked, wire::meta_planned{lease, 9000, std::move(pages)});
  }
  std::uint64_t lost(Lost why) const { return core->fetches().books().lost[static_cast<std::size_t>(why)]; }
};

TEST_F(FetchTest, EverythingInTheArenaIsReadyAtOnce) {
  const std::vector<Key> keys = test_keys(1, 0, 6);
  cached({keys.begin(), keys.begin() + 4});
  cached({keys.begin() + 4, keys.end()});
  wire::Scope heard_scope;
  say(prefill, scope(1), wire::kv_fetch{keys});
  const auto fetching = heard<wire::kv_fetching>(prefill, &heard_scope);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(heard_scope.request, test_request(1));
  EXPECT_EQ(heard_scope.attempt, 1);
  EXPECT_EQ(heard_scope.rank, 2);
  EXPECT_EQ(fetching->code, 0);
  EXPECT_EQ(fetching->blocks, 6u);
  ASSERT_EQ(fetching->slots.size(), 2u);
  EXPECT_EQ(fetching->slots[0].count, 4u);
  EXPECT_EQ(fetching->slots[1].count, 2u);
  const auto ready = heard<wire::kv_ready>(prefill);
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->groups, 4u);
  EXPECT_TRUE(ready->complete);
  EXPECT_EQ(arena.entries.at(fetching->entry).groups, 4u);
  EXPECT_FALSE(heard<wire::meta_plan>(meta));
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_EQ(core->fetches().books().swapped, 6u);
  EXPECT_TRUE(idle());
  EXPECT_TRUE(arena.entries.empty());
}

TEST_F(FetchTest, AReaderUsesAPageFromTheMiddle) {
  const std::vector<Key> keys = test_keys(1, 0, 7);
  cached({keys.begin(), keys.begin() + 2});
  // A page that begins one block earlier than the reader needs, and ends later.
  cached(test_keys(1, 1, 4));
  say(prefill, scope(1), wire::kv_fetch{{keys.begin(), keys.begin() + 4}});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 4u);
  ASSERT_EQ(fetching->slots.size(), 2u);
  EXPECT_EQ(fetching->slots[1].first, 1u);
  EXPECT_EQ(fetching->slots[1].count, 2u);
  EXPECT_EQ(fetching->slots[1].page_blocks, 4u);
}

TEST_F(FetchTest, PagesComeFromTheStoreGroupByGroup) {
  const std::vector<Key> keys = test_keys(1, 0, 8);
  const std::vector<Key> a(keys.begin(), keys.begin() + 4);
  const std::vector<Key> b(keys.begin() + 4, keys.end());
  say(prefill, scope(1), wire::kv_fetch{keys});
  EXPECT_FALSE(heard<wire::kv_fetching>(prefill));
  answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 8u);
  const auto read_a = heard<wire::kv_read>(store);
  const auto read_b = heard<wire::kv_read>(store);
  ASSERT_TRUE(read_a && read_b);
  EXPECT_EQ(read_a->stripe, 10u);
  EXPECT_EQ(read_a->from_group, 0u);
  EXPECT_EQ(read_a->slot.slot, fetching->slots[0].slot);
  EXPECT_EQ(arena.slots.at(read_a->slot.slot).state, kv::SlotState::filling);
  EXPECT_EQ(gauge("leases"), 1u);
  EXPECT_EQ(gauge("reads"), 2u);

  deliver(*read_a, a, 0);
  EXPECT_EQ(arena.entries.at(fetching->entry).groups, 0u);  // the other page's first group is missing
  EXPECT_EQ(arena.slots.at(read_a->slot.slot).segments, 1u);
  deliver(*read_b, b, 0);
  auto ready = heard<wire::kv_ready>(prefill);
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->groups, 1u);
  EXPECT_FALSE(ready->complete);
  // One message for several groups.
  for (std::uint32_t g = 1; g < 3; ++g) arena.write(layout, read_a->slot, g, test_crcs(a)[g]);
  deliver(*read_a, a, 3);
  EXPECT_EQ(gauge("reads"), 1u);
  deliver(*read_b, b, 1);
  deliver(*read_b, b, 2);
  EXPECT_FALSE(heard<wire::meta_release>(meta));
  deliver(*read_b, b, 3);
  const auto released = heard<wire::meta_release>(meta);
  ASSERT_TRUE(released);
  EXPECT_EQ(released->leases, std::vector<std::uint64_t>{77});
  EXPECT_EQ(arena.entries.at(fetching->entry).groups, 4u);
  EXPECT_EQ(core->fetches().books().fetched, 8u);
  const auto delta = heard<wire::meta_arena_delta>(meta);
  ASSERT_TRUE(delta);                              // the first page, and in a later turn the second
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));  // it came from the store
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
  EXPECT_TRUE(core->pages().has(keys[7]));
}

TEST_F(FetchTest, TwoRequestsShareOneReadAndOneGoesAway) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  say(decode, scope(2), wire::kv_fetch{keys});
  EXPECT_FALSE(heard<wire::meta_plan>(meta));
  EXPECT_FALSE(heard<wire::kv_read>(store));
  EXPECT_EQ(heard<wire::kv_fetching>(decode)->blocks, 4u);
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_FALSE(heard<wire::kv_read_cancel>(store));
  EXPECT_EQ(lost(Lost::cancelled), 4u);
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read, keys, g);
  EXPECT_TRUE(heard<wire::kv_ready>(decode));
  say(decode, scope(2), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, TheLastOneToLeaveCancelsAndTheSlotWaitsInQuarantine) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  deliver(*read, keys, 0);
  say(prefill, scope(1), wire::kv_release{});
  const auto cancel = heard<wire::kv_read_cancel>(store);
  ASSERT_TRUE(cancel);
  EXPECT_EQ(cancel->transfer, read->transfer);
  EXPECT_EQ(gauge("quarantined_pages"), 1u);
  EXPECT_EQ(gauge("leases"), 1u);  // the stripe is still being read
  EXPECT_FALSE(arena.current(read->slot));
  // The same keys again: another slot.
  say(prefill, scope(2), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)}, 78);
  const auto again = heard<wire::kv_read>(store);
  ASSERT_TRUE(again);
  EXPECT_NE(again->slot.slot, read->slot.slot);
  say(store, {}, wire::kv_read_cancelled{read->transfer});
  EXPECT_EQ(gauge("quarantined_pages"), 0u);
  EXPECT_EQ(heard<wire::meta_release>(meta)->leases, std::vector<std::uint64_t>{77});
  say(prefill, scope(2), wire::kv_release{});
  say(store, {}, wire::kv_read_done{again->transfer, 0, 3});  // it had finished: that is an answer too
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, WrongBytesFailTheBlockAndAreReported) {
  const std::vector<Key> keys = test_keys(1, 0, 8);
  const std::vector<Key> a(keys.begin(), keys.begin() + 4);
  const std::vector<Key> b(keys.begin() + 4, keys.end());
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  const auto read_a = heard<wire::kv_read>(store);
  const auto read_b = heard<wire::kv_read>(store);
  deliver(*read_b, b, 0, 1);  // other bytes
  const auto failed = heard<wire::meta_read_failed>(meta);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->page, 11u << 8);
  EXPECT_EQ(failed->code, static_cast<std::uint16_t>(Code::corrupt));
  EXPECT_EQ(failed->instance, store.instance);
  EXPECT_EQ(failed->generation, store.generation);
  auto ready = heard<wire::kv_ready>(prefill);
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->failed_block, 4u);
  EXPECT_EQ(arena.entries.at(fetching->entry).failed_block, 4u);
  EXPECT_EQ(lost(Lost::checksum), 4u);
  // A reader may still be copying: the reference stays good until the release.
  EXPECT_TRUE(arena.current(read_b->slot));
  EXPECT_TRUE(heard<wire::kv_read_cancel>(store));
  // What is in front of it goes on.
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read_a, a, g);
  EXPECT_EQ(arena.entries.at(fetching->entry).groups, 4u);
  EXPECT_EQ(core->fetches().books().fetched, 4u);
  say(store, {}, wire::kv_read_cancelled{read_b->transfer});
  EXPECT_EQ(gauge("quarantined_pages"), 1u);  // pinned
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_EQ(core->fetches().books().swapped, 4u);
  EXPECT_TRUE(idle());
  EXPECT_FALSE(core->pages().has(keys[4]));
}

// D12, D13: di-meta promised the block and the store does not have it.
TEST_F(FetchTest, AFailedReadFailsTheBlock) {
  for (const Code code : {Code::not_found, Code::io, Code::corrupt, Code::stale}) {
    const std::vector<Key> keys = test_keys(static_cast<std::uint32_t>(code), 0, 4);
    say(prefill, scope(1), wire::kv_fetch{keys});
    answer_plan({planned(10, keys, 0, 4)});
    const auto read = heard<wire::kv_read>(store);
    say(store, {}, wire::kv_read_done{read->transfer, static_cast<std::uint16_t>(code), 0});
    const auto ready = heard<wire::kv_ready>(prefill);
    ASSERT_TRUE(ready);
    EXPECT_EQ(ready->failed_block, 0u);
    EXPECT_EQ(heard<wire::meta_read_failed>(meta).has_value(), code != Code::stale);
    say(prefill, scope(1), wire::kv_release{});
    EXPECT_TRUE(idle());
  }
  EXPECT_EQ(lost(Lost::evicted), 4u);
  EXPECT_EQ(lost(Lost::timeout), 4u);
  EXPECT_EQ(lost(Lost::checksum), 4u);
  EXPECT_EQ(lost(Lost::cancelled), 4u);
}

TEST_F(FetchTest, WithoutAPlanTheArenaIsWhatThereIs) {
  const std::vector<Key> keys = test_keys(1, 0, 8);
  cached({keys.begin(), keys.begin() + 4});
  say(prefill, scope(1), wire::kv_fetch{keys});
  wire::Scope asked;
  const auto plan = heard<wire::meta_plan>(meta, &asked);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->keys.size(), 4u);  // only what is missing
  EXPECT_EQ(core->next_due().liveness, now.liveness + seconds(1));
  advance(seconds(1));
  auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 4u);
  EXPECT_EQ(lost(Lost::timeout), 4u);
  // The late answer's lease is given back.
  say(meta, asked, wire::meta_planned{5, 9000, {planned(9, {keys.begin() + 4, keys.end()}, 0, 4)}});
  EXPECT_EQ(heard<wire::meta_release>(meta)->leases, std::vector<std::uint64_t>{5});
  EXPECT_FALSE(heard<wire::kv_read>(store));
  say(prefill, scope(1), wire::kv_release{});

  // di-meta away: at once.
  lose(meta);
  say(prefill, scope(2), wire::kv_fetch{keys});
  fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 4u);
  say(prefill, scope(2), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, AnOutstandingPlanFailsWithDiMeta) {
  say(prefill, scope(1), wire::kv_fetch{test_keys(1, 0, 4)});
  lose(meta);
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->code, 0);
  EXPECT_EQ(fetching->blocks, 0u);
  EXPECT_TRUE(idle());  // nothing to release
}

TEST_F(FetchTest, ReadsGoOnWhenDiMetaIsLost) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  lose(meta);
  EXPECT_EQ(gauge("leases"), 0u);
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read, keys, g);
  EXPECT_EQ(core->fetches().books().fetched, 4u);
}

TEST_F(FetchTest, LeasesAreRenewedWhileReadsRunAndEndAtTheCap) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  Core::Options with = options(64);
  with.fetch.read_wait = seconds(1000);
  with.fetch.fetch_wait = seconds(1000);
  restart(with);
  usual_peers();
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  int renewals = 0;
  for (int second = 0; second < 119; ++second) {
    advance(seconds(1));
    if (heard<wire::meta_renew>(meta)) ++renewals;
  }
  EXPECT_EQ(renewals, 39);  // every third of 9 s
  EXPECT_FALSE(heard<wire::kv_read_cancel>(store));
  advance(seconds(1));
  EXPECT_TRUE(heard<wire::kv_read_cancel>(store));
  EXPECT_TRUE(heard<wire::meta_release>(meta));
  EXPECT_EQ(gauge("leases"), 0u);
  say(store, {}, wire::kv_read_cancelled{read->transfer});
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, ASilentStoreFailsTheBlock) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  advance(seconds(9));
  deliver(*read, keys, 0);
  out.clear();
  advance(seconds(9));
  EXPECT_FALSE(heard<wire::kv_ready>(prefill));
  advance(seconds(1));
  const auto ready = heard<wire::kv_ready>(prefill);
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->failed_block, 0u);
  EXPECT_EQ(lost(Lost::timeout), 4u);
  EXPECT_TRUE(heard<wire::kv_read_cancel>(store));
}

TEST_F(FetchTest, TheDeadlineOfTheRequestBoundsItsFetch) {
  const std::vector<Key> keys = test_keys(1, 0, 8);
  const std::vector<Key> a(keys.begin(), keys.begin() + 4);
  const std::vector<Key> b(keys.begin() + 4, keys.end());
  say(prefill, scope(1, 500), wire::kv_fetch{keys});
  answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
  const auto read_a = heard<wire::kv_read>(store);
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read_a, a, g);
  out.clear();
  advance(milliseconds(500));
  const auto ready = heard<wire::kv_ready>(prefill);
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->failed_block, 4u);
  EXPECT_EQ(ready->groups, 4u);
  EXPECT_TRUE(ready->complete);
  // The read itself goes on until nobody wants it.
  EXPECT_FALSE(heard<wire::kv_read_cancel>(store));
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(heard<wire::kv_read_cancel>(store));
}

TEST_F(FetchTest, ALostStoreFailsItsReads) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  lose(store);
  EXPECT_EQ(heard<wire::kv_ready>(prefill)->failed_block, 0u);
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());  // it did not map the arena

  up(store, PeerKind::store);
  core->on_attached(store);
  say(prefill, scope(2), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto second = heard<wire::kv_read>(store);
  lose(store);
  say(prefill, scope(2), wire::kv_release{});
  EXPECT_EQ(gauge("quarantined_pages"), 1u);  // it may be frozen in the middle of a write
  up(store, PeerKind::store);
  EXPECT_EQ(heard<wire::kv_read_cancel>(store)->transfer, second->transfer);
  say(store, {}, wire::kv_read_cancelled{second->transfer});
  EXPECT_TRUE(idle());

  say(prefill, scope(3), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  lose(store);
  say(prefill, scope(3), wire::kv_release{});
  EXPECT_EQ(gauge("quarantined_pages"), 1u);
  core->on_detached(store, now);
  turn();
  EXPECT_TRUE(idle());
  static_cast<void>(read);
}

TEST_F(FetchTest, APlanWithoutAUsablePlaceEndsThePrefix) {
  const std::vector<Key> keys = test_keys(1, 0, 16);
  const auto part = [&](std::uint32_t page) {
    return std::vector<Key>(keys.begin() + page * 4, keys.begin() + page * 4 + 4);
  };
  say(prefill, scope(1), wire::kv_fetch{keys});
  wire::PlannedPage elsewhere = planned(11, part(1), 0, 4);
  elsewhere.columns.clear();
  elsewhere.arenas = {"di-kvd.host1"};
  answer_plan({planned(10, part(0), 0, 4), elsewhere, planned(12, part(2), 0, 4)});
  EXPECT_EQ(heard<wire::kv_fetching>(prefill)->blocks, 4u);
  EXPECT_EQ(lost(Lost::evicted), 12u);
  say(prefill, scope(1), wire::kv_release{});

  say(decode, scope(2), wire::kv_fetch{keys});
  wire::PlannedPage unknown_store = planned(10, part(0), 0, 4);
  unknown_store.columns[0].instance = "di-kvd.store9";
  answer_plan({unknown_store});
  EXPECT_EQ(heard<wire::kv_fetching>(decode)->blocks, 0u);
  EXPECT_EQ(lost(Lost::timeout), 16u);

  for (int wrong = 0; wrong < 3; ++wrong) {
    say(decode, scope(3), wire::kv_fetch{keys});
    wire::PlannedPage page = planned(10, part(0), 0, 4);
    if (wrong == 0) page.crcs.pop_back();
    if (wrong == 1) page.keys.pop_back();
    if (wrong == 2) page.page_blocks = 0;
    answer_plan({page});
    EXPECT_EQ(heard<wire::kv_fetching>(decode)->blocks, 0u);
  }
  EXPECT_EQ(core->fillings().counters().malformed, 3u);
}

TEST_F(FetchTest, AnArenaWithoutRoomSaysBusy) {
  for (std::uint32_t page = 0; page < 16; ++page) seal(decode, scope(100), test_keys(9, page * 4, 4));
  out.clear();
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(prefill, scope(1), wire::kv_fetch{keys});
  answer_plan({planned(10, keys, 0, 4)});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->code, static_cast<std::uint16_t>(Code::busy));
  EXPECT_EQ(fetching->blocks, 0u);
  EXPECT_EQ(heard<wire::meta_release>(meta)->leases, std::vector<std::uint64_t>{77});
  EXPECT_EQ(gauge("fetches"), 0u);
}

TEST_F(FetchTest, TheDelayHoldsGroupsBackEvenInTheArena) {
  Core::Options with = options(64);
  with.fetch.fetch_delay = milliseconds(100);
  restart(with);
  usual_peers();
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  say(prefill, scope(1), wire::kv_fetch{keys});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_FALSE(heard<wire::kv_ready>(prefill));
  for (std::uint32_t groups = 1; groups <= 4; ++groups) {
    EXPECT_EQ(core->next_due().product, now.product + milliseconds(100));
    advance(milliseconds(99));
    EXPECT_FALSE(heard<wire::kv_ready>(prefill));
    advance(milliseconds(1));
    const auto ready = heard<wire::kv_ready>(prefill);
    ASSERT_TRUE(ready);
    EXPECT_EQ(ready->groups, groups);
    EXPECT_EQ(arena.entries.at(fetching->entry).groups, groups);
  }
  // The delay is on product time alone.
  say(prefill, scope(2), wire::kv_fetch{keys});
  now.liveness = now.liveness + seconds(10);
  core->on_time(now);
  turn();
  EXPECT_FALSE(heard<wire::kv_ready>(prefill));
}

TEST_F(FetchTest, AHintBringsThePagesAndTheFetchTakesThemOver) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  say(router, scope(1), wire::kv_prefetch{keys, 1});
  answer_plan({planned(10, keys, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->priority, 1);
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read, keys, g);
  EXPECT_EQ(gauge("prefetches"), 1u);
  EXPECT_EQ(gauge("pins"), 1u);
  EXPECT_EQ(core->fetches().books().matched, 0u);
  say(prefill, scope(1), wire::kv_fetch{keys});
  EXPECT_EQ(gauge("prefetches"), 0u);
  EXPECT_EQ(heard<wire::kv_ready>(prefill)->groups, 4u);
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, AHintEndsByReleaseByLossAndByTime) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  say(router, scope(1), wire::kv_prefetch{keys, 1});
  EXPECT_EQ(gauge("pins"), 1u);
  say(router, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
  say(router, scope(2), wire::kv_prefetch{keys, 1});
  lose(router);
  EXPECT_TRUE(idle());
  up(router, PeerKind::router);
  say(router, scope(3), wire::kv_prefetch{keys, 1});
  advance(seconds(59));
  EXPECT_EQ(gauge("pins"), 1u);
  advance(seconds(1));
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, HintsPinAtMostAQuarterOfTheArena) {
  for (std::uint32_t chain = 0; chain < 6; ++chain) {
    cached(test_keys(chain, 0, 4));
    say(router, scope(chain), wire::kv_prefetch{test_keys(chain, 0, 4), 1});
  }
  EXPECT_EQ(gauge("pins"), 4u);  // of sixteen pages
}

TEST_F(FetchTest, AnUrgentReaderMovesAHintsReadForward) {
  Core::Options with = options(64);
  with.fetch.reads_per_source = 1;
  restart(with);
  usual_peers();
  for (std::uint32_t chain = 1; chain <= 3; ++chain) {
    say(router, scope(chain), wire::kv_prefetch{test_keys(chain, 0, 4), 2});
    answer_plan({planned(chain, test_keys(chain, 0, 4), 0, 4)}, chain);
  }
  const auto first = heard<wire::kv_read>(store);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->stripe, 1u);
  EXPECT_FALSE(heard<wire::kv_read>(store));
  say(prefill, scope(3), wire::kv_fetch{test_keys(3, 0, 4)});
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*first, test_keys(1, 0, 4), g);
  const auto second = heard<wire::kv_read>(store);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->stripe, 3u);
  EXPECT_EQ(second->priority, 0);
  // A read that never started needs no cancel.
  say(router, scope(2), wire::kv_release{});
  EXPECT_FALSE(heard<wire::kv_read_cancel>(store));
  EXPECT_EQ(gauge("quarantined_pages"), 0u);
}

TEST_F(FetchTest, AskingTwiceGivesTheSameAnswer) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  say(prefill, scope(1), wire::kv_fetch{keys});
  const auto first = heard<wire::kv_fetching>(prefill);
  say(prefill, scope(1), wire::kv_fetch{keys});
  const auto second = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(*first, *second);
  EXPECT_EQ(gauge("pins"), 1u);
}

TEST_F(FetchTest, ALostClientLeavesNothing) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  say(prefill, scope(1), wire::kv_fetch{keys});
  say(prefill, scope(2), wire::kv_fetch{test_keys(2, 0, 4)});
  lose(prefill);
  EXPECT_EQ(core->fetches().books().unused, 4u);
  EXPECT_EQ(lost(Lost::cancelled), 4u);
  EXPECT_TRUE(idle());
}

TEST_F(FetchTest, APageThatFailsDuringThePlanIsKnownAfterwards) {
  const std::vector<Key> keys = test_keys(1, 0, 8);
  const std::vector<Key> a(keys.begin(), keys.begin() + 4);
  say(prefill, scope(1), wire::kv_fetch{a});
  answer_plan({planned(10, a, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  say(decode, scope(2), wire::kv_fetch{keys});  // shares the read, plans the rest
  say(store, {}, wire::kv_read_done{read->transfer, static_cast<std::uint16_t>(Code::io), 0});
  answer_plan({planned(11, {keys.begin() + 4, keys.end()}, 0, 4)}, 78);
  const auto fetching = heard<wire::kv_fetching>(decode);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 8u);
  EXPECT_EQ(arena.entries.at(fetching->entry).failed_block, 0u);
  EXPECT_EQ(heard<wire::kv_ready>(decode)->failed_block, 0u);
}

// ---- Fetch or compute ------------------------------------------------------------------------------------

class ChoiceTest : public FetchTest {
 protected:
  // What it takes to compute a prompt that ends one token behind `blocks`.
  wire::ComputeCost compute(std::uint32_t blocks, double token_us) const {
    wire::ComputeCost cost;
    cost.tokens = blocks * layout.block_tokens() + 1;
    cost.chunk_tokens = 512;
    cost.groups = 1;
    cost.base_us = 1;
    cost.token_us = token_us;
    return cost;
  }
  static constexpr double cheap = 20;  // a token; a page of the store takes about a millisecond
  static constexpr double dear = 1000;
  const std::vector<Key> keys = test_keys(1, 0, 8);
  const std::vector<Key> a{keys.begin(), keys.begin() + 4};
  const std::vector<Key> b{keys.begin() + 4, keys.end()};
};

TEST_F(ChoiceTest, WhatIsSoonerComputedIsNotBrought) {
  say(prefill, scope(1), wire::kv_fetch{keys, {compute(8, cheap)}});
  answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->code, 0);
  EXPECT_EQ(fetching->blocks, 0u);
  EXPECT_EQ(fetching->computed_blocks, 8u);
  EXPECT_FALSE(heard<wire::kv_read>(store));
  EXPECT_EQ(heard<wire::meta_release>(meta)->leases, std::vector<std::uint64_t>{77});
  EXPECT_EQ(lost(Lost::computed), 8u);
  EXPECT_EQ(core->fetches().counters().fetches_cut, 1u);
  EXPECT_TRUE(idle());
}

TEST_F(ChoiceTest, WhatIsDearToComputeIsBrought) {
  say(prefill, scope(1), wire::kv_fetch{keys, {compute(8, dear)}});
  answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 8u);
  EXPECT_EQ(fetching->computed_blocks, 0u);
}

TEST_F(ChoiceTest, TheArenasFrontIsUsedAndTheStoresRestIsComputed) {
  cached(a);
  say(prefill, scope(1), wire::kv_fetch{keys, {compute(8, cheap)}});
  answer_plan({planned(11, b, 0, 4)});
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 4u);
  EXPECT_EQ(fetching->computed_blocks, 4u);
  EXPECT_TRUE(heard<wire::kv_ready>(prefill)->complete);
  EXPECT_FALSE(heard<wire::kv_read>(store));
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_EQ(core->fetches().books().swapped, 4u);
  EXPECT_TRUE(idle());
}

TEST_F(ChoiceTest, WhatIsNowhereIsNotCountedAsComputed) {
  say(prefill, scope(1), wire::kv_fetch{keys, {compute(8, cheap)}});
  answer_plan({planned(10, a, 0, 4)});
  EXPECT_EQ(heard<wire::kv_fetching>(prefill)->computed_blocks, 4u);
  EXPECT_EQ(lost(Lost::computed), 4u);
  EXPECT_EQ(lost(Lost::evicted), 4u);
  EXPECT_TRUE(idle());
}

TEST_F(ChoiceTest, APrefetchThatIsTooSlowIsGivenUp) {
  say(router, scope(1), wire::kv_prefetch{keys, 1});
  answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
  const auto read_a = heard<wire::kv_read>(store);
  const auto read_b = heard<wire::kv_read>(store);
  ASSERT_TRUE(read_a && read_b);
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read_a, a, g);
  // The first page is here by now, the second is sooner computed.
  say(prefill, scope(1), wire::kv_fetch{keys, {compute(8, cheap)}});
  EXPECT_FALSE(heard<wire::meta_plan>(meta));
  const auto fetching = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(fetching);
  EXPECT_EQ(fetching->blocks, 4u);
  EXPECT_EQ(fetching->computed_blocks, 4u);
  EXPECT_EQ(heard<wire::kv_read_cancel>(store)->transfer, read_b->transfer);
  say(store, {}, wire::kv_read_cancelled{read_b->transfer});
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(ChoiceTest, ACostThatMakesNoSenseIsNoChoice) {
  wire::ComputeCost nan = compute(8, cheap);
  nan.base_us = std::numeric_limits<double>::quiet_NaN();
  wire::ComputeCost negative = compute(8, -1);
  wire::ComputeCost no_chunk = compute(8, cheap);
  no_chunk.chunk_tokens = 0;
  wire::ComputeCost no_group = compute(8, cheap);
  no_group.groups = 0;
  wire::ComputeCost nothing_left = compute(8, cheap);
  --nothing_left.tokens;
  std::uint32_t request = 1;
  for (const wire::ComputeCost& wrong : {nan, negative, no_chunk, no_group, nothing_left}) {
    say(prefill, scope(request), wire::kv_fetch{keys, {wrong}});
    if (request == 1) answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)});
    EXPECT_EQ(heard<wire::kv_fetching>(prefill)->blocks, 8u) << request;
    ++request;
  }
}

TEST_F(ChoiceTest, FetchesThatTakeLongAreLearntFrom) {
  const double before = core->fetches().cost().predict_us(balance::Place::store, 1 << 20);
  std::uint32_t learnt = 0;
  for (std::uint32_t chain = 2; chain < 12; ++chain) {
    const std::vector<Key> others = test_keys(chain, 0, 4);
    say(prefill, scope(chain), wire::kv_fetch{others});
    answer_plan({planned(chain, others, 0, 4)}, chain);
    const auto read = heard<wire::kv_read>(store);
    ASSERT_TRUE(read);
    advance(milliseconds(500));
    for (std::uint32_t g = 0; g < 4; ++g) deliver(*read, others, g);
    say(prefill, scope(chain), wire::kv_release{});
    EXPECT_EQ(core->fetches().cost().samples(balance::Place::store), ++learnt);
  }
  EXPECT_GT(core->fetches().cost().predict_us(balance::Place::store, 1 << 20), 10 * before);
  // One that nobody waits for to the end tells as much when it has taken longer than it should, and nothing before.
  for (const Duration waited : {milliseconds(1), milliseconds(2000)}) {
    say(prefill, scope(1), wire::kv_fetch{keys});
    answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)}, 99);
    const auto read_a = heard<wire::kv_read>(store);
    const auto read_b = heard<wire::kv_read>(store);
    advance(waited);
    say(prefill, scope(1), wire::kv_release{});
    for (const auto& read : {read_a, read_b}) say(store, {}, wire::kv_read_cancelled{read->transfer});
    if (waited > milliseconds(1)) ++learnt;
    EXPECT_EQ(core->fetches().cost().samples(balance::Place::store), learnt);
  }
  const std::string text = core->fetches().cost().to_text();
  restart(options(64));
  ASSERT_TRUE(core->restore_costs(text).ok());
  EXPECT_EQ(core->fetches().cost().to_text(), text);
}

TEST_F(ChoiceTest, APlaceThatIsAlwaysCutIsTriedNowAndThen) {
  std::uint32_t probes = 0;
  for (std::uint32_t request = 1; request <= 25; ++request) {  // one a second
    say(prefill, scope(request), wire::kv_fetch{keys, {compute(8, cheap)}});
    answer_plan({planned(10, a, 0, 4), planned(11, b, 0, 4)}, request);
    if (heard<wire::kv_fetching>(prefill)->blocks > 0) {
      ++probes;
      say(prefill, scope(request), wire::kv_release{});
      while (const auto read = heard<wire::kv_read>(store))
        say(store, {}, wire::kv_read_cancelled{read->transfer});
    }
    advance(seconds(1));
  }
  EXPECT_EQ(probes, 2u);
  EXPECT_EQ(core->fetches().counters().probes, 2u);
  EXPECT_EQ(core->fetches().counters().fetches_cut, 23u);
  EXPECT_TRUE(idle());
}

TEST_F(ChoiceTest, WhatOthersBroughtIsNotLearntFrom) {
  say(prefill, scope(1), wire::kv_fetch{a});
  answer_plan({planned(10, a, 0, 4)});
  const auto read = heard<wire::kv_read>(store);
  say(decode, scope(2), wire::kv_fetch{a});
  advance(milliseconds(500));
  for (std::uint32_t g = 0; g < 4; ++g) deliver(*read, a, g);
  EXPECT_EQ(core->fetches().cost().samples(balance::Place::store), 1u);
}

}  // namespace
}  // namespace di::host
