#include "directory/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "kv/stripe.h"

namespace di::directory {
namespace {

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
      const auto choice = placements.choose(stripe, whole(geometry));
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
  EXPECT_FALSE(few.choose(1, whole(geometry)));
  EXPECT_EQ(few.shortage(), "4+2 wants 6 store nodes, 4 are known: nothing is written to the store");
  Placements lab = made(geometry, 2, 2, 0, true);
  EXPECT_TRUE(lab.choose(1, whole(geometry)));
  EXPECT_NE(lab.shortage().find("share a node"), std::string::npos);
}

TEST(Placements, PairsAreSharedAboutEqually) {
  Placements placements = made({10, 2}, 24);
  ASSERT_TRUE(placements.choose(1, whole({10, 2})));
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
    ++parity[placements.choose(stripe, whole({2, 1}))->targets[2].store];
  ASSERT_EQ(parity.size(), 3U);
  for (const auto& [node, count] : parity) EXPECT_NEAR(count, 100, 30);
}

TEST(Placements, RacksHoldAtMostWhatTheCodeCanLose) {
  Placements placements = made({4, 2}, 12, 1, 3);
  for (std::uint64_t stripe = 1; stripe <= 200; ++stripe) {
    std::map<std::uint32_t, int> racks;
    const auto choice = placements.choose(stripe, whole({4, 2}));
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
    const auto choice = placements.choose(stripe, whole({4, 2}));
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->unreachable, 0U);
    EXPECT_EQ(std::count(choice->targets.begin(), choice->targets.end(), Target{3, 0}), 0);
  }
  placements.set({4, 0}, {{"h4", "", ""}, false, 0});
  EXPECT_EQ(placements.choose(1, whole({4, 2}))->unreachable, 1U);
  placements.set({5, 0}, {{"h5", "", ""}, false, 0});
  placements.set({6, 0}, {{"h6", "", ""}, false, 0});
  EXPECT_FALSE(placements.choose(1, whole({4, 2})));  // more than the code can lose
}

TEST(Placements, ReplacedMemberLeavesTheRecordsAndReturnsAsANewOne) {
  Placements placements = made({2, 1}, 5);
  ASSERT_TRUE(placements.choose(1, whole({2, 1})));
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
    const auto choice = placements.choose(stripe, whole({2, 1}));
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
    EXPECT_EQ(placements.choose(stripe, whole({1, 0}))->targets[0], (Target{1, 0}));
  }
}

}  // namespace
}  // namespace di::directory
