#include "kv/miss_ratio.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <list>
#include <unordered_map>
#include <vector>

#include "base/rng.h"

namespace di::kv {
namespace {

struct Use {
  std::uint64_t name;
  std::uint64_t bytes;
};

// What a least-recently-used cache really misses.
double lru_misses(const std::vector<Use>& uses, std::uint64_t capacity) {
  std::list<Use> order;
  std::unordered_map<std::uint64_t, std::list<Use>::iterator> at;
  std::uint64_t held = 0;
  std::uint64_t misses = 0;
  for (const Use& use : uses) {
    if (const auto found = at.find(use.name); found != at.end()) {
      order.splice(order.begin(), order, found->second);
      continue;
    }
    ++misses;
    order.push_front(use);
    at[use.name] = order.begin();
    held += use.bytes;
    while (held > capacity) {
      held -= order.back().bytes;
      at.erase(order.back().name);
      order.pop_back();
    }
  }
  return static_cast<double>(misses) / static_cast<double>(uses.size());
}

// Popularity by a power law, and a scan in between.
std::vector<Use> made_up(std::uint64_t seed, std::size_t count, std::uint64_t names) {
  Rng rng(seed);
  std::vector<Use> uses;
  std::uint64_t scan = 1'000'000'000;
  while (uses.size() < count) {
    if (rng.chance(0.001)) {
      for (int i = 0; i < 500; ++i) uses.push_back({scan++, 4096});
    }
    const double u = rng.uniform();
    const auto name = static_cast<std::uint64_t>(static_cast<double>(names) * std::pow(u, 2.5));
    uses.push_back({name + seed * 1'000'000'000'000, 1024 * (1 + name % 16)});
  }
  return uses;
}

TEST(MissRatio, agrees_with_a_simulated_cache_at_every_size) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
    const std::vector<Use> uses = made_up(seed, 100000, 30000);
    MissRatio all({.samples_max = 1u << 17});
    MissRatio some({.samples_max = 8192});
    for (const Use& use : uses) {
      all.reference(use.name, use.bytes);
      some.reference(use.name, use.bytes);
    }
    EXPECT_EQ(all.rate(), 1);
    EXPECT_LT(some.rate(), 0.3);
    EXPECT_LE(some.samples(), 8192u);
    double exact_error = 0;
    double error = 0;
    int points = 0;
    for (std::uint64_t capacity = std::uint64_t{1} << 20; capacity <= std::uint64_t{1} << 28; capacity *= 2) {
      const double real = lru_misses(uses, capacity);
      exact_error += std::abs(all.at(capacity) - real);
      error += std::abs(some.at(capacity) - real);
      ++points;
    }
    std::printf("mean error: all %.4f, 8,192 samples %.4f\n", exact_error / points, error / points);
    EXPECT_LT(exact_error / points, 0.005);
    EXPECT_LT(error / points, 0.02);
  }
}

TEST(MissRatio, the_curve_falls_from_one) {
  MissRatio ratio({});
  EXPECT_EQ(ratio.at(1 << 20), 1);
  EXPECT_TRUE(ratio.curve().empty());
  for (const Use& use : made_up(4, 100000, 5000)) ratio.reference(use.name, use.bytes);
  const auto curve = ratio.curve();
  ASSERT_GT(curve.size(), 3u);
  EXPECT_LE(curve.size(), 64u);
  for (std::size_t i = 1; i < curve.size(); ++i) {
    EXPECT_LE(curve[i].miss_ratio, curve[i - 1].miss_ratio);
    EXPECT_EQ(curve[i].capacity_bytes, 2 * curve[i - 1].capacity_bytes);
  }
  EXPECT_LT(curve.back().miss_ratio, curve.front().miss_ratio / 2);
}

TEST(MissRatio, follows_a_change_and_stays_within_its_bound) {
  MissRatio ratio({.samples_max = 500, .fade_references = 20000});
  for (std::uint64_t i = 0; i < 200000; ++i) ratio.reference(i, 4096);  // nothing comes twice
  EXPECT_GT(ratio.at(std::uint64_t{1} << 30), 0.99);
  Rng rng(9);
  for (int i = 0; i < 400000; ++i) ratio.reference(1'000'000 + rng.below(2000), 4096);
  EXPECT_LT(ratio.at(std::uint64_t{16} << 20), 0.1);
  EXPECT_LE(ratio.samples(), 500u);
  EXPECT_EQ(ratio.references(), 600000u);
}

}  // namespace
}  // namespace di::kv
