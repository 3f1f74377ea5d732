#include "directory/index.h"

#include <gtest/gtest.h>

#include "base/crypto.h"
#include "base/rng.h"
#include "kv/chain.h"
#include "kv/layout.h"

namespace di::directory {
namespace {

const Holder host0{"di-kvd.host0", 1};
const Holder host1{"di-kvd.host1", 1};
const Holder store0{"di-kvd.store0", 1};
const Holder store1{"di-kvd.store1", 1};
constexpr std::uint64_t page_bytes = 4096;

Instant at_s(int s) {
  return Instant{} + seconds(1000 + s);
}

Key key(int chain, int block) {
  const std::string text = std::to_string(chain) + "/" + std::to_string(block);
  Key out;
  out.raw = sha256(as_bytes(text));
  return out;
}

std::vector<Key> keys(int chain, int first, int count) {
  std::vector<Key> out;
  for (int i = 0; i < count; ++i) out.push_back(key(chain, first + i));
  return out;
}

wire::PutPage put_page(int chain, int first, int count) {
  return {key(chain, first - 1),
          keys(chain, first, count),
          {1, 2},
          page_bytes * static_cast<std::uint64_t>(count)};
}

wire::ArenaPage arena_page(std::uint64_t page, int chain, int first, int count) {
  return {page, key(chain, first - 1), keys(chain, first, count), {1, 2}};
}

class IndexTest : public testing::Test {
 protected:
  IndexTest() { start({}); }

  void start(Index::Options options) {
    index.emplace(options, at_s(0));
    EXPECT_TRUE(index->host_up(host0));
    EXPECT_TRUE(index->host_up(host1));
    store_comes(store0, {});
  }
  ~IndexTest() override { index->test_check(); }

  wire::meta_inventory_ack store_comes(const Holder& store, std::vector<wire::ShardRecord> shards,
                                       int s = 0) {
    EXPECT_TRUE(index->store_up(store, at_s(s)));
    const auto ack = index->inventory(store, {0, true, std::move(shards)}, at_s(s));
    EXPECT_TRUE(ack);
    return ack.value_or(wire::meta_inventory_ack{});
  }
  static wire::ShardRecord shard(std::uint64_t stripe, const wire::PutPage& page) {
    return {stripe, 0, 0, 1, Key{}, {page}};
  }
  std::uint32_t hit(int chain, int count) { return index->match({Key{}, keys(chain, 0, count)}).hit_blocks; }
  wire::meta_planned plan(int chain, int first, int count, int s = 1) {
    return index->plan(host0, RequestId{}, {keys(chain, first, count)}, at_s(s));
  }
  std::uint64_t put(int chain, int first, int count, int s = 1) {
    const auto opened = index->put_open(host0, {Key{}, {put_page(chain, first, count)}}, at_s(s));
    EXPECT_EQ(opened.code, 0);
    EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(s)).code, 0);
    return opened.stripe;
  }
  static std::uint16_t code(Code c) { return static_cast<std::uint16_t>(c); }
  // A host read the only column there, and it was not what it should be.
  void failed(std::uint64_t stripe, std::uint16_t column, Code c, int s) {
    index->read_failed({stripe << 8, column, code(c), store0.instance, store0.generation, 0}, at_s(s));
  }

  std::optional<Index> index;
};

TEST_F(IndexTest, EmptyDirectoryAnswersZero) {
  const auto matched = index->match({Key{}, keys(1, 0, 3)});
  EXPECT_EQ(matched, wire::meta_matched{});
  const auto planned = plan(1, 0, 3);
  EXPECT_EQ(planned.lease, 0U);
  EXPECT_TRUE(planned.pages.empty());
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_EQ(index->next_due(), instant_never);
}

TEST_F(IndexTest, MatchSaysWhoHoldsHowMuch) {
  put(1, 0, 4);
  EXPECT_FALSE(index->arena_delta(host0, {1, true, {arena_page(1, 1, 0, 2)}, {}}));
  EXPECT_FALSE(index->arena_delta(host1, {1, true, {arena_page(9, 1, 4, 4), arena_page(8, 1, 0, 1)}, {}}));
  const auto matched = index->match({Key{}, keys(1, 0, 10)});
  EXPECT_EQ(matched.hit_blocks, 8U);
  ASSERT_EQ(matched.tiers.size(), 3U);
  EXPECT_EQ(matched.tiers[0], (wire::TierHit{"", 4, 4 * page_bytes}));
  EXPECT_EQ(matched.tiers[1], (wire::TierHit{"di-kvd.host0", 2, 2 * page_bytes}));
  EXPECT_EQ(matched.tiers[2], (wire::TierHit{"di-kvd.host1", 1, page_bytes}));
  EXPECT_GE(matched.fetch_us, fetch_store_us);
}

TEST_F(IndexTest, PlanNamesPagesAndHowMuchOfThemIsWanted) {
  const std::uint64_t first = put(1, 0, 4);
  const std::uint64_t second = put(1, 4, 4);
  static_cast<void>(index->arena_delta(host1, {1, true, {arena_page(9, 1, 4, 4)}, {}}));
  static_cast<void>(index->arena_delta(host0, {1, true, {arena_page(3, 1, 8, 2)}, {}}));
  const auto planned = plan(1, 2, 20);
  ASSERT_EQ(planned.pages.size(), 3U);
  EXPECT_NE(planned.lease, 0U);
  EXPECT_EQ(planned.ttl_ms, 10000U);
  EXPECT_EQ(planned.pages[0].page, first << 8);
  EXPECT_EQ(planned.pages[0].first, 2U);
  EXPECT_EQ(planned.pages[0].count, 2U);
  EXPECT_EQ(planned.pages[0].page_blocks, 4U);
  EXPECT_EQ(planned.pages[0].keys, keys(1, 0, 4));
  EXPECT_EQ(planned.pages[0].columns, (std::vector<wire::Column>{{"di-kvd.store0", 0, 0}}));
  EXPECT_TRUE(planned.pages[0].arenas.empty());
  EXPECT_EQ(planned.pages[1].page, second << 8);
  EXPECT_EQ(planned.pages[1].arenas, (std::vector<std::string>{"di-kvd.host1"}));
  EXPECT_EQ(planned.pages[2].page, 0U);
  EXPECT_TRUE(planned.pages[2].columns.empty());
  EXPECT_EQ(planned.pages[2].arenas, (std::vector<std::string>{"di-kvd.host0"}));
  EXPECT_EQ(planned.pages[2].count, 2U);
  EXPECT_EQ(plan(1, 11, 3).lease, 0U);
}

// D11: what another place computed differently is not mixed into a stripe.
TEST_F(IndexTest, OtherBitsOfTheSameBlocksAreAnotherPage) {
  put(1, 0, 4);
  wire::ArenaPage other = arena_page(9, 1, 0, 4);
  other.crcs = {7, 7};
  static_cast<void>(index->arena_delta(host1, {1, true, {other}, {}}));
  EXPECT_TRUE(plan(1, 0, 4).pages.at(0).arenas.empty());
}

// D11: the same tokens in layouts that differ in what a rank has of the model: its layers, their groups, its
// length of a page.  Each finds its own, and a fourth nothing.
TEST_F(IndexTest, TheSameTokensInAnotherLayoutAreOtherBlocks) {
  const std::vector<std::uint32_t> tokens(256, 7);
  const auto keys_in = [&](const Result<kv::Layout>& layout) {
    EXPECT_TRUE(layout.ok());
    return kv::chain_keys(
        kv::chain_root({.fingerprint = layout->fingerprint(), .revision = {}, .adapter = ""}), tokens, 32);
  };
  const std::vector<std::vector<Key>> layouts = {
      keys_in(kv::layout_mla("mla-f32-1", 32, 4, 64)), keys_in(kv::layout_mla("mla-f32-1", 32, 8, 64)),
      keys_in(kv::layout_mla("mla-f32-1", 32, 4, 128)), keys_in(kv::layout_mla("mla-f32-2", 32, 4, 64))};
  std::vector<std::uint64_t> stripes;
  for (std::size_t i = 0; i < 3; ++i) {
    const wire::PutPage page{Key{}, layouts[i], {static_cast<std::uint32_t>(i), 2}, 8 * page_bytes};
    const auto opened = index->put_open(host0, {Key{}, {page}}, at_s(1));
    ASSERT_EQ(opened.code, 0);
    EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(1)).code, 0);
    stripes.push_back(opened.stripe);
  }
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    EXPECT_EQ(index->match({Key{}, layouts[i]}).hit_blocks, i < 3 ? 8U : 0U) << i;
    const auto planned = index->plan(host0, RequestId{}, {layouts[i]}, at_s(1));
    ASSERT_EQ(planned.pages.size(), i < 3 ? 1U : 0U) << i;
    if (i == 3) continue;
    EXPECT_EQ(planned.pages[0].page, stripes[i] << 8);
    EXPECT_EQ(planned.pages[0].crcs[0], i);
  }
}

TEST_F(IndexTest, FirstCommittedPageOwnsItsKeys) {
  const std::uint64_t a = put(1, 0, 2);
  const std::uint64_t b = put(1, 1, 3);  // block 1 again, 2 and 3 new: the page is stored whole
  const auto planned = plan(1, 0, 4);
  ASSERT_EQ(planned.pages.size(), 2U);
  EXPECT_EQ(planned.pages[0].page, a << 8);
  EXPECT_EQ(planned.pages[0].count, 2U);
  EXPECT_EQ(planned.pages[1].page, b << 8);
  EXPECT_EQ(planned.pages[1].first, 1U);
  EXPECT_EQ(planned.pages[1].count, 2U);
  // When the first goes, the second one's copy of block 1 serves.
  failed(a, 0, Code::corrupt, 2);
  EXPECT_EQ(hit(1, 4), 0U);
  EXPECT_EQ(plan(1, 1, 3).pages.at(0).first, 0U);
}

TEST_F(IndexTest, PutsAreDeduplicated) {
  const wire::meta_put_open message{Key{}, {put_page(1, 0, 2)}};
  const auto opened = index->put_open(host0, message, at_s(0));
  ASSERT_EQ(opened.code, 0);
  EXPECT_EQ(opened.columns, (std::vector<wire::Column>{{"di-kvd.store0", 0, 0}}));
  EXPECT_EQ(index->put_open(host1, message, at_s(0)).code, code(Code::busy));
  EXPECT_EQ(index->put_open(host0, message, at_s(0)).stripe, opened.stripe);  // the answer was lost
  EXPECT_EQ(hit(1, 2), 0U);
  EXPECT_EQ(index->put_commit(host1, {opened.stripe, {}}, at_s(1)).code, code(Code::not_found));
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(1)).code, 0);
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(1)).code, 0);
  EXPECT_EQ(hit(1, 2), 2U);
  EXPECT_EQ(index->put_open(host1, message, at_s(1)).code, code(Code::exists));
  EXPECT_EQ(index->open_puts(), 0U);
}

// F02: sixteen writers of one page, one after the other in every phase; whoever is first has it, and a match
// that finds it is one whose bytes were committed.
TEST_F(IndexTest, OneOfManyWritersOfAPageCommits) {
  constexpr int writers = 16;
  std::vector<Holder> hosts;
  for (int n = 0; n < writers; ++n) {
    hosts.push_back({"di-kvd.writer" + std::to_string(n), 1});
    ASSERT_TRUE(index->host_up(hosts.back()));
  }
  for (int round = 0; round < 200; ++round) {
    const wire::meta_put_open message{Key{}, {put_page(100 + round, 0, 2)}};
    const int first = round % writers;
    std::vector<wire::meta_put_opened> opened;
    for (int n = 0; n < writers; ++n) {
      opened.push_back(
          index->put_open(hosts[static_cast<std::size_t>((first + n) % writers)], message, at_s(0)));
      EXPECT_EQ(opened.back().code, n == 0 ? 0 : code(Code::busy));
      EXPECT_EQ(hit(100 + round, 2), 0U);
    }
    for (int n = writers - 1; n >= 0; --n) {
      const auto done = index->put_commit(hosts[static_cast<std::size_t>((first + n) % writers)],
                                          {opened.front().stripe, {}}, at_s(1));
      EXPECT_EQ(done.code, n == 0 ? 0 : code(Code::not_found));
      EXPECT_EQ(hit(100 + round, 2), n == 0 ? 2U : 0U);
    }
    EXPECT_EQ(index->put_open(hosts[0], message, at_s(1)).code, code(Code::exists));
  }
  EXPECT_EQ(index->stripes(), 200U);
  EXPECT_EQ(index->open_puts(), 0U);
}

// F24: from arena to store a page is in both before it leaves the first, and a match sees it all the time.
TEST_F(IndexTest, PageThatMovesToTheStoreIsNeverInNeither) {
  ASSERT_FALSE(index->arena_delta(host0, {1, false, {arena_page(7, 1, 0, 4)}, {}}));
  EXPECT_EQ(hit(1, 4), 4U);
  const auto opened = index->put_open(host0, {Key{}, {put_page(1, 0, 4)}}, at_s(0));
  ASSERT_EQ(opened.code, 0);
  EXPECT_EQ(hit(1, 4), 4U);
  ASSERT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(1)).code, 0);
  EXPECT_EQ(hit(1, 4), 4U);
  ASSERT_FALSE(index->arena_delta(host0, {2, false, {}, {7}}));
  EXPECT_EQ(hit(1, 4), 4U);
  EXPECT_FALSE(plan(1, 0, 4).pages.at(0).columns.empty());
}

TEST_F(IndexTest, PutWhoseKeysCameFromElsewhereIsNotPublished) {
  const auto both = index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(0));
  const auto more = index->put_open(host1, {Key{}, {put_page(1, 0, 3)}}, at_s(0));  // block 2 is new
  ASSERT_EQ(more.code, 0);
  EXPECT_EQ(index->put_commit(host1, {more.stripe, {}}, at_s(1)).code, 0);
  EXPECT_EQ(index->put_commit(host0, {both.stripe, {}}, at_s(1)).code, code(Code::exists));
  const auto freed = index->step(at_s(1));
  ASSERT_EQ(freed.size(), 1U);
  EXPECT_EQ(freed[0].store, "di-kvd.store0");
  EXPECT_EQ(freed[0].message.stripes, (std::vector<std::uint64_t>{both.stripe}));
}

// F01: the writer dies; its late commit is refused.
TEST_F(IndexTest, DeadWriterLeavesNothing) {
  const auto opened = index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(0));
  index->lost(host0, at_s(1));
  EXPECT_EQ(index->open_puts(), 0U);
  const auto again = index->put_open(host1, {Key{}, {put_page(1, 0, 2)}}, at_s(1));
  EXPECT_EQ(again.code, 0);
  EXPECT_NE(again.stripe, opened.stripe);
  EXPECT_TRUE(index->step(at_s(5)).empty());  // a column may still be on its way to the store
  const auto freed = index->step(at_s(6));
  ASSERT_EQ(freed.size(), 1U);
  EXPECT_EQ(freed[0].message.stripes, (std::vector<std::uint64_t>{opened.stripe}));
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(32)).code, code(Code::not_found));
}

// F01: the writer lives and never commits.
TEST_F(IndexTest, OpenPutsLapse) {
  const auto opened = index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(0));
  EXPECT_EQ(index->next_due(), at_s(30));
  EXPECT_TRUE(index->step(at_s(29)).empty());
  EXPECT_EQ(index->open_puts(), 1U);
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(30)).code, code(Code::not_found));
  EXPECT_TRUE(index->step(at_s(30)).empty());
  EXPECT_EQ(index->open_puts(), 0U);
  EXPECT_EQ(index->step(at_s(35)).size(), 1U);
  EXPECT_EQ(index->pending_frees(), 0U);
}

TEST_F(IndexTest, NoStoreMeansBusy) {
  index->lost(store0, at_s(0));
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(0)).code, code(Code::busy));
  ASSERT_TRUE(index->store_up({"di-kvd.store0", 2}, at_s(1)));
  // Up, but what it holds is not known yet.
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(1)).code, code(Code::busy));
  ASSERT_TRUE(index->inventory({"di-kvd.store0", 2}, {0, true, {}}, at_s(1)));
  index->store_draining({"di-kvd.store0", 2}, true);
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(1)).code, code(Code::busy));
  index->store_draining({"di-kvd.store0", 2}, false);
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(1)).code, 0);
}

TEST_F(IndexTest, MalformedPutsAreInvalid) {
  const auto refused = [&](auto change) {
    wire::meta_put_open message{Key{}, {put_page(1, 0, 2)}};
    change(message);
    return index->put_open(host0, message, at_s(0)).code == code(Code::invalid);
  };
  EXPECT_TRUE(refused([](auto& m) { m.pages.clear(); }));
  EXPECT_TRUE(refused([](auto& m) { m.pages.push_back(m.pages[0]); }));  // geometry 1+0
  EXPECT_TRUE(refused([](auto& m) { m.pages[0].keys.clear(); }));
  EXPECT_TRUE(refused([](auto& m) { m.pages[0].crcs.clear(); }));
  EXPECT_TRUE(refused([](auto& m) { m.pages[0].crcs.resize(9); }));
  EXPECT_TRUE(refused([](auto& m) { m.pages[0].bytes = 0; }));
  EXPECT_TRUE(refused([](auto& m) { m.pages[0].bytes = UINT64_MAX; }));
  EXPECT_TRUE(refused([](auto& m) { m.pages[0].keys.resize(page_keys_max + 1); }));
  EXPECT_EQ(index->open_puts(), 0U);
}

TEST_F(IndexTest, ArenaDeltasCountOnceAndGapsResync) {
  EXPECT_FALSE(index->arena_delta(host0, {1, false, {arena_page(1, 1, 0, 3)}, {}}));
  EXPECT_FALSE(index->arena_delta(host0, {1, false, {arena_page(1, 1, 0, 3)}, {}}));  // repeated (D06)
  EXPECT_FALSE(index->arena_delta(host0, {2, false, {arena_page(1, 1, 0, 3)}, {}}));
  EXPECT_EQ(index->blocks(), 3U);
  EXPECT_EQ(hit(1, 3), 3U);
  EXPECT_TRUE(index->arena_delta(host0, {4, false, {arena_page(2, 1, 3, 1)}, {}}));
  EXPECT_FALSE(index->arena_delta(host0, {5, false, {arena_page(3, 1, 4, 1)}, {}}));  // asked already
  EXPECT_EQ(hit(1, 5), 3U);
  EXPECT_FALSE(index->arena_delta(host0, {6, true, {arena_page(3, 1, 0, 1)}, {}}));
  EXPECT_EQ(hit(1, 5), 1U);
  EXPECT_FALSE(index->arena_delta(host0, {7, false, {}, {3, 99}}));
  EXPECT_EQ(index->blocks(), 0U);
}

TEST_F(IndexTest, AHostThatDidNotHearTheQuestionForASnapshotIsAskedAgain) {
  ASSERT_TRUE(index->arena_delta(host0, {4, false, {arena_page(2, 1, 3, 1)}, {}}));
  std::uint64_t seq = 5;
  while (seq < 1000 && !index->arena_delta(host0, {seq, false, {}, {}})) ++seq;
  EXPECT_EQ(seq, 5 + resync_again);
  EXPECT_FALSE(index->arena_delta(host0, {seq + 1, true, {arena_page(3, 1, 0, 1)}, {}}));
  EXPECT_EQ(hit(1, 5), 1U);
  EXPECT_TRUE(index->arena_delta(host0, {seq + 3, false, {}, {}})) << "the next gap is no repetition";
}

TEST_F(IndexTest, FirstDeltaAfterARestartOfTheDirectoryIsAGap) {
  EXPECT_TRUE(index->arena_delta(host0, {57, false, {arena_page(1, 1, 0, 3)}, {}}));
  EXPECT_EQ(index->blocks(), 0U);
}

TEST_F(IndexTest, LostHostIsForgottenAndStaleMessagesIgnored) {
  static_cast<void>(index->arena_delta(host0, {1, true, {arena_page(1, 1, 0, 3)}, {}}));
  static_cast<void>(index->arena_delta(host1, {1, true, {arena_page(1, 1, 0, 2)}, {}}));
  EXPECT_EQ(hit(1, 3), 3U);
  index->lost({"di-kvd.host0", 7}, at_s(1));  // not the one that is up
  EXPECT_EQ(hit(1, 3), 3U);
  index->lost(host0, at_s(1));
  EXPECT_EQ(hit(1, 3), 2U);
  EXPECT_FALSE(index->arena_delta(host0, {2, false, {arena_page(2, 1, 2, 1)}, {}}));
  EXPECT_EQ(hit(1, 3), 2U);
  ASSERT_TRUE(index->host_up({"di-kvd.host1", 2}));  // restarted: a new, empty arena
  EXPECT_EQ(index->blocks(), 0U);
}

// G13: the same name, killed and back at once.
TEST_F(IndexTest, LostStoreIsUnavailableUntilItReturns) {
  const std::uint64_t stripe = put(1, 0, 4);
  index->lost(store0, at_s(1));
  EXPECT_EQ(hit(1, 4), 0U);
  EXPECT_EQ(plan(1, 0, 4).lease, 0U);
  EXPECT_EQ(index->blocks(), 4U);
  // The restarted daemon has another generation and the same slots.
  const auto ack = store_comes({"di-kvd.store0", 2}, {shard(stripe, put_page(1, 0, 4))}, 2);
  EXPECT_TRUE(ack.unknown.empty());
  EXPECT_EQ(hit(1, 4), 4U);
}

// F05.
TEST_F(IndexTest, StripeThatItsStoreLostIsForgotten) {
  put(1, 0, 4);
  put(2, 0, 2);
  index->lost(store0, at_s(1));
  store_comes({"di-kvd.store0", 2}, {shard((1ULL << 32) + 2, put_page(2, 0, 2))}, 2);
  EXPECT_EQ(hit(1, 4), 0U);
  EXPECT_EQ(hit(2, 2), 2U);
  EXPECT_EQ(index->stripes(), 1U);
  EXPECT_EQ(index->pending_frees(), 0U);
}

TEST_F(IndexTest, WritesDuringAnInventoryAreNotMissed) {
  const auto opened = index->put_open(host0, {Key{}, {put_page(1, 0, 2)}}, at_s(0));
  ASSERT_TRUE(index->inventory(store0, {0, false, {}}, at_s(0)));
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(0)).code, 0);
  ASSERT_TRUE(index->inventory(store0, {1, true, {}}, at_s(0)));
  EXPECT_EQ(hit(1, 2), 2U);
}

TEST_F(IndexTest, InventoryIsAdopted) {
  index.emplace(Index::Options{.run = 2}, at_s(0));
  ASSERT_TRUE(index->store_up(store0, at_s(0)));
  const auto first = index->inventory(store0, {0, false, {shard(5, put_page(1, 0, 4))}}, at_s(0));
  ASSERT_TRUE(first);
  EXPECT_EQ(first->cursor, 0U);
  EXPECT_TRUE(first->unknown.empty());
  EXPECT_EQ(hit(1, 8), 4U);
  EXPECT_FALSE(index->inventory(store0, {2, true, {}}, at_s(0)));                // a part is missing
  EXPECT_FALSE(index->inventory({"di-kvd.store0", 9}, {1, true, {}}, at_s(0)));  // stale
  ASSERT_TRUE(index->inventory(store0, {1, true, {shard(6, put_page(1, 4, 4))}}, at_s(0)));
  EXPECT_EQ(hit(1, 8), 8U);
  // The writer's commit comes after the inventory that showed its stripe.
  EXPECT_EQ(index->put_commit(host0, {6, {}}, at_s(0)).code, 0);
  EXPECT_EQ(index->counters().stripes_adopted, 2U);
}

TEST_F(IndexTest, FreeingFromAnInventoryWaitsForLeasesOfAnEarlierRun) {
  index.emplace(Index::Options{.run = 2}, at_s(0));
  ASSERT_TRUE(index->store_up(store0, at_s(0)));
  const auto duplicate = shard(6, put_page(1, 0, 4));
  auto ack = index->inventory(store0, {0, true, {shard(5, put_page(1, 0, 4)), duplicate}}, at_s(0));
  ASSERT_TRUE(ack);
  EXPECT_TRUE(ack->unknown.empty());
  EXPECT_TRUE(index->step(at_s(119)).empty());
  const auto freed = index->step(at_s(120));
  ASSERT_EQ(freed.size(), 1U);
  EXPECT_EQ(freed[0].message.stripes, (std::vector<std::uint64_t>{6}));
  // Later the answer frees at once.
  ack = index->inventory(store0, {0, true, {shard(5, put_page(1, 0, 4)), duplicate}}, at_s(121));
  ASSERT_TRUE(ack);
  EXPECT_EQ(ack->unknown, (std::vector<std::uint64_t>{6}));
  EXPECT_EQ(hit(1, 4), 4U);
}

TEST_F(IndexTest, InventoryOfForeignStripesIsFreed) {
  const std::uint64_t stripe = put(1, 0, 4);
  wire::ShardRecord other = shard(stripe, put_page(3, 0, 4));  // the number is somebody else's
  wire::ShardRecord hollow = shard(77, put_page(4, 0, 1));
  hollow.pages[0].keys.clear();
  wire::ShardRecord column = shard(78, put_page(5, 0, 1));
  column.column = 1;                                          // no such column in 1+0
  wire::ShardRecord copy = shard(stripe, put_page(1, 0, 4));  // it is on store0
  const auto ack = store_comes(store1, {hollow, column, copy, other}, 200);
  EXPECT_EQ(ack.unknown, (std::vector<std::uint64_t>{77, 78, stripe, stripe}));
  EXPECT_EQ(hit(1, 4), 4U);
  EXPECT_EQ(hit(3, 4), 0U);
}

TEST_F(IndexTest, OpenPutsSurviveAnInventory) {
  const auto opened = index->put_open(host0, {Key{}, {put_page(1, 0, 4)}}, at_s(200));
  const auto ack = store_comes(store0, {shard(opened.stripe, put_page(1, 0, 4))}, 201);
  EXPECT_TRUE(ack.unknown.empty());
  EXPECT_EQ(hit(1, 4), 0U);
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}}, at_s(202)).code, 0);
  EXPECT_EQ(hit(1, 4), 4U);
}

TEST_F(IndexTest, StripeNumbersDoNotMeetAdoptedOnes) {
  index.emplace(Index::Options{.run = 1}, at_s(0));  // the catalogue was lost: run 1 again
  store_comes(store0, {shard((1ULL << 32) + 500, put_page(1, 0, 4))});
  EXPECT_GT(put(2, 0, 1), (1ULL << 32) + 500);
}

// F05: a read in between finds the stale entry, and removes it.
TEST_F(IndexTest, FailedColumnsAreNotOfferedAgain) {
  const std::uint64_t a = put(1, 0, 2);
  const std::uint64_t b = put(2, 0, 2);
  const std::uint64_t c = put(3, 0, 2);
  failed(a, 0, Code::corrupt, 2);
  failed(b, 0, Code::not_found, 2);
  failed(c, 0, Code::io, 2);
  failed(c, 5, Code::corrupt, 2);  // no such column
  failed(99, 0, Code::corrupt, 2);
  EXPECT_EQ(hit(1, 2), 0U);
  EXPECT_EQ(hit(2, 2), 0U);
  EXPECT_EQ(hit(3, 2), 2U);
  const auto freed = index->step(at_s(2));
  ASSERT_EQ(freed.size(), 1U);
  EXPECT_EQ(freed[0].message.stripes, (std::vector<std::uint64_t>{a, b}));
  // Not even when an inventory that was on its way shows it again: then it is adopted and read anew.
  EXPECT_EQ(put(1, 0, 2, 3), (1ULL << 32) + 4);
}

TEST_F(IndexTest, NothingIsFreedUnderALease) {
  const std::uint64_t stripe = put(1, 0, 2, 1);
  const auto planned = plan(1, 0, 2, 1);
  failed(stripe, 0, Code::corrupt, 2);
  EXPECT_TRUE(index->step(at_s(2)).empty());
  for (int s = 5; s <= 115; s += 5) {
    index->renew(host0, {{planned.lease}}, at_s(s));
    EXPECT_TRUE(index->step(at_s(s)).empty()) << s;
  }
  index->renew(host1, {{planned.lease}}, at_s(115));
  EXPECT_EQ(index->step(at_s(121)).size(), 1U);  // the cap
  EXPECT_EQ(index->leases(), 0U);
}

// The lease of the read that found the damage kept its column for ten seconds after it was given back.
TEST_F(IndexTest, WhatALeaseKeptIsFreedWhenTheLastOneEnds) {
  const std::uint64_t stripe = put(1, 0, 2, 1);
  const auto first = plan(1, 0, 2, 1);
  const auto second = plan(1, 0, 2, 1);
  failed(stripe, 0, Code::corrupt, 2);
  EXPECT_TRUE(index->step(at_s(2)).empty());
  index->release(host0, {{first.lease}});
  EXPECT_TRUE(index->step(at_s(2)).empty());
  index->release(host0, {{second.lease}});
  EXPECT_LE(index->next_due(), at_s(2));
  index->test_check();
  const auto freed = index->step(at_s(2));
  ASSERT_EQ(freed.size(), 1U);
  EXPECT_EQ(freed[0].message.stripes, std::vector<std::uint64_t>{stripe});
  EXPECT_EQ(index->pending_frees(), 0U);
}

TEST_F(IndexTest, WhatALeaseKeptWaitsForItsStoreToo) {
  const std::uint64_t stripe = put(1, 0, 2, 1);
  const auto planned = plan(1, 0, 2, 1);
  failed(stripe, 0, Code::corrupt, 2);
  EXPECT_TRUE(index->step(at_s(2)).empty());
  index->lost(store0, at_s(3));
  index->release(host0, {{planned.lease}});
  EXPECT_TRUE(index->step(at_s(3)).empty());
  index->test_check();
  EXPECT_EQ(index->pending_frees(), 1U);
  store_comes({store0.instance, store0.generation + 1}, {}, 4);
  EXPECT_EQ(index->step(at_s(4)).size(), 1U);
}

TEST_F(IndexTest, LossOfTheHolderEndsItsLeases) {
  const std::uint64_t stripe = put(1, 0, 2);
  static_cast<void>(plan(1, 0, 2));
  EXPECT_EQ(index->leases(), 1U);
  failed(stripe, 0, Code::corrupt, 2);
  index->lost(host0, at_s(3));
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_EQ(index->step(at_s(5)).size(), 1U);
}

// F14: a third of the readers goes away after the plan, and some hosts die holding: what they held comes
// back.
TEST_F(IndexTest, NothingIsHeldAfterManyPlans) {
  constexpr int chains = 20;
  std::vector<std::uint64_t> stripes;
  for (int chain = 1; chain <= chains; ++chain) stripes.push_back(put(chain, 0, 4));
  Rng rng(14);
  Holder mortal{"di-kvd.host2", 1};
  EXPECT_TRUE(index->host_up(mortal));
  int s = 1;
  for (int round = 0; round < 20000; ++round) {
    s = 1 + round / 200;
    const Holder& host = round % 3 == 0 ? mortal : round % 3 == 1 ? host0 : host1;
    const int chain = 1 + static_cast<int>(rng.below(chains));
    const auto planned = index->plan(host, RequestId{}, {keys(chain, 0, 4)}, at_s(s));
    ASSERT_NE(planned.lease, 0U) << round;
    if (rng.chance(0.33)) continue;  // aborted: nobody speaks of it again
    if (rng.chance(0.5)) index->renew(host, {{planned.lease}}, at_s(s));
    index->release(host, {{planned.lease}});
    if (rng.chance(0.1)) index->release(host, {{planned.lease}});  // twice
    if (round % 2000 == 1999) {
      index->lost(mortal, at_s(s));
      ++mortal.generation;
      EXPECT_TRUE(index->host_up(mortal));
    }
    if (round % 200 == 0) {
      EXPECT_TRUE(index->step(at_s(s)).empty());
    }
  }
  EXPECT_GT(index->leases(), 0U);
  index->test_check();
  for (const std::uint64_t stripe : stripes) failed(stripe, 0, Code::corrupt, s);
  std::size_t freed = 0;
  for (; s < 300 && freed < chains; ++s) {
    for (const Index::Free& free : index->step(at_s(s))) freed += free.message.stripes.size();
  }
  EXPECT_EQ(freed, static_cast<std::size_t>(chains));
  EXPECT_EQ(index->leases(), 0U);
  EXPECT_EQ(index->pending_frees(), 0U);
}

TEST_F(IndexTest, ReleaseEndsALease) {
  put(1, 0, 2);
  const auto planned = plan(1, 0, 2);
  index->release(host1, {{planned.lease}});
  EXPECT_EQ(index->leases(), 1U);
  index->release(host0, {{planned.lease, 999}});
  EXPECT_EQ(index->leases(), 0U);
}

TEST_F(IndexTest, WithoutALeaseThereIsNoPlan) {
  start({.lease = {.leases_max = 1}});
  put(1, 0, 2);
  EXPECT_NE(plan(1, 0, 2).lease, 0U);
  const auto refused = plan(1, 0, 2);
  EXPECT_EQ(refused.lease, 0U);
  EXPECT_TRUE(refused.pages.empty());
  EXPECT_EQ(index->counters().plan_refused, 1U);
}

TEST_F(IndexTest, FullStoreEvictsTheOldestLeavesFirst) {
  for (int page = 0; page < 40; ++page) put(1, page, 1, 1);  // one chain, one block a page
  for (int chain = 2; chain < 12; ++chain) put(chain, 0, 1, 2);
  static_cast<void>(plan(1, 0, 20, 3));
  index->release(host0, {{(1ULL << 32) + 1}});
  const auto opened = index->put_open(host0, {Key{}, {put_page(50, 0, 1)}}, at_s(4));
  ASSERT_EQ(opened.code, 0);
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {{0, code(Code::no_space)}}}, at_s(4)).code,
            code(Code::no_space));
  EXPECT_EQ(hit(1, 40), 32U);  // eight times the put, from the end of the chain
  EXPECT_EQ(hit(2, 1), 1U);
  EXPECT_EQ(index->counters().stripes_evicted, evict_put_multiple);
  // What is on its way out counts: a second failure before the frees arrived evicts no more.
  const auto again = index->put_open(host0, {Key{}, {put_page(51, 0, 1)}}, at_s(4));
  static_cast<void>(index->put_commit(host0, {again.stripe, {{0, code(Code::no_space)}}}, at_s(4)));
  EXPECT_EQ(index->counters().stripes_evicted, evict_put_multiple);
  EXPECT_EQ(index->step(at_s(4)).at(0).message.stripes.size(), evict_put_multiple);
  // Then the rest of the chain that nobody used, and what was used once more keeps half of the room.
  for (int round = 0; round < 3; ++round) {
    const auto more = index->put_open(host0, {Key{}, {put_page(60 + round, 0, 1)}}, at_s(100 + round * 50));
    static_cast<void>(
        index->put_commit(host0, {more.stripe, {{0, code(Code::no_space)}}}, at_s(100 + round * 50)));
    static_cast<void>(index->step(at_s(140 + round * 50)));
  }
  std::uint64_t others = 0;
  for (int chain = 2; chain < 12; ++chain) others += hit(chain, 1);
  EXPECT_EQ(hit(1, 40) + others, index->stripes());
  EXPECT_GE(hit(1, 40), 8U);
  EXPECT_GE(others, 8U);
}

// A budget comes back by itself, so nothing is evicted for it.
TEST_F(IndexTest, StoreWithoutAWriteBudgetGetsNothingWhileItHasNone) {
  store_comes(store1, {});
  wire::VolumeState state{0, 0, std::uint64_t{1} << 40, 0};
  index->volumes(store0, {{state}}, at_s(1));
  index->volumes(store1, {{state}}, at_s(1));
  for (int chain = 0; chain < 10; ++chain) put(chain, 0, 1);
  const auto opened = index->put_open(host0, {Key{}, {put_page(50, 0, 1)}}, at_s(2));
  static_cast<void>(index->put_commit(host0, {opened.stripe, {{0, code(Code::over_budget)}}}, at_s(2)));
  EXPECT_EQ(index->counters().stripes_evicted, 0U);
  state.spent = true;
  index->volumes(store0, {{state}}, at_s(3));
  for (int chain = 60; chain < 80; ++chain) {
    const auto other = index->put_open(host0, {Key{}, {put_page(chain, 0, 1)}}, at_s(3));
    ASSERT_EQ(other.columns.size(), 1U);
    EXPECT_EQ(other.columns[0].instance, store1.instance);
  }
  index->volumes(store1, {{state}}, at_s(4));
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(90, 0, 1)}}, at_s(4)).code, code(Code::over_budget));
  EXPECT_EQ(index->counters().puts_over_budget, 1U);
  EXPECT_EQ(hit(1, 1), 1U);  // what is there is read
  state.spent = false;
  index->volumes(store0, {{state}}, at_s(5));
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(90, 0, 1)}}, at_s(5)).code, 0);
}

// Its segments are bound to columns of another length: it refuses, though by bytes it is nearly empty.
TEST_F(IndexTest, StoreThatRefusesForWantOfRoomGetsItWhateverItHolds) {
  index->volumes(store0, {{{0, 0, std::uint64_t{1} << 40, 0}}}, at_s(1));
  for (int chain = 0; chain < 1000; ++chain) put(1 + chain, 0, 1, 1);
  const auto refused = [&](Code why, int s) {
    const auto opened = index->put_open(host0, {Key{}, {put_page(5000, 0, 1)}}, at_s(s));
    EXPECT_EQ(opened.code, 0);
    EXPECT_EQ(index->put_commit(host0, {opened.stripe, {{0, code(why)}}}, at_s(s)).code,
              code(Code::no_space));
    static_cast<void>(index->step(at_s(s)));
    return 1000 - index->stripes();
  };
  // Any other reason is no want of room.
  EXPECT_EQ(refused(Code::io, 2), 0U);
  EXPECT_EQ(refused(Code::timeout, 3), 0U);
  EXPECT_EQ(refused(Code::no_space, 4), 41U);  // a 25th, the put itself included
  // Still none after those have arrived: more at a time.
  EXPECT_EQ(refused(Code::no_space, 50), 121U);
  std::size_t gone = 0;
  for (int round = 2; round < 6; ++round) gone = refused(Code::no_space, round * 50);
  EXPECT_GT(gone, 800U);
  // A column that it takes ends that.
  put(6000, 0, 1, 400);
  const std::uint64_t before = index->stripes();
  static_cast<void>(refused(Code::no_space, 450));
  EXPECT_LE(before - index->stripes(),
            std::max<std::uint64_t>(evict_put_multiple, before / evict_store_part + 1));
}

TEST_F(IndexTest, UnusedStripesExpire) {
  start({.stripe_life = {.ttl = seconds(100), .cap = seconds(300)}});
  put(1, 0, 1, 0);
  put(1, 1, 1, 50);
  put(2, 0, 1, 50);
  EXPECT_LE(index->next_due(), at_s(100));
  EXPECT_TRUE(index->step(at_s(100)).empty());  // its child is in use: it stays with it
  EXPECT_EQ(hit(1, 2), 2U);
  static_cast<void>(plan(2, 0, 1, 120));
  EXPECT_EQ(index->step(at_s(150)).at(0).message.stripes.size(), 2U);
  EXPECT_EQ(hit(1, 2), 0U);
  EXPECT_EQ(hit(2, 1), 1U);
  for (int s = 200; s < 350; s += 50) {
    static_cast<void>(plan(2, 0, 1, s));
    EXPECT_TRUE(index->step(at_s(s)).empty()) << s;
  }
  static_cast<void>(plan(2, 0, 1, 349));
  index->release(
      host0, {{(1ULL << 32) + 1, (1ULL << 32) + 2, (1ULL << 32) + 3, (1ULL << 32) + 4, (1ULL << 32) + 5}});
  EXPECT_EQ(index->step(at_s(350)).at(0).message.stripes.size(), 1U);  // the cap, though it is in use
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->counters().stripes_expired, 3U);
}

// D10: two blocks whose keys differ in their last bit only, and so in no hash of a part of them.
TEST_F(IndexTest, KeysAreComparedInFull) {
  put(1, 0, 1);
  Key twin = key(1, 0);
  twin.raw[31] ^= std::byte{1};
  EXPECT_EQ(index->match({Key{}, {twin}}).hit_blocks, 0U);
  EXPECT_EQ(index->plan(host0, RequestId{}, {{twin}}, at_s(1)).lease, 0U);
  wire::PutPage page = put_page(1, 0, 1);
  page.keys = {twin};
  const auto opened = index->put_open(host0, {Key{}, {page}}, at_s(1));
  EXPECT_EQ(index->put_commit(host0, {opened.stripe, {}, {}}, at_s(1)).code, 0);
  EXPECT_EQ(index->plan(host0, RequestId{}, {{twin}}, at_s(1)).pages.at(0).page, opened.stripe << 8);
  EXPECT_EQ(hit(1, 1), 1U);
  EXPECT_EQ(index->blocks(), 2U);
}

TEST_F(IndexTest, BlocksAndArenasAreBounded) {
  start({.blocks_max = 10, .arena_pages_max = 3});
  for (std::uint64_t page = 1; page <= 5; ++page) {
    static_cast<void>(
        index->arena_delta(host0, {page, false, {arena_page(page, static_cast<int>(page), 0, 2)}, {}}));
  }
  EXPECT_EQ(index->blocks(), 6U);
  EXPECT_EQ(index->arena_counters().refused, 2U);
  static_cast<void>(index->arena_delta(host1, {1, true, {arena_page(1, 9, 0, 8)}, {}}));
  EXPECT_EQ(index->blocks(), 10U);
  EXPECT_EQ(hit(9, 8), 4U);
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(20, 0, 1)}}, at_s(0)).code, code(Code::busy));
  index->lost(host1, at_s(1));
  EXPECT_EQ(index->put_open(host0, {Key{}, {put_page(20, 0, 1)}}, at_s(1)).code, 0);
}

TEST_F(IndexTest, PendingFreesWaitForTheirStore) {
  const std::uint64_t stripe = put(1, 0, 2);
  failed(stripe, 0, Code::corrupt, 2);
  index->lost(store0, at_s(2));
  EXPECT_TRUE(index->step(at_s(100)).empty());
  EXPECT_EQ(index->next_due(), at_s(302));  // then it is gone, not only away
  const auto ack = store_comes({"di-kvd.store0", 2}, {shard(stripe, put_page(1, 0, 2))}, 200);
  EXPECT_TRUE(ack.unknown.empty());
  EXPECT_EQ(hit(1, 2), 0U);
  EXPECT_EQ(index->step(at_s(200)).size(), 1U);
}

// What the store lists when it comes, it may have listed before the free reached it: were that forgotten by then, the
// stripe would be in the books again, and nowhere else.
TEST_F(IndexTest, WhatAStoreShowsWhileItHasYetToFreeItStaysOut) {
  const std::uint64_t stripe = put(1, 0, 2);
  index->lost(store0, at_s(2));
  ASSERT_TRUE(index->drop_stripe(stripe, at_s(3)));
  const Holder again{store0.instance, store0.generation + 1};
  for (int start = 0; start < 2; ++start) {  // its link may break, and the same start of it begins anew
    ASSERT_TRUE(index->store_up(again, at_s(4)));
    EXPECT_TRUE(index->step(at_s(4)).empty());
    ASSERT_TRUE(index->inventory(again, {0, false, {shard(stripe, put_page(1, 0, 2))}}, at_s(5)));
    EXPECT_TRUE(index->step(at_s(5)).empty());
    index->test_check();
  }
  ASSERT_TRUE(index->inventory(again, {1, true, {}}, at_s(6)));
  EXPECT_EQ(index->stripes(), 0U);
  EXPECT_EQ(index->step(at_s(6)).size(), 1U);
  EXPECT_EQ(index->pending_frees(), 0U);
}

TEST_F(IndexTest, RowsForControl) {
  put(1, 0, 2);
  put(1, 2, 1);
  index->set_block_bytes(100);
  static_cast<void>(index->arena_delta(host0, {1, true, {arena_page(1, 1, 0, 3)}, {}}));
  const auto places = index->places();
  ASSERT_EQ(places.size(), 3U);
  EXPECT_EQ(places[0].instance, "di-kvd.host0");
  EXPECT_EQ(places[0].pages, 1U);
  EXPECT_EQ(places[0].blocks, 3U);
  EXPECT_EQ(places[0].bytes, 300U);
  EXPECT_TRUE(places[2].store);
  EXPECT_EQ(places[2].pages, 2U);
  EXPECT_EQ(places[2].blocks, 3U);
  EXPECT_EQ(places[2].bytes, 3 * page_bytes);
  const auto first = index->pages_after(0, 1);
  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].first, key(1, 0));
  const auto rest = index->pages_after(first[0].page, 10);
  ASSERT_EQ(rest.size(), 1U);
  EXPECT_EQ(rest[0].blocks, 1U);
  EXPECT_TRUE(rest[0].readable);
}

TEST_F(IndexTest, BlocksThatMatchesAskForMakeTheMissRatio) {
  start({.placement = {{1, 1}, true}});  // half of what a block takes is parity
  const auto ask = [&](int chain) { index->asked({Key{}, keys(chain, 0, 8)}); };
  ask(1);
  EXPECT_EQ(index->miss_ratio().references(), 0U);  // no model yet, so a block has no size
  index->set_block_bytes(512);
  EXPECT_EQ(index->capacity_bytes(), 0U);
  index->volumes(store0, {{{0, 0, 24 << 10, 0}, {1, volume_failed, 24 << 10, 0}}}, at_s(1));
  EXPECT_EQ(index->capacity_bytes(), 24U << 10);
  // Four chains of 8 KiB with their parity, in turn: a cache of two of them never has the next one.
  for (int turn = 0; turn < 25; ++turn) {
    for (int chain = 1; chain <= 4; ++chain) ask(chain);
  }
  EXPECT_EQ(index->miss_ratio().references(), 25U * 4 * 8);
  EXPECT_NEAR(index->miss_ratio().at(16 << 10), 1, 0.01);
  EXPECT_NEAR(index->miss_ratio().at(64 << 10), 0.04, 0.01);  // the first turn
  // The root of a chain is there longer than its end.
  for (int turn = 0; turn < 200; ++turn) ask(1);
  EXPECT_LT(index->miss_ratio().at(16 << 10), 0.4);
}

}  // namespace
}  // namespace di::directory
