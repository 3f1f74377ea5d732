// Slots, keys, pins and eviction.
#include "host/pages.h"

#include "tests/unit/host/world.h"

namespace di::host {
namespace {

class PagesTest : public World {
 protected:
  PagesTest() : World(16) { usual_peers(); }  // 16 units: four full pages
  wire::Scope scope(std::uint32_t number) const { return {test_request(number), 1, 0, 0}; }
};

TEST_F(PagesTest, GrantsAreAllOrNothingAndComeBackWithTheRelease) {
  say(prefill, scope(1), wire::kv_open{{4, 4, 4}, 5});
  auto opened = heard<wire::kv_opened>(prefill);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->code, 0);
  EXPECT_EQ(opened->tag, 5u);
  ASSERT_EQ(opened->slots.size(), 3u);
  EXPECT_EQ(gauge("grants"), 3u);
  for (const wire::SlotRef& slot : opened->slots) {
    EXPECT_EQ(arena.slots.at(slot.slot).state, kv::SlotState::granted);
    EXPECT_EQ(slot.count, 4u);
  }
  say(prefill, scope(2), wire::kv_open{{4, 4}, 6});
  opened = heard<wire::kv_opened>(prefill);
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->code, static_cast<std::uint16_t>(Code::busy));
  EXPECT_TRUE(opened->slots.empty());
  say(prefill, scope(2), wire::kv_open{{4, 4, 4, 4, 1}, 6});  // never, whoever lets go
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, static_cast<std::uint16_t>(Code::invalid));
  say(prefill, scope(2), wire::kv_open{{5}, 6});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, static_cast<std::uint16_t>(Code::invalid));
  say(prefill, scope(2), wire::kv_open{{}, 6});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, static_cast<std::uint16_t>(Code::invalid));

  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
  EXPECT_TRUE(arena.slots.empty());
}

// Pages of one question were 4096 at most, and a longer prompt heard that it was longer than the arena.
TEST_F(PagesTest, TheArenaAloneBoundsThePagesOfAQuestion) {
  Core::Options large = options(20000);
  large.arena.slots_max = 12000;
  restart(large);
  usual_peers();
  const auto ask = [&](std::uint32_t number, std::size_t pages) {
    say(prefill, scope(number), wire::kv_open{std::vector<std::uint32_t>(pages, 1), number});
    return *heard<wire::kv_opened>(prefill);
  };
  const wire::kv_opened opened = ask(1, 10000);
  EXPECT_EQ(opened.code, 0);
  EXPECT_EQ(opened.slots.size(), 10000U);
  EXPECT_EQ(ask(2, 5000).code, static_cast<std::uint16_t>(Code::busy));
  EXPECT_EQ(ask(2, 12001).code, static_cast<std::uint16_t>(Code::invalid));
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_EQ(ask(2, 12000).slots.size(), 12000U);
}

TEST_F(PagesTest, ASealedPageIsToldToMetaAndFound) {
  const std::vector<Key> keys = test_keys(1, 0, 3);
  const wire::SlotRef slot = seal(prefill, scope(1), keys);
  const auto delta = heard<wire::meta_arena_delta>(meta);
  ASSERT_TRUE(delta);
  EXPECT_FALSE(delta->snapshot);
  ASSERT_EQ(delta->added.size(), 1u);
  EXPECT_EQ(delta->added[0].keys, keys);
  EXPECT_EQ(arena.slots.at(slot.slot).state, kv::SlotState::sealed);
  EXPECT_EQ(arena.slots.at(slot.slot).segments, 0xfu);
  EXPECT_EQ(arena.slots.at(slot.slot).crcs, test_crcs(keys));
  EXPECT_EQ(gauge("pins"), 1u);
}

// E15: a page is published when its bytes are what its writer said, not before.
TEST_F(PagesTest, BytesThatDoNotMatchAreNeverPublished) {
  say(prefill, scope(1), wire::kv_open{{2}, 1});
  const auto opened = heard<wire::kv_opened>(prefill);
  ASSERT_TRUE(opened);
  const std::vector<Key> keys = test_keys(1, 0, 2);
  for (std::uint32_t g = 0; g < 4; ++g)
    arena.write(layout, opened->slots[0], g, test_crcs(keys)[g] + (g == 2 ? 1 : 0));
  say(prefill, scope(1), wire::kv_sealed{opened->slots[0], Key{}, keys, test_crcs(keys), 0});
  EXPECT_EQ(core->counters().seals_corrupt, 1u);
  EXPECT_FALSE(heard<wire::meta_arena_delta>(meta));
  EXPECT_FALSE(core->pages().has(keys[0]));
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, OnlyTheHolderSealsAndOnlyWhatFits) {
  say(prefill, scope(1), wire::kv_open{{2}, 1});
  const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots[0];
  const std::vector<Key> keys = test_keys(1, 0, 2);
  say(decode, scope(1), wire::kv_sealed{slot, Key{}, keys, test_crcs(keys), 0});
  say(prefill, scope(2), wire::kv_sealed{slot, Key{}, keys, test_crcs(keys), 0});
  wire::SlotRef stale = slot;
  ++stale.generation;
  say(prefill, scope(1), wire::kv_sealed{stale, Key{}, keys, test_crcs(keys), 0});
  EXPECT_EQ(core->counters().ignored, 3u);
  EXPECT_EQ(gauge("grants"), 1u);
  say(prefill, scope(1), wire::kv_sealed{slot, Key{}, test_keys(1, 0, 3), test_crcs(keys), 0});
  EXPECT_EQ(core->counters().seals_invalid, 1u);
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, ADuplicateLivesAsLongAsItsPinsAndInheritsWhenTheOwnerGoes) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  seal(prefill, scope(1), keys);
  const wire::SlotRef second = seal(decode, scope(2), keys, 0);
  EXPECT_EQ(core->pages().counters().duplicates, 1u);
  settle_puts();
  say(decode, scope(2), wire::kv_release{});
  EXPECT_FALSE(arena.current(second));  // nobody else found it
  EXPECT_EQ(core->pages().all().size(), 1u);

  const wire::SlotRef third = seal(decode, scope(3), keys, 0);
  say(prefill, scope(1), wire::kv_release{});
  // Room for four pages: the unpinned owner is thrown out, and the pinned duplicate owns the keys now.
  say(prefill, scope(4), wire::kv_open{{4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  EXPECT_TRUE(arena.current(third));
  EXPECT_TRUE(core->pages().has(keys[3]));
  say(decode, scope(3), wire::kv_release{});
  EXPECT_TRUE(arena.current(third));  // it is the owner, so it stays as a cached page
  say(prefill, scope(4), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, ATailIsSealedAndNeverFound) {
  const wire::SlotRef tail = seal(prefill, scope(1), {});
  EXPECT_FALSE(heard<wire::meta_arena_delta>(meta));
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));
  EXPECT_TRUE(arena.current(tail));
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_FALSE(arena.current(tail));
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, TheEndOfAChainIsEvictedBeforeItsBeginning) {
  const wire::Scope writer = scope(1);
  for (std::uint32_t page = 0; page < 4; ++page) seal(prefill, writer, test_keys(1, page * 4, 4));
  settle_puts();
  say(prefill, writer, wire::kv_release{});
  EXPECT_TRUE(idle());
  out.clear();
  say(prefill, scope(2), wire::kv_open{{4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  EXPECT_TRUE(core->pages().has(test_key(1, 11)));
  EXPECT_FALSE(core->pages().has(test_key(1, 12)));
  const auto delta = heard<wire::meta_arena_delta>(meta);
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->removed.size(), 1u);
  say(prefill, scope(3), wire::kv_open{{4, 4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, static_cast<std::uint16_t>(Code::busy));
  EXPECT_EQ(core->pages().counters().evicted, 1u);  // nothing is thrown out for what cannot fit
}

// Its beginning was cached, so that only the rest was asked for, again and again: it waited for what it held itself.
TEST_F(PagesTest, WhatFitsBesideNothingOfItsOwnRequestNeverFits) {
  const auto opened = [&](std::uint32_t number, const std::vector<std::uint32_t>& blocks) {
    say(prefill, scope(number), wire::kv_open{blocks, 1});
    return heard<wire::kv_opened>(prefill)->code;
  };
  cached(test_keys(1, 0, 4));
  say(prefill, scope(1), wire::kv_fetch{test_keys(1, 0, 4)});
  settle_puts();
  EXPECT_EQ(opened(1, {4, 4, 4, 4}), static_cast<std::uint16_t>(Code::invalid));
  EXPECT_EQ(opened(1, {4, 4}), 0);
  EXPECT_EQ(opened(1, {4, 4}), static_cast<std::uint16_t>(Code::invalid));
  // Of another request it may be let go of.
  EXPECT_EQ(opened(2, {4, 4}), static_cast<std::uint16_t>(Code::busy));
  EXPECT_EQ(opened(1, {4}), 0);
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_EQ(opened(2, {4, 4}), 0);
}

// The answer was late: what it had granted stayed the request's, and the prompt seemed to fit no more.
TEST_F(PagesTest, WhatWasGrantedInAnAnswerThatNobodyHeardIsGivenBack) {
  const auto open = [&](std::uint64_t tag, std::uint64_t unheard) {
    say(prefill, scope(1), wire::kv_open{{4, 4, 4}, tag, unheard});
    const auto answer = heard<wire::kv_opened>(prefill);
    EXPECT_EQ(answer->tag, tag);
    return answer->code;
  };
  EXPECT_EQ(open(7, 7), 0);
  EXPECT_EQ(open(8, 7), 0);
  EXPECT_EQ(open(9, 7), 0);
  EXPECT_EQ(open(10, 10), static_cast<std::uint16_t>(Code::invalid));  // those of 9 are in use
  const auto left = [&] { return core->pages().bytes_free(); };
  EXPECT_EQ(left(), layout.page_bytes(4));
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_EQ(left(), 4 * layout.page_bytes(4));
  EXPECT_TRUE(idle());
}

// A rank that has told no layout.
TEST_F(PagesTest, WithoutALayoutThereIsNoRoomYet) {
  Pages pages({.payload_bytes = 1 << 20, .slots_max = 8}, arena);
  EXPECT_TRUE(pages.fits(std::vector<std::uint32_t>{1}, {}));
  EXPECT_EQ(pages.take(std::vector<std::uint32_t>{1}, PageState::granted).error().code, Code::busy);
}

// So it is when the beginning was there before, and is let go of together with the end.
TEST_F(PagesTest, WhatARequestMadeIsEvictedBeforeWhatItContinued) {
  cached(test_keys(1, 0, 4));
  say(prefill, scope(1), wire::kv_fetch{test_keys(1, 0, 8)});
  seal(prefill, scope(1), test_keys(1, 4, 4));
  settle_puts();
  say(prefill, scope(1), wire::kv_release{});
  settle_puts();
  say(prefill, scope(2), wire::kv_open{{4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  EXPECT_TRUE(core->pages().has(test_key(1, 0)));
  EXPECT_FALSE(core->pages().has(test_key(1, 4)));
}

// Its beginning was written back first, was let go of first, and was thrown out first: the rest of the chain,
// which nobody finds without it, stayed.
TEST_F(PagesTest, AChainThatIsLetGoOfFromItsBeginningIsEvictedFromItsEnd) {
  const auto page = [this](std::uint32_t first) {
    const std::vector<Key> keys = test_keys(1, first, 4);
    say(prefill, scope(first), wire::kv_open{{4}, 1});
    const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots.at(0);
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
    const Key parent = first == 0 ? Key{} : test_key(1, first - 1);
    say(prefill, scope(first), wire::kv_sealed{slot, parent, keys, test_crcs(keys), 0, 0});
  };
  for (const std::uint32_t first : {0, 4, 8}) page(first);
  settle_puts();
  for (const std::uint32_t first : {0, 4, 8}) say(prefill, scope(first), wire::kv_release{});
  EXPECT_TRUE(idle());
  for (const std::uint32_t left : {8, 4, 0}) {
    std::vector<std::uint32_t> pages((16 - left) / 4, 4);
    say(prefill, scope(20), wire::kv_open{pages, 1});
    EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
    for (const std::uint32_t first : {0, 4, 8})
      EXPECT_EQ(core->pages().has(test_key(1, first)), first < left) << first;
    say(prefill, scope(20), wire::kv_release{});
  }
}

// Its second part was let go of at once, its end first: the page in the middle became older than all, went first, and
// took the rest with it.
TEST_F(PagesTest, AChainThatIsLetGoOfInPartsIsEvictedFromItsEnd) {
  for (const bool second_first : {false, true}) {
    const std::uint32_t chain = second_first ? 2 : 1;
    const auto seal_part = [&](std::uint32_t part) {
      for (const std::uint32_t first : {8 * part, 8 * part + 4}) {
        const std::vector<Key> keys = test_keys(chain, first, 4);
        say(prefill, scope(part), wire::kv_open{{4}, 1});
        const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots.at(0);
        for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
        const Key parent = first == 0 ? Key{} : test_key(chain, first - 1);
        say(prefill, scope(part), wire::kv_sealed{slot, parent, keys, test_crcs(keys), 0, 0});
      }
    };
    seal_part(0);
    seal_part(1);
    settle_puts();
    say(prefill, scope(second_first ? 1 : 0), wire::kv_release{});
    say(prefill, scope(second_first ? 0 : 1), wire::kv_release{});
    EXPECT_TRUE(idle());
    for (const std::uint32_t left : {12, 8, 4, 0}) {
      std::vector<std::uint32_t> pages((16 - left) / 4, 4);
      say(prefill, scope(20), wire::kv_open{pages, 1});
      EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
      for (const std::uint32_t first : {0, 4, 8, 12})
        EXPECT_EQ(core->pages().has(test_key(chain, first)), first < left) << first << " of " << left;
      say(prefill, scope(20), wire::kv_release{});
    }
  }
}

// What continues it was being written back, and so was in nobody's way: it went, and the rest could not be found.
TEST_F(PagesTest, WhatAPinnedPageContinuesStaysWhileAnythingElseCanGo) {
  cached(test_keys(1, 0, 4));
  const std::vector<Key> keys = test_keys(1, 4, 4);
  say(prefill, scope(1), wire::kv_open{{4}, 1});
  const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots.at(0);
  for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
  say(prefill, scope(1), wire::kv_sealed{slot, test_key(1, 3), keys, test_crcs(keys), 0, 0});
  settle_puts();
  cached(test_keys(7, 0, 4));
  say(prefill, scope(2), wire::kv_open{{4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  EXPECT_TRUE(core->pages().has(test_key(1, 0)));
  EXPECT_TRUE(core->pages().has(test_key(1, 4)));
  EXPECT_FALSE(core->pages().has(test_key(7, 0)));
  say(prefill, scope(2), wire::kv_release{});
  say(prefill, scope(2), wire::kv_open{{4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  EXPECT_FALSE(core->pages().has(test_key(1, 0))) << "nothing else was left";
  EXPECT_TRUE(core->pages().has(test_key(1, 4)));
}

// Of two chains with one beginning that goes last which was used last, and the beginning with it.
TEST_F(PagesTest, WhatSeveralContinueGoesWhenNoneIsLeft) {
  cached(test_keys(1, 0, 4));
  const auto branch = [&](std::uint32_t chain) {
    const std::vector<Key> keys = test_keys(chain, 4, 4);
    say(prefill, scope(chain), wire::kv_open{{4}, 1});
    const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots.at(0);
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
    say(prefill, scope(chain), wire::kv_sealed{slot, test_key(1, 3), keys, test_crcs(keys), 0, 0});
    settle_puts();
    say(prefill, scope(chain), wire::kv_release{});
  };
  branch(2);
  cached(test_keys(7, 0, 4));
  branch(3);
  EXPECT_TRUE(idle());
  const auto left = [&](std::uint32_t wanted) {
    say(prefill, scope(20), wire::kv_open{std::vector<std::uint32_t>(wanted, 4), 1});
    EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
    say(prefill, scope(20), wire::kv_release{});
    std::vector<bool> there;
    for (const Key& key : {test_key(2, 4), test_key(7, 0), test_key(3, 4), test_key(1, 0)})
      there.push_back(core->pages().has(key));
    return there;
  };
  EXPECT_EQ(left(1), (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(left(2), (std::vector<bool>{false, false, true, true}));
  EXPECT_EQ(left(3), (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(left(4), (std::vector<bool>{false, false, false, false}));
}

class LongChainTest : public World {
 protected:
  LongChainTest() : World(600) { usual_peers(); }
  wire::Scope scope(std::uint32_t number) const { return {test_request(number), 1, 0, 0}; }
};

// As when another machine reads it.
TEST_F(LongChainTest, AChainThatIsLetGoOfPageByPageIsEvictedFromItsEnd) {
  constexpr std::uint32_t pages = 128;
  const auto all = test_keys(1, 0, pages);
  for (std::uint32_t i = 0; i < pages; ++i) {
    say(prefill, scope(i), wire::kv_open{{1}, 1});
    const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots.at(0);
    const auto crcs = test_crcs({all[i]});
    for (std::uint32_t g = 0; g < crcs.size(); ++g) arena.write(layout, slot, g, crcs[g]);
    say(prefill, scope(i), wire::kv_sealed{slot, i == 0 ? Key{} : all[i - 1], {all[i]}, crcs, 0, 0});
  }
  settle_puts();
  for (std::uint32_t i = 0; i < pages; ++i) say(prefill, scope(i), wire::kv_release{});
  EXPECT_TRUE(idle());
  // Of 256 slots 192 are taken: half of the chain goes, and it is the end.
  say(prefill, scope(500), wire::kv_open{std::vector<std::uint32_t>(192, 1), 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  for (std::uint32_t i = 0; i < pages; ++i) EXPECT_EQ(core->pages().has(all[i]), i < 64) << i;
}

// What a peer says of parents need not be true.
TEST_F(PagesTest, PagesThatAreEachOthersParentsAreEvictedLikeOthers) {
  for (const std::uint32_t first : {0, 4}) {
    const std::vector<Key> keys = test_keys(1, first, 4);
    say(prefill, scope(first), wire::kv_open{{4}, 1});
    const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots.at(0);
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
    say(prefill, scope(first), wire::kv_sealed{slot, test_key(1, 7 - first), keys, test_crcs(keys), 0, 0});
  }
  settle_puts();
  for (const std::uint32_t first : {0, 4}) say(prefill, scope(first), wire::kv_release{});
  EXPECT_TRUE(idle());
  say(prefill, scope(9), wire::kv_open{{4, 4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
}

TEST_F(PagesTest, AFullArenaIsEmptiedForAsManyPagesAsAreWanted) {
  for (std::uint32_t chain = 1; chain <= 4; ++chain) cached(test_keys(chain, 0, 4));
  std::vector<std::uint32_t> single(16, 1);
  say(prefill, scope(1), wire::kv_open{single, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->slots.size(), 16u);
  EXPECT_EQ(core->pages().counters().evicted, 4u);
  say(prefill, scope(1), wire::kv_release{});
  // Short ones first, and the long one needs the run that they would lie in.
  say(prefill, scope(2), wire::kv_open{{1, 2, 4, 1, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->slots.size(), 6u);
}

// Two pages have the same first keys: a key stands for all that comes before it, so the last one tells them apart.
TEST_F(PagesTest, AnotherHostGetsThePageThatItsPlanNames) {
  const Peer other{"di-kvd.host9", 5};
  up(other, PeerKind::host, true);
  std::vector<Key> one = test_keys(1, 0, 4);
  std::vector<Key> two = one;
  two[2] = test_key(2, 2);
  two[3] = test_key(2, 3);
  seal(prefill, scope(1), one);
  const wire::SlotRef wanted = seal(prefill, scope(1), two);
  say(other, {}, wire::arena_read{77, two.back(), 4, {3, 1, 4, 0, 4}, 1});
  ASSERT_FALSE(data.pushes.empty());
  EXPECT_EQ(data.pushes.front().offset / layout.page_bytes(1),
            arena.slots.at(wanted.slot).assigned.offset / layout.page_bytes(1));
}

TEST_F(PagesTest, PinnedPagesAreNotEvicted) {
  for (std::uint32_t page = 0; page < 4; ++page) seal(prefill, scope(1), test_keys(1, page * 4, 4));
  say(decode, scope(2), wire::kv_open{{1}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(decode)->code, static_cast<std::uint16_t>(Code::busy));
}

TEST_F(PagesTest, ALostRankThatStillMapsTheArenaKeepsItsGrantsInQuarantine) {
  core->on_attached(prefill);
  say(prefill, scope(1), wire::kv_open{{4}, 1});
  const wire::SlotRef slot = heard<wire::kv_opened>(prefill)->slots[0];
  lose(prefill);
  EXPECT_FALSE(arena.current(slot));  // its references are stale
  EXPECT_EQ(gauge("quarantined_pages"), 1u);
  EXPECT_EQ(gauge("grants"), 0u);
  core->on_detached(prefill, now);
  turn();
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, APageWasGivenToOthersWhileAFrozenRankWasReadingIt) {
  core->on_attached(decode);
  cached(test_keys(1, 0, 4));
  say(decode, scope(1), wire::kv_fetch{test_keys(1, 0, 4)});
  ASSERT_TRUE(heard<wire::kv_fetching>(decode));
  lose(decode);
  // The arena has room for four pages; the one that may be read stays.
  say(prefill, scope(2), wire::kv_open{{4, 4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, static_cast<std::uint16_t>(Code::busy));
  // Back again with a new mapping, the old one closes after that.
  up(decode, PeerKind::rank);
  core->on_attached(decode);
  EXPECT_EQ(gauge("pins"), 1u);
  core->on_detached(decode, now);
  turn();
  EXPECT_TRUE(idle());
  say(prefill, scope(2), wire::kv_open{{4, 4, 4, 4}, 1});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
}

TEST_F(PagesTest, AReadForALostRankThatLetsGoOfTheArenaIsCancelled) {
  core->on_attached(decode);
  say(decode, scope(1), wire::kv_fetch{test_keys(1, 0, 4)});
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::meta_plan>(meta, &asked));
  wire::meta_planned plan;
  plan.lease = 5;
  plan.ttl_ms = 10000;
  plan.pages = {planned(7, test_keys(1, 0, 4), 0, 4)};
  say(meta, asked, plan);
  const auto read = heard<wire::kv_read>(store);
  ASSERT_TRUE(read);
  lose(decode);
  EXPECT_FALSE(heard<wire::kv_read_cancel>(store));  // it may be copying the first groups
  core->on_detached(decode, now);
  turn();
  EXPECT_TRUE(heard<wire::kv_read_cancel>(store));
  say(store, {}, wire::kv_read_cancelled{read->transfer});
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, TheEndOfTheArenaSocketReleasesAClient) {
  core->on_attached(prefill);
  seal(prefill, scope(1), test_keys(1, 0, 4));
  settle_puts();
  say(prefill, scope(1), wire::kv_open{{1}, 1});
  EXPECT_EQ(gauge("grants"), 1u);
  EXPECT_EQ(gauge("pins"), 1u);
  core->on_detached(prefill, now);
  turn();
  EXPECT_TRUE(idle());
}

TEST_F(PagesTest, MessagesOfAnEarlierGenerationAreDropped) {
  const Peer earlier{prefill.instance, prefill.generation - 1};
  say(earlier, scope(1), wire::kv_open{{1}, 1});
  EXPECT_FALSE(heard<wire::kv_opened>(prefill));
  EXPECT_EQ(core->counters().ignored, 1u);
  // A rank is no directory.
  say(prefill, scope(1), wire::meta_planned{});
  EXPECT_EQ(core->counters().ignored, 2u);
}

TEST_F(PagesTest, ASnapshotGoesToEveryNewDirectoryAndOnAGap) {
  for (std::uint32_t page = 0; page < 3; ++page) cached(test_keys(page, 0, 4));
  out.clear();
  lose(meta);
  const Peer successor{meta.instance, 9};
  up(successor, PeerKind::meta);
  auto delta = heard<wire::meta_arena_delta>(successor);
  ASSERT_TRUE(delta);
  EXPECT_TRUE(delta->snapshot);
  EXPECT_EQ(delta->added.size(), 3u);
  const std::uint64_t seq = delta->seq;
  say(successor, {}, wire::meta_arena_resync{});
  delta = heard<wire::meta_arena_delta>(successor);
  ASSERT_TRUE(delta);
  EXPECT_TRUE(delta->snapshot);
  EXPECT_EQ(delta->seq, seq + 1);
}

TEST(PagesLayout, ALongSnapshotIsCutIntoParts) {
  test::FakeArena arena;
  Core::Options options;
  options.self = {"di-kvd.host0", 1};
  options.arena = {.payload_bytes = 64 * test_layout().page_bytes(1), .slots_max = 64};
  options.delta_pages_max = 4;
  test::FakeData data;
  Core core(options, arena, data);
  ASSERT_TRUE(core.set_layout(test_layout()).ok());
  const Now now{{1000}, {1000}};
  core.on_peer_up({"di-decode.0", 2}, PeerKind::rank, false, now);
  wire::Scope scope{test_request(1), 1, 0, 0};
  for (std::uint32_t i = 0; i < 10; ++i) {
    core.on_message(wire::Envelope::make("di-decode.0", 2, scope, wire::kv_open{{1}, i}), now);
    const auto opened = core.take_outgoing().back().as<wire::kv_opened>();
    const std::vector<Key> keys = test_keys(1, i, 1);
    wire::Decoded<wire::kv_opened> answer = opened;
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(test_layout(), answer->slots[0], g, test_crcs(keys)[g]);
    core.on_message(wire::Envelope::make("di-decode.0", 2, scope,
                                         wire::kv_sealed{answer->slots[0], Key{}, keys, test_crcs(keys), 0}),
                    now);
  }
  core.on_peer_up({"di-meta.0", 1}, PeerKind::meta, false, now);
  core.flush(now);
  std::vector<std::size_t> counts;
  std::vector<bool> snapshots;
  std::uint64_t seq = 0;
  for (const wire::Envelope& message : core.take_outgoing()) {
    if (message.number != wire::meta_arena_delta::number) continue;
    wire::Decoded<wire::meta_arena_delta> delta = message.as<wire::meta_arena_delta>();
    EXPECT_EQ(delta->seq, ++seq);
    counts.push_back(delta->added.size());
    snapshots.push_back(delta->snapshot);
  }
  EXPECT_EQ(counts, (std::vector<std::size_t>{4, 4, 2}));
  EXPECT_EQ(snapshots, (std::vector<bool>{true, false, false}));
}

TEST(PagesLayout, OneArenaOneLayout) {
  test::FakeArena arena;
  Core::Options options;
  options.self = {"di-kvd.host0", 1};
  options.arena = {.payload_bytes = 1 << 20, .slots_max = 4};
  test::FakeData data;
  Core core(options, arena, data);
  const Result<kv::Layout> large = kv::layout_mla("large", 64, 61, 1152);
  EXPECT_EQ(core.set_layout(*large).error().code, Code::invalid);  // not a single page fits
  EXPECT_TRUE(core.set_layout(test_layout()).ok());
  EXPECT_TRUE(core.set_layout(test_layout()).ok());
  EXPECT_EQ(core.set_layout(kv::layout_v41()).error().code, Code::unsupported);
}

}  // namespace
}  // namespace di::host
