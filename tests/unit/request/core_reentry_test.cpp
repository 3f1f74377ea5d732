// What is lost, refused or late, and how a request re-enters.
#include "tests/unit/request/core_fixture.h"

namespace di::request {
namespace {

TEST_F(RouterTest, ARequestThatReentersWaitedBehindYoungerOnes) {
  const RequestId old = decoding();
  now = now + seconds(30);
  grant(prefill0, 0);
  grant(prefill1, 0);
  const RequestId younger = submit();
  matched(younger, 0);
  lose(decode0);
  matched(old, 0, 2);
  EXPECT_EQ(core->queued(), 2U);
  grant(prefill1, 1);
  wire::Scope bound;
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1, &bound));
  EXPECT_EQ(bound.request, old);
}

TEST_F(RouterTest, AReentryHadTheTimeBetweenTwoTokensForQueueAndPrefillTogether) {
  const RequestId id = decoding();
  grant(prefill0, 0);
  grant(prefill1, 0);
  lose(decode0);
  matched(id, 0, 2);
  advance(seconds(599));
  EXPECT_EQ(attempt(id), 2);
  EXPECT_EQ(state(id), FlightState::queued);
  grant(prefill1, 1);
  EXPECT_EQ(state(id), FlightState::prefill);
  token(prefill1, id, 2, 2);
  advance(seconds(59));
  EXPECT_EQ(attempt(id), 2);
  advance(seconds(1));  // after its first token it is silence
  EXPECT_EQ(attempt(id), 3);
}

TEST_F(RouterTest, ARankThatReadsAReentryWithoutAWordIsGivenUpAndOneThatGetsOnIsNot) {
  const RequestId id = decoding();
  lose(decode0);
  matched(id, 0, 2);
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill0));
  for (std::uint32_t i = 1; i < 4; ++i) {
    advance(seconds(50));
    say(prefill0, scope(id, 2), wire::prefill_progress{1000, i, 0, {}});
  }
  EXPECT_EQ(attempt(id), 2);
  advance(seconds(60));
  EXPECT_EQ(attempt(id), 3);
}

TEST_F(RouterTest, AReentryThatFindsNoRankInTimeEndsAndDoesNotQueueAgain) {
  const RequestId id = decoding();
  grant(prefill0, 0);
  grant(prefill1, 0);
  lose(decode0);
  matched(id, 0, 2);
  advance(seconds(600));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::timeout);
  EXPECT_EQ(endings[0].attempts, 2);
  expect_nothing_held();
}

// A credit that takes back what another router filled crossed with the bind.
TEST_F(RouterTest, ABindThatCrossedWithItsCreditGoesToTheNextRankInTheSameAttempt) {
  const RequestId id = submit();
  matched(id, 0);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_TRUE(heard<wire::prefill_target>(prefill0));
  grant(prefill0, 1);  // as many as were sent
  say(prefill0, scope(id), wire::prefill_refused{bind->bind, static_cast<wire::U16>(Code::busy), "no place"});
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill1));
  EXPECT_EQ(attempt(id), 1);
  // The seat is told to who has the request now; what the first one says to its target is over.
  EXPECT_EQ(heard<wire::prefill_target>(prefill1)->seat, 5U);
  say(prefill0, scope(id),
      wire::prefill_refused{0, static_cast<wire::U16>(Code::not_found), "the request is not here any more"});
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  token(prefill1, id, 0);
  say(decode0, scope(id), wire::decode_started{5, 4});
  done(prefill1, id);
  token(decode0, id, 1, 1, wire::Finish::stop);
  done(decode0, id);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  EXPECT_EQ(endings[0].attempts, 1);
  expect_nothing_held();
}

// An arena without room was taken for a crossing when the rank was full as well, and asked again for ever.
TEST_F(RouterTest, ARefusalForWantOfRoomInTheArenaIsAnAttempt) {
  const RequestId id = submit();
  matched(id, 0);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  grant(prefill0, 1);  // as many as were sent
  const auto no_space = static_cast<wire::U16>(Code::no_space);
  say(prefill0, scope(id), wire::prefill_refused{bind->bind, no_space, "no room in the arena"});
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, BindsThatCrossWithTheirCreditsDoNotUseUpTheAttempts) {
  const RequestId id = submit(18, 1);
  const RequestId younger = submit(18, 1);
  matched(id, 0);
  grant(prefill0, 0);
  grant(prefill1, 0);
  matched(younger, 0);
  std::uint64_t granted = 1;
  for (int i = 0; i < 20; ++i) {
    const auto bind = heard<wire::prefill_bind>(prefill0);
    ASSERT_TRUE(bind) << i;
    grant(prefill0, bind->bind);
    say(prefill0, scope(id),
        wire::prefill_refused{bind->bind, static_cast<wire::U16>(Code::busy), "no place"});
    EXPECT_EQ(state(id), FlightState::queued);
    EXPECT_EQ(count<wire::prefill_bind>(), 0);
    grant(prefill0, ++granted);  // in front of the younger one again
    EXPECT_EQ(state(id), FlightState::prefill);
    EXPECT_EQ(state(younger), FlightState::queued);
  }
  EXPECT_EQ(attempt(id), 1);
  EXPECT_TRUE(endings.empty());
  EXPECT_EQ(core->ranks().outstanding(), 1U);
}

TEST_F(RouterTest, ARequestThatEndedWhileItWaitedWasBoundAgain) {
  RouterCore::Options slow = options();
  slow.match_wait = seconds(20);
  begin(slow);
  const RequestId id = submit();
  core->end_all(Code::busy, "the service stops", now);
  listen();
  EXPECT_EQ(core->find(id)->match_until, instant_never);
  expect_nothing_held();
  // At the same time its match is over and nobody has come back.
  slow.match_wait = seconds(15);
  endings.clear();
  begin(slow);
  submit();
  lose(prefill0);
  lose(prefill1);
  advance(seconds(15));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(core->queued(), 0U);
  up(prefill0);
  EXPECT_EQ(count<wire::prefill_bind>(), 0);
  expect_nothing_held();
}

TEST_F(RouterTest, AGapReentersWithWhatWasProduced) {
  const RequestId id = decoding();
  token(decode0, id, 3);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(core->next_due(), now + seconds(3));
  advance(seconds(3));
  EXPECT_EQ(attempt(id), 2);
  EXPECT_EQ(heard<wire::request_stop>(decode0)->reason, static_cast<wire::U16>(Code::stale));
  EXPECT_TRUE(heard<wire::meta_match>(meta));
  matched(id, 4, 2);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  EXPECT_EQ(bind->tokens.size(), 20U);
  EXPECT_EQ(bind->tokens.back(), 1001U);
  EXPECT_EQ(bind->first_index, 2U);
  EXPECT_EQ(bind->keys.size(), 5U);
  token(decode0, id, 2);  // of the attempt that is over
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1}));
  token(prefill0, id, 2, 2);
  EXPECT_EQ(indexes(), (std::vector<std::uint32_t>{0, 1, 2}));
}

TEST_F(RouterTest, AFilledGapIsForgotten) {
  const RequestId id = decoding();
  token(decode0, id, 3);
  token(decode0, id, 2);
  advance(seconds(4));
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, AGapOfAnAttemptThatIsOverEndedTheNextOne) {
  const RequestId id = decoding();
  lose(decode0);
  EXPECT_EQ(attempt(id), 2);
  matched(id, 0, 2);
  token(prefill0, id, 4, 2);  // nonsense, but a gap
  advance(seconds(3));
  EXPECT_EQ(attempt(id), 3);  // waits before it starts
  EXPECT_EQ(core->next_due(), now + milliseconds(100));
  advance(milliseconds(50));
  EXPECT_EQ(attempt(id), 3);
  advance(milliseconds(50));
  EXPECT_EQ(attempt(id), 3);
  EXPECT_EQ(count<wire::meta_match>(), 2);
}

TEST_F(RouterTest, AttemptsAreCounted) {
  const RequestId id = submit();
  const auto busy = static_cast<wire::U16>(Code::busy);
  for (std::uint16_t attempt = 1; attempt <= 4; ++attempt) {
    if (attempt > 2) {
      EXPECT_EQ(core->next_due(), now + milliseconds(50) * (1 << (attempt - 2)));
      advance(milliseconds(50) * (1 << (attempt - 2)));
    }
    matched(id, 0, attempt);
    auto bind = heard<wire::prefill_bind>(prefill0);
    const std::string rank = bind ? prefill0 : prefill1;
    if (!bind) bind = heard<wire::prefill_bind>(prefill1);
    ASSERT_TRUE(bind) << attempt;
    say(rank, scope(id, attempt), wire::prefill_refused{bind->bind, busy, "no place", 0, {}});
  }
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::unreachable);
  EXPECT_EQ(endings[0].attempts, 4);
  for (std::uint16_t attempt = 1; attempt <= 4; ++attempt) done(decode0, id, Code::stale, attempt);
  expect_nothing_held();
}

// Hosts have arenas of different sizes: what the smallest said ended the request for all of them.
TEST_F(RouterTest, ABindThatNeverFitsAtOneRankGoesToTheOthers) {
  const RequestId id = submit(18, 1);
  matched(id, 0);
  bind_never_fits(prefill0, id);
  EXPECT_TRUE(endings.empty());
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1));
  EXPECT_EQ(attempt(id), 1);
  // A loss later on does not lead to the first one again.
  grant(prefill0, 100);
  lose(prefill1);
  matched(id, 0, 2);
  EXPECT_EQ(attempt(id), 2);
  EXPECT_EQ(count<wire::prefill_bind>(), 0);
  up(prefill1);
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1));
  token(prefill1, id, 0, 2);
  done(prefill1, id, Code::ok, 2);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::ok);
  expect_nothing_held();
}

TEST_F(RouterTest, ABindThatNeverFitsAnywhereIsAnErrorAtOnce) {
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  bind_never_fits(prefill0, id);
  bind_never_fits(prefill1, id);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::invalid);
  EXPECT_EQ(endings[0].reason, "longer than the arena");
  EXPECT_EQ(endings[0].read_tokens, 0U);
  EXPECT_EQ(endings[0].output_tokens, 0U);
  EXPECT_EQ(endings[0].attempts, 1);
  EXPECT_TRUE(heard<wire::request_stop>(decode0));
  done(decode0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, ARequestThatWaitsForALargerRankKeepsNobodyElseWaiting) {
  grant(prefill1, 0);
  const RequestId large = submit();
  matched(large, 0);
  bind_never_fits(prefill0, large);
  EXPECT_EQ(state(large), FlightState::queued);
  const RequestId small = submit();
  matched(small, 0);
  wire::Scope bound;
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill0, &bound));
  EXPECT_EQ(bound.request, small);
  grant(prefill1, 8);
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1, &bound));
  EXPECT_EQ(bound.request, large);
}

// Its host's arena is restarted, or it is asked to stop and another is on its way: it counted as if it had never been.
TEST_F(RouterTest, ARequestThatFitsNoneOfTheOthersWaitsAWhileForTheOneThatDrains) {
  grant(prefill1, 8, true);
  const RequestId id = submit();
  matched(id, 0);
  bind_never_fits(prefill0, id);
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_TRUE(endings.empty());
  EXPECT_EQ(core->next_due(), now + seconds(15));
  grant(prefill1, 8);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill1));
}

// It waited for its first token instead.
TEST_F(RouterTest, WhoWaitsForALargerRankHearsThatItWent) {
  grant(prefill1, 0);
  const RequestId id = submit();
  matched(id, 0);
  bind_never_fits(prefill0, id);
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(state(id), FlightState::queued);
  lose(prefill1);
  EXPECT_EQ(core->next_due(), now + seconds(15));
  advance(seconds(15));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].reason, "longer than the arena");
}

// The larger rank is away for a moment: only when it stays away the word of the others counts.
TEST_F(RouterTest, ARequestThatFitsNoneOfThoseThatAreUpWaitsAWhileForTheOneThatWasLost) {
  const RequestId id = submit();
  matched(id, 0);
  lose(prefill1);
  bind_never_fits(prefill0, id);
  EXPECT_EQ(core->next_due(), now + seconds(2));  // about the seat
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(core->next_due(), now + seconds(15));
  advance(seconds(15) - milliseconds(1));
  EXPECT_TRUE(endings.empty());
  advance(milliseconds(1));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::invalid);
  done(decode0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, APrefillLostBeforeDecodeStartedReenters) {
  const RequestId waits = seated();
  token(prefill0, waits, 0);
  done(prefill0, waits);
  lose(prefill0);
  EXPECT_EQ(attempt(waits), 2);
  lose(prefill0);  // and only once
  EXPECT_EQ(attempt(waits), 2);
}

TEST_F(RouterTest, LossesReenterWhereTheyMatter) {
  const RequestId bound = submit();
  matched(bound, 0);
  lose(prefill0);
  EXPECT_EQ(attempt(bound), 2);
  begin();
  const RequestId decodes = decoding();
  lose(prefill0);  // it is through
  EXPECT_EQ(attempt(decodes), 1);
  lose(decode0);
  EXPECT_EQ(attempt(decodes), 2);
  begin();
  const RequestId early = seated();
  say(decode0, scope(early), wire::decode_started{5, 4});
  token(decode0, early, 1);
  lose(prefill0);  // token 0 never came
  EXPECT_EQ(attempt(early), 2);
}

TEST_F(RouterTest, EndsWithACodeReenter) {
  const RequestId bound = seated();
  done(prefill0, bound, Code::unreachable);
  EXPECT_EQ(attempt(bound), 2);
  begin();
  const RequestId decodes = decoding();
  done(decode0, decodes, Code::unreachable);
  EXPECT_EQ(attempt(decodes), 2);
}

TEST_F(RouterTest, AnEndOfDecodeWithoutItsTokensReenters) {
  const RequestId id = decoding();
  done(decode0, id);  // and the last token is missing
  advance(seconds(3));
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, NoNextTokenReenters) {
  const RequestId id = decoding();
  advance(seconds(60));
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, ScriptPiecesTravelWithAReentry) {
  const RequestId id = seated();
  wire::TokenEvent event;
  event.request = id;
  event.attempt = 1;
  event.token.id = wire::script_token_base;
  event.token.bytes = {std::byte{'x'}};
  say(prefill0, {}, wire::token_batch{{event}});
  lose(prefill0);
  matched(id, 0, 2);
  const auto bind = heard<wire::prefill_bind>(prefill1);
  ASSERT_TRUE(bind);
  ASSERT_EQ(bind->resume.size(), 1U);
  EXPECT_EQ(bind->resume[0], Bytes{std::byte{'x'}});
  EXPECT_EQ(bind->first_index, 1U);
}

}  // namespace
}  // namespace di::request
