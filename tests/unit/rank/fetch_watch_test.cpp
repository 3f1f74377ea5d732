#include "rank/fetch_watch.h"

#include <gtest/gtest.h>

#include "rank/prefill.h"
#include "tests/unit/rank/peers.h"

namespace di::rank {
namespace {

constexpr FetchWatch::Options four_groups{.enabled = true,
                                          .block_bytes = 1 << 16,
                                          .groups = 4,
                                          .block_tokens = 4,
                                          .chunk_tokens = 512,
                                          .overlap = true,
                                          .guess = {1000, 1050}};
constexpr std::uint32_t blocks = 10;
constexpr std::uint32_t tokens = 42;
const balance::StepCost step;  // 0.4 ms a token: what is cached here took 16 ms

struct Waiting {
  FetchWatch watch{four_groups};
  Instant now{seconds(100).count()};

  // Looks whenever it is time, until it is given up or `most` has passed; how long that was.
  Duration wait(Handle handle, Duration most, double queue_us = 0) {
    const Instant asked = now;
    watch.begin(handle, blocks, tokens, asked, now);
    while (watch.next_look(handle) <= asked + most) {
      now = watch.next_look(handle);
      if (watch.give_up(handle, queue_us, step, now)) break;
    }
    return now - asked;
  }
};

TEST(FetchWatch, WhatIsInTheArenaIsNotLookedAt) {
  Waiting w;
  w.watch.begin(1, blocks, tokens, w.now, w.now);
  w.watch.moved(1, 4, w.now);
  EXPECT_EQ(w.watch.next_look(1), instant_never);
  EXPECT_EQ(w.watch.counters().at_once, 1u);
  EXPECT_EQ(w.watch.cost().samples(balance::Place::store), 0u);
}

TEST(FetchWatch, AFetchThatDoesNotComeIsGivenUpOnceItHasTakenWhatItWouldSave) {
  Waiting w;
  const Duration waited = w.wait(1, seconds(10));
  EXPECT_EQ(w.watch.counters().given_up, 1u);
  EXPECT_EQ(w.watch.counters().given_up_blocks, blocks);
  EXPECT_LT(waited, milliseconds(25));
  EXPECT_EQ(w.watch.next_look(1), instant_never);
}

TEST(FetchWatch, WaitingBesideOtherWorkIsFree) {
  Waiting w;
  w.wait(1, milliseconds(500), 1e6);
  EXPECT_EQ(w.watch.counters().given_up, 0u);
  w.watch.moved(1, 4, w.now);
  EXPECT_EQ(w.watch.counters().waited, 1u);
}

// Given up each time, and complete long after: from then on nobody waits for such ones at all.
TEST(FetchWatch, WhatIsAlwaysLateIsNotWaitedFor) {
  for (const bool comes : {true, false}) {
    Waiting w;
    for (Handle handle = 1; handle <= 30; ++handle) {
      w.wait(handle, seconds(10));
      w.now = w.now + milliseconds(400);
      if (comes) {
        w.watch.moved(handle, 4, w.now);
      } else {
        w.watch.begin(1000, 1, tokens, w.now, w.now);  // time is told by others
        w.watch.failed(1000);
        w.watch.end(handle);
      }
    }
    EXPECT_EQ(w.watch.counters().came_late, comes ? 30u : 0u);
    EXPECT_LE(w.wait(100, seconds(10)), milliseconds(1));
    EXPECT_EQ(w.watch.counters().given_up, 31u);
  }
}

TEST(FetchWatch, SwitchedOffItNeverLooks) {
  FetchWatch::Options options = four_groups;
  options.enabled = false;
  FetchWatch watch(options);
  watch.begin(1, blocks, tokens, Instant{}, Instant{});
  EXPECT_EQ(watch.next_look(1), instant_never);
}

class ArbiterTest : public CoreTest<PrefillCore> {
 protected:
  // A hit of four blocks; what di-kvd is asked for.
  std::optional<wire::kv_fetch> bind(bool arbiter) {
    PrefillCore::Options options;
    options.arbiter = arbiter;
    begin(options);
    wire::prefill_bind bind;
    bind.bind = 1;
    bind.tokens = test_tokens(18);
    bind.keys = kv::chain_keys(Key{}, bind.tokens, 4);
    bind.hit_blocks = 4;
    bind.sampling.max_tokens = 20;
    bind.cost_us = 100;
    from_router(one, bind);
    return heard<wire::kv_fetch>();
  }
  // Its fetch was answered and does not come.
  void hit(bool arbiter) {
    ASSERT_TRUE(bind(arbiter));
    from_kvd(one, wire::kv_fetching{0, 77, 4, {slot(50, 4)}});
    const auto open = heard<wire::kv_open>();
    ASSERT_TRUE(open);
    from_kvd(one, wire::kv_opened{0, open->tag, {slot(0, 1)}});
    ASSERT_TRUE(take());
    ASSERT_EQ(batch->admissions.at(0).spec.cached_tokens, 16u);
    give();
  }
  const wire::Scope one = test_scope(1);
};

TEST_F(ArbiterTest, TheBlocksOfAFetchThatDoesNotComeAreComputed) {
  hit(true);
  EXPECT_FALSE(take());
  EXPECT_LE(core->next_due(), now + milliseconds(1));
  now = now + milliseconds(100);
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->truncations.size(), 1u);
  EXPECT_EQ(batch->truncations[0].second, 0u);
  ASSERT_EQ(batch->plan.rows.size(), 1u);
  EXPECT_TRUE(heard<wire::kv_open>());  // pages for what is computed now
  EXPECT_EQ(core->watch().counters().given_up, 1u);
  done.step.rows.at(0).computed_tokens = 2;
  give();
  EXPECT_EQ(core->tokens_computed(), 2u);
  const auto progress = heard<wire::prefill_progress>();
  ASSERT_TRUE(progress);
  ASSERT_EQ(progress->spans.size(), 1u);  // explain shows the wait
  EXPECT_EQ(progress->spans[0].length_us, 100000u);
}

TEST_F(ArbiterTest, DiKvdHearsWhatComputingTakesAndWhatItCutsIsComputed) {
  const std::optional<wire::kv_fetch> fetch = bind(true);
  ASSERT_TRUE(fetch);
  ASSERT_EQ(fetch->compute.size(), 1u);
  EXPECT_EQ(fetch->compute[0].tokens, 18u);
  EXPECT_EQ(fetch->compute[0].chunk_tokens, PrefillCore::Options().chunk_tokens);
  EXPECT_EQ(fetch->compute[0].queue_us, 0u);
  EXPECT_DOUBLE_EQ(fetch->compute[0].token_us, balance::StepCost::Shape().token_us);
  from_kvd(one, wire::kv_fetching{0, 77, 1, {slot(50, 1)}, 3});
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  EXPECT_EQ(core->watch().counters().cut_blocks, 3u);
  std::vector<wire::SlotRef> slots;
  for (std::uint32_t page = 0; page < open->page_blocks.size(); ++page)
    slots.push_back(slot(page, open->page_blocks[page]));
  from_kvd(one, wire::kv_opened{0, open->tag, slots});
  from_kvd(one, wire::kv_ready{77, 4, wire::block_none, true, {}, {}});
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->admissions.at(0).spec.cached_tokens, 4u);
  give();
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->plan.rows.size(), 1u);
  done.step.rows.at(0).computed_tokens = 14;
  give();
  const auto progress = heard<wire::prefill_progress>();
  ASSERT_TRUE(progress);
  ASSERT_EQ(progress->spans.size(), 1u);  // explain shows it
  EXPECT_EQ(progress->spans[0].kind, static_cast<wire::U8>(wire::SpanKind::cut));
  EXPECT_EQ(progress->spans[0].group, 3u);
}

TEST_F(ArbiterTest, CostsOutliveTheProcess) {
  hit(true);
  const std::string text = core->costs();
  EXPECT_TRUE(core->restore_costs(text).ok());
  EXPECT_EQ(core->costs(), text);
  EXPECT_FALSE(core->restore_costs("step 1 2 3").ok());
  EXPECT_FALSE(core->restore_costs("").ok());
}

TEST_F(ArbiterTest, WithoutItARequestWaits) {
  hit(false);
  now = now + seconds(4);
  EXPECT_FALSE(take());
  from_kvd(one, wire::kv_ready{77, 4, wire::block_none, true, {}, {}});
  EXPECT_TRUE(take());
}

}  // namespace
}  // namespace di::rank
