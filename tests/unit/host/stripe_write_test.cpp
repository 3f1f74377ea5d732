// Stripes on their way to the store: runs of pages, parts, parity, failed columns, scratch.
#include "tests/unit/host/stripe_world.h"

namespace di::host {
namespace {

// So that the host knows how many pages a stripe takes.
void learn_geometry(StripeWorld& world) {
  world.write(1000, 0, 1);
  world.settle();
  world.opens.clear();
  world.commits.clear();
}

void lose_meta(StripeWorld& world) {
  world.core->on_peer_lost(world.meta, world.now);
  world.turn();
}
void meta_back(StripeWorld& world) {
  world.core->on_peer_up(world.meta, PeerKind::meta, false, world.now);
  world.turn();
}

// What the stores have of a stripe is what the code says.
void verify_columns(const StripeWorld& world, std::uint64_t id) {
  const StripeWorld::Stripe& stripe = world.stripes.at(id);
  const kv::StripeShape shape = world.shape_of(stripe);
  std::vector<Bytes> pages;
  for (const wire::PutPage& page : stripe.pages) pages.push_back(world.page_bytes(page.keys));
  for (std::uint32_t g = 0; g < shape.groups(); ++g) {
    std::vector<Bytes> data(shape.data_columns());
    for (std::uint32_t column = 0; column < shape.data_stored(); ++column) {
      const auto from =
          pages[shape.page_of(column)].begin() + static_cast<std::ptrdiff_t>(shape.page_offset(column, g));
      data[column].assign(from, from + static_cast<std::ptrdiff_t>(shape.segment_bytes(column, g)));
    }
    for (const auto& [column, store] : stripe.columns) {
      const Bytes right = shape.is_parity(column)
                              ? test::code_row(column, data, shape.segment_bytes(column, g))
                              : data[column];
      const Bytes& kept = world.stores[store].columns.at({id, column});
      ASSERT_EQ(kept.size(), shape.column_bytes(column));
      EXPECT_TRUE(std::equal(right.begin(), right.end(),
                             kept.begin() + static_cast<std::ptrdiff_t>(shape.column_offset(column, g))))
          << "column " << column << " group " << g;
      if (const auto place = shape.crc_index(column, g)) {
        EXPECT_EQ(stripe.code.crcs.at(*place), crc32c(right));
      }
    }
  }
}

TEST(StripeWrite, AStripeIsOfOneTenant) {
  StripeWorld world(stripe_setup(4, 2));
  learn_geometry(world);
  lose_meta(world);
  for (std::uint32_t first = 492; first < 508; first += 4) world.write(1, first, 4);
  meta_back(world);
  world.settle();
  ASSERT_EQ(world.opens.size(), 2u);
  for (const wire::meta_put_open& open : world.opens) EXPECT_EQ(open.pages.size(), 2u);
  EXPECT_NE(world.opens[0].tenant, world.opens[1].tenant);
  EXPECT_TRUE(world.idle());
}

TEST(StripeWrite, APageAloneIsCutIntoParts) {
  for (const std::uint32_t remote : {0u, 6u}) {
    StripeWorld world(stripe_setup(4, 2, remote));
    world.write(1, 0, 4);
    world.settle();
    ASSERT_EQ(world.commits.size(), 1u);
    EXPECT_TRUE(world.commits[0].failed_columns.empty());
    const StripeWorld::Stripe& stripe = world.stripes.at(1);
    EXPECT_TRUE(stripe.published);
    EXPECT_EQ(stripe.columns.size(), 5u);  // three parts of 64 KiB, two of parity
    EXPECT_EQ(stripe.code.crcs.size(), 15u);
    verify_columns(world, 1);
    EXPECT_EQ(world.core->writeback().counters().written, 1u);
    EXPECT_EQ(world.core->writeback().counters().columns, 5u);
    EXPECT_TRUE(world.idle());
    EXPECT_TRUE(world.data.exposures.empty());
  }
}

TEST(StripeWrite, PagesOfAChainMakeAStripe) {
  StripeWorld world(stripe_setup(4, 2));
  learn_geometry(world);
  lose_meta(world);
  // Two chains, one after the other and mixed.
  for (std::uint32_t page = 0; page < 5; ++page) {
    world.write(1, page * 4, 4);
    if (page < 3) world.write(2, page * 3, page == 1 ? 2 : 3);  // of which the second ends elsewhere
  }
  meta_back(world);
  world.settle();
  std::map<std::size_t, int> sizes;
  for (const auto& [id, stripe] : world.stripes) {
    EXPECT_TRUE(stripe.published);
    ++sizes[stripe.pages.size()];
    verify_columns(world, id);
    for (std::size_t i = 1; i < stripe.pages.size(); ++i)
      EXPECT_EQ(stripe.pages[i].parent, stripe.pages[i - 1].keys.back());
  }
  // Four and one of the first chain; two and one of the second, whose third page does not follow; one before.
  EXPECT_EQ(sizes, (std::map<std::size_t, int>{{1, 3}, {2, 1}, {4, 1}}));
  EXPECT_TRUE(world.idle());
}

TEST(StripeWrite, KnownPagesAreLeftOutAndThoseBehindComeAgain) {
  StripeWorld world(stripe_setup(4, 1));
  learn_geometry(world);
  // The store has the first page and the fourth.
  world.write(1, 0, 4);
  world.settle();
  world.write(1, 12, 4);
  world.settle();
  lose_meta(world);
  world.core->on_time(world.now);
  world.evict_all();
  for (const std::uint32_t first : {0u, 4u, 8u, 12u, 16u}) world.write(1, first, 4);
  world.opens.clear();
  const std::uint64_t existed = world.core->writeback().counters().existed;
  meta_back(world);
  world.settle();
  ASSERT_EQ(world.opens.size(), 3u);
  EXPECT_EQ(world.opens[0].pages.size(), 4u);
  EXPECT_EQ(world.core->writeback().counters().existed - existed, 2u);
  for (const auto& [id, stripe] : world.stripes) verify_columns(world, id);
  for (std::uint32_t block = 0; block < 20; ++block) EXPECT_TRUE(world.find(stripe_key(1, block))) << block;
  EXPECT_TRUE(world.idle());
}

TEST(StripeWrite, AFullPageWaitsForThoseBehindItAndAShortOneDoesNot) {
  StripeWorld::Setup setup = stripe_setup(4, 1);
  setup.units = 256;
  StripeWorld world(setup);
  learn_geometry(world);
  world.write(1, 0, 16);
  world.settle();
  EXPECT_TRUE(world.opens.empty());
  EXPECT_EQ(world.core->next_due().product, world.now.product + milliseconds(100));
  world.advance(milliseconds(60));
  world.write(1, 16, 16);
  world.advance(milliseconds(39));
  EXPECT_TRUE(world.opens.empty());
  world.advance(milliseconds(1));
  ASSERT_EQ(world.opens.size(), 1u);  // counted from the first page on
  EXPECT_EQ(world.opens[0].pages.size(), 2u);
  world.settle();

  for (std::uint32_t page = 0; page < 4; ++page) world.write(2, page * 16, 16);
  ASSERT_EQ(world.opens.size(), 2u);  // a full stripe
  EXPECT_EQ(world.opens[1].pages.size(), 4u);
  world.settle();

  world.write(3, 0, 16);
  EXPECT_EQ(world.opens.size(), 2u);
  world.write(3, 16, 2);
  ASSERT_EQ(world.opens.size(), 3u);
  EXPECT_EQ(world.opens[2].pages.size(), 2u);
  world.settle();

  world.write(4, 0, 16);
  EXPECT_EQ(world.opens.size(), 3u);
  world.core->hurry();  // the daemon stops
  world.write(5, 0, 1);
  EXPECT_EQ(world.opens.size(), 5u);
  world.settle();
  EXPECT_TRUE(world.idle());
}

TEST(StripeWrite, EncodingTakesOneGroupATurn) {
  StripeWorld world(stripe_setup(4, 2));
  world.write(1, 0, 4);
  ASSERT_EQ(world.mail.size(), 1u);
  world.deliver(0);
  EXPECT_EQ(world.gauge("scratch_pages"), 2u);
  for (std::uint64_t group = 0; group < 3; ++group) {
    EXPECT_EQ(world.arena.encodes, group);
    EXPECT_TRUE(world.work.empty());
    EXPECT_TRUE(world.step());
  }
  EXPECT_EQ(world.arena.encodes, 3u);
  EXPECT_FALSE(world.step());
  EXPECT_EQ(world.work.size(), 5u);
  EXPECT_EQ(world.gauge("scratch_pages"), 2u);
  while (!world.work.empty()) world.work_on(0);
  while (world.commits.empty()) world.deliver(0);
  EXPECT_EQ(world.gauge("scratch_pages"), 0u);  // before the commit is answered
  world.settle();
  EXPECT_TRUE(world.idle());
}

TEST(StripeWrite, AStripeIsPublishedWithoutTheColumnsThatItCanSpare) {
  for (std::uint32_t lost = 1; lost <= 3; ++lost) {
    SCOPED_TRACE(lost);
    StripeWorld world(stripe_setup(4, 2));
    world.write(1, 0, 4);
    world.deliver(0);
    while (world.step()) {
    }
    // One does not answer any more, one was never up, one says no.
    ASSERT_EQ(world.work.size(), 5u);
    world.kill_store(world.work[0].store);
    if (lost >= 2) world.kill_store(world.work[0].store);
    if (lost >= 3) world.kill_store(world.work[0].store);
    world.settle();
    const WritebackCounters& counters = world.core->writeback().counters();
    if (lost <= 2) {
      ASSERT_EQ(world.commits.size(), 1u);
      EXPECT_EQ(world.commits[0].failed_columns.size(), lost);
      EXPECT_EQ(counters.degraded, 1u);
      EXPECT_EQ(counters.written, 1u);
      verify_columns(world, 1);
      EXPECT_TRUE(world.idle());
    } else {
      EXPECT_TRUE(world.commits.empty());
      EXPECT_EQ(world.aborts, 1u);
      EXPECT_EQ(counters.retried, 1u);
      EXPECT_EQ(world.gauge("scratch_pages"), 0u);
      EXPECT_EQ(world.gauge("pending_writebacks"), 1u);
      for (std::size_t i = 0; i < world.stores.size(); ++i) world.start_store(i);
      world.advance(milliseconds(100));
      world.settle();
      EXPECT_EQ(counters.written, 1u);
      EXPECT_TRUE(world.idle());
    }
  }
}

TEST(StripeWrite, StoresThatAreAwayAreKnownBeforeAnythingIsEncoded) {
  StripeWorld world(stripe_setup(4, 1));
  world.kill_store(1);  // columns 0, 1, 2 and 4 are on stores 1, 2, 3 and 4
  world.write(1, 0, 4);
  world.settle();
  ASSERT_EQ(world.commits.size(), 1u);
  EXPECT_EQ(world.commits[0].failed_columns,
            (std::vector<wire::FailedColumn>{{0, static_cast<std::uint16_t>(Code::unreachable)}}));
  world.kill_store(2);
  const std::uint64_t encodes = world.arena.encodes;
  world.write(2, 0, 4);
  world.deliver(0);
  EXPECT_EQ(world.aborts, 0u);  // stripe 2 begins at store 2, which is away: one is missing
  world.settle();
  EXPECT_GT(world.arena.encodes, encodes);
  world.kill_store(3);
  world.write(3, 0, 4);
  world.deliver(0);
  EXPECT_EQ(world.aborts, 1u);
  EXPECT_EQ(world.gauge("scratch_pages"), 0u);
}

TEST(StripeWrite, ASilentStoreIsGivenUpBeforeTheOpeningLapses) {
  StripeWorld world(stripe_setup(4, 1));
  world.write(1, 0, 4);
  world.deliver(0);
  while (world.step()) {
  }
  ASSERT_EQ(world.work.size(), 4u);
  const StripeWorld::Work silent = world.work.front();
  world.work.pop_front();
  world.settle();
  EXPECT_TRUE(world.commits.empty());
  world.advance(seconds(15));  // of 30
  ASSERT_EQ(world.commits.size(), 1u);
  EXPECT_EQ(
      world.commits[0].failed_columns,
      (std::vector<wire::FailedColumn>{{silent.put->column, static_cast<std::uint16_t>(Code::timeout)}}));
  world.settle();
  EXPECT_TRUE(world.idle());
  world.work.push_back(silent);  // too late
  world.settle();
  EXPECT_TRUE(world.idle());
}

TEST(StripeWrite, APageThatChangedIsNotWritten) {
  for (const std::uint32_t count : {4u, 1u}) {  // parts, and a whole page
    StripeWorld world(stripe_setup(4, 1));
    world.write(1, 0, count);
    const auto& [slot, page] = *world.core->pages().all().begin();
    world.arena.at(page.place.offset + 5000, 1)[0] ^= std::byte{1};
    world.settle();
    EXPECT_EQ(world.core->writeback().counters().pages_changed, 1u);
    EXPECT_EQ(world.aborts, 1u);
    EXPECT_TRUE(world.commits.empty());
    EXPECT_TRUE(world.idle());
  }
}

TEST(StripeWrite, ScratchIsGivenBackWhenDiMetaIsLostAtAnyMoment) {
  for (int moment = 0; moment < 12; ++moment) {
    SCOPED_TRACE(moment);
    StripeWorld world(stripe_setup(4, 2, 3));
    world.write(1, 0, 4);
    for (int i = 0; i < moment; ++i) {
      if (!world.mail.empty()) {
        world.deliver(0);
      } else if (!world.step() && !world.work.empty()) {
        world.work_on(0);
      }
    }
    lose_meta(world);
    EXPECT_EQ(world.gauge("scratch_pages"), 0u);
    world.settle();
    EXPECT_TRUE(world.data.exposures.empty());
    meta_back(world);
    world.advance(milliseconds(200));
    world.settle();
    EXPECT_TRUE(world.idle());
    EXPECT_TRUE(world.find(stripe_key(1, 0)));
  }
}

TEST(StripeWrite, WithoutRoomForParityItIsTriedLater) {
  StripeWorld::Setup setup = stripe_setup(4, 2);
  setup.units = 8;
  StripeWorld world(setup);
  const wire::Scope scope{stripe_request(1), 1, 0, 0};
  world.write(1, 0, 4);
  world.say(world.rank, scope, wire::kv_open{{4}, 1});
  world.deliver(0);
  EXPECT_EQ(world.aborts, 1u);
  world.say(world.rank, scope, wire::kv_release{});
  world.advance(milliseconds(100));
  world.settle();
  EXPECT_EQ(world.aborts, 2u);  // two slots of four blocks, and the page: not in eight
  EXPECT_EQ(world.gauge("pending_writebacks"), 1u);
}

TEST(StripeWrite, AnswersThatMakeNoSenseAreRefused) {
  for (int wrong = 0; wrong < 7; ++wrong) {
    SCOPED_TRACE(wrong);
    StripeWorld world(stripe_setup(4, 2));
    world.write(1, 0, 4);
    wire::Envelope message = world.mail.front();
    world.mail.clear();
    auto opened = *message.as<wire::meta_put_opened>();
    if (wrong == 0) opened.columns.pop_back();
    if (wrong == 1) opened.columns[1].column = opened.columns[0].column;
    if (wrong == 2) opened.columns[0].column = 3;  // of which nothing is stored
    if (wrong == 3) opened.pages = 2;
    if (wrong == 4) opened.first = 1;
    if (wrong == 5) opened.data_columns = 0;
    if (wrong == 6) opened.parity_columns = 9;
    world.say(world.meta, message.scope, opened);
    world.settle();
    EXPECT_EQ(world.aborts, 1u);
    EXPECT_TRUE(world.idle());
    EXPECT_EQ(world.core->writeback().counters().dropped_failed, 1u);
  }
}

}  // namespace
}  // namespace di::host
