#include "transfer/budget.h"

#include <gtest/gtest.h>

#include <array>

namespace di::transfer {
namespace {

constexpr std::uint64_t unit = 1 << 20;

// Bytes per class after `units` units with every class of `backlog` always ready.
std::array<std::uint64_t, classes> share(Budget& budget, int units,
                                         std::array<std::uint64_t, classes> heads) {
  std::array<std::uint64_t, classes> sent{};
  Budget::Heads ready{};
  for (std::size_t i = 0; i < classes; ++i) ready[i] = {heads[i], heads[i] != 0};
  for (int i = 0; i < units; ++i) {
    const auto cls = budget.take(ready, Instant{});
    if (!cls) break;
    sent[static_cast<std::size_t>(*cls)] += heads[static_cast<std::size_t>(*cls)];
  }
  return sent;
}

TEST(BudgetTest, bytes_follow_the_weights) {
  Budget budget({});
  const auto sent = share(budget, 7000, {unit, unit, unit});
  EXPECT_NEAR(static_cast<double>(sent[0]) / unit, 4000, 8);
  EXPECT_NEAR(static_cast<double>(sent[1]) / unit, 2000, 8);
  EXPECT_NEAR(static_cast<double>(sent[2]) / unit, 1000, 8);
}

TEST(BudgetTest, bytes_count_and_not_units) {
  Budget budget({});
  const auto sent = share(budget, 100000, {4096, unit, 100});
  EXPECT_NEAR(static_cast<double>(sent[0]) / static_cast<double>(sent[1]), 2.0, 0.1);
  EXPECT_NEAR(static_cast<double>(sent[0]) / static_cast<double>(sent[2]), 4.0, 0.2);
}

TEST(BudgetTest, idle_classes_cost_nothing_and_save_nothing) {
  Budget budget({});
  const auto alone = share(budget, 1000, {0, 0, unit});
  EXPECT_EQ(alone[2], 1000 * unit);
  const auto sent = share(budget, 14, {unit, unit, unit});
  EXPECT_NEAR(static_cast<double>(sent[0]) / unit, 8, 1);
  EXPECT_EQ(share(budget, 10, {0, 0, 0}), (std::array<std::uint64_t, classes>{}));
}

// The windows of a busy peer open for one unit at a time: between them nothing can go.
TEST(BudgetTest, waiting_for_a_window_loses_no_turn) {
  Budget budget({});
  std::array<int, classes> sent{};
  Budget::Heads ready{};
  Budget::Heads full{};
  for (std::size_t i = 0; i < classes; ++i) {
    ready[i] = {unit, true};
    full[i] = {0, true};
  }
  for (int i = 0; i < 700; ++i) {
    const auto cls = budget.take(ready, Instant{});
    ASSERT_TRUE(cls.has_value());
    ++sent[static_cast<std::size_t>(*cls)];
    ASSERT_FALSE(budget.take(full, Instant{}).has_value());
  }
  EXPECT_NEAR(sent[0], 400, 5);
  EXPECT_NEAR(sent[1], 200, 5);
  EXPECT_NEAR(sent[2], 100, 5);
}

TEST(BudgetTest, rate_holds_over_time_and_a_pause_saves_one_burst) {
  Budget::Options options;
  options.bytes_per_s = 10 * unit;
  options.burst_bytes = 2 * unit;
  Budget budget(options);
  Budget::Heads heads{};
  heads[1] = {unit, true};
  const auto drain = [&](Instant now) {
    int count = 0;
    while (budget.take(heads, now)) ++count;
    return count;
  };
  Instant now{1000};
  EXPECT_EQ(drain(now), 2);
  EXPECT_GT(budget.ready_at(now), now);
  int sent = 0;
  for (int i = 0; i < 1000; ++i) {
    now = now + milliseconds(10);
    sent += drain(now);
  }
  EXPECT_NEAR(sent, 100, 2);
  now = now + seconds(3600);
  EXPECT_LE(drain(now), 3);
}

TEST(BudgetTest, ready_at_is_when_a_unit_goes) {
  Budget::Options options;
  options.bytes_per_s = unit;
  options.burst_bytes = 1;
  Budget budget(options);
  Budget::Heads heads{};
  heads[0] = {unit, true};
  Instant now{1};
  ASSERT_TRUE(budget.take(heads, now));
  for (int i = 0; i < 5; ++i) {
    const Instant at = budget.ready_at(now);
    EXPECT_NEAR(static_cast<double>((at - now).count()), 1e9, 1e4);
    EXPECT_FALSE(budget.take(heads, at - microseconds(10)));
    ASSERT_TRUE(budget.take(heads, at));
    now = at;
  }
}

}  // namespace
}  // namespace di::transfer
