// Columns on slow stores: skipped where others make them for nothing, hedged when they are late.
#include "tests/unit/host/stripe_world.h"

namespace di::host {
namespace {

const wire::Scope asked{stripe_request(1), 1, 0, 0};

// Pages in one stripe of 4+2, read often enough to know the stores.
class Known : public StripeWorld {
 public:
  // `slow`: the store of this column takes a second longer than the others.
  explicit Known(const Hedge::Limits& hedge, std::optional<std::uint16_t> slow = std::nullopt,
                 std::uint32_t pages = 4, std::uint32_t page_blocks = 3)
      : StripeWorld(with(hedge)), blocks(pages * page_blocks) {
    work_time = milliseconds(1);
    write(1000, 0, 1);
    StripeWorld::settle();
    core->on_peer_lost(meta, now);
    for (std::uint32_t page = 0; page < pages; ++page) write(1, page * page_blocks, page_blocks);
    core->on_peer_up(meta, PeerKind::meta, false, now);
    StripeWorld::settle();
    id = find(stripe_key(1, 0))->first;
    evict_all();
    for (int round = 0; round < 8; ++round) {
      ask();
      const std::deque<Work> held = slow ? hold(*slow) : std::deque<Work>{};
      StripeWorld::settle();
      if (!held.empty()) {
        advance(seconds(1));
        work.insert(work.end(), held.begin(), held.end());
        StripeWorld::settle();
      }
      EXPECT_EQ(brought(), blocks);
      release();
    }
  }
  void ask() {
    reads = 0;
    say(rank, asked, wire::kv_fetch{stripe_keys(1, 0, blocks)});
    while (!mail.empty()) deliver(0);
  }
  // What the store of a column was to do.
  std::deque<Work> hold(std::uint16_t column) {
    std::deque<Work> held;
    for (auto item = work.begin(); item != work.end();) {
      if (item->read && item->read->column == column) {
        held.push_back(*item);
        item = work.erase(item);
      } else {
        ++item;
      }
    }
    return held;
  }
  std::uint32_t brought() {
    verify_shown();
    return std::min(fetching[asked.request].blocks, ready[asked.request].failed_block);
  }
  [[nodiscard]] bool complete() { return ready[asked.request].complete && brought() == blocks; }
  void release() {
    say(rank, asked, wire::kv_release{});
    ready.erase(asked.request);
    StripeWorld::settle();
    EXPECT_TRUE(idle());
    EXPECT_TRUE(leases.empty());
    evict_all();
  }
  void advance_to_due() {
    const Instant due = core->next_due().liveness;
    ASSERT_GT(due, now.liveness);
    advance(due - now.liveness);
  }
  const std::uint32_t blocks;
  std::uint64_t id = 0;

 private:
  static Setup with(const Hedge::Limits& hedge) {
    Setup setup = stripe_setup(4, 2);
    setup.hedge = hedge;
    return setup;
  }
};

TEST(StripeHedge, AColumnThatIsLateIsMadeOfTheOthers) {
  Known world{{}};
  world.ask();
  const auto held = world.hold(1);
  ASSERT_EQ(held.size(), 1u);
  world.settle();
  EXPECT_FALSE(world.complete());
  EXPECT_EQ(world.reads, 4u);
  world.advance_to_due();
  EXPECT_EQ(world.core->fillings().counters().hedges, 1u);
  EXPECT_EQ(world.reads, 5u);
  world.settle();
  EXPECT_TRUE(world.complete());
  EXPECT_EQ(world.core->fillings().counters().hedges_won, 1u);
  EXPECT_TRUE(world.read_failed.empty());  // late is not lost
  world.release();
}

TEST(StripeHedge, ALateColumnThatComesFirstWins) {
  Known world{{}};
  world.ask();
  auto held = world.hold(1);
  world.settle();
  world.advance_to_due();
  EXPECT_EQ(world.core->fillings().counters().hedges, 1u);
  const auto parity = world.hold(4);
  ASSERT_EQ(parity.size(), 1u);
  world.work.insert(world.work.end(), held.begin(), held.end());
  world.settle();
  EXPECT_TRUE(world.complete());
  EXPECT_EQ(world.arena.decodes, 0u);
  EXPECT_EQ(world.core->fillings().counters().hedges_won, 0u);
  world.release();
}

TEST(StripeHedge, ALateColumnAndALostOne) {
  Known world{{}};
  world.stores[world.stripes.at(world.id).columns.at(2)].columns.erase({world.id, 2});
  world.ask();
  const auto held = world.hold(1);
  world.settle();
  EXPECT_FALSE(world.complete());  // the lost one waits for the late one, or for parity
  for (int i = 0; i < 20 && !world.complete(); ++i) {
    world.advance_to_due();
    world.settle();
  }
  EXPECT_TRUE(world.complete());
  world.release();
}

// One page of three parts: with two of them late, all parity is read for those.
class TwoLate : public Known {
 public:
  TwoLate() : Known({}, std::nullopt, 1, 4) {}
  void ask_until_late() {
    ask();
    EXPECT_EQ(work.size(), 3u);
    for (const std::uint16_t column : {std::uint16_t{1}, std::uint16_t{2}}) {
      for (const Work& item : hold(column)) late.push_back(item);
    }
    settle();
    advance(milliseconds(500));
    EXPECT_EQ(core->fillings().counters().hedges, 1u);
    EXPECT_EQ(reads, 5u);
  }
  // A byte of the last layer group.
  void spoil_end(std::uint16_t column) {
    spoil(id, column, shape_of(stripes.at(id)).column_bytes(column) - 1);
  }
  void late_come() {
    work.insert(work.end(), late.begin(), late.end());
    late.clear();
    settle();
  }
  std::deque<Work> late;
};

TEST(StripeHedge, WhatIsLateIsNotGivenUpForWhatIsLost) {
  TwoLate world;
  world.spoil(world.id, 0, 0);
  world.ask_until_late();
  world.hold(4);      // for good: one of parity is enough for what is lost
  world.late_come();  // and the first group can be compared
  ASSERT_EQ(world.read_failed.size(), 1u);
  EXPECT_EQ(world.read_failed[0].column, 0u);
  EXPECT_TRUE(world.complete());
  EXPECT_EQ(world.core->rebuilds().counters().failed, 0u);
  world.release();
}

TEST(StripeHedge, WhatIsLateIsNotGivenUpForWhatIsWrong) {
  for (const std::uint16_t wrong : {std::uint16_t{0}, std::uint16_t{4}, std::uint16_t{5}}) {
    SCOPED_TRACE(wrong);
    TwoLate world;
    world.spoil_end(wrong);
    world.ask_until_late();
    world.settle();
    EXPECT_EQ(world.core->fillings().counters().hedges_won, 0u);
    world.late_come();
    EXPECT_TRUE(world.complete());
    EXPECT_EQ(world.core->rebuilds().counters().failed, 0u);
    ASSERT_EQ(world.read_failed.size(), 1u);
    EXPECT_EQ(world.read_failed[0].column, wrong);
    world.release();
  }
}

TEST(StripeHedge, WithoutBudgetItWaits) {
  Hedge::Limits limits;
  limits.budget = 0;
  limits.burst = 0;
  Known world{limits};
  world.ask();
  const auto held = world.hold(1);
  world.settle();
  world.advance_to_due();
  EXPECT_EQ(world.reads, 4u);
  EXPECT_EQ(world.core->hedge().counters().hedges_refused, 1u);
  world.work.insert(world.work.end(), held.begin(), held.end());
  world.settle();
  EXPECT_TRUE(world.complete());
  world.release();
}

TEST(StripeHedge, AReaderOfOnePageDoesNotReadAllTheOthers) {
  Known world{{}};
  world.reads = 0;
  world.say(world.rank, asked, wire::kv_fetch{stripe_keys(1, 0, 3)});
  while (!world.mail.empty()) world.deliver(0);
  const auto held = world.hold(0);
  world.settle();
  world.advance(milliseconds(500));
  EXPECT_EQ(world.reads, 1u);
  world.work.insert(world.work.end(), held.begin(), held.end());
  world.settle();
  EXPECT_TRUE(world.ready[asked.request].complete);
  world.release();
}

Hedge::Limits no_hedges() {
  Hedge::Limits limits;
  limits.hedge_ratio = 1e9;
  return limits;
}

TEST(StripeHedge, ASlowStoreIsSkippedAtNoMoreReads) {
  Known world{no_hedges(), 1};
  world.ask();
  EXPECT_TRUE(world.hold(1).empty());
  world.settle();
  EXPECT_TRUE(world.complete());
  EXPECT_EQ(world.reads, 4u);  // parity instead
  EXPECT_GT(world.core->hedge().counters().skips, 0u);
  world.release();
  // Who wants one page only asks for it all the same.
  world.reads = 0;
  world.say(world.rank, asked, wire::kv_fetch{stripe_keys(1, 0, 6)});
  world.settle();
  EXPECT_EQ(world.reads, 2u);
  world.release();
}

TEST(StripeHedge, WhatWasSkippedIsReadWhenItIsNeeded) {
  Known world{no_hedges(), 1};
  for (const std::uint16_t column : {std::uint16_t{0}, std::uint16_t{2}})
    world.stores[world.stripes.at(world.id).columns.at(column)].columns.erase({world.id, column});
  world.ask();
  EXPECT_TRUE(world.hold(1).empty());
  world.settle();
  EXPECT_TRUE(world.complete());
  EXPECT_EQ(world.core->rebuilds().counters().failed, 0u);
  world.release();
}

// A page of which a column was skipped, and was made for its first layer group: its reader has that.
TEST(StripeHedge, WhatWasSkippedIsReadBehindWhatIsShown) {
  Known world{no_hedges(), 1};
  const std::uint64_t before = world.core->reads().counters().groups;
  world.ask();
  ASSERT_EQ(world.work.size(), 4u);  // 0, 2, 3 and parity
  for (std::size_t i = 0; i < 4; ++i) world.work_on(i);
  while (!world.mail.empty()) world.deliver(0);
  while (world.step()) continue;
  const auto shown = [&] {
    std::vector<std::uint32_t> groups;
    for (const auto& [slot, page] : world.core->pages().all()) {
      if (page.state == PageState::filling) groups.push_back(page.groups);
    }
    return groups;
  };
  ASSERT_EQ(shown(), std::vector<std::uint32_t>(4, 1));
  for (const std::uint16_t column : {std::uint16_t{0}, std::uint16_t{2}})
    world.stores[world.stripes.at(world.id).columns.at(column)].columns.erase({world.id, column});
  std::optional<std::uint32_t> from;
  while (!from && world.go_on()) {
    for (const auto& item : world.work) {
      if (item.read && item.read->column == 1) from = item.read->from_group;
    }
  }
  EXPECT_EQ(from, 1u);
  world.settle();
  EXPECT_EQ(world.core->reads().counters().groups - before, 1u + 1 + 3 + 3 + 3 + 2);
  EXPECT_TRUE(world.complete());
  world.release();
}

TEST(StripeHedge, TheLeaseIsHeldUntilWhatWasSkippedIsRead) {
  Known world{no_hedges(), 1};
  for (const std::uint16_t column : {std::uint16_t{4}, std::uint16_t{5}})
    world.stores[world.stripes.at(world.id).columns.at(column)].columns.erase({world.id, column});
  world.ask();
  std::deque<StripeWorld::Work> parity = world.hold(4);
  for (const auto& item : world.hold(5)) parity.push_back(item);
  ASSERT_EQ(parity.size(), 1u);
  world.settle();  // the others are there: nobody but the rebuild has the lease
  ASSERT_EQ(world.leases.size(), 1u);
  world.work.push_back(parity.front());
  while (world.hold(1).empty()) {
    EXPECT_EQ(world.leases.size(), 1u);
    ASSERT_TRUE(world.go_on());
  }
  EXPECT_EQ(world.leases.size(), 1u);
  world.core->on_message(
      wire::Envelope::make(world.rank.instance, world.rank.generation, asked, wire::kv_release{}), world.now);
  world.turn();
}

}  // namespace
}  // namespace di::host
