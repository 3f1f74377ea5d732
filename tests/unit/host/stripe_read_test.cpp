// Stripes on their way back: parts, columns that are lost, wrong or late, and what they are rebuilt from.
#include <algorithm>
#include <array>
#include <numeric>

#include "tests/unit/host/stripe_world.h"

namespace di::host {
namespace {

// Chain 1: `pages` pages of `blocks` blocks in one stripe, and nothing in the arena.
std::uint64_t store_chain(StripeWorld& world, std::uint32_t pages, std::uint32_t blocks) {
  world.write(1000, 0, 1);
  world.settle();
  world.core->on_peer_lost(world.meta, world.now);
  for (std::uint32_t page = 0; page < pages; ++page) world.write(1, page * blocks, blocks);
  world.core->on_peer_up(world.meta, PeerKind::meta, false, world.now);
  world.settle();
  EXPECT_TRUE(world.idle());
  world.evict_all();
  world.settle();
  for (const auto& [id, stripe] : world.stripes) {
    if (stripe.pages.size() == pages && stripe.pages[0].keys[0] == stripe_key(1, 0)) return id;
  }
  ADD_FAILURE() << "the chain is not one stripe";
  return 0;
}

const wire::Scope asked{stripe_request(1), 1, 0, 0};

void ask(StripeWorld& world, std::uint32_t blocks) {
  world.reads = 0;
  world.say(world.rank, asked, wire::kv_fetch{stripe_keys(1, 0, blocks)});
}
void release(StripeWorld& world) {
  world.say(world.rank, asked, wire::kv_release{});
  world.settle();
  EXPECT_TRUE(world.idle());
  EXPECT_TRUE(world.data.exposures.empty());
  EXPECT_TRUE(world.leases.empty());
}
// Blocks that the fetch brought.
std::uint32_t brought(StripeWorld& world) {
  const wire::kv_fetching& fetching = world.fetching[asked.request];
  const wire::kv_ready& ready = world.ready[asked.request];
  world.verify_shown();
  if (fetching.blocks == 0) return 0;
  EXPECT_TRUE(ready.complete);
  return std::min(fetching.blocks, ready.failed_block);
}

TEST(StripeRead, AHealthyStripeTakesOneReadAColumn) {
  for (const std::uint32_t remote : {0u, 6u}) {
    for (std::uint32_t pages = 1; pages <= 4; ++pages) {
      SCOPED_TRACE(pages);
      StripeWorld world(stripe_setup(4, 2, remote));
      const std::uint64_t id = store_chain(world, pages, 4);
      ask(world, pages * 4);
      world.settle();
      EXPECT_EQ(brought(world), pages * 4);
      EXPECT_EQ(world.reads, world.shape_of(world.stripes.at(id)).data_stored());
      EXPECT_EQ(world.arena.decodes, 0u);
      release(world);
    }
  }
}

// F16, and all ways to lose columns of a short, a half and a full stripe.
TEST(StripeRead, WhatIsLostOrWrongIsMadeOfTheOthers) {
  for (const std::uint32_t pages : {1u, 2u, 4u}) {
    for (const bool wrong : {false, true}) {
      for (std::uint32_t lost = 1; lost < 64; ++lost) {
        SCOPED_TRACE("pages=" + std::to_string(pages) + " lost=" + std::to_string(lost) +
                     (wrong ? " wrong" : ""));
        StripeWorld world(stripe_setup(4, 2));
        const std::uint64_t id = store_chain(world, pages, 3);
        const kv::StripeShape shape = world.shape_of(world.stripes.at(id));
        std::uint32_t bad_data = 0;
        std::uint32_t bad = 0;
        std::uint32_t first_bad = pages;
        for (std::uint32_t column = 0; column < 6; ++column) {
          if ((lost >> column & 1) == 0 || !shape.is_stored(column)) continue;
          ++bad;
          const auto number = static_cast<std::uint16_t>(column);
          if (wrong) {
            world.spoil(id, number, 0);
          } else {
            world.stores[world.stripes.at(id).columns.at(number)].columns.erase({id, number});
          }
          if (shape.is_parity(column)) continue;
          ++bad_data;
          first_bad = std::min(first_bad, shape.page_of(column));
        }
        if (bad == 0 || bad > 3) continue;
        ask(world, pages * 3);
        world.settle();
        if (bad_data == 0) {
          EXPECT_EQ(world.arena.decodes, 0u);
          EXPECT_TRUE(world.read_failed.empty());
        }
        if (bad_data == 0 || bad <= 2) {
          EXPECT_EQ(brought(world), pages * 3);
          EXPECT_LE(world.reads, shape.data_stored() + 2);
          EXPECT_GE(world.read_failed.size(), bad_data);
        } else {
          EXPECT_EQ(brought(world), first_bad * 3);
        }
        release(world);
      }
    }
  }
}

TEST(StripeRead, AReaderOfOnePageNeedsTheOthersOnlyWhenItsOwnIsLost) {
  StripeWorld world(stripe_setup(4, 2));
  const std::uint64_t id = store_chain(world, 4, 3);
  ask(world, 3);
  world.settle();
  EXPECT_EQ(world.reads, 1u);
  EXPECT_EQ(brought(world), 3u);
  release(world);
  world.evict_all();
  world.spoil(id, 0);
  ask(world, 3);
  world.settle();
  EXPECT_EQ(brought(world), 3u);
  EXPECT_EQ(world.reads, 5u);  // itself, three pages that nobody asked for, one of parity
  ASSERT_EQ(world.read_failed.size(), 1u);
  EXPECT_EQ(world.read_failed[0].page, id << 8);
  EXPECT_EQ(world.read_failed[0].code, static_cast<std::uint16_t>(Code::corrupt));
  EXPECT_EQ(world.core->rebuilds().counters().scratch_reads, 4u);
  EXPECT_EQ(world.core->fillings().counters().pages_rebuilt, 1u);
  release(world);
}

TEST(StripeRead, PagesOfTheArenaAreUsed) {
  StripeWorld world(stripe_setup(4, 2));
  const std::uint64_t id = store_chain(world, 4, 3);
  // The first, third and fourth page are here.
  for (const std::uint32_t page : {0u, 2u, 3u}) world.write(1, page * 3, 3);
  world.settle();
  world.spoil(id, 1);
  ask(world, 12);
  world.settle();
  EXPECT_EQ(brought(world), 12u);
  // Those behind are in the plan and in the arena; the first one is not named by the plan.
  EXPECT_EQ(world.core->rebuilds().counters().scratch_reads, 2u);
  release(world);
}

TEST(StripeRead, AColumnThatTheDirectoryMissesIsNotAskedFor) {
  for (const std::uint32_t pages : {1u, 3u}) {
    StripeWorld world(stripe_setup(4, 2));
    const std::uint64_t id = store_chain(world, pages, 3);
    StripeWorld::Stripe& stripe = world.stripes.at(id);
    stripe.columns.erase(0);
    stripe.columns.erase(4);
    ask(world, pages * 3);
    world.settle();
    EXPECT_EQ(brought(world), pages * 3);
    EXPECT_EQ(world.reads, world.shape_of(stripe).data_stored());
    EXPECT_TRUE(world.read_failed.empty());
    release(world);
  }
}

TEST(StripeRead, NothingIsMadeWhereAStoreMayStillWrite) {
  for (const std::uint32_t remote : {0u, 6u}) {
    SCOPED_TRACE(remote);
    StripeWorld world(stripe_setup(4, 2, remote));
    store_chain(world, 4, 3);
    ask(world, 12);
    while (!world.mail.empty()) world.deliver(0);
    // The store of the second page falls silent.
    ASSERT_EQ(world.work.size(), 4u);
    const StripeWorld::Work silent = world.work[1];
    world.work.erase(world.work.begin() + 1);
    world.settle();
    world.advance(seconds(10));
    while (!world.mail.empty() || !world.work.empty()) {
      if (!world.mail.empty()) {
        // Its answer to the cancel is not heard yet.
        if (world.mail.front().number == wire::kv_read_cancelled::number) break;
        world.deliver(0);
      } else {
        world.work_on(0);
      }
    }
    while (world.step()) {
    }
    EXPECT_EQ(world.arena.decodes, 0u);
    EXPECT_EQ(world.gauge("rebuilds"), 1u);
    world.settle();
    EXPECT_EQ(world.arena.decodes, 3u);
    EXPECT_EQ(brought(world), 12u);
    EXPECT_TRUE(world.read_failed.empty());  // slow is not wrong
    release(world);
  }
}

TEST(StripeRead, OneGroupATurnIsMadeAndShownAtOnce) {
  StripeWorld world(stripe_setup(4, 2));
  const std::uint64_t id = store_chain(world, 4, 3);
  world.stores[world.stripes.at(id).columns.at(2)].columns.erase({id, 2});
  ask(world, 12);
  for (int i = 0; i < 1000 && (!world.mail.empty() || !world.work.empty()); ++i) {
    world.mail.empty() ? world.work_on(0) : world.deliver(0);
  }
  for (std::uint64_t group = 0; group < 3; ++group) {
    EXPECT_EQ(world.arena.decodes, group);
    EXPECT_EQ(world.ready[asked.request].groups, group);
    EXPECT_TRUE(world.step());
  }
  EXPECT_EQ(brought(world), 12u);
  EXPECT_FALSE(world.step());
  release(world);
}

TEST(StripeRead, WhoeverLeavesEndsWhatWasDoneForIt) {
  for (int moment = 0; moment < 60; ++moment) {
    SCOPED_TRACE(moment);
    StripeWorld world(stripe_setup(4, 2, 3));
    const std::uint64_t id = store_chain(world, 3, 3);
    world.spoil(id, 1);
    world.spoil(id, 5);
    ask(world, 9);
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
    release(world);
    EXPECT_EQ(world.gauge("scratch_pages"), 0u);
  }
}

TEST(StripeRead, TheLeaseIsKeptWhileARebuildRuns) {
  StripeWorld world(stripe_setup(4, 2));
  const std::uint64_t id = store_chain(world, 1, 3);
  world.stripes.at(id).columns.erase(0);
  world.stripes.at(id).columns.erase(1);
  ask(world, 3);
  while (!world.mail.empty()) world.deliver(0);
  for (int second = 0; second < 4; ++second) {
    world.advance(seconds(1));
    EXPECT_EQ(world.leases.size(), 1u);
    EXPECT_EQ(world.gauge("leases"), 1u);
  }
  world.settle();
  EXPECT_EQ(brought(world), 3u);
  EXPECT_TRUE(world.leases.empty());
  release(world);
}

// Nothing else is read under it any more when the last read fails, or brings wrong bytes.
TEST(StripeRead, TheLeaseIsKeptFromAReadThatFailedToItsRebuild) {
  for (const bool wrong : {false, true}) {
    SCOPED_TRACE(wrong);
    StripeWorld world(stripe_setup(4, 2));
    const std::uint64_t id = store_chain(world, 4, 4);
    if (wrong) {
      world.spoil(id, 0, 0);
    } else {
      world.stores[world.stripes.at(id).columns.at(0)].columns.erase({id, 0});
    }
    ask(world, 16);
    while (!world.mail.empty()) world.deliver(0);
    const auto first = std::find_if(world.work.begin(), world.work.end(),
                                    [](const StripeWorld::Work& item) { return item.read->column == 0; });
    ASSERT_TRUE(first != world.work.end());
    const StripeWorld::Work last = *first;
    world.work.erase(first);
    world.settle();
    world.work.push_back(last);
    while (world.reads == 4) ASSERT_TRUE(world.go_on());
    EXPECT_EQ(world.leases.size(), 1u);  // while parity is read
    world.settle();
    EXPECT_EQ(brought(world), 16u);
    release(world);
  }
}

// Whatever is lost, wrong, slow or gone in the middle: no wrong byte is shown, and nothing is left.
TEST(StripeRandom, NoWrongByteAndNothingLeft) {
  std::uint64_t cut = 0;
  std::uint64_t rebuilt = 0;
  std::uint64_t failed = 0;
  std::uint64_t fetched = 0;
  std::uint64_t degraded = 0;
  std::uint64_t corrupt = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    Rng rng(seed);
    StripeWorld::Setup setup;
    const std::pair<std::uint16_t, std::uint16_t> geometries[] = {{2, 1}, {4, 2}, {1, 0}, {10, 2}, {3, 0}};
    std::tie(setup.data_columns, setup.parity_columns) = geometries[seed % 5];
    setup.stores = setup.data_columns + setup.parity_columns + static_cast<std::uint32_t>(rng.below(2));
    setup.remote_stores = static_cast<std::uint32_t>(rng.below(setup.stores));
    setup.units = 32 + rng.below(64);
    setup.seed = seed * 77;
    setup.writeback.linger = milliseconds(rng.below(2) * 50);
    setup.fetch.reads_per_source = static_cast<std::uint32_t>(1 + rng.below(4));
    StripeWorld world(setup);
    world.flips = rng.chance(0.5) ? 0.01 : 0;
    world.fails = rng.chance(0.5) ? 0.02 : 0;
    world.no_space = rng.chance(0.3) ? 0.03 : 0;
    std::set<std::uint32_t> asking;
    Rng choices(seed * 31);  // its own: what else happens does not hang on it
    const int steps = 1500;
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      const std::uint64_t what = rng.below(100);
      if (what < 4) {
        world.write(static_cast<std::uint32_t>(rng.below(3)), static_cast<std::uint32_t>(rng.below(8)) * 3,
                    3);
      } else if (what < 10) {
        const auto number = static_cast<std::uint32_t>(rng.below(6));
        const wire::Scope scope{stripe_request(number), 1, 0, 0};
        if (!asking.insert(number).second) {
          asking.erase(number);
          world.say(world.rank, scope, wire::kv_release{});
        } else {
          wire::kv_fetch fetch;
          fetch.keys = stripe_keys(number % 3, 0, static_cast<std::uint32_t>(3 + rng.below(24)));
          // Half of them may be cut where computing is sooner, if anything is.
          if (choices.chance(0.5)) {
            fetch.compute.push_back(
                {.tokens = static_cast<wire::U32>(fetch.keys.size()) * world.layout.block_tokens() + 1,
                 .chunk_tokens = 512,
                 .groups = static_cast<wire::U32>(1 + choices.below(4)),
                 .queue_us = choices.below(2) * 500,
                 .base_us = 100,
                 .token_us = std::array{1.0, 30.0, 500.0}[choices.below(3)],
                 .context_us = 1});
          }
          world.say(world.rank, scope, fetch);
        }
      } else if (what < 12) {
        world.evict_all();
      } else if (what < 14) {
        const std::size_t store = rng.below(world.stores.size());
        world.stores[store].up ? world.kill_store(store) : world.start_store(store);
      } else if (what < 15 && !world.stripes.empty()) {
        auto stripe = world.stripes.begin();
        std::advance(stripe, static_cast<std::ptrdiff_t>(rng.below(world.stripes.size())));
        if (!stripe->second.published || stripe->second.columns.empty()) continue;
        auto column = stripe->second.columns.begin();
        std::advance(column, static_cast<std::ptrdiff_t>(rng.below(stripe->second.columns.size())));
        if (world.stores[column->second].columns.contains({stripe->first, column->first}))
          world.spoil(stripe->first, column->first);
      } else if (what < 17) {
        world.advance(std::array<Duration, 3>{milliseconds(20), seconds(1),
                                              seconds(rng.chance(0.2) ? 12 : 1)}[rng.below(3)]);
      } else if (what < 50) {
        if (!world.mail.empty()) world.deliver(rng.chance(0.8) ? 0 : rng.below(world.mail.size()));
      } else if (what < 85) {
        if (!world.work.empty()) world.work_on(rng.below(world.work.size()));
      } else if (what < 90) {
        if (!world.data.concealing.empty()) world.answer_conceal();
      } else {
        world.step();
      }
      if (step % 16 == 0) world.verify_shown();
    }
    for (const std::uint32_t number : asking)
      world.say(world.rank, {stripe_request(number), 1, 0, 0}, wire::kv_release{});
    world.fails = world.no_space = world.flips = 0;
    for (std::size_t store = 0; store < world.stores.size(); ++store) world.start_store(store);
    for (int i = 0; i < 200 && !world.core->idle(); ++i) {
      world.settle();
      world.advance(seconds(1));
    }
    world.settle();  // nobody waits for what is concealed after its last byte
    world.verify_shown();
    EXPECT_TRUE(world.idle());
    EXPECT_TRUE(world.data.exposures.empty());
    EXPECT_TRUE(world.leases.empty());
    if (::testing::Test::HasFailure()) {
      std::printf("failed with seed=%llu\n", static_cast<unsigned long long>(seed));
      return;
    }
    const Books& books = world.core->fetches().books();
    EXPECT_EQ(books.matched,
              books.fetched + std::accumulate(books.lost.begin(), books.lost.end(), std::uint64_t{0}));
    cut += world.core->fetches().counters().fetches_cut;
    rebuilt += world.core->fillings().counters().pages_rebuilt;
    failed += world.core->fillings().counters().pages_failed;
    fetched += world.core->fetches().books().fetched;
    degraded += world.core->writeback().counters().degraded;
    corrupt +=
        world.core->fillings().counters().columns_corrupt + world.core->rebuilds().counters().columns_corrupt;
  }
  // It must reach what it is to test.
  EXPECT_GT(cut, 25u);
  EXPECT_GT(rebuilt, 25u);
  EXPECT_GT(failed, 20u);
  EXPECT_GT(fetched, 500u);
  EXPECT_GT(degraded, 5u);
  EXPECT_GT(corrupt, 10u);
}

}  // namespace
}  // namespace di::host
