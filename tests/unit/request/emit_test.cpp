#include "request/emit.h"

#include <gtest/gtest.h>

namespace di::request {
namespace {

std::vector<std::uint32_t> take(InOrder& order, std::uint32_t index) {
  auto due = order.take({index, {}, wire::Finish::none});
  EXPECT_TRUE(due);
  std::vector<std::uint32_t> indexes;
  for (const InOrder::Item& item : *due) indexes.push_back(item.index);
  return indexes;
}
using Indexes = std::vector<std::uint32_t>;

TEST(InOrder, EarlyTokensWaitForThoseBefore) {
  InOrder order;
  EXPECT_EQ(take(order, 1), Indexes{});
  EXPECT_EQ(take(order, 3), Indexes{});
  EXPECT_TRUE(order.has_gap());
  EXPECT_EQ(take(order, 0), (Indexes{0, 1}));
  EXPECT_TRUE(order.has_gap());
  EXPECT_EQ(take(order, 2), (Indexes{2, 3}));
  EXPECT_FALSE(order.has_gap());
  EXPECT_EQ(order.next_index(), 4U);
}

TEST(InOrder, RepeatedTokensGiveNothing) {
  InOrder order;
  EXPECT_EQ(take(order, 0), Indexes{0});
  EXPECT_EQ(take(order, 0), Indexes{});
  EXPECT_EQ(take(order, 2), Indexes{});
  EXPECT_EQ(take(order, 2), Indexes{});
  EXPECT_EQ(take(order, 1), (Indexes{1, 2}));
}

TEST(InOrder, WhatWaitedForAnEndedAttemptIsDropped) {
  InOrder order;
  EXPECT_EQ(take(order, 2), Indexes{});
  order.drop_early();
  EXPECT_FALSE(order.has_gap());
  EXPECT_EQ(take(order, 0), Indexes{0});
  EXPECT_EQ(take(order, 1), Indexes{1});
}

TEST(InOrder, WhatWaitsIsBounded) {
  InOrder order;
  for (std::uint32_t i = 1; i <= early_max; ++i) EXPECT_EQ(take(order, i), Indexes{});
  const auto refused = order.take({early_max + 1, {}, wire::Finish::none});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::no_space);
}

}  // namespace
}  // namespace di::request
