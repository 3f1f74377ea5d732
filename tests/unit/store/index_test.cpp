#include "store/index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/rng.h"

namespace di::store {
namespace {

// Against a multimap: few stripes, so that they collide, and erasures everywhere.
TEST(SlotIndex, finds_what_a_multimap_finds) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    Rng rng(seed);
    SlotIndex index;
    std::map<std::uint32_t, std::uint64_t> stripe_of_number;
    std::multimap<std::uint64_t, std::uint32_t> model;
    const auto stripe_of = [&](std::uint32_t number) { return stripe_of_number.at(number); };
    for (int turn = 0; turn < 20000; ++turn) {
      const std::uint64_t stripe = rng.below(3000) << (seed % 3 * 20);
      if (rng.chance(0.55)) {
        const auto number = static_cast<std::uint32_t>(rng.below(1u << 20));
        if (stripe_of_number.contains(number)) continue;
        stripe_of_number[number] = stripe;
        index.insert(stripe, number, stripe_of);
        model.emplace(stripe, number);
      } else if (const auto found = model.find(stripe); found != model.end()) {
        index.erase(stripe, found->second, stripe_of);
        stripe_of_number.erase(found->second);
        model.erase(found);
      }
      ASSERT_EQ(index.count(), model.size());
      std::set<std::uint32_t> seen;
      const std::uint32_t none = index.find(stripe, stripe_of, [&](std::uint32_t number) {
        seen.insert(number);
        return false;
      });
      ASSERT_EQ(none, SlotIndex::none);
      std::set<std::uint32_t> expected;
      for (auto [it, last] = model.equal_range(stripe); it != last; ++it) expected.insert(it->second);
      ASSERT_EQ(seen, expected);
    }
  }
}

// Built at once it finds what it finds when it is filled one by one; of slots that are the same, the higher number.
TEST(SlotIndex, building_is_inserting) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    Rng rng(seed);
    const std::uint64_t stripes = 1 + rng.below(60000);
    const auto numbers = static_cast<std::uint32_t>(rng.below(60000));
    std::vector<std::uint64_t> stripe_of_number;
    std::vector<std::uint32_t> column_of_number;
    for (std::uint32_t number = 0; number < numbers; ++number) {
      stripe_of_number.push_back(rng.below(stripes) << (seed % 4 * 16));
      column_of_number.push_back(static_cast<std::uint32_t>(rng.below(3)));
    }
    std::map<std::pair<std::uint64_t, std::uint32_t>, std::uint32_t> model;
    for (std::uint32_t number = 0; number < numbers; ++number)
      model[{stripe_of_number[number], column_of_number[number]}] = number;
    SlotIndex index;
    index.build(
        [&](const auto& add) {
          for (std::uint32_t number = 0; number < numbers; ++number) add(number, stripe_of_number[number]);
        },
        [&](std::uint32_t number, std::uint32_t earlier) {
          const bool same = stripe_of_number[number] == stripe_of_number[earlier] &&
                            column_of_number[number] == column_of_number[earlier];
          if (!same) return SlotIndex::Clash::other_stripe;
          return number > earlier ? SlotIndex::Clash::replace : SlotIndex::Clash::keep_earlier;
        });
    ASSERT_EQ(index.count(), model.size());
    if (numbers > 20000) {
      EXPECT_LE(index.bytes(), std::size_t{numbers} * 12 + sizeof index);
    }
    const auto stripe_of = [&](std::uint32_t number) { return stripe_of_number[number]; };
    const auto find = [&](std::uint64_t stripe, std::uint32_t column) {
      return index.find(stripe, stripe_of,
                        [&](std::uint32_t other) { return column_of_number[other] == column; });
    };
    for (const auto& [name, number] : model) ASSERT_EQ(find(name.first, name.second), number);
    // It goes on as any other.
    for (const auto& [name, number] : model) {
      index.erase(name.first, number, stripe_of);
      ASSERT_EQ(find(name.first, name.second), SlotIndex::none);
      index.insert(name.first, number, stripe_of);
    }
    ASSERT_EQ(index.count(), model.size());
  }
}

TEST(SlotIndex, takes_at_most_twelve_bytes_an_entry) {
  SlotIndex index;
  const auto stripe_of = [](std::uint32_t number) { return std::uint64_t{number} * 3; };
  std::size_t most = 0;
  for (std::uint32_t number = 0; number < 300000; ++number) {
    index.insert(stripe_of(number), number, stripe_of);
    if (number > 100000) most = std::max(most, index.bytes() * 100 / index.count());
  }
  EXPECT_LE(most, 1200u);
}

}  // namespace
}  // namespace di::store
