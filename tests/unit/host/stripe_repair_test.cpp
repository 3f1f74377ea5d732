// meta_repair: columns made anew and written where di-meta wants them.
#include "tests/unit/host/stripe_world.h"

namespace di::host {
namespace {

// A stripe of 4+2 whose pages are not in the arena any more.
class Repaired : public StripeWorld {
 public:
  explicit Repaired(std::uint32_t pages, std::uint32_t remote = 0, std::uint16_t data_columns = 4,
                    std::uint16_t parity_columns = 2)
      : StripeWorld(with(data_columns, parity_columns, remote)) {
    write(1000, 0, 1);
    StripeWorld::settle();
    core->on_peer_lost(meta, now);
    for (std::uint32_t page = 0; page < pages; ++page) write(1, page * 3, 3);
    core->on_peer_up(meta, PeerKind::meta, false, now);
    StripeWorld::settle();
    evict_all();
    StripeWorld::settle();
    id = find(stripe_key(1, 0))->first;
    EXPECT_EQ(stripes.at(id).pages.size(), pages);
    for (std::size_t i = 0; i < stores.size(); ++i) {
      if (std::none_of(stripes.at(id).columns.begin(), stripes.at(id).columns.end(),
                       [&](const auto& item) { return item.second == i; })) {
        target = i;
      }
    }
    reads = 0;
  }

  // The column is gone, and di-meta knows.
  void lose(std::uint16_t column) {
    Stripe& stripe = stripes.at(id);
    lost[column] = stores[stripe.columns.at(column)].columns.at({id, column});
    stores[stripe.columns.at(column)].columns.erase({id, column});
    stripe.columns.erase(column);
  }
  wire::meta_repair order() {
    wire::meta_repair repair;
    repair.lease = next_lease++;
    repair.ttl_ms = 9000;
    repair.fingerprint = layout.fingerprint();
    repair.pages = stripes.at(id).pages;
    repair.tenant = tenant_of(repair.pages.front().keys);
    repair.stripe = planned_stripe(id);
    for (const auto& [column, bytes] : lost)
      repair.targets.push_back({stores[target].peer.instance, 0, column});
    return repair;
  }
  // The column is to be somewhere else, and can still be read.
  void leave(std::uint16_t column) {
    const Stripe& stripe = stripes.at(id);
    lost[column] = stores[stripe.columns.at(column)].columns.at({id, column});
  }
  void repair(const wire::meta_repair& order) {
    leases.insert(order.lease);
    say(meta, {}, order);
  }
  void expect_written() {
    ASSERT_EQ(repaired.size(), 1u);
    EXPECT_EQ(repaired[0].stripe, id);
    EXPECT_EQ(repaired[0].code, 0);
    EXPECT_EQ(repaired[0].written.size(), lost.size());
    for (const auto& [column, bytes] : lost) EXPECT_EQ(stores[target].columns.at({id, column}), bytes);
    expect_nothing_held();
  }
  void expect_nothing_held() {
    EXPECT_TRUE(idle());
    EXPECT_TRUE(leases.empty());
    EXPECT_TRUE(data.exposures.empty());
  }

  std::uint64_t id = 0;
  std::size_t target = 0;
  std::map<std::uint16_t, Bytes> lost;

 private:
  static Setup with(std::uint16_t data, std::uint16_t parity, std::uint32_t remote) {
    Setup setup = stripe_setup(data, parity, remote);
    setup.stores = 7;
    return setup;
  }
};

TEST(StripeRepair, EveryLossThatCanBeMadeUpForIs) {
  for (const std::uint32_t pages : {1u, 2u, 4u}) {
    for (std::uint16_t first = 0; first < 6; ++first) {
      for (std::uint16_t second = first; second < 6; ++second) {
        for (const std::uint32_t remote : {0u, 7u}) {
          Repaired world(pages, remote);
          const kv::StripeShape shape = world.shape_of(world.stripes.at(world.id));
          if (!shape.is_stored(first) || !shape.is_stored(second)) continue;
          SCOPED_TRACE(std::to_string(pages) + " pages, " + std::to_string(first) + " and " +
                       std::to_string(second));
          world.lose(first);
          if (second != first) world.lose(second);
          world.repair(world.order());
          world.settle();
          EXPECT_EQ(world.reads, shape.data_stored());
          world.expect_written();
        }
      }
    }
  }
}

TEST(StripeRepair, PagesOfTheArenaNeedNoReads) {
  Repaired world(4);
  world.lose(0);
  world.lose(5);
  for (const std::uint32_t page : {0u, 1u, 2u, 3u}) world.write(1, page * 3, 3);
  world.settle();
  world.repair(world.order());
  world.settle();
  // The lost page itself does not count: what is here is written back by itself, not by a repair.
  EXPECT_EQ(world.reads, 1u);
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, 0);
  EXPECT_TRUE(world.leases.empty());
}

// Of a store that is to be emptied: without parity there is no other way, and with it none that costs less.
TEST(StripeRepair, AColumnThatCanStillBeReadIsCopied) {
  for (const std::uint32_t remote : {0u, 7u}) {
    Repaired without(1, remote, 1, 0);
    without.leave(0);
    without.repair(without.order());
    without.settle();
    EXPECT_EQ(without.reads, 1u);
    EXPECT_EQ(without.core->repairs().counters().copied, 1u);
    without.expect_written();
    for (const std::uint32_t pages : {1u, 2u, 4u}) {
      for (std::uint16_t column = 0; column < 6; ++column) {
        Repaired world(pages, remote);
        if (!world.shape_of(world.stripes.at(world.id)).is_stored(column)) continue;
        SCOPED_TRACE(std::to_string(pages) + " pages, column " + std::to_string(column));
        world.leave(column);
        world.repair(world.order());
        world.settle();
        EXPECT_EQ(world.reads, 1u);
        EXPECT_EQ(world.core->repairs().counters().copied, 1u);
        world.expect_written();
      }
    }
  }
}

TEST(StripeRepair, OneIsCopiedAndOneIsMade) {
  Repaired world(4, 3);
  world.leave(1);
  world.lose(4);
  world.repair(world.order());
  world.settle();
  EXPECT_EQ(world.reads, 1u + 4u);
  EXPECT_EQ(world.core->repairs().counters().copied, 1u);
  EXPECT_EQ(world.core->repairs().counters().columns, 2u);
  world.expect_written();
}

TEST(StripeRepair, ACopyThatIsNotWhatThePlanSaysIsMadeInstead) {
  Repaired world(4);
  world.leave(1);
  world.spoil(world.id, 1);
  world.repair(world.order());
  world.settle();
  EXPECT_EQ(world.reads, 1u + 4u);
  ASSERT_EQ(world.read_failed.size(), 1u);
  EXPECT_EQ(world.read_failed[0].column, 1u);
  EXPECT_EQ(world.read_failed[0].code, static_cast<std::uint16_t>(Code::corrupt));
  EXPECT_EQ(world.core->repairs().counters().copied, 0u);
  world.expect_written();
  // Without parity nothing can be done, and nothing wrong is written.
  Repaired without(1, 0, 1, 0);
  without.leave(0);
  without.spoil(without.id, 0);
  without.repair(without.order());
  without.settle();
  ASSERT_EQ(without.repaired.size(), 1u);
  EXPECT_EQ(without.repaired[0].code, static_cast<std::uint16_t>(Code::unreachable));
  EXPECT_TRUE(without.repaired[0].written.empty());
  EXPECT_EQ(without.read_failed.size(), 1u);
  EXPECT_FALSE(without.stores[without.target].columns.contains({without.id, 0}));
  without.expect_nothing_held();
}

TEST(StripeRepair, WhatNoCodeGivesIsRefused) {
  Repaired world(1, 0, 1, 0);
  world.lose(0);
  world.repair(world.order());
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::unreachable));
  EXPECT_EQ(world.core->repairs().counters().refused, 1u);
  world.expect_nothing_held();
}

TEST(StripeRepair, AWrongColumnIsFoundAndAnotherIsUsed) {
  Repaired world(4);
  world.lose(1);
  world.spoil(world.id, 2);
  world.repair(world.order());
  world.settle();
  EXPECT_EQ(world.read_failed.size(), 1u);
  world.expect_written();
}

TEST(StripeRepair, TooFewColumnsAreSaidSo) {
  Repaired world(4);
  world.lose(0);
  world.lose(1);
  world.spoil(world.id, 2);
  world.repair(world.order());
  world.settle();
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::unreachable));
  EXPECT_TRUE(world.repaired[0].written.empty());
  world.expect_nothing_held();
}

// ---- cross-check: a repair without targets

// As whoever encoded it wrong would have left it: the column is another, and its checksums are those of what it is.
void encode_wrong(Repaired& world, std::uint16_t column) {
  StripeWorld::Stripe& stripe = world.stripes.at(world.id);
  const kv::StripeShape shape = world.shape_of(stripe);
  Bytes& bytes = world.stores[stripe.columns.at(column)].columns.at({world.id, column});
  const std::uint32_t group = shape.groups() - 1;
  bytes[shape.column_offset(column, group)] ^= std::byte{0x10};
  const std::uint32_t crc =
      crc32c(ByteView(bytes).subspan(shape.column_offset(column, group), shape.segment_bytes(column, group)));
  if (const auto place = shape.crc_index(column, group)) {
    stripe.code.crcs[*place] = crc;
  } else {
    stripe.pages[shape.page_of(column)].crcs[group] = crc;
  }
}

TEST(StripeCrossCheck, FindsWhatWasEncodedWrongWhateverItsChecksumsSay) {
  for (const std::uint32_t pages : {1u, 2u, 4u}) {
    for (const std::uint32_t remote : {0u, 7u}) {
      SCOPED_TRACE(std::to_string(pages) + " pages, " + std::to_string(remote) + " stores elsewhere");
      Repaired right(pages, remote);
      const kv::StripeShape shape = right.shape_of(right.stripes.at(right.id));
      right.repair(right.order());
      right.settle();
      ASSERT_EQ(right.repaired.size(), 1u);
      EXPECT_EQ(right.repaired[0].code, 0);
      EXPECT_TRUE(right.repaired[0].written.empty());
      EXPECT_EQ(right.reads, shape.data_stored() + 1);
      EXPECT_EQ(right.arena.cross_checks, shape.groups());
      EXPECT_EQ(right.core->repairs().counters().checks, 1u);
      EXPECT_EQ(right.core->repairs().counters().repairs, 0u);
      right.expect_nothing_held();
      for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
        const auto column = static_cast<std::uint16_t>(shape.stored_column(i));
        if (shape.segment_bytes(column, shape.groups() - 1) == 0) continue;
        Repaired world(pages, remote);
        encode_wrong(world, column);
        world.repair(world.order());
        world.settle();
        ASSERT_EQ(world.repaired.size(), 1u);
        // Of parity only the first is an XOR.
        EXPECT_EQ(world.repaired[0].code, column == 5 ? 0 : static_cast<std::uint16_t>(Code::corrupt))
            << column;
        EXPECT_TRUE(world.read_failed.empty());
        EXPECT_EQ(world.core->repairs().counters().failed, 0u);
        world.expect_nothing_held();
      }
    }
  }
}

// A repair finds that too, also of the second parity; it would find it whenever it is tried again.
TEST(StripeRepair, WhatWasEncodedWrongIsSaidToBe) {
  for (const std::uint16_t column : {std::uint16_t{1}, std::uint16_t{4}, std::uint16_t{5}}) {
    SCOPED_TRACE(column);
    Repaired world(4);
    encode_wrong(world, column);
    world.lose(column);
    world.repair(world.order());
    world.settle();
    ASSERT_EQ(world.repaired.size(), 1u);
    EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::corrupt));
    EXPECT_TRUE(world.repaired[0].written.empty());
    EXPECT_TRUE(world.read_failed.empty());
    world.expect_nothing_held();
  }
}

TEST(StripeRepair, BytesThatAStoreDidNotGetAsTheyWereAreNotTheStripesFault) {
  Repaired world(4);
  world.lose(0);
  world.repair(world.order());
  while (world.work.empty() || !world.work.front().put) {
    ASSERT_TRUE(world.go_on() || world.step());
  }
  const auto put = *world.work.front().put;
  const Peer store = world.stores[world.work.front().store].peer;
  world.work.pop_front();
  world.say(store, {}, wire::kv_put_done{put.stripe, put.column, static_cast<std::uint16_t>(Code::corrupt)});
  world.settle();
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::io));
  world.expect_nothing_held();
}

TEST(StripeCrossCheck, WithoutEveryColumnItSaysNothing) {
  Repaired damaged(4);
  damaged.spoil(damaged.id, 2);
  damaged.repair(damaged.order());
  damaged.settle();
  ASSERT_EQ(damaged.repaired.size(), 1u);
  EXPECT_EQ(damaged.repaired[0].code, static_cast<std::uint16_t>(Code::unreachable));
  EXPECT_EQ(damaged.read_failed.size(), 1u);
  EXPECT_EQ(damaged.arena.cross_checks, 0u);
  damaged.expect_nothing_held();
  Repaired away(4);
  away.kill_store(away.stripes.at(away.id).columns.at(4));
  away.repair(away.order());
  away.settle();
  ASSERT_EQ(away.repaired.size(), 1u);
  EXPECT_EQ(away.repaired[0].code, static_cast<std::uint16_t>(Code::unreachable));
  EXPECT_EQ(away.reads, 0u);
  away.expect_nothing_held();
  // The second parity is not looked at.
  Repaired second(4);
  second.kill_store(second.stripes.at(second.id).columns.at(5));
  second.repair(second.order());
  second.settle();
  ASSERT_EQ(second.repaired.size(), 1u);
  EXPECT_EQ(second.repaired[0].code, 0);
  second.expect_nothing_held();
  Repaired without(1, 0, 1, 0);
  without.repair(without.order());
  ASSERT_EQ(without.repaired.size(), 1u);
  EXPECT_EQ(without.repaired[0].code, static_cast<std::uint16_t>(Code::invalid));
  without.expect_nothing_held();
}

TEST(StripeCrossCheck, BytesThatChangeUnderItGiveNoVerdict) {
  Repaired world(4);
  world.repair(world.order());
  for (int i = 0; i < 1000 && !world.core->repairs().has_step(); ++i) {
    if (!world.mail.empty()) {
      world.deliver(0);
    } else if (!world.work.empty()) {
      world.work_on(0);
    }
  }
  ASSERT_TRUE(world.core->repairs().has_step());
  for (const auto& [slot, page] : world.core->pages().all()) {
    if (page.state == PageState::scratch) world.arena.at(page.place.offset, 1)[0] ^= std::byte{0x10};
  }
  world.settle();
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::unreachable));
  world.expect_nothing_held();
}

TEST(StripeRepair, FetchesAndRepairsWaitWhileThereIsOneAndMoveWithIt) {
  Repaired world(4);
  world.lose(0);
  const auto fetch = [&] { return world.core->background()[1]; };
  const auto repair = [&] { return world.core->background()[2]; };
  ASSERT_EQ(fetch().name, "host-fetch");
  ASSERT_EQ(repair().name, "host-repair");
  EXPECT_FALSE(fetch().waits);
  EXPECT_FALSE(repair().waits);
  const std::uint64_t fetches = fetch().moves;
  const std::uint64_t repairs = repair().moves;
  world.repair(world.order());
  EXPECT_TRUE(fetch().waits);
  EXPECT_TRUE(repair().waits);
  EXPECT_GT(fetch().moves, fetches);
  EXPECT_GT(repair().moves, repairs);
  // Everybody is silent: neither moves, but for what gives the reads up.
  world.work.clear();
  world.mail.clear();
  const std::uint64_t silent = fetch().moves;
  world.turn();
  EXPECT_EQ(fetch().moves, silent);
  world.advance(seconds(10));
  EXPECT_GT(fetch().moves, silent);
  world.settle();
  EXPECT_FALSE(fetch().waits);
  EXPECT_FALSE(repair().waits);
  EXPECT_TRUE(world.idle());
}

TEST(StripeRepair, WhatItsStoreRefusesIsNotWritten) {
  Repaired world(4);
  world.lose(0);
  world.no_space = 1;
  world.repair(world.order());
  world.settle();
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::no_space));
  EXPECT_TRUE(world.repaired[0].written.empty());
  EXPECT_TRUE(world.repaired[0].unanswered.empty());
  world.expect_nothing_held();
}

// A store that is asked and says nothing may have written; one that was never reached has not.
TEST(StripeRepair, OnlyWhatAStoreWasAskedForMayBeWritten) {
  enum class Moment { before_the_put, store_lost, store_silent };
  for (const Moment moment : {Moment::before_the_put, Moment::store_lost, Moment::store_silent}) {
    SCOPED_TRACE(static_cast<int>(moment));
    Repaired world(4);
    world.lose(0);
    if (moment == Moment::before_the_put) world.kill_store(world.target);
    world.repair(world.order());
    while (moment != Moment::before_the_put && (world.work.empty() || !world.work.front().put)) {
      ASSERT_TRUE(world.go_on() || world.step());
    }
    if (moment == Moment::store_lost) world.kill_store(world.target);
    if (moment == Moment::store_silent) {
      world.work.clear();
      world.advance(seconds(60));
    }
    world.settle();
    ASSERT_EQ(world.repaired.size(), 1u);
    EXPECT_TRUE(world.repaired[0].written.empty());
    EXPECT_EQ(world.repaired[0].unanswered, moment == Moment::before_the_put ? std::vector<std::uint32_t>{}
                                                                             : std::vector<std::uint32_t>{0});
    world.expect_nothing_held();
  }
}

TEST(StripeRepair, IsWrittenWhateverTheWriteBudgetHas) {
  Repaired world(4);
  world.lose(0);
  world.over_budget = 1;
  world.repair(world.order());
  world.settle();
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].code, 0u);
  world.expect_written();
}

TEST(StripeRepair, OrdersThatCannotBeCarriedOutAreAnsweredAtOnce) {
  Repaired world(4);
  world.lose(0);
  const auto refused = [&](wire::meta_repair order, Code code) {
    order.lease = world.next_lease++;
    world.repaired.clear();
    world.repair(order);
    ASSERT_EQ(world.repaired.size(), 1u);
    EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(code));
    world.expect_nothing_held();
  };
  wire::meta_repair order = world.order();
  order.fingerprint = stripe_key(1, 1);
  refused(order, Code::unsupported);
  order = world.order();
  order.pages.pop_back();
  refused(order, Code::invalid);
  order = world.order();
  order.targets.clear();  // a cross-check, and one of its columns is lost
  refused(order, Code::unreachable);
  order = world.order();
  order.targets.push_back(order.targets[0]);
  refused(order, Code::invalid);
  order = world.order();
  order.stripe.crcs.pop_back();
  refused(order, Code::invalid);
  // Two at a time.
  std::vector<wire::meta_repair> some(3, world.order());
  for (std::uint64_t i = 0; i < 3; ++i) {
    some[i].stripe.stripe += i * 1000;
    some[i].lease = world.next_lease++;
    world.repaired.clear();
    world.repair(some[i]);
  }
  ASSERT_EQ(world.repaired.size(), 1u);
  EXPECT_EQ(world.repaired[0].stripe, some[2].stripe.stripe);
  EXPECT_EQ(world.repaired[0].code, static_cast<std::uint16_t>(Code::busy));
  world.settle();
  world.expect_nothing_held();
}

// Whoever goes away in the middle: everything is given back, and di-meta hears, if it is there.
TEST(StripeRepair, NothingIsLeftWhateverEndsIt) {
  for (int end = 0; end < 4; ++end) {
    for (int moment = 0; moment < 40; ++moment) {
      SCOPED_TRACE("end=" + std::to_string(end) + " moment=" + std::to_string(moment));
      Repaired world(4, 3);
      // Of three cases one makes both, one copies one of them, and one is a cross-check.
      if (moment % 3 == 0) world.lose(3);
      if (moment % 3 == 1) world.leave(3);
      if (moment % 3 != 2) world.lose(4);
      world.repair(world.order());
      for (int i = 0; i < moment; ++i) {
        if (!world.mail.empty()) {
          world.deliver(0);
        } else if (!world.work.empty()) {
          world.work_on(0);
        } else if (!world.data.concealing.empty()) {
          world.answer_conceal();
        } else {
          world.step();
        }
      }
      if (end == 0) {
        world.core->on_peer_lost(world.meta, world.now);
        world.leases.clear();
      } else if (end == 1) {
        world.kill_store(world.target);
      } else if (end == 2) {
        world.kill_store(world.stripes.at(world.id).columns.at(0));
        world.kill_store(world.stripes.at(world.id).columns.at(1));
      } else {
        world.work.clear();  // everybody falls silent
        world.mail.clear();
        for (int i = 0; i < 14; ++i) {
          world.advance(seconds(5));
          world.settle();
        }
      }
      world.settle();
      EXPECT_TRUE(world.idle());
      EXPECT_TRUE(world.leases.empty());
      EXPECT_TRUE(world.data.exposures.empty());
      if (end != 0) {
        EXPECT_EQ(world.repaired.size(), 1u);
      }
    }
  }
}

}  // namespace
}  // namespace di::host
