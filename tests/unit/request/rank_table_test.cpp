#include "request/rank_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

#include "base/rng.h"

namespace di::request {
namespace {

const RankName p0{"p.0", 0};
const RankName p1{"p.0", 1};
const RankName d0{"d.0", 0};
const RankName d1{"d.1", 0};

wire::rank_credit credit(std::uint64_t seq, std::uint64_t requests, std::uint64_t kv_tokens_max = 100) {
  wire::rank_credit credit;
  credit.seq = seq;
  credit.granted_requests = requests;
  credit.granted_us = 1'000'000;
  credit.kv_tokens_max = kv_tokens_max;
  return credit;
}

class RankTableTest : public testing::Test {
 protected:
  RankTableTest() {
    table.add("p.0", 1, 2, false, "m", {});
    table.add("d.0", 1, 1, true, "m", {});
    table.add("d.1", 1, 1, true, "m", {});
  }
  void credit_all() {
    EXPECT_TRUE(table.credit(p0, 1, credit(1, 2)));
    EXPECT_TRUE(table.credit(p1, 1, credit(1, 2)));
    EXPECT_TRUE(table.credit(d0, 1, credit(1, 8, 100)));
    EXPECT_TRUE(table.credit(d1, 1, credit(1, 8, 400)));
  }

  RankTable table;
};

TEST_F(RankTableTest, ARankServesFromItsFirstCreditOn) {
  EXPECT_FALSE(table.serves("m", false));
  EXPECT_FALSE(table.serves("m", true));
  EXPECT_EQ(table.choose_prefill("m", {}), std::nullopt);
  credit_all();
  EXPECT_TRUE(table.serves("m", false));
  EXPECT_TRUE(table.serves("m", true));
  EXPECT_FALSE(table.serves("other", false));
}

TEST_F(RankTableTest, WhoServesIsCountedThroughEveryChange) {
  credit_all();
  wire::rank_credit draining = credit(2, 2);
  draining.draining = true;
  EXPECT_TRUE(table.credit(p0, 1, draining));
  EXPECT_TRUE(table.serves("m", false));
  EXPECT_FALSE(table.find(p0)->takes_bind());
  table.add("p.0", 2, 2, false, "m", {});
  EXPECT_FALSE(table.serves("m", false));  // until the first credit
  EXPECT_TRUE(table.credit(p1, 2, credit(1, 1)));
  EXPECT_TRUE(table.credit(p1, 2, credit(2, 1)));
  EXPECT_TRUE(table.serves("m", false));
  table.remove("p.0");
  EXPECT_FALSE(table.serves("m", false));
  EXPECT_TRUE(table.serves("m", true));
}

TEST_F(RankTableTest, OldCreditsAndOtherGenerationsAreIgnored) {
  EXPECT_TRUE(table.credit(p0, 1, credit(2, 5)));
  EXPECT_FALSE(table.credit(p0, 1, credit(2, 9)));
  EXPECT_FALSE(table.credit(p0, 1, credit(1, 9)));
  EXPECT_FALSE(table.credit(p0, 2, credit(3, 9)));
  EXPECT_FALSE(table.credit(RankName{"p.0", 4}, 1, credit(3, 9)));
  EXPECT_EQ(table.find(p0)->credit.granted_requests, 5U);
}

TEST_F(RankTableTest, WhatIsSentCountsAtOnce) {
  credit_all();
  EXPECT_EQ(table.sent(p0, 10, 4), 1U);
  EXPECT_EQ(table.outstanding(), 1U);
  table.sent(p0, 10, 4);
  table.sent(p1, 50, 4);
  // p0 has less work and no credit left.
  EXPECT_EQ(table.choose_prefill("m", {}), p1);
  table.sent(p1, 50, 4);
  EXPECT_EQ(table.choose_prefill("m", {}), std::nullopt);
  // What comes back frees no credit: that is the rank's to give.
  table.returned(p0, 1, 10, 4);
  EXPECT_EQ(table.outstanding(), 3U);
  EXPECT_EQ(table.choose_prefill("m", {}), std::nullopt);
  EXPECT_TRUE(table.credit(p0, 1, credit(2, 3)));
  EXPECT_EQ(table.choose_prefill("m", {}), p0);
}

TEST_F(RankTableTest, PredictedWorkIsGrantedToo) {
  credit_all();
  table.sent(p0, 1'000'000, 1);
  table.sent(p1, 999'999, 1);
  EXPECT_EQ(table.choose_prefill("m", {}), p1);
  table.sent(p1, 1, 1);
  EXPECT_EQ(table.choose_prefill("m", {}), std::nullopt);
}

TEST_F(RankTableTest, TheLeastOutstandingWorkIsChosen) {
  credit_all();
  EXPECT_EQ(table.choose_prefill("m", {}), p0);  // the first by name
  table.sent(p0, 10, 1);
  EXPECT_EQ(table.choose_prefill("m", {}), p1);
  table.sent(p1, 20, 1);
  EXPECT_EQ(table.choose_prefill("m", {}), p0);
}

TEST_F(RankTableTest, ADecodeRankNeedsRoomAndTheAvoidedOneIsLast) {
  credit_all();
  EXPECT_EQ(table.choose_decode("m", 60, {}, {}, std::nullopt), d0);
  EXPECT_EQ(table.choose_decode("m", 60, {}, {}, d0), d1);
  table.sent(d0, 0, 60);
  EXPECT_EQ(table.choose_decode("m", 60, {}, {}, std::nullopt), d1);
  table.sent(d1, 0, 300);
  table.sent(d1, 0, 100);
  EXPECT_EQ(table.choose_decode("m", 60, {}, {}, std::nullopt), std::nullopt);
  EXPECT_EQ(table.choose_decode("m", 40, {}, {}, std::nullopt), d0);
  EXPECT_EQ(table.choose_decode("m", 40, {}, {}, d0), d0);
}

TEST_F(RankTableTest, WhatFitsTheLargestRankWaitsForItAndWhatFitsNoneIsAskedAtOnce) {
  credit_all();
  table.sent(d1, 0, 300);
  EXPECT_EQ(table.choose_decode("m", 200, {}, {}, std::nullopt), std::nullopt);
  EXPECT_EQ(table.choose_decode("m", 401, {}, {}, std::nullopt), d0);
  table.returned(d1, 1, 0, 300);
  EXPECT_EQ(table.choose_decode("m", 200, {}, {}, std::nullopt), d1);
}

TEST_F(RankTableTest, DrainingRanksTakeNothing) {
  credit_all();
  wire::rank_credit draining = credit(2, 8, 400);
  draining.draining = true;
  EXPECT_TRUE(table.credit(d1, 1, draining));
  EXPECT_EQ(table.choose_decode("m", 60, {}, {}, d0), d0);
  EXPECT_EQ(table.choose_decode("m", 200, {}, {}, std::nullopt), std::nullopt);
  EXPECT_TRUE(table.credit(d0, 1, draining));
  EXPECT_FALSE(table.serves("m", true));
}

TEST(RankTablePlace, DistanceCountsTheLabelsThatDiffer) {
  const Place here{"a", "r1", "z1"};
  EXPECT_EQ(distance(here, here), 0U);
  EXPECT_EQ(distance(here, {"b", "r1", "z1"}), 1U);
  EXPECT_EQ(distance(here, {"b", "r2", "z1"}), 2U);
  EXPECT_EQ(distance(here, {"a", "r1", "z2"}), 3U);  // labels are unique inside a zone only
  EXPECT_EQ(distance({}, {}), 0U);
}

TEST(RankTablePlace, LocationBreaksTiesAndNeverBeatsTheQueue) {
  RankTable table;
  const Place a{"a", "r1", ""};
  const Place b{"b", "r1", ""};
  const Place far{"c", "r9", ""};
  for (const auto& [name, place, decode] : std::vector<std::tuple<std::string, Place, bool>>{
           {"p.a", a, false}, {"p.b", b, false}, {"d.a", a, true}, {"d.b", b, true}, {"d.c", far, true}}) {
    table.add(name, 1, 1, decode, "m", place);
    wire::rank_credit given = credit(1, 8, 1000);
    given.host = "kvd." + place.host;
    EXPECT_TRUE(table.credit({name, 0}, 1, given));
  }
  Wish wish;
  EXPECT_EQ(table.choose_prefill("m", wish)->instance, "p.a");  // by name
  wish.held = {{"kvd.b", 5}, {"kvd.a", 3}};
  EXPECT_EQ(table.choose_prefill("m", wish)->instance, "p.b");
  EXPECT_EQ(table.choose_host("m", wish), "kvd.b");
  EXPECT_EQ(table.choose_decode("m", 10, b, wish, std::nullopt)->instance, "d.b");
  EXPECT_EQ(table.choose_decode("m", 10, a, wish, RankName{"d.a", 0})->instance, "d.b");  // the same rack
  table.sent({"p.b", 0}, 10, 4);
  table.sent({"d.b", 0}, 0, 4);
  EXPECT_EQ(table.choose_prefill("m", wish)->instance, "p.a");
  EXPECT_EQ(table.choose_host("m", wish), "kvd.a");
  EXPECT_EQ(table.choose_decode("m", 10, b, wish, std::nullopt)->instance, "d.a");
  // A link was too slow: now the host comes first.
  wish.near_host = "b";
  EXPECT_EQ(table.choose_prefill("m", wish)->instance, "p.b");
  EXPECT_EQ(table.choose_host("m", wish), "kvd.b");
  EXPECT_EQ(table.choose_decode("m", 10, b, wish, std::nullopt)->instance, "d.b");
  table.remove("p.b");
  EXPECT_EQ(table.choose_prefill("m", wish)->instance, "p.a");  // and is no condition
}

TEST_F(RankTableTest, AReturningInstanceStartsOver) {
  credit_all();
  table.sent(p0, 10, 4);
  table.add("p.0", 2, 1, false, "m", {});
  EXPECT_EQ(table.outstanding(), 0U);
  EXPECT_EQ(table.find(p1), nullptr);
  EXPECT_EQ(table.choose_prefill("m", {}), std::nullopt);
  table.returned(p0, 1, 10, 4);  // of the generation before: nothing
  EXPECT_TRUE(table.credit(p0, 2, credit(1, 1)));
  EXPECT_EQ(table.choose_prefill("m", {}), p0);
  table.remove("p.0");
  EXPECT_EQ(table.find(p0), nullptr);
  EXPECT_EQ(table.all().size(), 2U);
}

// Whether there is a seat is known without a walk, through every change of a rank.
TEST(RankTableSeats, WhatIsKnownWithoutAWalkIsWhatAWalkFinds) {
  constexpr std::uint64_t seed = 11;
  std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  RankTable table;
  std::map<std::string, std::uint32_t> generations;
  struct Sent {
    RankName name;
    std::uint32_t generation;
    std::uint64_t tokens;
  };
  std::vector<Sent> sent;
  std::uint64_t seq = 0;
  const auto walk = [&](const std::string& model, std::uint64_t tokens) {
    std::uint64_t largest = 0;
    for (const auto& [name, info] : table.all()) {
      if (info.decode && info.model == model) largest = std::max(largest, info.credit.kv_tokens_max);
    }
    return std::ranges::any_of(table.all(), [&](const auto& entry) {
      const RankInfo& info = entry.second;
      return info.decode && info.model == model && !info.credit.draining &&
             info.sent_requests < info.credit.granted_requests &&
             (tokens > largest || info.outstanding_tokens + tokens <= info.credit.kv_tokens_max);
    });
  };
  int with = 0;
  for (int step = 0; step < 20000; ++step) {
    const RankName name{"d." + std::to_string(rng.below(4)), static_cast<std::uint16_t>(rng.below(2))};
    const RankInfo* info = table.find(name);
    const std::uint64_t what = rng.below(20);
    if (what == 0) {
      table.add(name.instance, ++generations[name.instance], 2, rng.chance(0.8), rng.chance(0.7) ? "m" : "n",
                {});
    } else if (what == 1) {
      table.remove(name.instance);
    } else if (what < 8 && info != nullptr) {
      wire::rank_credit fresh = credit(++seq, info->sent_requests + rng.below(4), rng.below(6) * 50);
      fresh.draining = rng.chance(0.1);
      EXPECT_TRUE(table.credit(name, info->generation, fresh));
    } else if (what < 14 && info != nullptr) {
      sent.push_back({name, info->generation, 1 + rng.below(200)});
      table.sent(name, 0, sent.back().tokens);
    } else if (!sent.empty()) {
      std::swap(sent[rng.below(sent.size())], sent.back());
      table.returned(sent.back().name, sent.back().generation, 0, sent.back().tokens);
      sent.pop_back();
    }
    for (const std::string model : {"m", "n", "other"}) {
      const std::uint64_t tokens = 1 + rng.below(300);
      const bool found = walk(model, tokens);
      const std::uint64_t walks = table.seat_walks();
      ASSERT_EQ(table.has_seat(model, tokens), found) << step;
      ASSERT_EQ(table.choose_decode(model, tokens, {}, {}, std::nullopt).has_value(), found) << step;
      ASSERT_EQ(table.seat_walks() - walks, found ? 1U : 0U);
      with += found ? 1 : 0;
    }
  }
  EXPECT_GT(with, 1000);
  EXPECT_LT(with, 59000);
}

}  // namespace
}  // namespace di::request
