// Seats, and the hand-over to them.
#include "tests/unit/rank/prefill_fixture.h"

namespace di::rank {
namespace {

TEST_F(PrefillTest, AHandOverWithoutAnAnswerEndsWithTheHold) {
  wait(one, 18);
  advance(seconds(30));
  from_router(one, target_of(5));
  EXPECT_TRUE(heard<wire::kv_handover>());
  advance(seconds(59));
  EXPECT_FALSE(heard<wire::request_done>());
  advance(seconds(1));
  expect_end(Code::timeout);
}

TEST_F(PrefillTest, AHandOverWithoutAnAnswerIsSaidAgain) {
  wait(one, 18);
  from_router(one, target_of(6));
  const auto first = heard<wire::kv_handover>();
  ASSERT_TRUE(first);
  EXPECT_EQ(core->next_due(), now + seconds(2));
  advance(seconds(1));
  EXPECT_FALSE(heard<wire::kv_handover>());
  advance(seconds(1));
  const auto again = heard<wire::kv_handover>();
  ASSERT_TRUE(again);
  EXPECT_EQ(*again, *first);
  handed(one, 6);
  expect_end(Code::ok);
  acknowledge(one);
  advance(seconds(2));
  EXPECT_FALSE(heard<wire::kv_handover>());
  expect_nothing_held();
}

TEST_F(PrefillTest, AFinalTokenNeedsNoSeat) {
  run(one, 18);
  ASSERT_TRUE(take());
  token(18, engine::Finish::stop);
  give();
  from_router(one, target_of(6));
  ASSERT_TRUE(take());
  give();
  EXPECT_FALSE(heard<wire::kv_handover>());
  expect_end(Code::ok);
}

TEST_F(PrefillTest, ATargetMayComeBeforeTheToken) {
  run(one, 18);
  from_router(one, target_of(6));
  ASSERT_TRUE(take());
  token(18);
  give();
  EXPECT_FALSE(heard<wire::kv_handover>());
  ASSERT_TRUE(take());
  give();
  EXPECT_EQ(heard<wire::kv_handover>()->seat, 6U);
}

TEST_F(PrefillTest, PagesOfAnEarlyTargetOnAnotherHostMayGoAtOnce) {
  run(one, 18);
  from_router(one, target_of(6));
  EXPECT_FALSE(heard<wire::kv_push>());  // the seat is in this arena
  wire::prefill_target away = target_of(7);
  away.host = "di-kvd.elsewhere";
  from_router(one, away);
  const auto push = heard<wire::kv_push>();
  ASSERT_TRUE(push);
  EXPECT_EQ(push->seat, 7U);
  EXPECT_EQ(push->host, away.host);
  EXPECT_EQ(push->keys.size(), 4U);
  EXPECT_TRUE(push->tail);
  ASSERT_TRUE(take());
  token(18);
  give();
  ASSERT_TRUE(take());
  give();
  EXPECT_EQ(heard<wire::kv_handover>()->seat, 7U);
}

TEST_F(PrefillTest, WithoutASeatTheHoldEnds) {
  wait(one, 18);
  advance(seconds(59));
  EXPECT_FALSE(heard<wire::request_done>());
  advance(seconds(1));
  expect_end(Code::timeout);
  acknowledge(one);
  expect_nothing_held();
}

TEST_F(PrefillTest, AFailedHandOverIsToldAndTriedElsewhere) {
  wait(one, 18);
  from_router(one, target_of(6));
  ASSERT_TRUE(heard<wire::kv_handover>());
  handed(one, 5);  // of another seat
  handed(one, 6, Code::ok, "di-decode.1");
  handed(one, 6, Code::not_found, "di-decode.1");
  EXPECT_FALSE(heard<wire::request_done>());
  EXPECT_FALSE(heard<wire::prefill_refused>());
  handed(one, 6, Code::not_found);
  const auto refused = heard<wire::prefill_refused>();
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->bind, 1U);
  EXPECT_EQ(refused->seat, 6U);
  EXPECT_EQ(refused->decode, "di-decode.0");
  EXPECT_EQ(gauge("holds"), 1U);
  from_router(one, target_of(7));
  EXPECT_EQ(heard<wire::kv_handover>()->seat, 7U);
  handed(one, 7);
  expect_end(Code::ok);
}

TEST_F(PrefillTest, PagesThatNeverArrivedWereOfferedToSeatAfterSeat) {
  wait(one, 18);
  from_router(one, target_of(6));
  handed(one, 6, Code::invalid);
  EXPECT_FALSE(heard<wire::prefill_refused>());
  expect_end(Code::invalid);
}

TEST_F(PrefillTest, ASeatOfTheSameNumberElsewhereWasTakenForTheSame) {
  wait(one, 18);
  from_router(one, target_of(6, "di-decode.0"));
  ASSERT_TRUE(heard<wire::kv_handover>());
  from_router(one, target_of(6, "di-decode.0"));  // said twice
  EXPECT_FALSE(heard<wire::kv_handover>());
  from_router(one, target_of(6, "di-decode.1"));
  const auto again = heard<wire::kv_handover>();
  ASSERT_TRUE(again);
  EXPECT_EQ(again->decode, "di-decode.1");
}

TEST_F(PrefillTest, ATargetForWhatIsNotHereIsAnswered) {
  from_router(one, target_of(6));
  const auto refused = heard<wire::prefill_refused>();
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->bind, 0U);
  EXPECT_EQ(refused->seat, 6U);
  EXPECT_EQ(refused->decode, "di-decode.0");
  EXPECT_EQ(refused->code, static_cast<wire::U16>(Code::not_found));
}

}  // namespace
}  // namespace di::rank
