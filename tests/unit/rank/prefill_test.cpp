// A request from its bind to its token, and what ends it.
#include "tests/unit/rank/prefill_fixture.h"

namespace di::rank {
namespace {

TEST_F(PrefillTest, AColdRequestIsComputedSealedAndHandedOver) {
  from_router(one, bind_of(18));
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  EXPECT_EQ(open->page_blocks, (std::vector<std::uint32_t>{4, 1}));  // one full page, the tail
  from_kvd(one, wire::kv_opened{0, open->tag, {slot(0, 4), slot(1, 1)}});
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->admissions.size(), 1U);
  EXPECT_EQ(batch->admissions[0].spec.cached_tokens, 0U);
  EXPECT_EQ(batch->admissions[0].spec.known_tokens_max, 19U);
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->plan.rows[0].tokens, 18U);
  token(18);
  give();
  const auto tokens = heard<wire::token_batch>();
  ASSERT_TRUE(tokens);
  EXPECT_EQ(tokens->events[0].token.id, 42U);
  EXPECT_FALSE(heard<wire::kv_sealed>());
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->exports.size(), 2U);
  EXPECT_FALSE(batch->exports[0].tail);
  EXPECT_TRUE(batch->exports[1].tail);
  give();
  const auto page = heard<wire::kv_sealed>();
  ASSERT_TRUE(page);
  EXPECT_EQ(page->keys.size(), 4U);
  EXPECT_EQ(page->crcs, (std::vector<std::uint32_t>{1, 2, 3, 4}));
  EXPECT_EQ(page->tenant, test_tenant);
  EXPECT_TRUE(heard<wire::kv_sealed>()->keys.empty());
  EXPECT_EQ(gauge("pool_blocks"), 0U);  // the room is free before the hand-over
  from_router(one, target_of(6));
  const auto handover = heard<wire::kv_handover>();
  ASSERT_TRUE(handover);
  EXPECT_EQ(handover->seat, 6U);
  EXPECT_EQ(handover->tail.slot, 1U);
  EXPECT_EQ(handover->token.id, 42U);
  handed(one, 6);
  expect_end(Code::ok);
  EXPECT_EQ(gauge("endings_unacknowledged"), 1U);
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(PrefillTest, ChunksAreCutAndReported) {
  PrefillCore::Options options;
  options.chunk_tokens = 8;
  begin(options);
  run(one, 18);
  for (const std::uint32_t computed : {8U, 16U}) {
    ASSERT_TRUE(take());
    EXPECT_EQ(batch->plan.rows[0].tokens, 8U);
    done.step.rows[0].computed_tokens = computed;
    give();
    const auto progress = heard<wire::prefill_progress>();
    ASSERT_TRUE(progress);
    EXPECT_EQ(progress->computed_tokens, computed);
  }
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->plan.rows[0].tokens, 2U);
  EXPECT_EQ(batch->exports.size(), 1U);  // the full page goes while the last chunk computes
}

TEST_F(PrefillTest, TheChunkIsSharedByRows) {
  PrefillCore::Options options;
  options.chunk_tokens = 24;
  begin(options);
  for (std::uint32_t i = 1; i <= 3; ++i) {
    from_router(test_scope(i), bind_of(18));
    grant(test_scope(i), i * 10);
  }
  ASSERT_TRUE(take());
  give();
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->plan.rows.size(), 2U);  // nothing is left for the third
  EXPECT_EQ(batch->plan.rows[0].tokens, 18U);
  EXPECT_EQ(batch->plan.rows[1].tokens, 6U);
}

TEST_F(PrefillTest, BindsThatCannotBeTakenAreRefused) {
  const auto refusal = [&](const wire::prefill_bind& bind) {
    from_router(one, bind);
    const auto refused = heard<wire::prefill_refused>();
    EXPECT_TRUE(refused);
    EXPECT_FALSE(heard<wire::kv_open>() || heard<wire::kv_fetch>());
    return refused ? static_cast<Code>(refused->code) : Code::ok;
  };
  wire::prefill_bind bind = bind_of(18);
  bind.keys.pop_back();
  EXPECT_EQ(refusal(bind), Code::invalid);
  EXPECT_EQ(refusal(wire::prefill_bind{}), Code::invalid);
  EXPECT_EQ(refusal(bind_of(1000)), Code::invalid);
  EXPECT_EQ(refusal(bind_of(200)), Code::invalid);    // larger than the pool
  EXPECT_EQ(refusal(bind_of(16, 4)), Code::invalid);  // nothing left to compute
  core->set_draining(true);
  EXPECT_EQ(refusal(bind_of(18)), Code::busy);
  core->set_draining(false);
  core->on_arena("", 0, now);
  EXPECT_EQ(refusal(bind_of(18)), Code::busy);
  core->on_arena(kvd, kvd_generation, now);
  for (std::uint32_t i = 0; i < 16; ++i) from_router(test_scope(100 + i), bind_of(5));
  EXPECT_EQ(gauge("requests"), 16U);
  out.clear();
  EXPECT_EQ(refusal(bind_of(18)), Code::busy);
  from_router(test_scope(100), bind_of(5));  // said twice: the first one counts
  EXPECT_FALSE(heard<wire::prefill_refused>());
  EXPECT_EQ(gauge("requests"), 16U);
}

TEST_F(PrefillTest, AnUnansweredOpenIsSaidAgain) {
  from_router(one, bind_of(18));
  const auto first = heard<wire::kv_open>();
  ASSERT_TRUE(first);
  advance(seconds(2));
  const auto again = heard<wire::kv_open>();
  ASSERT_TRUE(again);
  EXPECT_NE(again->tag, first->tag);
  EXPECT_EQ(first->unheard, first->tag);
  EXPECT_EQ(again->unheard, first->tag);
  advance(seconds(8));
  EXPECT_TRUE(heard<wire::prefill_refused>());
}

TEST_F(PrefillTest, NoRoomIsAskedAgainAndThenRefused) {
  from_router(one, bind_of(18));
  const auto busy = static_cast<wire::U16>(Code::busy);
  from_kvd(one, wire::kv_opened{busy, heard<wire::kv_open>()->tag, {}});
  EXPECT_FALSE(heard<wire::kv_open>());
  advance(core->next_due() - now);
  auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  from_kvd(one, wire::kv_opened{0, open->tag - 1, {slot(0, 4), slot(1, 1)}});  // of the earlier question
  EXPECT_FALSE(take());
  from_kvd(one, wire::kv_opened{busy, open->tag, {}});
  advance(seconds(10));
  const auto refused = heard<wire::prefill_refused>();
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, static_cast<wire::U16>(Code::no_space));
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(PrefillTest, WhatTheArenaNeverHoldsWasAskedForAgainAndAgain) {
  for (const Code code : {Code::invalid, Code::unsupported}) {
    from_router(one, bind_of(18));
    from_kvd(one, wire::kv_opened{static_cast<wire::U16>(code), heard<wire::kv_open>()->tag, {}});
    const auto refused = heard<wire::prefill_refused>();
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->code, static_cast<wire::U16>(code));
    EXPECT_EQ(refused->seat, 0U);
    advance(seconds(1));
    EXPECT_FALSE(heard<wire::kv_open>());
    expect_nothing_held();
  }
  run(two, 18, 4);
  ready(two, 1, 2);
  from_kvd(two, wire::kv_opened{static_cast<wire::U16>(Code::invalid), heard<wire::kv_open>()->tag, {}});
  expect_end(Code::invalid);
}

TEST_F(PrefillTest, GrantsThatDoNotFitEndTheRequest) {
  from_router(one, bind_of(18));
  from_kvd(one, wire::kv_opened{0, heard<wire::kv_open>()->tag, {slot(0, 4)}});
  expect_end(Code::invalid);
}

TEST_F(PrefillTest, AdmissionWaitsForPoolRoom) {
  for (std::uint32_t i = 0; i < 3; ++i) {
    from_router(test_scope(i), bind_of(66));  // 17 blocks of 40
    grant(test_scope(i), i * 10);
  }
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->admissions.size(), 2U);
  give();
  EXPECT_EQ(gauge("pool_blocks"), 34U);
  from_router(test_scope(0), wire::request_kill{});
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->releases.size(), 1U);
  EXPECT_EQ(batch->admissions.size(), 1U);  // in one batch: releases go first
}

// A large prompt waited for room for as long as smaller ones came.
TEST_F(PrefillTest, AWaitingRequestIsOvertakenAFewTimesOnly) {
  PrefillCore::Options options;
  options.requests_max = 64;
  begin(options);
  run(test_scope(1), 82);                   // 21 blocks of 40
  from_router(test_scope(2), bind_of(98));  // 25 blocks
  grant(test_scope(2));
  std::uint32_t overtakers = 0;
  for (std::uint32_t i = 3; i < 40; ++i) {
    from_router(test_scope(i), bind_of(18));
    grant(test_scope(i));
    if (!take()) continue;
    overtakers += static_cast<std::uint32_t>(batch->admissions.size());
    give();
    from_router(test_scope(i), wire::request_kill{});
  }
  EXPECT_EQ(overtakers, 8U);
  from_router(test_scope(1), wire::request_kill{});
  ASSERT_TRUE(take());
  ASSERT_FALSE(batch->admissions.empty());
  EXPECT_EQ(batch->admissions[0].spec.tokens.size(), 98U);
}

TEST_F(PrefillTest, AStopDuringAnAdmissionThatIsRefusedIsAnsweredWithTheEnd) {
  from_router(one, bind_of(18));
  grant(one);
  ASSERT_TRUE(take());
  from_router(one, wire::request_stop{static_cast<wire::U16>(Code::cancelled)});
  done.admitted[0].sequence = Error{Code::busy, 0, "no"};
  give();
  EXPECT_FALSE(heard<wire::prefill_refused>());
  expect_end(Code::cancelled);
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(PrefillTest, AnEngineThatRefusesIsAnswered) {
  from_router(one, bind_of(18));
  grant(one);
  ASSERT_TRUE(take());
  done.admitted[0].sequence = Error{Code::busy, 0, "no"};
  give();
  EXPECT_EQ(heard<wire::prefill_refused>()->reason, "no");
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(PrefillTest, AnExportThatFailsEndsTheRequest) {
  choose(one, 18);
  ASSERT_TRUE(take());
  done.exported[0].crcs = Error{Code::stale, 0, "gone"};
  give();
  expect_end(Code::stale);
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(PrefillTest, StopEndsEachState) {
  const wire::request_stop stop{static_cast<wire::U16>(Code::cancelled)};
  from_router(one, bind_of(18, 4));  // fetching
  from_router(one, stop);
  expect_end(Code::cancelled);
  from_router(two, bind_of(18));  // opening
  from_router(two, stop);
  expect_end(Code::cancelled);
  out.clear();
  const wire::Scope three = test_scope(3);  // admitting, not asked yet
  from_router(three, bind_of(18));
  grant(three);
  from_router(three, stop);
  expect_end(Code::cancelled);
  const wire::Scope four = test_scope(4);  // admitting, asked: ends with the batch after
  from_router(four, bind_of(18));
  grant(four);
  ASSERT_TRUE(take());
  from_router(four, stop);
  EXPECT_FALSE(heard<wire::request_done>());
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->cancels.size(), 1U);
  give();
  expect_end(Code::cancelled);
  const wire::Scope five = test_scope(5);  // running
  run(five, 18);
  from_router(five, stop);
  ASSERT_TRUE(take());
  give();
  expect_end(Code::cancelled);
  const wire::Scope six = test_scope(6);  // sealing
  choose(six, 18);
  from_router(six, stop);
  ASSERT_TRUE(take());
  EXPECT_TRUE(batch->exports.empty());
  give();
  expect_end(Code::cancelled);
  const wire::Scope seven = test_scope(7);  // waiting
  wait(seven, 18);
  from_router(seven, stop);
  expect_end(Code::cancelled);
  const wire::Scope eight = test_scope(8);  // handing
  wait(eight, 18);
  from_router(eight, target_of(6));
  from_router(eight, stop);
  expect_end(Code::cancelled);
  for (std::uint32_t i = 1; i <= 8; ++i) acknowledge(test_scope(i));
  from_router(one, stop);  // over already: answered, not kept
  EXPECT_EQ(heard<wire::request_done>()->code, static_cast<wire::U16>(Code::not_found));
  expect_nothing_held();
}

// Nobody carried its cancel: it kept its place for the hold, or was handed over.
TEST_F(PrefillTest, AStopWhileTheLastPagesWereCopiedWasLost) {
  choose(one, 18);
  from_router(one, target_of(6));
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->exports.size(), 2U);
  from_router(one, wire::request_stop{static_cast<wire::U16>(Code::stale)});
  EXPECT_FALSE(heard<wire::request_done>());
  give();
  EXPECT_FALSE(heard<wire::kv_handover>());
  expect_end(Code::stale);
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(PrefillTest, ACancelledRowWasSteppedInTheSameBatch) {
  run(one, 18);
  from_router(one, wire::request_stop{6});
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->cancels.size(), 1U);
  EXPECT_TRUE(batch->plan.rows.empty());
}

TEST_F(PrefillTest, AScriptThatLagsKeptItsPrefillForEver) {
  run(one, 18);
  from_router(one, wire::request_stop{6});
  ASSERT_TRUE(take());
  done.cancelled[0].second = false;
  give();
  EXPECT_FALSE(heard<wire::request_done>());
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->plan.rows.size(), 1U);
  token(18);
  give();
  expect_end(Code::cancelled);
  EXPECT_FALSE(heard<wire::token_batch>());

  choose(two, 18);  // the token is out already
  from_router(two, wire::request_stop{6});
  ASSERT_TRUE(take());
  done.cancelled[0].second = false;
  give();
  expect_end(Code::cancelled);
}

TEST_F(PrefillTest, KillForgetsWithoutAnAnswer) {
  run(one, 18);
  from_router(one, wire::request_kill{});
  EXPECT_FALSE(heard<wire::request_done>());
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(PrefillTest, PagesWereReleasedWhileTheEngineCopiedThem) {
  choose(one, 18);
  ASSERT_TRUE(take());  // exports
  from_router(one, wire::request_kill{});
  EXPECT_FALSE(heard<wire::kv_release>());
  give();
  EXPECT_TRUE(heard<wire::kv_release>());

  run(two, 18, 4);
  ready(two, 4);
  ASSERT_TRUE(take());  // swaps in
  from_router(two, wire::request_kill{});
  EXPECT_FALSE(heard<wire::kv_release>());
  give();
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(PrefillTest, AKillDuringAdmissionGivesTheSequenceBack) {
  from_router(one, bind_of(18));
  grant(one);
  ASSERT_TRUE(take());
  from_router(one, wire::request_kill{});
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->releases.size(), 1U);
  give();
  expect_nothing_held();
}

TEST_F(PrefillTest, ALostRouterTakesItsRequestsAndEndingsAlong) {
  from_router(one, bind_of(18));
  from_router(one, wire::request_stop{6});
  out.clear();
  run(two, 18);
  EXPECT_EQ(gauge("endings_unacknowledged"), 1U);
  out.clear();
  core->on_router_lost(router);
  listen();
  EXPECT_TRUE(heard<wire::kv_release>());
  EXPECT_FALSE(heard<wire::request_done>());
  expect_nothing_held();
}

TEST_F(PrefillTest, EndingsAreSaidAgainToAReturningRouter) {
  from_router(one, bind_of(18));
  from_router(one, wire::request_stop{6});
  out.clear();
  core->on_router_up(router, router_generation);
  listen();
  EXPECT_EQ(count<wire::request_done>(), 1);
}

TEST_F(PrefillTest, ALostArenaEndsEverythingAndClosesTheRankFirst) {
  wait(two, 18);
  run(one, 18);
  out.clear();
  core->on_arena("", 0, now);
  listen();
  ASSERT_FALSE(out.empty());
  EXPECT_EQ(out[0].number, wire::rank_credit::number);  // before a request is bound here again
  EXPECT_TRUE(out[0].as<wire::rank_credit>()->draining);
  EXPECT_EQ(count<wire::request_done>(), 2);
  EXPECT_EQ(count<wire::kv_release>(), 0);
  acknowledge(one);
  acknowledge(two);
  expect_nothing_held();
  out.clear();
  core->on_arena(kvd, kvd_generation, now);
  listen();
  EXPECT_FALSE(heard<wire::rank_credit>()->draining);
}

TEST_F(PrefillTest, AStepCountsFromItsInstantOn) {
  run(one, 18);
  ASSERT_TRUE(take());
  token(18);
  done.step.ready_at = now + milliseconds(50);
  give();
  EXPECT_FALSE(heard<wire::token_batch>());
  EXPECT_FALSE(take());
  EXPECT_EQ(core->next_due(), now + milliseconds(50));
  advance(milliseconds(50));
  EXPECT_TRUE(heard<wire::token_batch>());
}

TEST_F(PrefillTest, CreditFollowsTheWork) {
  begin();
  core->on_router_up("di-router.1", 1);
  listen();
  // Half of what there is, and the first one's other half is taken back.
  ASSERT_EQ(count<wire::rank_credit>(), 2);
  for (const wire::Envelope& message : out) {
    EXPECT_EQ(message.as<wire::rank_credit>()->granted_requests, 8U) << message.peer;
  }
  out.clear();
  from_router(one, bind_of(18));
  std::erase_if(out, [](const wire::Envelope& message) { return message.peer != router; });
  const auto credit = heard<wire::rank_credit>();
  ASSERT_TRUE(credit);
  EXPECT_EQ(credit->last_bind, 1U);
  EXPECT_EQ(credit->running, 1U);
  EXPECT_GT(credit->queue_us, 0U);
}

}  // namespace
}  // namespace di::rank
