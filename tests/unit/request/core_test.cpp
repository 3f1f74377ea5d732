// A request from its match to its end.
#include "tests/unit/request/core_fixture.h"

namespace di::request {
namespace {

TEST_F(RouterTest, ARequestGoesFromMatchToItsLastToken) {
  const RequestId id = submit();
  EXPECT_EQ(heard<wire::meta_match>(meta)->keys.size(), 4U);
  matched(id, 3);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  EXPECT_EQ(bind->hit_blocks, 3U);
  EXPECT_EQ(bind->bind, 1U);
  EXPECT_EQ(bind->tenant, 7U);
  const auto ask = heard<wire::decode_seat>(decode0);
  ASSERT_TRUE(ask);
  EXPECT_EQ(ask->tokens.size(), 18U);
  EXPECT_EQ(ask->tenant, 7U);
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  const auto target = heard<wire::prefill_target>(prefill0);
  ASSERT_TRUE(target);
  EXPECT_EQ(target->decode, decode0);
  EXPECT_EQ(target->host, kvd);
  wire::prefill_progress progress;
  progress.swapped_blocks = 3;
  say(prefill0, scope(id), progress);
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::decode_started{5, 4});
  wire::request_done prefill_done;
  prefill_done.swapped_blocks = 3;
  say(prefill0, scope(id), prefill_done);
  EXPECT_TRUE(heard<wire::done_ack>(prefill0));
  token(decode0, id, 1);
  token(decode0, id, 2, 1, wire::Finish::stop);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  EXPECT_EQ(endings[0].finish, wire::Finish::stop);
  EXPECT_EQ(endings[0].output_tokens, 3U);
  EXPECT_EQ(endings[0].cached_tokens, 12U);
  EXPECT_EQ(core->flights().size(), 1U);  // decode still owes its counts
  done(decode0, id);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1, 2}));
  expect_nothing_held();
  EXPECT_NE(core->find(id), nullptr);  // for `explain`
}

TEST_F(RouterTest, SubmitSaysWhatIsInTheWay) {
  RouterCore::Options few = options();
  few.flights_max = 1;
  begin(few);
  const RequestId id = submit();
  NewRequest again;
  again.id = id;
  again.model = "m";
  again.prompt = {1};
  EXPECT_EQ(core->submit(again, now).error().code, Code::busy);
  core->cancel(id, Code::cancelled, now);
  again.model = "other";
  EXPECT_EQ(core->submit(again, now).error().code, Code::unreachable);
  again.model = "m";
  EXPECT_TRUE(core->submit(again, now).ok());
}

TEST_F(RouterTest, RequestsWaitAWhileForTheLastRankOfAKind) {
  const RequestId id = submit();
  lose(prefill0);
  lose(prefill1);
  matched(id, 0);
  const RequestId later = submit();
  EXPECT_EQ(state(id), FlightState::queued);
  matched(later, 0);
  EXPECT_EQ(core->next_due(), now + seconds(15));
  advance(seconds(14));
  up(prefill0);
  EXPECT_EQ(count<wire::prefill_bind>(), 2);
  lose(prefill0);  // both re-enter and wait again
  advance(seconds(15));
  ASSERT_EQ(endings.size(), 2U);
  EXPECT_EQ(endings[0].code, Code::busy);
  NewRequest refused;
  refused.model = "m";
  EXPECT_EQ(core->submit(refused, now).error().code, Code::unreachable);
}

TEST_F(RouterTest, WithoutDirectoryEverythingIsCold) {
  lose(meta);
  submit();
  EXPECT_EQ(count<wire::meta_match>(), 0);
  EXPECT_EQ(heard<wire::prefill_bind>(prefill0)->hit_blocks, 0U);
}

TEST_F(RouterTest, ADirectoryThatGoesWhileMatchingIsNotWaitedFor) {
  submit();
  lose(meta);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
}

TEST_F(RouterTest, ADirectoryThatDoesNotAnswerIsNotWaitedFor) {
  const RequestId id = submit();
  EXPECT_EQ(core->next_due(), now + milliseconds(200));
  advance(milliseconds(200));
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
  matched(id, 3);  // late
  EXPECT_EQ(count<wire::prefill_bind>(), 0);
}

TEST_F(RouterTest, AHitIsNeverMoreThanUsable) {
  const RequestId id = submit(16);
  matched(id, 99);
  EXPECT_EQ(heard<wire::prefill_bind>(prefill0)->hit_blocks, 3U);
}

TEST_F(RouterTest, WithoutCreditItWaitsAndHintsAPrefetch) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId id = submit();
  matched(id, 3);
  EXPECT_EQ(state(id), FlightState::queued);
  EXPECT_EQ(heard<wire::kv_prefetch>(kvd)->keys.size(), 3U);
  grant(prefill1, 1);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill1));
  say(prefill1, scope(id), wire::prefill_progress{});
  EXPECT_TRUE(heard<wire::kv_release>(kvd));
}

TEST_F(RouterTest, TheQueueIsServedInOrder) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId first = submit();
  const RequestId second = submit();
  matched(second, 0);
  matched(first, 0);
  grant(prefill0, 1);
  wire::Scope bound;
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill0, &bound));
  EXPECT_EQ(bound.request, second);  // as they came from match
  EXPECT_EQ(core->queued(), 1U);
}

TEST_F(RouterTest, AnEndingSaysHowMuchOfThePromptWasRead) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId waits = submit();
  matched(waits, 3);
  core->cancel(waits, Code::cancelled, now);
  listen();
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].read_tokens, 0U);
  grant(prefill0, 8);
  const RequestId bound = submit();
  matched(bound, 0);
  core->cancel(bound, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 0U);
  const auto over = [&](const RequestId& id) {
    for (const std::string& rank : {prefill0, decode0, decode1}) done(rank, id, Code::cancelled);
  };
  over(bound);
  const RequestId begun = submit();
  matched(begun, 2);
  wire::prefill_progress progress;
  progress.computed_tokens = 12;
  progress.swapped_blocks = 2;
  say(prefill0, scope(begun), progress);
  core->cancel(begun, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 12U);
  EXPECT_EQ(endings.back().cached_tokens, 8U);
  over(begun);
  const RequestId failed = submit();
  matched(failed, 0);
  wire::request_done counts;
  counts.code = static_cast<wire::U16>(Code::unreachable);
  counts.computed_tokens = 6;
  say(prefill0, scope(failed), counts);
  core->cancel(failed, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 6U);
  grant(prefill0, 100);
  out.clear();
  const RequestId answered = decoding();
  lose(decode0);
  core->cancel(answered, Code::cancelled, now);
  listen();
  EXPECT_EQ(endings.back().read_tokens, 18U);  // the prompt, without what was produced
}

TEST_F(RouterTest, AMessageCostTheFlightsOfEverybodyElse) {
  RouterCore::Options many = options();
  many.flights_max = 5000;
  begin(many);
  grant(prefill0, 1);
  grant(prefill1, 0);
  const RequestId id = decoding();
  for (int i = 0; i < 2000; ++i) matched(submit(), 0);
  EXPECT_EQ(core->queued(), 2000U);
  const std::uint64_t before = core->visits();
  for (std::uint32_t index = 2; index < 9; ++index) token(decode0, id, index);
  for (int i = 0; i < 100; ++i) grant(prefill1, 0);
  advance(milliseconds(10));
  EXPECT_EQ(core->visits() - before, 7U);
  EXPECT_EQ(core->next_due(), now - milliseconds(10) + seconds(60));  // its next token
  grant(prefill1, 3);
  EXPECT_EQ(core->visits() - before, 10U);
}

TEST_F(RouterTest, AnotherModelBehindTheNameEndsWhatWasBegunAndCountsItsOwnBlocks) {
  const RequestId streams = decoding();
  for (const std::string& name : {prefill0, prefill1, decode0, decode1}) lose(name);
  const RequestId waits = submit();
  core->start_over(8, "the model is another one now", now);
  listen();
  ASSERT_EQ(endings.size(), 2U);
  for (const Ending& ending : endings) EXPECT_EQ(ending.code, Code::busy);
  EXPECT_NE(core->find(streams), nullptr);
  EXPECT_NE(core->find(waits), nullptr);
  expect_nothing_held();
  up(prefill0);
  up(decode0);
  out.clear();
  NewRequest request;
  request.model = "m";
  request.prompt.resize(18);
  request.keys.resize(2);
  EXPECT_TRUE(core->submit(std::move(request), now).ok());
  listen();
  EXPECT_EQ(heard<wire::meta_match>(meta)->keys.size(), 2U);
}

TEST_F(RouterTest, ACancelledRequestStayedInTheQueue) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId first = submit();
  matched(first, 0);
  for (int i = 0; i < 5; ++i) {
    const RequestId id = submit();
    matched(id, 3);
    core->cancel(id, Code::cancelled, now);
    listen();
    EXPECT_TRUE(heard<wire::kv_release>(kvd));
  }
  EXPECT_EQ(core->queued(), 1U);
  EXPECT_EQ(core->flights().size(), 1U);
}

TEST_F(RouterTest, TokenZeroMayComeAfterTokensOfDecode) {
  const RequestId id = seated();
  say(decode0, scope(id), wire::decode_started{5, 4});
  token(decode0, id, 1);
  token(decode0, id, 2, 1, wire::Finish::stop);
  EXPECT_TRUE(emissions.empty());
  done(decode0, id);
  token(prefill0, id, 0);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1, 2}));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].finish, wire::Finish::stop);
  done(prefill0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, CancelInEachState) {
  const RequestId matching = submit();
  core->cancel(matching, Code::cancelled, now);
  listen();
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId queued = submit();
  matched(queued, 0);
  core->cancel(queued, Code::cancelled, now);
  listen();
  EXPECT_TRUE(core->flights().empty());
  grant(prefill0, 8);
  grant(prefill1, 8);
  out.clear();
  const RequestId prefill = seated();
  core->cancel(prefill, Code::timeout, now);
  core->cancel(prefill, Code::cancelled, now);
  listen();
  EXPECT_EQ(heard<wire::request_stop>(prefill0)->reason, static_cast<wire::U16>(Code::timeout));
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
  token(prefill0, prefill, 0);  // too late
  done(prefill0, prefill, Code::timeout);
  done(decode0, prefill, Code::timeout);
  EXPECT_TRUE(emissions.empty());
  const RequestId decodes = decoding();
  core->cancel(decodes, Code::cancelled, now);
  listen();
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
  EXPECT_EQ(state(decodes), FlightState::closing);
  done(decode0, decodes, Code::cancelled);
  EXPECT_EQ(endings.size(), 4U);
  expect_nothing_held();
}

TEST_F(RouterTest, AStopStringEndsWell) {
  const RequestId id = decoding();
  core->cancel(id, Code::ok, now);
  listen();
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
}

TEST_F(RouterTest, LegsThatDoNotEndAreKilled) {
  const RequestId id = decoding();
  core->cancel(id, Code::cancelled, now);
  EXPECT_EQ(core->next_due(), now + seconds(5));
  advance(seconds(5));
  EXPECT_TRUE(heard<wire::request_kill>(decode0));
  expect_nothing_held();
}

TEST_F(RouterTest, NoFirstTokenIsAnError) {
  grant(prefill0, 0);
  grant(prefill1, 0);
  submit();
  advance(seconds(600));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::timeout);
  expect_nothing_held();
}

TEST_F(RouterTest, TheWholeRequestIsBounded) {
  RouterCore::Options patient = options();
  patient.next_token_wait = seconds(3000);
  begin(patient);
  decoding();
  advance(seconds(1800));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::timeout);
}

TEST_F(RouterTest, AnswersOfOtherRanksAndGenerationsWereTaken) {
  up(decode0, 2);
  const RequestId id = submit();
  matched(id, 0);
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::decode_seat>(decode0, &asked) || heard<wire::decode_seat>(decode1, &asked));
  const std::string rank = core->find(id)->decode.rank.instance;
  wire::Scope other = scope(id);
  other.rank = static_cast<wire::U16>(asked.rank + 1);
  say(rank, other, wire::seat_refused{static_cast<wire::U16>(Code::busy), ""});
  say(rank, other, wire::seat_granted{5, kvd});
  wire::request_done ended;
  ended.leg = 1;
  ended.code = static_cast<wire::U16>(Code::stale);
  say(rank, other, ended);
  EXPECT_TRUE(core->find(id)->decode.open);
  EXPECT_EQ(core->find(id)->seat, 0U);
  core->on_message(wire::Envelope::make(rank, generations.at(rank) + 1, asked, wire::seat_granted{5, kvd}),
                   now);
  EXPECT_EQ(core->find(id)->seat, 0U);
  say(rank, asked, wire::seat_granted{6, kvd});
  EXPECT_EQ(core->find(id)->seat, 6U);
}

TEST_F(RouterTest, EndsAreAcknowledgedWhoeverTheyAreOf) {
  RequestId unknown;
  unknown.raw[3] = std::byte{9};
  done(decode0, unknown);
  EXPECT_EQ(heard<wire::done_ack>(decode0)->leg, 1);
}

TEST_F(RouterTest, FinishedRequestsAreRememberedWithinABound) {
  RouterCore::Options few = options();
  few.explain_max = 2;
  begin(few);
  std::vector<RequestId> ids;
  for (int i = 0; i < 3; ++i) {
    ids.push_back(submit());
    core->cancel(ids.back(), Code::cancelled, now);
    listen();
  }
  EXPECT_EQ(core->find(ids[0]), nullptr);
  ASSERT_NE(core->find(ids[2]), nullptr);
  EXPECT_FALSE(core->find(ids[2])->timeline.first().empty());
  EXPECT_TRUE(core->find(ids[2])->request.prompt.empty());
}

}  // namespace
}  // namespace di::request
