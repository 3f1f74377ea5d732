// Sealed pages on their way to the store.
#include "host/writeback.h"

#include "tests/unit/host/world.h"

namespace di::host {
namespace {

class WritebackTest : public World {
 protected:
  WritebackTest() { usual_peers(); }
  wire::Scope scope(std::uint32_t number) const { return {test_request(number), 1, 0, 0}; }
  // Seals a page and lets go of it.
  wire::SlotRef page(std::uint32_t chain, std::uint32_t first = 0, std::uint8_t reuse = 0) {
    const std::vector<Key> keys = test_keys(chain, first, 4);
    const wire::Scope mine = scope(1000 + chain * 16 + first);
    say(prefill, mine, wire::kv_open{{4}, 1});
    const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots[0];
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
    const Key parent = first == 0 ? test_key(chain, 9999) : test_key(chain, first - 1);
    say(prefill, mine, wire::kv_sealed{slot, parent, keys, test_crcs(keys), reuse, tenant});
    say(prefill, mine, wire::kv_release{});
    return slot;
  }
  wire::meta_put_opened granted(std::uint64_t stripe) const {
    return {0, stripe, 1, 0, {{store.instance, 3, 0}}, 30000, 0, 1};
  }

  std::uint64_t tenant = 7;  // of the next page
};

// The page stays in the arena and is not offered again; a next owner of the arena may.
TEST_F(WritebackTest, APageOfATenantOverItsQuotaIsNotWritten) {
  const wire::SlotRef slot = page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  wire::meta_put_opened refused;
  refused.code = static_cast<std::uint16_t>(Code::over_quota);
  say(meta, asked, refused);
  EXPECT_TRUE(idle());
  EXPECT_EQ(core->writeback().counters().dropped_quota, 1u);
  EXPECT_EQ(core->writeback().over_quota(), (std::map<std::uint64_t, std::uint64_t>{{7, 1}}));
  EXPECT_EQ(core->writeback().counters().dropped_failed, 0u);
  advance(seconds(60));
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));
  EXPECT_TRUE(core->pages().has(test_key(1, 0)));
  EXPECT_FALSE(arena.slots.at(slot.slot).record->stored);
}

TEST_F(WritebackTest, APageIsWrittenAndPublished) {
  const wire::SlotRef slot = page(1);
  wire::Scope asked;
  const auto open = heard<wire::meta_put_open>(meta, &asked);
  ASSERT_TRUE(open);
  ASSERT_EQ(open->pages.size(), 1u);
  EXPECT_EQ(open->fingerprint, layout.fingerprint());
  EXPECT_EQ(open->pages[0].keys, test_keys(1, 0, 4));
  EXPECT_EQ(open->pages[0].parent, test_key(1, 9999));
  EXPECT_EQ(open->pages[0].bytes, layout.page_bytes(4));
  EXPECT_EQ(open->tenant, 7u);
  EXPECT_EQ(gauge("pending_writebacks"), 1u);
  say(meta, asked, granted(50));
  const auto put = heard<wire::kv_put>(store);
  ASSERT_TRUE(put);
  EXPECT_EQ(put->stripe, 50u);
  EXPECT_EQ(put->volume, 3);
  EXPECT_EQ(put->slot.slot, slot.slot);
  EXPECT_EQ(put->pages, open->pages);
  EXPECT_EQ(put->tenant, 7u);
  // Pinned while it is written: not evictable.
  EXPECT_GT(gauge("used_bytes"), 0u);
  say(store, {}, wire::kv_put_done{50, 0, 0});
  const auto commit = heard<wire::meta_put_commit>(meta, &asked);
  ASSERT_TRUE(commit);
  EXPECT_EQ(commit->stripe, 50u);
  EXPECT_TRUE(commit->failed_columns.empty());
  EXPECT_EQ(gauge("pending_writebacks"), 1u);
  say(meta, asked, wire::meta_put_committed{0, 50});
  EXPECT_TRUE(idle());
  EXPECT_EQ(core->writeback().counters().written, 1u);
}

TEST_F(WritebackTest, ALoopMovesAsLongAsItsTimersDo) {
  const auto work = [&] { return core->background()[0]; };
  ASSERT_EQ(work().name, "host-writeback");
  EXPECT_FALSE(work().waits);
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  EXPECT_TRUE(work().waits);
  // di-meta says nothing: each time that the timer comes something moves, and in between nothing does.
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::uint64_t moves = work().moves;
    turn();
    EXPECT_EQ(work().moves, moves);
    advance(seconds(5));
    EXPECT_GT(work().moves, moves) << attempt;
    advance(seconds(5));
    ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked)) << attempt;
  }
  lose(store);
  EXPECT_FALSE(work().waits) << "there is nowhere to write to";
  up(store, PeerKind::store);
  say(meta, asked, wire::meta_put_opened{static_cast<std::uint16_t>(Code::exists), 0, 0, 0, {}, 0});
  EXPECT_FALSE(work().waits);
}

TEST_F(WritebackTest, ExistsIsDone) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, wire::meta_put_opened{static_cast<std::uint16_t>(Code::exists), 0, 0, 0, {}, 0});
  EXPECT_TRUE(idle());
  EXPECT_EQ(core->writeback().counters().existed, 1u);
}

TEST_F(WritebackTest, BusyIsTriedAgainEverLater) {
  page(1);
  wire::Scope asked;
  Duration wait = milliseconds(100);
  for (int attempt = 0; attempt < 19; ++attempt) {
    ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked)) << attempt;
    say(meta, asked, wire::meta_put_opened{static_cast<std::uint16_t>(Code::busy), 0, 0, 0, {}, 0});
    EXPECT_EQ(gauge("pending_writebacks"), 1u);
    EXPECT_EQ(core->next_due().liveness, now.liveness + wait);
    advance(wait - milliseconds(1));
    EXPECT_FALSE(heard<wire::meta_put_open>(meta));
    advance(milliseconds(1));
    wait = std::min<Duration>(wait * 2, seconds(5));
  }
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, wire::meta_put_opened{static_cast<std::uint16_t>(Code::busy), 0, 0, 0, {}, 0});
  EXPECT_TRUE(idle());
  EXPECT_EQ(core->writeback().counters().dropped_failed, 1u);
}

TEST_F(WritebackTest, AFailedColumnTriesAgainAndAFullStoreIsNamed) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(50));
  say(store, {}, wire::kv_put_done{50, 0, static_cast<std::uint16_t>(Code::no_space)});
  EXPECT_EQ(*heard<wire::meta_put_commit>(meta),
            (wire::meta_put_commit{50, {{0, static_cast<std::uint16_t>(Code::no_space)}}, {1, 0, {}}}));
  EXPECT_FALSE(heard<wire::meta_put_abort>(meta));
  say(meta, asked, wire::meta_put_committed{static_cast<std::uint16_t>(Code::no_space), 50});
  advance(milliseconds(100));
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(51));
  say(store, {}, wire::kv_put_done{51, 0, static_cast<std::uint16_t>(Code::corrupt)});
  EXPECT_EQ(heard<wire::meta_put_abort>(meta)->stripe, 51u);
  EXPECT_TRUE(idle());
}

TEST_F(WritebackTest, WhatIsAboveTheBudgetStaysInTheArenaAndIsNotTriedAgain) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(50));
  ASSERT_FALSE(heard<wire::kv_put>(store)->repair);
  say(store, {}, wire::kv_put_done{50, 0, static_cast<std::uint16_t>(Code::over_budget)});
  EXPECT_EQ(heard<wire::meta_put_abort>(meta)->stripe, 50u);
  EXPECT_FALSE(heard<wire::meta_put_commit>(meta));  // nobody is to make room
  EXPECT_TRUE(idle());
  page(2);
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, wire::meta_put_opened{static_cast<std::uint16_t>(Code::over_budget), 0, 0, 0, {}, 0});
  EXPECT_TRUE(idle());
  advance(seconds(60));
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));
  EXPECT_EQ(core->writeback().counters().dropped_over_budget, 2u);
  EXPECT_EQ(core->writeback().counters().dropped_failed, 0u);
  EXPECT_EQ(core->writeback().counters().retried, 0u);
}

TEST_F(WritebackTest, ALostStoreAbortsAndTriesAgain) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(50));
  ASSERT_TRUE(heard<wire::kv_put>(store));
  lose(store);
  EXPECT_EQ(heard<wire::meta_put_abort>(meta)->stripe, 50u);
  EXPECT_EQ(gauge("pending_writebacks"), 1u);
  advance(milliseconds(100));
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(51));  // di-meta does not know yet
  EXPECT_EQ(heard<wire::meta_put_abort>(meta)->stripe, 51u);
  EXPECT_FALSE(heard<wire::kv_put>(store));
}

TEST_F(WritebackTest, WithoutDiMetaPagesWaitAndGoOnWhenItIsBack) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(50));
  lose(meta);
  page(2);
  EXPECT_EQ(gauge("pending_writebacks"), 2u);
  EXPECT_EQ(core->next_due().liveness, instant_never);
  advance(seconds(20));
  out.clear();
  up(meta, PeerKind::meta);
  EXPECT_TRUE(heard<wire::meta_arena_delta>(meta)->snapshot);
  EXPECT_TRUE(heard<wire::meta_put_open>(meta));
  EXPECT_TRUE(heard<wire::meta_put_open>(meta));
  // The old stripe's late answer means nothing now.
  say(store, {}, wire::kv_put_done{50, 0, 0});
  EXPECT_FALSE(heard<wire::meta_put_commit>(meta));
}

TEST_F(WritebackTest, ACommitWithoutAnswerIsAskedAgainFromTheStart) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, granted(50));
  say(store, {}, wire::kv_put_done{50, 0, 0});
  ASSERT_TRUE(heard<wire::meta_put_commit>(meta, &asked));
  advance(seconds(5));
  EXPECT_FALSE(heard<wire::meta_put_abort>(meta));    // it may be published
  say(meta, asked, wire::meta_put_committed{0, 50});  // too late: open tells
  advance(milliseconds(100));
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  say(meta, asked, wire::meta_put_opened{static_cast<std::uint16_t>(Code::exists), 0, 0, 0, {}, 0});
  EXPECT_TRUE(idle());
}

TEST_F(WritebackTest, AnAnswerThatNobodyWaitsForIsAborted) {
  page(1);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  advance(seconds(5));
  say(meta, asked, granted(50));
  EXPECT_EQ(heard<wire::meta_put_abort>(meta)->stripe, 50u);
}

TEST_F(WritebackTest, TheQueueIsBoundedAndTheOldestGo) {
  Core::Options with = options(64);
  with.writeback.queue_pages = 3;
  restart(with);
  up(prefill, PeerKind::rank);
  for (std::uint32_t chain = 1; chain <= 5; ++chain) page(chain);
  EXPECT_EQ(gauge("pending_writebacks"), 3u);
  EXPECT_EQ(core->writeback().counters().dropped_full, 2u);
  up(meta, PeerKind::meta);
  EXPECT_EQ(heard<wire::meta_put_open>(meta)->pages[0].keys, test_keys(3, 0, 4));
}

TEST_F(WritebackTest, AQueuedPageMayBeEvicted) {
  lose(meta);
  for (std::uint32_t chain = 1; chain <= 16; ++chain) page(chain);  // the whole arena
  EXPECT_EQ(gauge("pending_writebacks"), 16u);
  page(17);
  EXPECT_EQ(gauge("pending_writebacks"), 16u);
  up(meta, PeerKind::meta);
  EXPECT_EQ(core->writeback().counters().dropped_evicted, 1u);
}

// E13: what a store is reading is not given away, however much room is wanted.
TEST_F(WritebackTest, APageThatIsBeingWrittenStays) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  const wire::Scope scope{test_request(1), 1, 0, 0};
  const wire::SlotRef slot = seal(prefill, scope, keys);
  say(prefill, scope, wire::kv_release{});
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_put_open>(meta, &asked));
  wire::meta_put_opened opened;
  opened.stripe = 5;
  opened.data_columns = 1;
  opened.columns = {{store.instance, 0, 0}};
  opened.ttl_ms = 30000;
  opened.pages = 1;
  say(meta, asked, opened);
  ASSERT_TRUE(heard<wire::kv_put>(store));
  // Everything else of the arena, and one page more.
  const wire::Scope greedy{test_request(2), 1, 0, 0};
  std::uint32_t granted = 0;
  for (std::uint16_t code = 0; code == 0;) {
    say(decode, greedy, wire::kv_open{{4}, granted});
    const auto answer = heard<wire::kv_opened>(decode);
    ASSERT_TRUE(answer);
    code = answer->code;
    for (const wire::SlotRef& other : answer->slots) EXPECT_NE(other.slot, slot.slot);
    granted += code == 0 ? 1 : 0;
  }
  EXPECT_GT(granted, 0u);
  EXPECT_TRUE(core->pages().has(keys[0]));
  say(store, {}, wire::kv_put_done{5, 0, 0});
  ASSERT_TRUE(heard<wire::meta_put_commit>(meta, &asked));
  say(meta, asked, wire::meta_put_committed{0, 5});
  say(decode, greedy, wire::kv_open{{4}, 99});
  EXPECT_EQ(heard<wire::kv_opened>(decode)->code, 0);  // now it may go
  EXPECT_FALSE(core->pages().has(keys[0]));
  say(decode, greedy, wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(WritebackTest, SecondSightingWritesWhatIsSeenAgain) {
  Core::Options with = options(64);
  with.writeback.admit = Admit::second_sighting;
  restart(with);
  usual_peers();
  page(1);
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));
  say(decode, scope(1), wire::kv_fetch{test_keys(1, 0, 4)});
  EXPECT_EQ(heard<wire::meta_put_open>(meta)->pages[0].keys, test_keys(1, 0, 4));
  say(decode, scope(2), wire::kv_fetch{test_keys(1, 0, 4)});
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));  // once
  page(2, 0, 1);                                   // its writer expects another turn
  EXPECT_TRUE(heard<wire::meta_put_open>(meta));
}

}  // namespace
}  // namespace di::host
