// transfer/links.h.
#include "transfer/links.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

namespace di::transfer {
namespace {

struct TestLink : LinkBase {
  void* connection = nullptr;
};

Peer peer(std::size_t number) {
  return {"di-kvd.host" + std::to_string(number), 1};
}

Instant at_ms(std::int64_t ms) {
  return Instant{} + milliseconds(ms);
}

TEST(Links, OneThatNobodyUsesMakesRoomForANewOne) {
  Links<TestLink> links;
  for (std::size_t i = 0; i < peers_max; ++i) {
    TestLink* link = links.add(peer(i));
    ASSERT_NE(link, nullptr);
    link->waiting[0].push_back(i);
  }
  EXPECT_EQ(links.add(peer(peers_max)), nullptr);
  // One that waits for its ticket is in use, and so is one with a connection.
  TestLink* asked = links.find(peer(3));
  asked->waiting[0].clear();
  asked->phase = LinkPhase::asked;
  TestLink* connected = links.find(peer(4));
  connected->waiting[0].clear();
  connected->connection = &links;
  EXPECT_EQ(links.add(peer(peers_max)), nullptr);
  links.find(peer(5))->waiting[0].clear();
  ASSERT_NE(links.add(peer(peers_max)), nullptr);
  EXPECT_EQ(links.find(peer(5)), nullptr);
  EXPECT_EQ(links.all().size(), peers_max);
  EXPECT_TRUE(links.timed());
  asked->phase = LinkPhase::up;
  EXPECT_FALSE(links.timed());
}

TEST(Links, EachThatHasAUnitHasItsTurn) {
  Links<TestLink> links;
  for (std::size_t i = 0; i < 5; ++i) {
    TestLink* link = links.add(peer(i));
    link->phase = i == 1 ? LinkPhase::greeting : LinkPhase::up;
    link->waiting[1] = {i};
  }
  // The window of the third is full: it is a backlog, and passed over.
  const auto bytes_of = [](const TestLink&, OpId op) { return op == 2 ? 0 : 100 + op; };
  std::multiset<std::string> turns;
  for (int i = 0; i < 9; ++i) {
    const auto turn = links.turn(bytes_of);
    EXPECT_EQ(turn.heads[0].bytes, 0U);
    EXPECT_FALSE(turn.heads[0].backlog);
    ASSERT_GT(turn.heads[1].bytes, 0U);
    TestLink& link = links.take(turn, static_cast<Class>(1));
    EXPECT_EQ(turn.heads[1].bytes, 100 + link.waiting[1].front());
    turns.insert(link.peer.instance);
  }
  for (const std::size_t i : {0, 3, 4}) EXPECT_EQ(turns.count(peer(i).instance), 3U) << i;
  const auto none = links.turn([](const TestLink&, OpId) { return 0; });
  EXPECT_EQ(none.heads[1].bytes, 0U);
  EXPECT_TRUE(none.heads[1].backlog);
}

TEST(LinkRate, IsOfTheTimeInWhichThereWasSomethingToMove) {
  LinkRate rate;
  rate.begin(at_ms(0));
  rate.begin(at_ms(2));                                       // it has begun already
  EXPECT_EQ(rate.moved(1000, true, at_ms(2)), std::nullopt);  // too short to say
  const std::optional<double> first = rate.moved(4000, false, at_ms(5));
  ASSERT_TRUE(first);
  EXPECT_DOUBLE_EQ(*first, 1e6);
  EXPECT_FALSE(rate.busy());
  // A second without anything to move does not count.
  rate.begin(at_ms(1000));
  const std::optional<double> second = rate.moved(1'000'000, true, at_ms(1500));
  ASSERT_TRUE(second);
  EXPECT_DOUBLE_EQ(*second, 1e6 + (1 - std::exp(-1.0)) * (2e6 - 1e6));
  rate.forget();
  EXPECT_FALSE(rate.busy());
  rate.begin(at_ms(2000));
  EXPECT_DOUBLE_EQ(*rate.moved(50'000, false, at_ms(2005)), 1e7);
}

TEST(LinkBase, OperationsEndAtOnceAfterAFailedDialUntilTheLinkIsUp) {
  TestLink link;
  EXPECT_FALSE(link.failed());
  link.dial_failed(at_ms(0), milliseconds(10), milliseconds(1000), {});
  EXPECT_TRUE(link.failed());
  EXPECT_GT(link.until, at_ms(0));
  EXPECT_LE(link.until, at_ms(1000));
  link.phase = LinkPhase::asked;
  EXPECT_TRUE(link.failed());
  link.waiting[2] = {7};
  link.connected(at_ms(20));
  EXPECT_FALSE(link.failed());
  EXPECT_EQ(link.phase, LinkPhase::up);
  EXPECT_TRUE(link.rate.busy());
}

TEST(LinkBase, FailedDialsAreToldOnceUntilTheLinkWasUp) {
  TestLink link;
  link.peer = peer(7);
  const auto fail = [&link](LinkPhase in, std::string_view why) {
    link.phase = in;
    testing::internal::CaptureStderr();
    link.dial_failed(at_ms(0), milliseconds(10), milliseconds(1000), why);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(fail(LinkPhase::asked, {}), "") << "it was told elsewhere";
  link.phase = LinkPhase::connecting;
  const std::string first = fail(LinkPhase::connecting, link.late());
  EXPECT_NE(first.find("warn"), std::string::npos) << first;
  EXPECT_NE(first.find("dial failed peer=di-kvd.host7 error=\"no connection in time\""), std::string::npos)
      << first;
  EXPECT_EQ(fail(LinkPhase::connecting, "once more"), "");
  link.connected(at_ms(20));
  EXPECT_NE(fail(LinkPhase::greeting, "hung up"), "");
}

}  // namespace
}  // namespace di::transfer
