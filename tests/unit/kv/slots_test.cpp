#include "kv/slots.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <map>

#include "base/rng.h"
#include "kv/layout.h"

namespace di::kv {
namespace {

TEST(BuddyPool, runs_are_aligned_and_disjoint_and_merge_again) {
  for (const std::uint32_t units : {1u, 7u, 8u, 100u, 1000u}) {
    constexpr std::uint64_t seed = 20;
    std::printf("units=%u seed=%llu\n", units, static_cast<unsigned long long>(seed));
    Rng rng(seed);
    BuddyPool pool(units);
    const auto longest = pool.order_free_max();
    std::map<std::uint32_t, std::uint32_t> taken;  // first -> order
    for (int turn = 0; turn < 2000; ++turn) {
      if (rng.chance(0.55)) {
        const auto order = static_cast<std::uint32_t>(rng.below(5));
        const auto first = pool.take(order);
        if (!first) continue;
        EXPECT_EQ(*first % (1u << order), 0u);
        ASSERT_LE(*first + (1u << order), units);
        const auto next = taken.lower_bound(*first);
        if (next != taken.end()) {
          ASSERT_GE(next->first, *first + (1u << order));
        }
        if (next != taken.begin()) {
          const auto before = std::prev(next);
          ASSERT_LE(before->first + (1u << before->second), *first);
        }
        taken[*first] = order;
      } else if (!taken.empty()) {
        auto it = taken.begin();
        std::advance(it, rng.below(taken.size()));
        pool.give_back(it->first, it->second);
        taken.erase(it);
      }
      std::uint32_t used = 0;
      for (const auto& [first, order] : taken) used += 1u << order;
      ASSERT_EQ(pool.units_free(), units - used);
    }
    for (const auto& [first, order] : taken) pool.give_back(first, order);
    EXPECT_EQ(pool.units_free(), units);
    EXPECT_EQ(pool.order_free_max(), longest);
  }
}

TEST(BuddyPool, refuses_what_is_not_there) {
  BuddyPool pool(4);
  EXPECT_FALSE(pool.take(3));
  EXPECT_EQ(pool.take(2), 0u);
  EXPECT_FALSE(pool.take(0));
}

TEST(SlotPool, pages_take_the_next_power_of_two_of_units) {
  const Layout layout = layout_v41();
  auto pool = SlotPool::create({layout.page_bytes(1) * 16, layout.page_bytes(1), 64});
  ASSERT_TRUE(pool.ok());
  const auto full = pool->take(layout.page_bytes(8));
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full->bytes, layout.page_bytes(1) * 8);
  const auto three = pool->take(layout.page_bytes(3));
  ASSERT_TRUE(three.ok());
  EXPECT_EQ(three->bytes, layout.page_bytes(1) * 4);
  EXPECT_GE(three->offset, full->offset + full->bytes);
  EXPECT_EQ(pool->slots_used(), 2u);
  EXPECT_EQ(pool->bytes_free(), layout.page_bytes(1) * 4);
}

TEST(SlotPool, generation_changes_with_each_taking) {
  auto pool = SlotPool::create({4096 * 4, 4096, 4});
  ASSERT_TRUE(pool.ok());
  const SlotPlace first = *pool->take(4096);
  EXPECT_NE(first.generation, 0u);
  EXPECT_TRUE(pool->current(first.slot, first.generation));
  pool->give_back(first.slot);
  EXPECT_FALSE(pool->current(first.slot, first.generation));
  const SlotPlace second = *pool->take(4096);
  EXPECT_EQ(second.slot, first.slot);
  EXPECT_NE(second.generation, first.generation);
  EXPECT_FALSE(pool->current(first.slot, first.generation));
  EXPECT_FALSE(pool->current(99, 1));
}

TEST(SlotPool, take_all_is_all_or_nothing) {
  auto pool = SlotPool::create({4096 * 4, 4096, 4});
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool->take_all(std::array<std::uint64_t, 3>{8192, 4096, 8192}).error().code, Code::busy);
  EXPECT_EQ(pool->slots_used(), 0u);
  EXPECT_EQ(pool->bytes_free(), 4096u * 4);
  EXPECT_TRUE(pool->take_all(std::array<std::uint64_t, 3>{8192, 4096, 4096}).ok());
  EXPECT_EQ(pool->bytes_free(), 0u);
}

TEST(SlotPool, bounds_have_their_own_answers) {
  EXPECT_EQ(SlotPool::create({4096, 8192, 4}).error().code, Code::invalid);
  EXPECT_EQ(SlotPool::create({8192, 100, 4}).error().code, Code::invalid);
  auto pool = SlotPool::create({4096 * 4, 4096, 1});
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool->take(4096 * 5).error().code, Code::invalid);
  EXPECT_EQ(pool->take(0).error().code, Code::invalid);
  EXPECT_TRUE(pool->take(4096).ok());
  EXPECT_EQ(pool->take(4096).error().code, Code::busy);  // no slot number
}

TEST(EntryPool, handles_are_never_zero_and_go_stale) {
  EntryPool pool(2);
  const std::uint32_t a = *pool.take();
  const std::uint32_t b = *pool.take();
  EXPECT_NE(a, 0u);
  EXPECT_NE(a, b);
  EXPECT_EQ(pool.take().error().code, Code::busy);
  pool.give_back(a);
  EXPECT_FALSE(pool.current(a));
  EXPECT_TRUE(pool.current(b));
  const std::uint32_t c = *pool.take();
  EXPECT_EQ(entry_index(c), entry_index(a));
  EXPECT_NE(c, a);
  EXPECT_EQ(pool.used(), 2u);
}

TEST(EntryPool, generation_wraps_past_zero) {
  EntryPool pool(1);
  for (int i = 0; i < 70000; ++i) {
    const std::uint32_t handle = *pool.take();
    ASSERT_NE(entry_generation(handle), 0u);
    pool.give_back(handle);
  }
}

}  // namespace
}  // namespace di::kv
