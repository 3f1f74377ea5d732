#include "store/index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

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

TEST(SlotIndex, room_that_was_reserved_is_enough) {
  SlotIndex index;
  index.reserve(50000);
  const std::size_t bytes = index.bytes();
  EXPECT_LE(bytes, 50000u * 12 + sizeof index);
  const auto stripe_of = [](std::uint32_t number) { return std::uint64_t{number} + 1000; };
  for (std::uint32_t number = 0; number < 50000; ++number) {
    index.prefetch(stripe_of(number));
    index.insert(stripe_of(number), number, stripe_of);
  }
  EXPECT_EQ(index.bytes(), bytes);
  EXPECT_EQ(index.first_looked_at(stripe_of(0)) == SlotIndex::none, false);
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
