#include "rank/ending.h"

#include <gtest/gtest.h>

namespace di::rank {
namespace {

constexpr Instant now{1'000'000'000};

wire::Scope scope(std::uint32_t number, std::uint16_t attempt = 1) {
  RequestId id;
  put_le<std::uint32_t>(id.raw.data(), number);
  return {id, attempt, 2, 0};
}

TEST(Endings, AreKeptUntilTheirRouterAcknowledges) {
  Endings endings;
  wire::request_done done;
  done.next_index = 9;
  const wire::Envelope said = endings.add("r0", 4, scope(1), done, now);
  EXPECT_EQ(said.peer, "r0");
  EXPECT_EQ(said.as<wire::request_done>()->next_index, 9U);
  endings.acknowledge("r1", scope(1));     // another router
  endings.acknowledge("r0", scope(1, 2));  // another attempt
  ASSERT_EQ(endings.of("r0").size(), 1U);
  EXPECT_EQ(endings.of("r0")[0].body, said.body);
  endings.acknowledge("r0", scope(1));
  endings.acknowledge("r0", scope(1));
  EXPECT_EQ(endings.count(), 0U);
}

TEST(Endings, ADroppedEndingWasNeverSaidAgain) {
  Endings endings;
  EXPECT_EQ(endings.next_due(), instant_never);
  endings.add("r0", 1, scope(1), {}, now);
  endings.add("r0", 1, scope(2), {}, now + seconds(1));
  EXPECT_EQ(endings.next_due(), now + ending_again);
  EXPECT_TRUE(endings.due(now + seconds(4)).empty());
  ASSERT_EQ(endings.due(now + ending_again).size(), 1U);
  EXPECT_EQ(endings.next_due(), now + seconds(1) + ending_again);
  endings.acknowledge("r0", scope(2));
  EXPECT_EQ(endings.next_due(), now + 2 * ending_again);
  EXPECT_EQ(endings.due(now + 2 * ending_again)[0].scope, scope(1));
  endings.forget("r0");
  EXPECT_EQ(endings.next_due(), instant_never);
}

TEST(Endings, ALostRouterTakesItsOwn) {
  Endings endings;
  endings.add("r0", 1, scope(1), {}, now);
  endings.add("r0", 1, scope(2), {}, now);
  endings.add("r1", 1, scope(3), {}, now);
  endings.forget("r0");
  EXPECT_TRUE(endings.of("r0").empty());
  EXPECT_EQ(endings.of("r1").size(), 1U);
}

TEST(Endings, TheOldestGoesAboveTheBound) {
  Endings endings;
  for (std::uint32_t i = 0; i <= endings_max; ++i) endings.add("r0", 1, scope(i), {}, now);
  EXPECT_EQ(endings.count(), endings_max);
  EXPECT_EQ(endings.dropped(), 1U);
  endings.acknowledge("r0", scope(0));  // that one is gone already
  EXPECT_EQ(endings.count(), endings_max);
}

TEST(Endings, SaidAgainTheNewerCountsStay) {
  Endings endings;
  endings.add("r0", 1, scope(1), {}, now);
  wire::request_done newer;
  newer.next_index = 5;
  endings.add("r0", 1, scope(1), newer, now);
  ASSERT_EQ(endings.count(), 1U);
  EXPECT_EQ(endings.of("r0")[0].as<wire::request_done>()->next_index, 5U);
}

TEST(Endings, AStopOfWhatIsNotThereIsAnswered) {
  wire::Envelope stop;
  stop.peer = "r0";
  stop.peer_generation = 4;
  stop.scope = scope(8);
  stop.number = wire::request_stop::number;
  const wire::Envelope answer = ending_of_unknown(stop, wire::Leg::decode);
  EXPECT_EQ(answer.peer, "r0");
  EXPECT_EQ(answer.peer_generation, 4U);
  EXPECT_EQ(answer.scope, scope(8));
  const auto done = *answer.as<wire::request_done>();
  EXPECT_EQ(done.leg, static_cast<wire::U8>(wire::Leg::decode));
  EXPECT_EQ(done.code, static_cast<wire::U16>(Code::not_found));
}

}  // namespace
}  // namespace di::rank
