// Cached pages that are fetched, late, or do not come.
#include "tests/unit/rank/prefill_fixture.h"

namespace di::rank {
namespace {

TEST_F(PrefillTest, AFetchWithoutRoomMeansComputing) {
  from_router(one, bind_of(18, 4));
  EXPECT_EQ(heard<wire::kv_fetch>()->keys.size(), 4U);
  EXPECT_FALSE(heard<wire::kv_open>());
  from_kvd(one, wire::kv_fetching{static_cast<wire::U16>(Code::busy), 0, 0, {}});
  EXPECT_EQ(heard<wire::kv_open>()->page_blocks, (std::vector<std::uint32_t>{4, 1}));
}

TEST_F(PrefillTest, AFetchWithoutAnAnswerWaitedForEver) {
  from_router(one, bind_of(18, 4));
  EXPECT_TRUE(heard<wire::kv_fetch>());
  advance(seconds(4));
  EXPECT_FALSE(heard<wire::kv_open>());
  advance(seconds(1));
  EXPECT_TRUE(heard<wire::kv_release>());
  EXPECT_EQ(heard<wire::kv_open>()->page_blocks, (std::vector<std::uint32_t>{4, 1}));
  from_kvd(one, wire::kv_fetching{0, 77, 4, {slot(50, 4)}});  // too late
  EXPECT_FALSE(heard<wire::kv_open>());
}

// D13: what counts is what was loaded, not what was promised.
TEST_F(PrefillTest, AShorterHitIsTakenAndTheRestComputed) {
  from_router(one, bind_of(18, 4));
  from_kvd(one, wire::kv_fetching{0, 77, 3, {slot(50, 3)}});
  grant(one);
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->admissions[0].spec.cached_tokens, 12U);
  EXPECT_EQ(batch->admissions[0].entry, 77U);
  give();
  EXPECT_FALSE(take());  // no layer group is there
  ready(one, 1);
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->plan.rows[0].tokens, 6U);
}

TEST_F(PrefillTest, WithoutOverlapItWaitsForAllGroups) {
  PrefillCore::Options options;
  options.overlap = false;
  begin(options);
  run(one, 18, 4);
  ready(one, 3);
  EXPECT_FALSE(take());
  ready(one, 4);
  EXPECT_TRUE(take());
}

TEST_F(PrefillTest, ALateGroupIsWaitedFor) {
  run(one, 18, 4);
  ready(one, 1);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::late;
  done.step.rows[0].late_group = 2;
  give();
  ready(one, 2);
  EXPECT_FALSE(take());
  ready(one, 3);
  EXPECT_TRUE(take());
}

TEST_F(PrefillTest, AGroupThatCameDuringALateStepIsNotWaitedForAgain) {
  run(one, 18, 4);
  ready(one, 1);
  ASSERT_TRUE(take());
  ready(one, 4);
  done.step.rows[0].state = engine::RowState::late;
  done.step.rows[0].late_group = 1;
  give();
  EXPECT_TRUE(take());
}

// E11: a block that does not come ends the hit there; what is behind it is computed.
TEST_F(PrefillTest, AFailedBlockIsComputedInstead) {
  run(one, 26, 6);  // cached 6 blocks: pages of 4 and 2
  ready(one, 1, 4);
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  EXPECT_EQ(open->page_blocks, (std::vector<std::uint32_t>{2}));  // blocks 4 and 5; 0 to 3 are cached
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->truncations, (std::vector<std::pair<engine::SequenceId, std::uint32_t>>{{100, 4}}));
  from_kvd(one, wire::kv_opened{0, open->tag, {slot(20, 2)}});
}

// What was promised and did not come counted as computed: the counter of tokens went back, which is four
// thousand million forward, and the first chunk was cut short.
TEST_F(PrefillTest, APromiseThatIsNotKeptIsNoComputedToken) {
  run(one, 18, 4);
  const double promised_us = core->queue_us();
  ready(one, 1, 2);
  EXPECT_GT(core->queue_us(), promised_us);
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->plan.rows.size(), 1U);
  EXPECT_EQ(batch->plan.rows[0].tokens, 10U);  // of 18, eight are cached
  done.step.rows[0].computed_tokens = 12;
  done.step.rows[0].swapped_blocks = 2;
  give();
  EXPECT_EQ(core->tokens_computed(), 4U);
}

// A client that left while the pages were late was charged with all that the cache had promised.
TEST_F(PrefillTest, WhatIsLateIsNotReadYet) {
  run(one, 18, 4);
  ready(one, 1);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::late;
  done.step.rows[0].late_group = 2;
  give();
  const auto progress = heard<wire::prefill_progress>();
  ASSERT_TRUE(progress);
  EXPECT_EQ(progress->computed_tokens, 0U);
}

TEST_F(PrefillTest, NothingIsComputedBeforeTheFirstStep) {
  run(one, 18, 4);
  from_router(one, wire::request_stop{6});
  ASSERT_TRUE(take());
  give();
  const auto ended = heard<wire::request_done>();
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->computed_tokens, 0U);
}

// The step was late for a group of a block of which it was said meanwhile that it will not come.
TEST_F(PrefillTest, AFailureDuringALateStepWasForgotten) {
  run(one, 18, 4);
  ready(one, 1);
  ASSERT_TRUE(take());
  ready(one, 1, 2);
  EXPECT_FALSE(heard<wire::kv_open>());
  done.step.rows[0].state = engine::RowState::late;
  done.step.rows[0].late_group = 1;
  give();
  EXPECT_EQ(heard<wire::kv_open>()->page_blocks, (std::vector<std::uint32_t>{2}));
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->truncations, (std::vector<std::pair<engine::SequenceId, std::uint32_t>>{{100, 2}}));
}

TEST_F(PrefillTest, AFailureInTheStepTruncatesTheSame) {
  run(one, 18, 4);
  ready(one, 1);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::kv_failed;
  done.step.rows[0].failed_block = 0;
  give();
  EXPECT_EQ(heard<wire::kv_open>()->page_blocks, (std::vector<std::uint32_t>{4}));
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->truncations.size(), 1U);
  EXPECT_EQ(batch->truncations[0].second, 0U);
  EXPECT_EQ(batch->plan.rows.size(), 1U);  // nothing is cached: it runs at once
}

// D13.
TEST_F(PrefillTest, AFailureBeforeAdmissionShortensTheHit) {
  from_router(one, bind_of(18, 4));
  from_kvd(one, wire::kv_fetching{0, 77, 4, {slot(50, 2), slot(51, 2)}});
  grant(one);
  ready(one, 0, 2);
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->admissions[0].spec.cached_tokens, 8U);
  EXPECT_EQ(heard<wire::kv_open>()->page_blocks, (std::vector<std::uint32_t>{2}));
}

TEST_F(PrefillTest, AFailureDuringAdmissionTruncates) {
  from_router(one, bind_of(18, 4));
  from_kvd(one, wire::kv_fetching{0, 77, 4, {slot(50, 2), slot(51, 2)}});
  grant(one);
  ASSERT_TRUE(take());
  ready(one, 0, 2);
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->truncations.size(), 1U);
}

TEST_F(PrefillTest, ARequestThatIsOverWasTruncated) {
  run(one, 18, 4);
  ready(one, 1, 2);
  from_router(one, wire::request_kill{});
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->releases.size(), 1U);
  EXPECT_TRUE(batch->truncations.empty());
}

TEST_F(PrefillTest, NoRoomForWhatFailedEndsARunningRequest) {
  run(one, 18, 4);
  ready(one, 1, 2);
  from_kvd(one, wire::kv_opened{static_cast<wire::U16>(Code::busy), heard<wire::kv_open>()->tag, {}});
  advance(seconds(10));
  expect_end(Code::timeout);
}

TEST_F(PrefillTest, ADelayedRowDoesNotSpinItsTimer) {
  run(one, 18);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::not_before;
  done.step.rows[0].not_before = now + milliseconds(20);
  give();
  EXPECT_FALSE(take());
  EXPECT_EQ(core->next_due(), now + milliseconds(20));
  from_router(two, bind_of(18));
  grant(two, 10);
  ASSERT_TRUE(take());  // a batch is out when the delay ends
  advance(milliseconds(30));
  EXPECT_EQ(core->next_due(), instant_never);
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->plan.rows.size(), 2U);
}

// What it had cached is in the pool since: neither a late word of a failure nor a long wait takes it back.
TEST_F(PrefillTest, ADelayedRowKeepsWhatWasSwappedIn) {
  run(one, 18, 4);
  ready(one, 1);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::not_before;
  done.step.rows[0].not_before = now + milliseconds(20);
  done.step.rows[0].computed_tokens = 16;
  done.step.rows[0].swapped_blocks = 4;
  give();
  ready(one, 1, 2);
  advance(seconds(60));
  ASSERT_TRUE(take());
  EXPECT_TRUE(batch->truncations.empty());
  EXPECT_EQ(batch->plan.rows.size(), 1U);
}

}  // namespace
}  // namespace di::rank
