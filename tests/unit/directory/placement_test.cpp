#include "directory/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "kv/stripe.h"

namespace di::directory {
namespace {

constexpr Instant start{1'000'000'000};

StripeForm whole(Geometry geometry) {
  return {geometry.data_columns, geometry.parity_columns, geometry.data_columns, 1};
}

Placements made(Geometry geometry, std::uint32_t nodes, std::uint16_t volumes = 1, std::uint32_t racks = 0,
                bool lab = false) {
  Placements out({geometry, lab});
  for (std::uint32_t node = 0; node < nodes; ++node) {
    Labels labels;
    labels.host = "h" + std::to_string(node);
    if (racks > 0) labels.rack = "r" + std::to_string(node % racks);
    for (std::uint16_t volume = 0; volume < volumes; ++volume) out.set({node, volume}, {labels, true, 0});
  }
  return out;
}

TEST(Geometry, IsReadAndBounded) {
  EXPECT_EQ(*Geometry::parse("10+2"), (Geometry{10, 2}));
  EXPECT_EQ(*Geometry::parse("1+0"), (Geometry{1, 0}));
  EXPECT_EQ(Geometry::parse("10+2")->text(), "10+2");
  for (const char* bad : {"", "10", "0+2", "15+2", "4+", "+2", "a+b", "2+1 ", "-1+2", "4+0", "70000+1"}) {
    EXPECT_FALSE(Geometry::parse(bad)) << bad;
  }
}

TEST(StripeForm, IsThatOfTheShape) {
  for (const kv::Layout& layout : {kv::layout_v41(), kv::layout_v3(), *kv::layout_mla("t", 32, 4, 64)}) {
    for (const Geometry geometry : {Geometry{10, 2}, Geometry{4, 2}, Geometry{2, 1}, Geometry{1, 0}}) {
      for (std::uint32_t count = 1; count <= geometry.data_columns; ++count) {
        std::vector<std::uint32_t> blocks(count, layout.page_blocks());
        blocks.back() = 1;
        std::vector<wire::PutPage> pages;
        for (const std::uint32_t n : blocks) {
          wire::PutPage page;
          page.keys.resize(n);
          page.crcs.resize(layout.groups());
          page.bytes = layout.page_bytes(n);
          pages.push_back(page);
        }
        const auto shape =
            kv::StripeShape::of(layout, geometry.data_columns, geometry.parity_columns, blocks);
        ASSERT_TRUE(shape);
        const StripeForm form = StripeForm::of_put(geometry, pages);
        EXPECT_EQ(form.parts, shape->parts());
        ASSERT_EQ(form.columns_stored(), shape->columns_stored());
        for (std::uint32_t i = 0; i < form.columns_stored(); ++i) {
          EXPECT_EQ(form.stored_column(i), shape->stored_column(i));
        }
        EXPECT_EQ(form.code_crcs(layout.groups()), shape->crcs_count());
        const wire::StripeCode code{geometry.data_columns, geometry.parity_columns,
                                    std::vector<std::uint32_t>(shape->crcs_count())};
        EXPECT_EQ(*StripeForm::of_code(code, pages), form);
      }
    }
  }
}

TEST(StripeForm, CodesThatDoNotFitAreRefused) {
  std::vector<wire::PutPage> pages(2);
  for (wire::PutPage& page : pages) page = {Key{}, {Key{}}, {1, 2}, 4096};
  const auto refused = [&](wire::StripeCode code) { return !StripeForm::of_code(code, pages); };
  EXPECT_FALSE(refused({4, 2, {1, 2, 3, 4}}));
  EXPECT_TRUE(refused({0, 0, {}}));            // two pages without a code
  EXPECT_TRUE(refused({1, 2, {1, 2, 3, 4}}));  // more pages than columns
  EXPECT_TRUE(refused({4, 2, {1, 2}}));        // checksums are missing
  EXPECT_TRUE(refused({4, 2, {1, 2, 3}}));
  EXPECT_TRUE(refused({4, 1, {1, 2, 3, 4, 5, 6, 7, 8}}));           // three rows of parts for two pages
  EXPECT_TRUE(refused({4, 1, std::vector<std::uint32_t>(14, 0)}));  // three parts each: six columns of four
  EXPECT_FALSE(refused({4, 1, std::vector<std::uint32_t>(10, 0)}));
  EXPECT_TRUE(refused({15, 2, std::vector<std::uint32_t>(4, 0)}));
}

// F17.
TEST(Placements, NoNodeHasMoreColumnsThanTheCodeCanLose) {
  const Geometry geometry{4, 2};
  for (const std::uint32_t nodes : {6U, 4U, 3U}) {
    Placements placements = made(geometry, nodes, 2, 0, nodes < 6);
    for (std::uint64_t stripe = 1; stripe <= 500; ++stripe) {
      const auto choice = placements.choose(stripe, whole(geometry), start);
      ASSERT_TRUE(choice);
      EXPECT_EQ(choice->unreachable, 0U);
      std::map<std::uint32_t, int> on_node;
      std::set<Target> targets;
      for (const Target target : choice->targets) {
        ++on_node[target.store];
        targets.insert(target);
      }
      EXPECT_EQ(targets.size(), 6U);  // no disk has two
      for (const auto& [node, count] : on_node) EXPECT_LE(count, nodes < 6 ? 2 : 1);
    }
  }
  Placements few = made(geometry, 4, 2);
  EXPECT_FALSE(few.choose(1, whole(geometry), start));
  EXPECT_EQ(few.shortage(), "4+2 wants 6 store nodes, 4 are known: nothing is written to the store");
  Placements lab = made(geometry, 2, 2, 0, true);
  EXPECT_TRUE(lab.choose(1, whole(geometry), start));
  EXPECT_NE(lab.shortage().find("share a node"), std::string::npos);
}

// Three of twelve stores went, and nobody heard that nothing was written any more.
TEST(Placements, WhatCannotBeWrittenIsSaidAsLongAsNodesTakeNoColumns) {
  const Geometry geometry{4, 2};
  const auto set = [](Placements& placements, std::uint32_t node, bool usable) {
    placements.set({node, 0}, {{"h" + std::to_string(node), "", ""}, usable, 0});
  };
  Placements placements = made(geometry, 6);
  set(placements, 1, false);
  set(placements, 2, false);
  EXPECT_TRUE(placements.choose(1, whole(geometry), start)) << "without its parity";
  EXPECT_EQ(placements.unwritten(), "");
  EXPECT_EQ(placements.shortage(), "");
  set(placements, 3, false);
  EXPECT_FALSE(placements.choose(2, whole(geometry), start));
  EXPECT_EQ(
      placements.unwritten(),
      "4+2 wants 6 store nodes, 3 take columns: stripes of more than 3 pages are not written to the store");
  EXPECT_EQ(placements.shortage(), placements.unwritten());
  set(placements, 1, true);
  EXPECT_TRUE(placements.choose(3, whole(geometry), start));
  EXPECT_EQ(placements.unwritten(), "");
  for (std::uint32_t node = 0; node < 6; ++node) set(placements, node, false);
  EXPECT_EQ(placements.unwritten(),
            "4+2 wants 6 store nodes, 0 take columns: nothing is written to the store");

  Placements lab = made(geometry, 2, 2, 0, true);
  EXPECT_TRUE(lab.choose(1, whole(geometry), start));
  EXPECT_EQ(lab.unwritten(), "") << "as it was asked for";
  EXPECT_NE(lab.shortage(), "");
}

TEST(Placements, PairsAreSharedAboutEqually) {
  Placements placements = made({10, 2}, 24);
  ASSERT_TRUE(placements.choose(1, whole({10, 2}), start));
  std::map<std::pair<std::uint32_t, std::uint32_t>, int> pairs;
  std::map<std::uint32_t, int> records;
  for (const Placements::Record& record : placements.records()) {
    ASSERT_EQ(record.members.size(), 12U);
    for (const Target a : record.members) {
      ++records[a.store];
      for (const Target b : record.members) {
        if (a.store < b.store) ++pairs[{a.store, b.store}];
      }
    }
  }
  ASSERT_EQ(records.size(), 24U);
  EXPECT_EQ(pairs.size(), 24U * 23 / 2);
  const auto [low, high] = std::minmax_element(
      pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  // 24 targets in 100 records of 12 each: a pair shares 100 * 11 / 23 = 48.
  EXPECT_GE(low->second, 38);
  EXPECT_LE(high->second, 58);
  for (const auto& [node, count] : records) EXPECT_NEAR(count, 100, 3);
}

TEST(Placements, ColumnsRotate) {
  Placements placements = made({2, 1}, 3);
  std::map<std::uint32_t, int> parity;
  for (std::uint64_t stripe = 1; stripe <= 300; ++stripe)
    ++parity[placements.choose(stripe, whole({2, 1}), start)->targets[2].store];
  ASSERT_EQ(parity.size(), 3U);
  for (const auto& [node, count] : parity) EXPECT_NEAR(count, 100, 30);
}

TEST(Placements, RacksHoldAtMostWhatTheCodeCanLose) {
  Placements placements = made({4, 2}, 12, 1, 3);
  for (std::uint64_t stripe = 1; stripe <= 200; ++stripe) {
    std::map<std::uint32_t, int> racks;
    const auto choice = placements.choose(stripe, whole({4, 2}), start);
    ASSERT_TRUE(choice);
    for (const Target target : choice->targets) ++racks[target.store % 3];
    for (const auto& [rack, count] : racks) EXPECT_EQ(count, 2);
  }
  EXPECT_EQ(placements.shortage(), "");
  EXPECT_NE(made({4, 2}, 12, 1, 2).shortage().find("wants 3 racks"), std::string::npos);
}

TEST(Placements, AbsentMembersAreStoodInForOrMissed) {
  Placements placements = made({4, 2}, 7);
  placements.set({3, 0}, {{"h3", "", ""}, false, 0});
  for (std::uint64_t stripe = 1; stripe <= 100; ++stripe) {
    const auto choice = placements.choose(stripe, whole({4, 2}), start);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->unreachable, 0U);
    EXPECT_EQ(std::count(choice->targets.begin(), choice->targets.end(), Target{3, 0}), 0);
  }
  placements.set({4, 0}, {{"h4", "", ""}, false, 0});
  EXPECT_EQ(placements.choose(1, whole({4, 2}), start)->unreachable, 1U);
  placements.set({5, 0}, {{"h5", "", ""}, false, 0});
  placements.set({6, 0}, {{"h6", "", ""}, false, 0});
  EXPECT_FALSE(placements.choose(1, whole({4, 2}), start));  // more than the code can lose
}

TEST(Placements, WhatOneStoreWouldHaveHadGoesToAllOthersAlike) {
  struct Fleet {
    Geometry geometry;
    std::uint32_t nodes;
    std::uint16_t volumes;
  };
  for (const Fleet& fleet :
       {Fleet{{4, 2}, 9, 1}, Fleet{{4, 2}, 12, 2}, Fleet{{10, 2}, 24, 1}, Fleet{{1, 0}, 5, 1}}) {
    SCOPED_TRACE(fleet.geometry.text() + " on " + std::to_string(fleet.nodes));
    const std::uint32_t away = 3;
    Placements placements = made(fleet.geometry, fleet.nodes, fleet.volumes);
    Placements whole_fleet = made(fleet.geometry, fleet.nodes, fleet.volumes);
    for (std::uint16_t volume = 0; volume < fleet.volumes; ++volume)
      placements.set({away, volume}, {{"h3", "", ""}, false, 0});
    std::map<std::uint32_t, int> count;
    for (std::uint64_t stripe = 1; stripe <= 12000; ++stripe) {
      const auto member = whole_fleet.choose(stripe, whole(fleet.geometry), start);
      ASSERT_TRUE(member);
      std::vector<Target> others;
      for (const Target target : member->targets) {
        if (target.store != away) others.push_back(target);
      }
      if (others.size() == member->targets.size()) continue;
      const auto other = placements.substitute(stripe, others, {});
      ASSERT_TRUE(other);
      EXPECT_EQ(
          std::count_if(others.begin(), others.end(), [&](Target t) { return t.store == other->store; }), 0);
      EXPECT_EQ(other, placements.substitute(stripe, others, {}));
      ++count[other->store];
    }
    ASSERT_EQ(count.size(), fleet.nodes - 1);
    int sum = 0;
    for (const auto& [node, columns] : count) sum += columns;
    const double share = static_cast<double>(sum) / (fleet.nodes - 1);
    for (const auto& [node, columns] : count) EXPECT_NEAR(columns, share, share / 4) << node;
  }
}

TEST(Placements, NewStripesOfAnAbsentMemberAreSpreadToo) {
  Placements placements = made({4, 2}, 9);
  ASSERT_TRUE(placements.choose(1, whole({4, 2}), start));
  placements.set({3, 0}, {{"h3", "", ""}, false, 0});
  std::map<std::uint32_t, int> columns;
  for (std::uint64_t stripe = 1; stripe <= 6000; ++stripe) {
    const auto choice = placements.choose(stripe, whole({4, 2}), start);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->unreachable, 0U);
    std::set<Target> targets;
    for (const Target target : choice->targets) {
      EXPECT_TRUE(targets.insert(target).second);
      ++columns[target.store];
    }
  }
  ASSERT_EQ(columns.size(), 8U);
  for (const auto& [node, count] : columns) EXPECT_NEAR(count, 4500, 225) << node;
}

TEST(Placements, StandInsKeepToRacksBeforeTheyAreSpread) {
  // Three racks of four, two columns each: only the rest of the rack of the one that is away will do.
  Placements placements = made({4, 2}, 12, 1, 3);
  ASSERT_TRUE(placements.choose(1, whole({4, 2}), start));
  placements.set({3, 0}, {{"h3", "r0", ""}, false, 0});
  std::map<std::uint32_t, int> of_rack;
  for (std::uint64_t stripe = 1; stripe <= 3000; ++stripe) {
    const auto choice = placements.choose(stripe, whole({4, 2}), start);
    ASSERT_TRUE(choice);
    std::map<std::uint32_t, int> racks;
    for (const Target target : choice->targets) {
      ++racks[target.store % 3];
      if (target.store % 3 == 0) ++of_rack[target.store];
    }
    for (const auto& [rack, count] : racks) EXPECT_EQ(count, 2) << rack;
  }
  EXPECT_EQ(of_rack.size(), 3U);
  for (const auto& [node, count] : of_rack) EXPECT_NEAR(count, 2000, 100) << node;
}

TEST(Placements, AnEmptyStoreStandsInForNoMoreThanTwiceItsShare) {
  Placements placements = made({1, 0}, 6);
  for (std::uint32_t node = 0; node < 5; ++node) {
    placements.set({node, 0}, {{"h" + std::to_string(node), "", ""}, true, std::uint64_t{1} << 30});
    placements.add_bytes({node, 0}, std::uint64_t{1} << 29);
  }
  placements.set({5, 0}, {{"h5", "", ""}, true, std::uint64_t{1} << 30});
  std::map<std::uint32_t, int> count;
  for (std::uint64_t stripe = 1; stripe <= 6000; ++stripe)
    ++count[placements.substitute(stripe, {}, {})->store];
  ASSERT_EQ(count.size(), 6U);
  // One of the two that are drawn: 2 of 6.
  EXPECT_NEAR(count[5], 2000, 150);
  for (std::uint32_t node = 0; node < 5; ++node) EXPECT_NEAR(count[node], 800, 120) << node;
}

TEST(Placements, SpentMembersAreStoodInForAndCountedWhereNobodyCan) {
  Placements placements = made({4, 2}, 7);
  const auto spend = [&](std::uint32_t node) {
    placements.set({node, 0}, {{"h" + std::to_string(node), "", ""}, true, 0, true});
  };
  spend(3);
  for (std::uint64_t stripe = 1; stripe <= 100; ++stripe) {
    const auto choice = placements.choose(stripe, whole({4, 2}), start);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->spent, 0U);
    EXPECT_EQ(std::count(choice->targets.begin(), choice->targets.end(), Target{3, 0}), 0);
  }
  EXPECT_NE(placements.substitute(1, {}, {}), (Target{3, 0}));
  spend(4);
  for (std::uint64_t stripe = 1; stripe <= 100; ++stripe) {
    const auto choice = placements.choose(stripe, whole({4, 2}), start);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->spent, 1U);
    EXPECT_EQ(choice->unreachable, 0U);
    EXPECT_EQ(std::set<Target>(choice->targets.begin(), choice->targets.end()).size(), 6U);
  }
  // What has to be made anew goes there when there is nothing else.
  std::vector<Target> others;
  for (const std::uint32_t node : {0U, 1U, 2U, 5U, 6U}) others.push_back({node, 0});
  std::map<std::uint32_t, int> spent;
  for (std::uint64_t stripe = 1; stripe <= 100; ++stripe)
    ++spent[placements.substitute(stripe, others, {})->store];
  EXPECT_EQ(spent.size(), 2U);
  EXPECT_EQ(spent[3] + spent[4], 100);
}

TEST(Placements, ReplacedMemberLeavesTheRecordsAndReturnsAsANewOne) {
  Placements placements = made({2, 1}, 5);
  ASSERT_TRUE(placements.choose(1, whole({2, 1}), start));
  placements.set({2, 0}, {{"h2", "", ""}, false, 0});
  placements.replace({2, 0});
  EXPECT_GT(placements.generations(), 0U);
  for (const Placements::Record& record : placements.records()) {
    std::set<std::uint32_t> nodes;
    for (const Target target : record.members) nodes.insert(target.store);
    EXPECT_EQ(nodes.size(), 3U);
    EXPECT_FALSE(nodes.contains(2));
  }
  placements.set({2, 0}, {{"h2", "", ""}, true, 0});
  int used = 0;
  for (std::uint64_t stripe = 1; stripe <= 100; ++stripe) {
    const auto choice = placements.choose(stripe, whole({2, 1}), start);
    used += static_cast<int>(std::count(choice->targets.begin(), choice->targets.end(), Target{2, 0}));
  }
  EXPECT_NEAR(used, 60, 20);
}

TEST(Placements, FullerTargetsGetLess) {
  Placements placements = made({1, 0}, 2);
  placements.set({0, 0}, {{}, true, std::uint64_t{1} << 30});
  placements.set({1, 0}, {{}, true, std::uint64_t{1} << 30});
  placements.add_bytes({0, 0}, std::uint64_t{1} << 29);
  for (std::uint64_t stripe = 1; stripe <= 20; ++stripe) {
    EXPECT_EQ(placements.choose(stripe, whole({1, 0}), start)->targets[0], (Target{1, 0}));
  }
}

// ---- slow start

constexpr Duration slow_start = seconds(600);

class SlowStart : public testing::Test {
 protected:
  Placements made(Geometry geometry, std::uint32_t nodes, std::uint32_t racks = 0) {
    Placements out({geometry, false, slow_start});
    for (std::uint32_t node = 0; node < nodes; ++node) join(out, node, racks);
    return out;
  }
  static void join(Placements& placements, std::uint32_t node, std::uint32_t racks = 0, bool usable = true) {
    Labels labels;
    labels.host = "h" + std::to_string(node);
    if (racks > 0) labels.rack = "r" + std::to_string(node % racks);
    placements.set({node, 0}, {labels, usable, 0});
  }
  // Columns by node, of so many stripes.
  std::map<std::uint32_t, int> columns(Placements& placements, int stripes, Instant now) {
    std::map<std::uint32_t, int> count;
    for (int i = 0; i < stripes; ++i) {
      const Geometry geometry = placements.options().geometry;
      const auto choice = placements.choose(++stripe, whole(geometry), now);
      EXPECT_TRUE(choice);
      if (!choice) return count;
      EXPECT_EQ(choice->unreachable, 0U);
      std::set<std::uint32_t> nodes;
      for (const Target target : choice->targets) {
        ++count[target.store];
        EXPECT_TRUE(nodes.insert(target.store).second) << "two columns on one node";
      }
    }
    return count;
  }
  std::uint64_t stripe = 0;
};

TEST_F(SlowStart, ANewStoreTakesATenthAtFirstAndItsWholeShareInTheEnd) {
  for (const Geometry geometry : {Geometry{1, 0}, Geometry{2, 1}, Geometry{4, 2}}) {
    SCOPED_TRACE(geometry.text());
    Placements placements = made(geometry, 8);
    static_cast<void>(columns(placements, 1000, start));
    EXPECT_EQ(placements.passed_over(), 0U) << "a fleet that starts as a whole has no slow start";
    join(placements, 8);
    const Instant joined = start + seconds(5000);
    static_cast<void>(columns(placements, 1, joined));  // its time begins
    std::vector<double> shares;
    for (const int minute : {0, 3, 5, 10, 11}) {
      const Instant now = joined + seconds(60 * minute);
      const std::uint64_t before = placements.passed_over();
      std::map<std::uint32_t, int> count = columns(placements, 6000, now);
      const auto whole =
          static_cast<double>(count[8]) + static_cast<double>(placements.passed_over() - before);
      shares.push_back(count[8] / whole);
      EXPECT_NEAR(shares.back() * 1000, placements.share({8, 0}, now), 60) << minute;
      // Nobody has to take much more than the others for it.
      int least = INT32_MAX;
      int most = 0;
      for (std::uint32_t node = 0; node < 8; ++node) {
        least = std::min(least, count[node]);
        most = std::max(most, count[node]);
      }
      EXPECT_LT(most, least * 5 / 4) << minute;
    }
    EXPECT_NEAR(shares[0], 0.1, 0.05);
    EXPECT_NEAR(shares[2], 0.55, 0.06);
    EXPECT_EQ(shares[3], 1.0);
    EXPECT_EQ(shares[4], 1.0);
    EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  }
}

TEST_F(SlowStart, WithoutAnotherPlaceTheNewOneTakesEverything) {
  Placements placements = made({2, 1}, 2);
  EXPECT_FALSE(placements.choose(1, whole({2, 1}), start));
  join(placements, 2);
  const std::map<std::uint32_t, int> count = columns(placements, 100, start + seconds(60));
  EXPECT_LT(placements.share({2, 0}, start + seconds(60)), 1000U);
  EXPECT_EQ(count, (std::map<std::uint32_t, int>{{0, 100}, {1, 100}, {2, 100}}));
  EXPECT_EQ(placements.passed_over(), 0U);
}

TEST_F(SlowStart, RacksAreNotCrowdedForIt) {
  // Three racks with two nodes each: a column of the new one has no other place that is as good.
  Placements placements = made({4, 2}, 6, 3);
  static_cast<void>(columns(placements, 1, start));
  Labels labels{"h6", "r0", {}};
  placements.set({6, 0}, {labels, true, 0});
  const Instant now = start + seconds(5000);
  for (int i = 0; i < 2000; ++i) {
    const auto choice = placements.choose(++stripe, whole({4, 2}), now);
    ASSERT_TRUE(choice);
    std::map<std::uint32_t, int> in_rack;
    for (const Target target : choice->targets) ++in_rack[target.store % 3];
    for (const auto& [rack, count] : in_rack) EXPECT_EQ(count, 2) << rack;
  }
  EXPECT_GT(placements.passed_over(), 0U) << "the others of its rack stand in";
}

TEST_F(SlowStart, AnAbsenceIsNoNewStartAndAReplacementIs) {
  Placements placements = made({1, 0}, 4);
  static_cast<void>(columns(placements, 1, start));
  const Instant later = start + seconds(5000);
  join(placements, 2, 0, false);
  static_cast<void>(columns(placements, 100, later));
  join(placements, 2);
  static_cast<void>(columns(placements, 100, later));
  EXPECT_EQ(placements.share({2, 0}, later), 1000U);
  EXPECT_EQ(placements.passed_over(), 0U);
  join(placements, 2, 0, false);
  placements.replace({2, 0});
  static_cast<void>(columns(placements, 100, later));
  join(placements, 2);
  static_cast<void>(columns(placements, 1, later));
  EXPECT_EQ(placements.share({2, 0}, later), 100U);
  EXPECT_EQ(placements.share({2, 0}, later + seconds(300)), 550U);
  EXPECT_EQ(placements.share({2, 0}, later + slow_start), 1000U);
}

TEST_F(SlowStart, EqualCallsGiveEqualAnswers) {
  Placements one = made({2, 1}, 5);
  Placements other = made({2, 1}, 5);
  for (int i = 0; i < 500; ++i) {
    if (i == 100) {
      join(one, 5);
      join(other, 5);
    }
    const Instant now = start + seconds(i);
    const auto a = one.choose(static_cast<std::uint64_t>(i), whole({2, 1}), now);
    const auto b = other.choose(static_cast<std::uint64_t>(i), whole({2, 1}), now);
    ASSERT_TRUE(a && b);
    EXPECT_EQ(a->targets, b->targets);
  }
  EXPECT_GT(one.passed_over(), 0U);
}

}  // namespace
}  // namespace di::directory
