// A host's core that is handed the arena of an earlier start.
#include "host/recover.h"

#include "tests/unit/host/world.h"

namespace di::host {
namespace {

class RecoverTest : public World {
 protected:
  RecoverTest() : World(16) { usual_peers(); }  // 16 units: four full pages

  wire::Scope scope(std::uint32_t number) const { return {test_request(number), 1, 0, 0}; }

  // A page of a chain whose blocks before it are in another page.
  wire::SlotRef seal_after(const Key& parent, const std::vector<Key>& keys) {
    const wire::Scope by = scope(800000 + ++next_seal_);
    say(prefill, by, wire::kv_open{{static_cast<std::uint32_t>(keys.size())}, 99});
    const auto opened = heard<wire::kv_opened>(prefill);
    EXPECT_TRUE(opened && opened->slots.size() == 1);
    if (!opened || opened->slots.empty()) return {};
    const wire::SlotRef slot = opened->slots[0];
    for (std::uint32_t g = 0; g < 4; ++g) arena.write(layout, slot, g, test_crcs(keys)[g]);
    say(prefill, by, wire::kv_sealed{slot, parent, keys, test_crcs(keys), 0, 7});
    say(prefill, by, wire::kv_release{});
    return slot;
  }

  // kill -9; what kv::ArenaOwner::take_over finds in the memory.
  kv::Former die() {
    kv::Former former;
    former.layout = layout;
    former.slot_generations.assign(256, 0);
    former.entry_generations.assign(64, 3);
    for (const auto& [number, slot] : arena.slots) {
      const kv::ArenaOwner::Slot& at = slot.assigned;
      former.slot_generations[number] = at.generation;
      former.slots.push_back({{number, at.generation, at.offset, at.bytes}, at.page_blocks, std::nullopt});
      if (slot.state == kv::SlotState::sealed) former.slots.back().record = slot.record;
    }
    arena.entries.clear();
    return former;
  }
  Status begin(kv::Former former) {
    core.emplace(options(16), arena, data);
    out.clear();
    return core->restore(std::move(former));
  }
  void restart() {
    const Status restored = begin(die());
    ASSERT_TRUE(restored.ok()) << restored.error().message;
    turn();
  }
  // What the shell's threads do.
  void compare() {
    for (const Recovery::Check& check : core->take_checks()) {
      bool good = true;
      for (const Recovery::Segment& segment : check.segments)
        good = good && arena.segment_crc(segment.offset, segment.bytes) == segment.crc;
      core->on_checked(check.slot, good, now);
      turn();
    }
  }
  void former_gone() {
    core->on_former_gone(now);
    turn();
  }

  std::uint32_t next_seal_ = 0;
};

TEST_F(RecoverTest, PagesOfBeforeAreOfferedWhenTheirBytesWereCompared) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  restart();
  EXPECT_FALSE(core->pages().has(keys[0]));
  compare();
  EXPECT_TRUE(core->pages().has(keys[3]));
  usual_peers();
  out.clear();
  core->on_message(wire::Envelope::make(meta.instance, meta.generation, {}, wire::meta_arena_resync{}), now);
  turn();
  const auto delta = heard<wire::meta_arena_delta>(meta);
  ASSERT_TRUE(delta);
  EXPECT_TRUE(delta->snapshot);
  ASSERT_EQ(delta->added.size(), 1u);
  EXPECT_EQ(delta->added[0].keys, keys);
  EXPECT_EQ(delta->added[0].crcs, test_crcs(keys));
  // A rank of before may be reading it.
  EXPECT_EQ(gauge("pins"), 1u);
  former_gone();
  EXPECT_TRUE(idle());
  EXPECT_EQ(core->pages().bytes_evictable(), layout.page_bytes(4));
  EXPECT_FALSE(core->recovering());
}

TEST_F(RecoverTest, ARequestFindsThePagesOfBefore) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  restart();
  compare();
  former_gone();
  usual_peers();
  say(prefill, scope(1), wire::kv_fetch{keys});
  const auto answer = heard<wire::kv_fetching>(prefill);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->code, 0);
  EXPECT_EQ(answer->blocks, 4u);
  // An entry that the last owner had handed out never matches again.
  EXPECT_EQ(kv::entry_generation(answer->entry), 4u);
  EXPECT_EQ(core->reads().counters().reads, 0u);
  say(prefill, scope(1), wire::kv_release{});
  EXPECT_TRUE(idle());
}

TEST_F(RecoverTest, WrongBytesAreNotOfferedAndTheirSlotWaitsForTheProcessesOfBefore) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  cached(keys);
  const std::uint64_t offset = arena.slots.begin()->second.assigned.offset;
  arena.write_at(offset, layout, 4, 2, 4711);
  restart();
  compare();
  EXPECT_FALSE(core->pages().has(keys[0]));
  EXPECT_EQ(core->recovery().bad(), 1u);
  EXPECT_EQ(gauge("quarantined_pages"), 1u);
  EXPECT_EQ(arena.slots.size(), 1u);
  former_gone();
  EXPECT_TRUE(idle());
  EXPECT_TRUE(arena.slots.empty());
}

TEST_F(RecoverTest, WhatRanksWereWritingIsNotGivenToOthers) {
  say(prefill, scope(1), wire::kv_open{{4, 4}, 5});
  ASSERT_EQ(heard<wire::kv_opened>(prefill)->slots.size(), 2u);
  seal(prefill, scope(2), {});  // a tail, which only its request could use
  restart();
  usual_peers();
  EXPECT_EQ(gauge("quarantined_pages"), 3u);
  say(prefill, scope(3), wire::kv_open{{4, 4}, 6});
  EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, static_cast<std::uint16_t>(Code::busy));
  // The entries of the index stay, so that what the ranks of before hold can be read.
  EXPECT_EQ(arena.slots.size(), 3u);
  const auto before = arena.slots;
  former_gone();
  EXPECT_TRUE(idle());
  say(prefill, scope(3), wire::kv_open{{4, 4}, 7});
  const auto opened = heard<wire::kv_opened>(prefill);
  ASSERT_TRUE(opened && opened->slots.size() == 2);
  for (const wire::SlotRef& slot : opened->slots) {
    const auto old = before.find(slot.slot);
    if (old != before.end()) {
      EXPECT_GT(slot.generation, old->second.assigned.generation);
    }
  }
}

// A frozen rank may go on in the middle of a copy: its slot was in quarantine before, and still is.
TEST_F(RecoverTest, WhatWasInQuarantineStaysThere) {
  core->on_attached(prefill);
  say(prefill, scope(1), wire::kv_open{{4}, 5});
  const wire::SlotRef frozen = heard<wire::kv_opened>(prefill)->slots.at(0);
  lose(prefill);
  ASSERT_EQ(gauge("quarantined_pages"), 1u);
  EXPECT_FALSE(arena.current(frozen));
  restart();
  usual_peers();
  EXPECT_EQ(gauge("quarantined_pages"), 1u);
  say(decode, scope(2), wire::kv_open{{4, 4, 4, 4}, 6});
  EXPECT_EQ(heard<wire::kv_opened>(decode)->code, static_cast<std::uint16_t>(Code::busy));
  say(decode, scope(2), wire::kv_open{{4, 4, 4}, 7});
  const auto opened = heard<wire::kv_opened>(decode);
  ASSERT_EQ(opened->code, 0);
  for (const wire::SlotRef& slot : opened->slots) EXPECT_NE(slot.slot, frozen.slot);
  say(decode, scope(2), wire::kv_release{});
  former_gone();
  EXPECT_TRUE(idle());
}

TEST_F(RecoverTest, TheProcessesOfBeforeMayLetGoBeforeEverythingIsCompared) {
  cached(test_keys(1, 0, 4));
  cached(test_keys(2, 0, 4));
  restart();
  former_gone();
  EXPECT_EQ(gauge("quarantined_pages"), 2u);
  EXPECT_TRUE(core->recovering());
  compare();
  EXPECT_TRUE(idle());
  EXPECT_EQ(core->pages().bytes_evictable(), 2 * layout.page_bytes(4));
}

TEST_F(RecoverTest, TheChainThatWasLongestNotContinuedGoesFirstAndAChildBeforeItsParent) {
  const std::vector<Key> old_first = test_keys(1, 0, 4);
  const std::vector<Key> other = test_keys(2, 0, 4);
  const std::vector<Key> old_second = test_keys(1, 4, 4);
  seal_after(Key{}, old_first);
  seal_after(Key{}, other);
  seal_after(old_first.back(), old_second);
  settle_puts();
  restart();
  compare();
  former_gone();
  usual_peers();
  const auto take_a_page = [&](std::uint32_t number) {
    say(prefill, scope(number), wire::kv_open{{4}, number});
    EXPECT_EQ(heard<wire::kv_opened>(prefill)->code, 0);
  };
  take_a_page(1);  // the free one
  take_a_page(2);
  EXPECT_FALSE(core->pages().has(other[0]));
  EXPECT_TRUE(core->pages().has(old_second[0]));
  take_a_page(3);
  EXPECT_FALSE(core->pages().has(old_second[0]));
  EXPECT_TRUE(core->pages().has(old_first[0]));
}

TEST_F(RecoverTest, WhatTheStoreDoesNotHaveIsWrittenBackAndNothingElse) {
  cached(test_keys(1, 0, 4));  // there already
  seal_after(Key{}, test_keys(2, 0, 4));
  restart();
  usual_peers();
  compare();
  former_gone();
  wire::Scope asked;
  const auto open = heard<wire::meta_put_open>(meta, &asked);
  ASSERT_TRUE(open);
  ASSERT_EQ(open->pages.size(), 1u);
  EXPECT_EQ(open->pages[0].keys, test_keys(2, 0, 4));
  EXPECT_EQ(open->tenant, 7u);
  EXPECT_FALSE(heard<wire::meta_put_open>(meta));
}

TEST_F(RecoverTest, ADuplicateOfBeforeIsFreed) {
  const std::vector<Key> keys = test_keys(1, 0, 4);
  seal(prefill, scope(1), keys);
  seal(prefill, scope(2), keys);
  settle_puts();
  restart();
  compare();
  former_gone();
  EXPECT_EQ(core->pages().all().size(), 1u);
  EXPECT_TRUE(core->pages().has(keys[0]));
}

TEST_F(RecoverTest, AnotherModelGetsAnEmptyArena) {
  cached(test_keys(1, 0, 4));
  restart();
  const kv::Layout other = *kv::layout_mla("test-2", 4, 4, 8192);
  EXPECT_EQ(core->set_layout(other).error().code, Code::busy);  // not yet compared
  compare();
  EXPECT_EQ(core->set_layout(other).error().code, Code::busy);  // a rank of before may read it
  former_gone();
  EXPECT_TRUE(core->set_layout(other).ok());
  EXPECT_TRUE(core->pages().all().empty());
  EXPECT_EQ(core->set_layout(layout).error().code, Code::unsupported);  // this one is in use
  turn();
}

TEST_F(RecoverTest, SlotsThatContradictEachOtherSpoilTheWholeArena) {
  cached(test_keys(1, 0, 4));
  kv::Former former = die();
  former.slots.push_back(former.slots.front());
  former.slots.back().place.slot = 9;
  EXPECT_EQ(begin(former).error().code, Code::corrupt);
  former = die();
  former.layout.reset();
  EXPECT_EQ(begin(former).error().code, Code::corrupt);
}

TEST_F(RecoverTest, ARecordThatDoesNotFitTheLayoutIsNone) {
  cached(test_keys(1, 0, 4));
  kv::Former former = die();
  former.slots.front().record->keys.pop_back();
  ASSERT_TRUE(begin(former).ok());
  EXPECT_TRUE(core->take_checks().empty());
  EXPECT_EQ(core->recovery().bad(), 1u);
  former_gone();
  EXPECT_TRUE(core->pages().all().empty());
}

TEST_F(RecoverTest, DroppingTheArenaLeavesWhatIsHeld) {
  const std::vector<Key> free_keys = test_keys(1, 0, 4);
  const std::vector<Key> held_keys = test_keys(2, 0, 4);
  cached(free_keys);
  seal(prefill, scope(5), held_keys);
  settle_puts();
  out.clear();
  const Pages::Dropped dropped = core->drop_arena(now);
  turn();
  EXPECT_EQ(dropped.pages, 1u);
  EXPECT_EQ(dropped.blocks, 4u);
  EXPECT_EQ(dropped.bytes, layout.page_bytes(4));
  EXPECT_FALSE(core->pages().has(free_keys[0]));
  EXPECT_TRUE(core->pages().has(held_keys[0]));
  const auto delta = heard<wire::meta_arena_delta>(meta);
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->removed.size(), 1u);
}

}  // namespace
}  // namespace di::host
