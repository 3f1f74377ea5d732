#include "rank/decode.h"

#include <set>

#include "tests/unit/rank/peers.h"

namespace di::rank {
namespace {

class DecodeTest : public CoreTest<DecodeCore> {
 protected:
  DecodeTest() { begin(); }

  static wire::decode_seat seat_of(std::uint32_t tokens, std::uint32_t max_tokens = 20,
                                   std::uint32_t first_index = 0) {
    wire::decode_seat ask;
    ask.bind = 1;
    ask.tokens = test_tokens(tokens);
    ask.keys = kv::chain_keys(Key{}, ask.tokens, 4);
    ask.first_index = first_index;
    ask.sampling.max_tokens = max_tokens;
    ask.tenant = test_tenant;
    return ask;
  }
  // Seated: the answer to the router was heard.
  std::uint64_t sit(const wire::Scope& scope, std::uint32_t tokens, std::uint32_t max_tokens = 20) {
    while (heard<wire::kv_expect>()) {
    }
    from_router(scope, seat_of(tokens, max_tokens));
    const auto expect = heard<wire::kv_expect>();
    EXPECT_TRUE(expect);
    if (!expect) return 0;
    from_kvd(scope, wire::kv_expected{0, expect->seat, 77});
    const auto granted = heard<wire::seat_granted>();
    EXPECT_TRUE(granted && granted->seat == expect->seat && granted->host == kvd);
    return expect->seat;
  }
  void arrive(const wire::Scope& scope, std::uint64_t seat, std::uint32_t index = 0) {
    from_kvd(scope, wire::kv_seated{seat, {slot(3, 4), slot(4, 1)}, {42, {}}, index, {}});
  }
  // In the engine and running.
  std::uint64_t run(const wire::Scope& scope, std::uint32_t tokens, std::uint32_t max_tokens = 20) {
    const std::uint64_t seat = sit(scope, tokens, max_tokens);
    arrive(scope, seat);
    EXPECT_TRUE(take() && batch->admissions.size() == 1);
    give();
    EXPECT_TRUE(heard<wire::decode_started>());
    return seat;
  }
  // One step of the only running request.
  void step(std::uint32_t computed, std::uint32_t index, engine::Finish finish = engine::Finish::none) {
    ASSERT_TRUE(take());
    ASSERT_EQ(batch->plan.rows.size(), 1U);
    row(computed, index, finish);
    give();
  }
  void row(std::uint32_t computed, std::uint32_t index, engine::Finish finish = engine::Finish::none) {
    engine::RowResult& result = done.step.rows.at(0);
    result.computed_tokens = computed;
    result.has_token = true;
    result.token.id = 50 + index;
    result.index = index;
    result.finish = finish;
  }
  void expect_end(Code code) {
    const auto ended = heard<wire::request_done>();
    ASSERT_TRUE(ended);
    EXPECT_EQ(ended->code, static_cast<wire::U16>(code)) << ended->reason;
    EXPECT_EQ(ended->leg, 1);
  }
  void acknowledge(const wire::Scope& scope) { from_router(scope, wire::done_ack{1}); }

  const wire::Scope one = test_scope(1);
  const wire::Scope two = test_scope(2);
};

// After a restart the first seat of a request had the number that it had had before: a host took the hand-over to it for
// the one that it had carried out, and the request stood still until the seat lapsed.
TEST_F(DecodeTest, AnotherStartGivesOtherSeats) {
  std::set<std::uint64_t> seats;
  for (const std::uint64_t first : {std::uint64_t{1}, std::uint64_t{1} << 32, (std::uint64_t{1} << 48) - 1}) {
    for (const std::uint16_t rank : {std::uint16_t{0}, std::uint16_t{3}}) {
      DecodeCore::Options options;
      options.rank = rank;
      options.first_seat = first;
      begin(options);
      wire::Scope scope = one;
      scope.rank = rank;
      seats.insert(sit(scope, 18));
    }
  }
  EXPECT_EQ(seats.size(), 6U);
  EXPECT_FALSE(seats.contains(0));  // sit() failed
}

// A lost kv_expected or seat_granted kept a request from its seat until the seat lapsed.
TEST_F(DecodeTest, ASeatThatIsAskedForAgainIsTheSameOne) {
  from_router(one, seat_of(18));
  const auto expect = heard<wire::kv_expect>();
  ASSERT_TRUE(expect);
  from_router(one, seat_of(18));
  EXPECT_EQ(heard<wire::kv_expect>(), expect);
  EXPECT_FALSE(heard<wire::seat_granted>());
  from_kvd(one, wire::kv_expected{0, expect->seat, 77});
  const auto granted = heard<wire::seat_granted>();
  ASSERT_TRUE(granted);
  from_router(one, seat_of(18));
  EXPECT_EQ(heard<wire::seat_granted>(), granted);
  EXPECT_FALSE(heard<wire::kv_expect>());
  EXPECT_EQ(gauge("requests"), 1U);
  EXPECT_EQ(gauge("pool_blocks"), 10U);
  arrive(one, expect->seat);
  from_router(one, seat_of(18));
  EXPECT_FALSE(heard<wire::seat_granted>());
  EXPECT_FALSE(heard<wire::seat_refused>());
}

// di-kvd knows a seat by the instance and its number: the second rank's first request was refused, for ever.
TEST_F(DecodeTest, TheSeatsOfTwoRanksOfOneProcessHaveDifferentNumbers) {
  std::set<std::uint64_t> seats;
  for (std::uint16_t rank = 0; rank < 2; ++rank) {
    DecodeCore::Options options;
    options.rank = rank;
    begin(options);
    for (const wire::Scope& scope : {one, two}) {
      from_router(scope, seat_of(18));
      const auto expect = heard<wire::kv_expect>();
      ASSERT_TRUE(expect);
      seats.insert(expect->seat);
    }
  }
  EXPECT_EQ(seats.size(), 4U);
  EXPECT_FALSE(seats.contains(0));  // which says that there is none
}

TEST_F(DecodeTest, ASeatIsFilledRunsAndEnds) {
  from_router(one, seat_of(18, 4));
  const auto expect = heard<wire::kv_expect>();
  ASSERT_TRUE(expect);
  EXPECT_EQ(expect->keys.size(), 4U);
  EXPECT_EQ(expect->tail_tokens, 2U);
  EXPECT_FALSE(heard<wire::seat_granted>());
  from_kvd(one, wire::kv_expected{0, expect->seat, 77});
  EXPECT_EQ(heard<wire::seat_granted>()->seat, expect->seat);
  EXPECT_EQ(gauge("seats"), 1U);
  EXPECT_EQ(gauge("pool_blocks"), 6U);  // 18 + 4 tokens
  EXPECT_FALSE(take());
  arrive(one, expect->seat);
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->admissions.size(), 1U);
  const engine::SequenceSpec& spec = batch->admissions[0].spec;
  EXPECT_EQ(spec.tokens.size(), 19U);
  EXPECT_EQ(spec.tokens.back(), 42U);
  EXPECT_EQ(spec.cached_tokens, 18U);
  EXPECT_EQ(spec.first_index, 1U);
  EXPECT_EQ(spec.known_tokens_max, 22U);
  EXPECT_EQ(batch->admissions[0].slots.size(), 2U);
  give();
  EXPECT_EQ(heard<wire::decode_started>()->swapped_blocks, 4U);
  EXPECT_FALSE(heard<wire::kv_release>());
  step(19, 1);
  EXPECT_TRUE(heard<wire::kv_release>());  // swapped in
  EXPECT_EQ(heard<wire::token_batch>()->events.at(0).index, 1U);
  step(20, 2);
  const auto page = heard<wire::kv_open>();  // block 4 is full, its page is not
  EXPECT_FALSE(page);
  step(21, 3, engine::Finish::length);
  const auto last = heard<wire::token_batch>();
  ASSERT_TRUE(last);
  EXPECT_EQ(heard<wire::token_batch>()->events.at(0).finish, static_cast<wire::U8>(wire::Finish::length));
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  EXPECT_EQ(open->page_blocks, std::vector<std::uint32_t>{1});
  from_kvd(one, wire::kv_opened{0, open->tag, {slot(9, 1)}});
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->exports.size(), 1U);
  EXPECT_EQ(batch->exports[0].first, 4U);
  give();
  const auto sealed = heard<wire::kv_sealed>();
  ASSERT_TRUE(sealed);
  std::vector<std::uint32_t> tokens = test_tokens(18);
  tokens.insert(tokens.end(), {42, 51});
  EXPECT_EQ(sealed->keys, std::vector<Key>{kv::chain_keys(Key{}, tokens, 4).back()});
  EXPECT_EQ(sealed->parent, kv::chain_keys(Key{}, tokens, 4)[3]);
  EXPECT_EQ(sealed->tenant, test_tenant);
  const auto ended = heard<wire::request_done>();
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->code, 0);
  EXPECT_EQ(ended->next_index, 4U);
  EXPECT_EQ(ended->computed_tokens, 3U);
  acknowledge(one);
  expect_nothing_held();
}

// E12: a seat is given only when the whole answer fits beside what is promised already.
TEST_F(DecodeTest, SeatsThatCannotBeGivenAreRefused) {
  const auto refusal = [&](const wire::decode_seat& ask) {
    from_router(one, ask);
    const auto refused = heard<wire::seat_refused>();
    EXPECT_TRUE(refused);
    EXPECT_FALSE(heard<wire::kv_expect>());
    return refused ? static_cast<Code>(refused->code) : Code::ok;
  };
  wire::decode_seat ask = seat_of(18);
  ask.keys.pop_back();
  EXPECT_EQ(refusal(ask), Code::invalid);
  EXPECT_EQ(refusal(wire::decode_seat{}), Code::invalid);
  EXPECT_EQ(refusal(seat_of(18, 5, 5)), Code::invalid);
  EXPECT_EQ(refusal(seat_of(900, 200)), Code::invalid);
  EXPECT_EQ(refusal(seat_of(100, 100)), Code::invalid);  // larger than the pool
  core->set_draining(true);
  EXPECT_EQ(refusal(seat_of(18)), Code::busy);
  core->set_draining(false);
  core->on_arena("", 0, now);
  EXPECT_EQ(refusal(seat_of(18)), Code::busy);
  core->on_arena(kvd, kvd_generation, now);
  sit(two, 100, 40);  // 35 of 40 blocks
  EXPECT_EQ(refusal(seat_of(18)), Code::busy);
  from_router(two, seat_of(18));  // said twice
  EXPECT_FALSE(heard<wire::seat_refused>());
}

TEST_F(DecodeTest, RequestsAreBounded) {
  DecodeCore::Options options;
  options.requests_max = 1;
  begin(options);
  sit(one, 18);
  from_router(two, seat_of(18));
  EXPECT_EQ(heard<wire::seat_refused>()->code, static_cast<wire::U16>(Code::busy));
}

TEST_F(DecodeTest, NoRoomInTheArenaRefusesTheSeat) {
  from_router(one, seat_of(18));
  from_kvd(one, wire::kv_expected{static_cast<wire::U16>(Code::busy), heard<wire::kv_expect>()->seat, 0});
  EXPECT_EQ(heard<wire::seat_refused>()->code, static_cast<wire::U16>(Code::busy));
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(DecodeTest, TheSeatIsRefusedAsDiKvdSays) {
  for (const Code code : {Code::busy, Code::exists, Code::invalid}) {
    from_router(one, seat_of(18));
    from_kvd(one, wire::kv_expected{static_cast<wire::U16>(code), heard<wire::kv_expect>()->seat, 0});
    EXPECT_EQ(heard<wire::seat_refused>()->code, static_cast<wire::U16>(code));
    expect_nothing_held();
  }
}

TEST_F(DecodeTest, ASeatThatNobodyTakesLapses) {
  sit(one, 18);
  from_router(two, seat_of(18));  // di-kvd does not even answer
  EXPECT_EQ(core->next_due(), now + seconds(30));
  advance(seconds(30));
  EXPECT_EQ(count<wire::seat_refused>(), 2);
  EXPECT_EQ(heard<wire::seat_refused>()->code, static_cast<wire::U16>(Code::timeout));
  EXPECT_EQ(count<wire::kv_release>(), 2);
  expect_nothing_held();
}

TEST_F(DecodeTest, ReleasedSeatsAreForgottenAndStartedOnesStopped) {
  from_router(one, seat_of(18));
  from_router(one, wire::seat_release{1});  // expecting
  expect_nothing_held();
  const std::uint64_t seat = sit(one, 18);     // the same request and attempt again
  from_router(one, wire::seat_release{seat});  // seated
  EXPECT_FALSE(heard<wire::request_done>());
  expect_nothing_held();
  arrive(two, sit(two, 18));
  from_router(two, wire::seat_release{3});  // admitting, not asked yet
  expect_end(Code::cancelled);
  acknowledge(two);
  const wire::Scope three = test_scope(3);
  run(three, 18);
  from_router(three, wire::seat_release{4});  // running
  ASSERT_TRUE(take());
  give();
  expect_end(Code::cancelled);
  acknowledge(three);
  expect_nothing_held();
}

TEST_F(DecodeTest, StopEndsEachState) {
  const wire::request_stop stop{static_cast<wire::U16>(Code::stale)};
  from_router(one, seat_of(18));  // expecting
  from_router(one, stop);
  expect_end(Code::stale);
  acknowledge(one);
  sit(one, 18);  // seated
  from_router(one, stop);
  expect_end(Code::stale);
  acknowledge(one);
  arrive(one, sit(one, 18));  // admitting, asked
  ASSERT_TRUE(take());
  from_router(one, stop);
  EXPECT_FALSE(heard<wire::request_done>());
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->cancels.size(), 1U);
  give();
  expect_end(Code::stale);
  acknowledge(one);
  run(one, 18);  // running
  from_router(one, stop);
  from_router(one, stop);
  ASSERT_TRUE(take());
  give();
  expect_end(Code::stale);
  acknowledge(one);
  from_router(one, stop);
  EXPECT_EQ(heard<wire::request_done>()->code, static_cast<wire::U16>(Code::not_found));
  expect_nothing_held();
}

TEST_F(DecodeTest, ACancelledRowWasSteppedInTheSameBatch) {
  run(one, 18);
  from_router(one, wire::request_stop{6});
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->cancels.size(), 1U);
  EXPECT_TRUE(batch->plan.rows.empty());
}

TEST_F(DecodeTest, AScriptThatLagsSpeaksUntilItEnds) {
  run(one, 18);
  from_router(one, wire::request_stop{6});
  ASSERT_TRUE(take());
  done.cancelled[0].second = false;
  give();
  step(19, 1);
  EXPECT_TRUE(heard<wire::token_batch>());
  step(20, 2, engine::Finish::cancelled);
  EXPECT_EQ(heard<wire::token_batch>()->events.at(0).finish, 0);
  from_kvd(one, wire::kv_opened{static_cast<wire::U16>(Code::busy), heard<wire::kv_open>()->tag, {}});
  advance(Duration(0));
  expect_end(Code::cancelled);
}

TEST_F(DecodeTest, KillForgetsInEachState) {
  from_router(one, seat_of(18));
  from_router(one, wire::request_kill{});
  arrive(one, sit(one, 18));
  ASSERT_TRUE(take());
  from_router(one, wire::request_kill{});
  give();
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->releases.size(), 1U);
  give();
  run(one, 18);
  from_router(one, wire::request_kill{});
  EXPECT_FALSE(heard<wire::request_done>());
  expect_nothing_held();
}

TEST_F(DecodeTest, PagesWereReleasedWhileTheEngineCopiedThem) {
  run(one, 18);
  ASSERT_TRUE(take());  // swaps in
  from_router(one, wire::request_kill{});
  EXPECT_FALSE(heard<wire::kv_release>());
  give();
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(DecodeTest, APageIsPublishedWhenItIsFull) {
  run(one, 15, 20);  // three full blocks were prefill's, the page ends with the fourth
  step(16, 1);
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  EXPECT_EQ(open->page_blocks, std::vector<std::uint32_t>{1});
  out.clear();
  step(17, 2);                                                     // goes on meanwhile
  from_kvd(one, wire::kv_opened{0, open->tag + 1, {slot(9, 1)}});  // of somebody else
  from_kvd(one, wire::kv_opened{0, open->tag, {slot(9, 1)}});
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->exports.size(), 1U);
  EXPECT_EQ(batch->exports[0].first, 3U);
  row(18, 3);
  give();
  const auto sealed = heard<wire::kv_sealed>();
  ASSERT_TRUE(sealed);
  EXPECT_EQ(sealed->reuse, 1);
  EXPECT_TRUE(heard<wire::kv_release>());  // a running request reads its pool
  for (std::uint32_t computed = 19; computed < 32; ++computed) step(computed, computed - 15);
  EXPECT_FALSE(heard<wire::kv_open>());
  step(32, 17);
  EXPECT_EQ(heard<wire::kv_open>()->page_blocks, std::vector<std::uint32_t>{4});
}

TEST_F(DecodeTest, APageWithoutASlotIsGivenUpAndNothingMoreIsPublished) {
  run(one, 15, 25);
  step(16, 1);
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  from_kvd(one, wire::kv_opened{static_cast<wire::U16>(Code::busy), open->tag, {}});
  advance(Duration(0));
  EXPECT_EQ(core->pages_given_up(), 1U);
  for (std::uint32_t computed = 17; computed <= 33; ++computed) step(computed, computed - 15);
  EXPECT_FALSE(heard<wire::kv_open>());
  step(34, 19, engine::Finish::stop);
  expect_end(Code::ok);
}

TEST_F(DecodeTest, AnAnswerThatDoesNotComeIsGivenUp) {
  run(one, 15);
  step(16, 1, engine::Finish::stop);
  const auto open = heard<wire::kv_open>();
  ASSERT_TRUE(open);
  EXPECT_FALSE(heard<wire::request_done>());
  EXPECT_EQ(core->next_due(), now + seconds(1));
  advance(seconds(1));
  expect_end(Code::ok);
  from_kvd(one, wire::kv_opened{0, open->tag, {slot(9, 1)}});  // late
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(DecodeTest, AnExportThatFailsIsGivenUp) {
  run(one, 15);
  step(16, 1);
  from_kvd(one, wire::kv_opened{0, heard<wire::kv_open>()->tag, {slot(9, 1)}});
  ASSERT_TRUE(take());
  done.exported[0].crcs = Error{Code::stale, 0, "gone"};
  row(17, 2);
  give();
  EXPECT_FALSE(heard<wire::kv_sealed>());
  EXPECT_EQ(core->pages_given_up(), 1U);
  step(18, 3, engine::Finish::stop);
  expect_end(Code::ok);
}

TEST_F(DecodeTest, AHandOverThatDoesNotFitIsRefused) {
  const std::uint64_t seat = sit(one, 18);
  arrive(one, seat + 1);  // of nobody
  EXPECT_FALSE(take());
  arrive(one, seat, 7);
  EXPECT_EQ(heard<wire::seat_refused>()->code, static_cast<wire::U16>(Code::invalid));
  expect_nothing_held();
}

TEST_F(DecodeTest, AnEngineThatRefusesGivesTheSeatUp) {
  arrive(one, sit(one, 18));
  ASSERT_TRUE(take());
  done.admitted[0].sequence = Error{Code::busy, 0, "no"};
  give();
  EXPECT_EQ(heard<wire::seat_refused>()->reason, "no");
  EXPECT_TRUE(heard<wire::kv_release>());
  expect_nothing_held();
}

TEST_F(DecodeTest, AStopDuringAnAdmissionThatIsRefusedIsAnsweredWithTheEnd) {
  arrive(one, sit(one, 18));
  ASSERT_TRUE(take());
  from_router(one, wire::request_stop{static_cast<wire::U16>(Code::stale)});
  done.admitted[0].sequence = Error{Code::busy, 0, "no"};
  give();
  EXPECT_FALSE(heard<wire::seat_refused>());
  expect_end(Code::stale);
  acknowledge(one);
  expect_nothing_held();
}

// Between its admission and its first step, which another request's delay holds back: the pins of its pages
// are gone, and what they hold may be another's when the step copies it.
TEST_F(DecodeTest, ARequestThatHadNotSwappedInWasKeptWhenItsPagesWent) {
  run(one, 18);
  ASSERT_TRUE(take());
  row(19, 1);
  done.step.ready_at = now + milliseconds(50);
  arrive(two, sit(two, 18));
  give();
  advance(milliseconds(50));
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->admissions.size(), 1U);
  row(20, 2);
  done.step.ready_at = now + milliseconds(50);
  give();
  ASSERT_TRUE(heard<wire::decode_started>());
  core->on_arena("", 0, now);
  listen();
  expect_end(Code::unreachable);  // the second
  EXPECT_FALSE(heard<wire::request_done>());
  core->on_arena(kvd, kvd_generation, now);
  advance(milliseconds(50));
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->releases.size(), 1U);
  ASSERT_EQ(batch->plan.rows.size(), 1U);
  row(21, 3, engine::Finish::stop);
  give();
  expect_end(Code::ok);
  acknowledge(one);
  acknowledge(two);
  expect_nothing_held();
}

TEST_F(DecodeTest, ARequestWhoseFirstStepIsOutOutlivesTheArena) {
  run(one, 18);
  ASSERT_TRUE(take());  // swaps in
  core->on_arena("", 0, now);
  listen();
  EXPECT_FALSE(heard<wire::request_done>());
  row(19, 1, engine::Finish::stop);
  give();
  expect_end(Code::ok);
}

TEST_F(DecodeTest, ADelayedRowHasSwappedIn) {
  run(one, 18);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::not_before;
  done.step.rows[0].not_before = now + milliseconds(20);
  done.step.rows[0].computed_tokens = 18;
  done.step.rows[0].swapped_blocks = 4;
  give();
  EXPECT_TRUE(heard<wire::kv_release>());
  core->on_arena("", 0, now);
  listen();
  EXPECT_FALSE(heard<wire::request_done>());
}

TEST_F(DecodeTest, PagesThatAreGoneAtSwapInEndTheRequest) {
  run(one, 18);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::kv_failed;
  give();
  expect_end(Code::unreachable);
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(DecodeTest, ALostArenaRefusesSeatsAndRunningRequestsGoOn) {
  sit(one, 18);
  run(two, 15);
  step(16, 1);
  ASSERT_TRUE(heard<wire::kv_open>());
  out.clear();
  core->on_arena("", 0, now);
  listen();
  EXPECT_EQ(out.at(0).number, wire::rank_credit::number);
  EXPECT_TRUE(heard<wire::rank_credit>()->draining);
  EXPECT_EQ(heard<wire::seat_refused>()->code, static_cast<wire::U16>(Code::unreachable));
  EXPECT_EQ(count<wire::kv_release>(), 0);
  step(17, 2);
  EXPECT_TRUE(heard<wire::token_batch>());
  core->on_arena(kvd, kvd_generation, now);
  listen();
  step(18, 3, engine::Finish::stop);
  EXPECT_FALSE(heard<wire::kv_open>());  // its chain has a hole
  expect_end(Code::ok);
  acknowledge(two);
  expect_nothing_held();
}

TEST_F(DecodeTest, ALostArenaDoesNotKeepAClosingRequest) {
  run(one, 15);
  step(16, 1, engine::Finish::stop);
  from_kvd(one, wire::kv_opened{0, heard<wire::kv_open>()->tag, {slot(9, 1)}});
  ASSERT_TRUE(take());  // the export is out
  core->on_arena("", 0, now);
  listen();
  expect_end(Code::ok);
  give();
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(DecodeTest, ALostRouterTakesItsRequestsAlong) {
  sit(one, 18);
  run(two, 18);
  core->on_router_lost(router);
  listen();
  EXPECT_FALSE(heard<wire::request_done>());
  EXPECT_EQ(count<wire::kv_release>(), 2);
  expect_nothing_held();
}

TEST_F(DecodeTest, TokensOfAStepGoInOneMessageAndBeforeTheEndings) {
  run(one, 17, 10);
  run(two, 17, 10);
  ASSERT_TRUE(take());
  ASSERT_EQ(batch->plan.rows.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    engine::RowResult& result = done.step.rows[i];
    result.computed_tokens = 18;
    result.has_token = true;
    result.index = 1;
    result.finish = i == 0 ? engine::Finish::stop : engine::Finish::none;
  }
  out.clear();
  give();
  std::vector<std::uint16_t> order;
  for (const wire::Envelope& message : out) {
    if (message.peer == router && message.number != wire::rank_credit::number)
      order.push_back(message.number);
  }
  EXPECT_EQ(order, (std::vector<std::uint16_t>{wire::token_batch::number, wire::request_done::number}));
  EXPECT_EQ(heard<wire::token_batch>()->events.size(), 2U);
}

TEST_F(DecodeTest, AContextThatIsNoMultipleOfABlockWasTooLongForTheEngine) {
  // 22 known tokens are six blocks of four: the engine is asked for 22, not 24.
  arrive(one, sit(one, 18, 4));
  ASSERT_TRUE(take());
  EXPECT_EQ(batch->admissions[0].spec.known_tokens_max, 22U);
}

TEST_F(DecodeTest, ADelayedRowDoesNotSpinItsTimer) {
  run(one, 18);
  ASSERT_TRUE(take());
  done.step.rows[0].state = engine::RowState::not_before;
  done.step.rows[0].not_before = now + milliseconds(20);
  give();
  EXPECT_EQ(core->next_due(), now + milliseconds(20));
  arrive(two, sit(two, 18));
  ASSERT_TRUE(take());
  advance(milliseconds(30));
  EXPECT_EQ(core->next_due(), instant_never);
}

}  // namespace
}  // namespace di::rank
