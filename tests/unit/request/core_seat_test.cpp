// Seats at decode, and the hand-over to them.
#include <algorithm>

#include "tests/unit/request/core_fixture.h"

namespace di::request {
namespace {

TEST_F(RouterTest, ASeatThatLapsesWhileItsRequestWaitsAgainIsNoLoss) {
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  grant(prefill1, 0);
  grant(prefill0, 1);
  say(prefill0, scope(id), wire::prefill_refused{1, static_cast<wire::U16>(Code::busy), "no place"});
  EXPECT_EQ(state(id), FlightState::queued);
  // What it says to the target that it was told before, and the end of the seat.
  say(prefill0, scope(id),
      wire::prefill_refused{0, static_cast<wire::U16>(Code::not_found), "the request is not here any more"});
  EXPECT_EQ(state(id), FlightState::queued);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::timeout), "the seat lapsed"});
  EXPECT_EQ(state(id), FlightState::queued);
  EXPECT_EQ(attempt(id), 1);
  out.clear();
  grant(prefill0, 2);
  EXPECT_TRUE(heard<wire::prefill_bind>(prefill0));
  EXPECT_TRUE(heard<wire::decode_seat>(decode1));
  core->cancel(id, Code::cancelled, now);
  listen();
  done(prefill0, id, Code::cancelled);
  done(decode1, id, Code::cancelled);
  expect_nothing_held();
}

TEST_F(RouterTest, ARefusedSeatIsAskedElsewhereAndLaterAgain) {
  const RequestId id = submit();
  matched(id, 0);
  const auto busy = static_cast<wire::U16>(Code::busy);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(decode0, scope(id), wire::seat_refused{busy, ""});
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_refused{busy, ""});
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  advance(milliseconds(50));
  EXPECT_EQ(count<wire::decode_seat>(), 1);
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, TheEndOfARequestThatWasRefusedAHundredTimesWasMissingInItsTimeline) {
  lose(decode1);
  grant(decode0, 1000);
  const RequestId id = submit();
  matched(id, 0);
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(heard<wire::decode_seat>(decode0)) << i;
    say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), "no seat"});
    advance(milliseconds(50));
  }
  core->cancel(id, Code::cancelled, now);
  listen();
  done(prefill0, id, Code::cancelled);
  done(decode0, id, Code::cancelled);
  const auto& rows = core->find(id)->timeline;
  EXPECT_EQ(rows.first().front().event, "submitted");
  EXPECT_GT(rows.missing(), 300U);
  const std::vector<TimelineRow> last = rows.last();
  EXPECT_LE(rows.first().size() + last.size(), timeline_rows_max);
  EXPECT_TRUE(
      std::any_of(last.begin(), last.end(), [](const TimelineRow& row) { return row.event == "end"; }));
  EXPECT_TRUE(std::is_sorted(last.begin(), last.end(),
                             [](const TimelineRow& x, const TimelineRow& y) { return x.at < y.at; }));
  EXPECT_GT(last.front().at, rows.first().back().at);
  expect_nothing_held();
}

TEST_F(RouterTest, WhatTheRankSaidOfARefusalWasNotInTheAnswer) {
  RouterCore::Options few = options();
  few.attempts_max = 1;
  few.seats_failed_max = 1;
  begin(few);
  const RequestId bound = submit();
  matched(bound, 0);
  const auto bind = heard<wire::prefill_bind>(prefill0);
  ASSERT_TRUE(bind);
  say(prefill0, scope(bound),
      wire::prefill_refused{bind->bind, static_cast<wire::U16>(Code::busy), "no room in the arena", 0, {}});
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].reason, "the bind was refused: no room in the arena");
  begin(few);
  endings.clear();
  const RequestId seated = submit();
  matched(seated, 0);
  for (const std::string& rank : {decode0, decode1}) {
    ASSERT_TRUE(heard<wire::decode_seat>(rank));
    say(rank, scope(seated), wire::seat_refused{static_cast<wire::U16>(Code::busy), "no room in the pool"});
  }
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].reason, "no seat was granted: no room in the pool");
}

TEST_F(RouterTest, RequestsThatWaitForASeatWalkedOverAllRanksAgainAndAgain) {
  grant(decode0, 0);
  grant(decode1, 0);
  for (int i = 0; i < 12; ++i) matched(submit(), 0);
  EXPECT_EQ(count<wire::prefill_bind>(), 12);
  for (int i = 0; i < 20; ++i) {
    grant(decode1, 0);
    advance(milliseconds(50));
  }
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_EQ(core->ranks().seat_walks(), 0U);
  grant(decode0, 3);
  advance(milliseconds(50));
  EXPECT_EQ(count<wire::decode_seat>(), 3);
  EXPECT_EQ(core->ranks().seat_walks(), 3U);
  grant(decode1, 100);
  advance(milliseconds(50));
  EXPECT_EQ(count<wire::decode_seat>(), 12);
  EXPECT_EQ(core->ranks().seat_walks(), 12U);
}

// The answer was lost, or the question: only the client's patience knew.
TEST_F(RouterTest, ASeatWithoutAnAnswerIsAskedForAgain) {
  const RequestId id = submit();
  matched(id, 0);
  const auto first = heard<wire::decode_seat>(decode0);
  ASSERT_TRUE(first);
  const std::uint64_t outstanding = core->ranks().outstanding();
  EXPECT_EQ(core->next_due(), now + seconds(2));
  advance(seconds(2));
  EXPECT_EQ(heard<wire::decode_seat>(decode0), first);
  EXPECT_EQ(core->ranks().outstanding(), outstanding);
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(count<wire::prefill_target>(), 1);
  advance(seconds(2));
  EXPECT_EQ(count<wire::decode_seat>(), 0);
}

TEST_F(RouterTest, ASeatThatNobodyWaitsForIsGivenBack) {
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  advance(seconds(2));
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  // The refusal was only late, and the second question found room.
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), ""});
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode0, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  EXPECT_EQ(core->find(id)->seat, 0U);
}

TEST_F(RouterTest, ASeatThatNeverFitsAtOneRankIsAskedOfTheOthers) {
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  seat_never_fits(decode0, id);
  EXPECT_TRUE(endings.empty());
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_granted{6, kvd});
  token(prefill0, id, 0);
  say(decode1, scope(id), wire::decode_started{6, 4});
  done(prefill0, id);
  token(decode1, id, 1);
  // In the middle of the answer the large one is lost, and comes back.
  lose(decode1);
  matched(id, 0, 2);
  advance(seconds(10));
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_TRUE(endings.empty());
  up(decode1);
  advance(milliseconds(50));
  wire::Scope asked;
  ASSERT_TRUE(heard<wire::decode_seat>(decode1, &asked));
  EXPECT_EQ(asked.attempt, 2);
}

TEST_F(RouterTest, ASeatThatNeverFitsAnywhereIsAnErrorAtOnce) {
  const RequestId id = submit();
  matched(id, 0);
  seat_never_fits(decode0, id);
  seat_never_fits(decode1, id);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::invalid);
  EXPECT_EQ(endings[0].read_tokens, 0U);
  EXPECT_EQ(count<wire::decode_seat>(), 2);
  EXPECT_TRUE(heard<wire::request_stop>(prefill0));
  EXPECT_EQ(count<wire::request_stop>(), 0);
  done(prefill0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, ASeatLargerThanAllPoolsIsAskedForOnce) {
  const RequestId id = submit(18, 200000);
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  seat_never_fits(decode0, id);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::invalid);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
}

// Another start of a rank may have another arena.
TEST_F(RouterTest, ARankThatStartedAnewIsAskedAgainForWhatNeverFitted) {
  lose(decode1);
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  seat_never_fits(decode0, id);
  EXPECT_TRUE(endings.empty());
  advance(seconds(1));
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  lose(decode0);
  up(decode0);
  advance(milliseconds(50));
  EXPECT_TRUE(heard<wire::decode_seat>(decode0));
}

TEST_F(RouterTest, NoSeatIsAskedFarAheadNorForASingleToken) {
  RouterCore::Options near = options();
  near.seat_ahead_us = 5;
  begin(near);
  const RequestId far = submit();
  matched(far, 0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_EQ(core->next_due(), now + seconds(600));
  say(prefill0, scope(far), wire::prefill_progress{4, 10, 0, {}});
  EXPECT_EQ(count<wire::decode_seat>(), 1);
  out.clear();
  begin();
  const RequestId single = submit(18, 1);
  matched(single, 0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  token(prefill0, single, 0);
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].finish, wire::Finish::length);  // its own bound
}

TEST_F(RouterTest, ASeatThatIsLostFarAheadDidNotSpinTheTimer) {
  RouterCore::Options near = options();
  near.seat_ahead_us = 100;
  begin(near);
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  say(prefill0, scope(id), wire::prefill_progress{5000, 10, 0, {}});  // slower than it looked
  lose(decode0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  EXPECT_GT(core->next_due(), now);
}

TEST_F(RouterTest, ASeatWasAskedOfTheRankThatIsLost) {
  lose(decode1);
  const RequestId id = submit();
  matched(id, 0);
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  lose(decode0);
  EXPECT_EQ(count<wire::decode_seat>(), 0);
  join(decode0, generations.at(decode0));  // the same process, another connection
  advance(milliseconds(50));
  ASSERT_TRUE(heard<wire::decode_seat>(decode0));
  lose(decode0);  // its accounts add up
}

TEST_F(RouterTest, TheLastTokenFromPrefillGivesTheSeatBack) {
  const RequestId id = seated();
  token(prefill0, id, 0, 1, wire::Finish::stop);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  ASSERT_EQ(endings.size(), 1U);
  done(prefill0, id);
  expect_nothing_held();
}

TEST_F(RouterTest, AFailedHandOverAsksForAnotherSeat) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  hand_over_failed(id, Code::not_found);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_granted{5, kvd});
  EXPECT_EQ(heard<wire::prefill_target>(prefill0)->decode, decode1);
  EXPECT_EQ(attempt(id), 1);
}

// Seats of two decode instances may have the same number.
TEST_F(RouterTest, AFailedHandOverToAnEarlierSeatGaveUpTheSeatOfNow) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::timeout), "lapsed"});
  hand_over_failed(id, Code::not_found);  // nobody is seated
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  say(decode1, scope(id), wire::seat_granted{5, kvd});
  ASSERT_TRUE(heard<wire::prefill_target>(prefill0));
  hand_over_failed(id, Code::not_found);
  EXPECT_EQ(count<wire::seat_release>(), 0);
  hand_over_failed(id, Code::not_found, 5, decode1);
  EXPECT_EQ(heard<wire::seat_release>(decode1)->seat, 5U);
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, ASeatBehindASlowLinkIsGivenUpForOneNextToThePages) {
  labels = {{prefill0, "a"}, {decode0, "b"}, {decode1, "a"}, {prefill1, "b"}};
  begin();
  lose(decode1);
  const RequestId id = seated();
  token(prefill0, id, 0);
  up(decode1);
  out.clear();
  hand_over_failed(id, Code::timeout);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  EXPECT_EQ(attempt(id), 1);
}

TEST_F(RouterTest, WithoutSuchASeatThePromptIsReadAgainNearTheFirstOne) {
  labels = {{prefill0, "a"}, {decode0, "b"}, {prefill1, "b"}};
  begin();
  lose(decode1);
  const RequestId id = seated();
  token(prefill0, id, 0);
  hand_over_failed(id, Code::timeout);
  EXPECT_EQ(heard<wire::seat_release>(decode0)->seat, 5U);
  EXPECT_EQ(attempt(id), 2);
  matched(id, 0, 2);
  ASSERT_TRUE(heard<wire::prefill_bind>(prefill1));  // not the first by name
  const std::vector<TimelineRow>& rows = core->find(id)->timeline.first();
  EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [](const TimelineRow& row) {
    return row.event == "handover_failed" && row.detail.find("code=timeout") != std::string::npos;
  }));
}

TEST_F(RouterTest, WhereNobodyReadsNearTheSeatThePagesWaitForTheLink) {
  labels = {{prefill0, "a"}, {prefill1, "a"}, {decode0, "b"}};
  begin();
  lose(decode1);
  const RequestId id = seated();
  token(prefill0, id, 0);
  // More often than a request may have attempts.
  for (std::uint64_t seat = 6; seat < 12; ++seat) {
    hand_over_failed(id, Code::timeout, seat - 1);
    advance(milliseconds(50));
    ASSERT_TRUE(heard<wire::decode_seat>(decode0));
    say(decode0, scope(id), wire::seat_granted{seat, kvd});
    EXPECT_EQ(heard<wire::prefill_target>(prefill0)->seat, seat);
  }
  EXPECT_EQ(attempt(id), 1);
  EXPECT_TRUE(endings.empty());
}

TEST_F(RouterTest, ARequestWithItsFirstTokenWaitedForASeatThatNobodyCouldGive) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  lose(decode0);
  lose(decode1);
  advance(seconds(14));
  EXPECT_TRUE(endings.empty());  // a supervisor may bring one back
  advance(seconds(1));
  ASSERT_EQ(endings.size(), 1U);
  EXPECT_EQ(endings[0].code, Code::busy);
  done(prefill0, id, Code::stale);
  expect_nothing_held();
}

TEST_F(RouterTest, ALostAnswerAboutTheHandOverStoppedARunningRequest) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::decode_started{5, 4});
  hand_over_failed(id, Code::timeout);
  EXPECT_EQ(count<wire::seat_release>(), 0);
  EXPECT_TRUE(heard<wire::request_stop>(prefill0));
  done(prefill0, id, Code::stale);
  EXPECT_EQ(attempt(id), 1);
  EXPECT_EQ(state(id), FlightState::decoding);
}

TEST_F(RouterTest, ASeatLostAfterTheHandOverReenters) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  done(prefill0, id);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::timeout), "lapsed"});
  EXPECT_EQ(attempt(id), 2);
}

TEST_F(RouterTest, AnEndOfPrefillForASeatThatIsLostReenters) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), "no"});
  ASSERT_TRUE(heard<wire::decode_seat>(decode1));
  done(prefill0, id);  // it had handed over to the first
  EXPECT_EQ(attempt(id), 2);
  EXPECT_TRUE(heard<wire::request_stop>(decode1));
}

TEST_F(RouterTest, ATargetThatFindsNothingReenters) {
  const RequestId id = seated();
  token(prefill0, id, 0);
  say(decode0, scope(id), wire::seat_refused{static_cast<wire::U16>(Code::busy), "no"});
  say(decode1, scope(id), wire::seat_granted{5, kvd});
  ASSERT_TRUE(heard<wire::prefill_target>(prefill0));
  done(prefill0, id);
  EXPECT_EQ(attempt(id), 1);  // it may have been for this seat
  const auto not_found = static_cast<wire::U16>(Code::not_found);
  say(prefill0, scope(id), wire::prefill_refused{0, not_found, "not here", 5, decode0});
  EXPECT_EQ(attempt(id), 1);  // for the one before
  say(prefill0, scope(id), wire::prefill_refused{0, not_found, "not here", 5, decode1});
  EXPECT_EQ(attempt(id), 2);
}

}  // namespace
}  // namespace di::request
