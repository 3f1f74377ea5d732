#include "account/quota.h"

#include <gtest/gtest.h>

namespace di::account {
namespace {

TEST(Concurrency, TicketsComeBackOnEveryPath) {
  Concurrency book(2);
  {
    auto a = book.acquire("t");
    auto b = book.acquire("t");
    ASSERT_TRUE(a && b);
    EXPECT_FALSE(book.acquire("t"));
    EXPECT_TRUE(book.acquire("other"));  // and goes back at once
    EXPECT_EQ(book.held(), 2U);
    Ticket moved = *std::move(a);
    EXPECT_EQ(book.held(), 2U);
    moved = *std::move(b);  // the first place is given back, the second kept
    EXPECT_EQ(book.held(), 1U);
    moved.release();
    moved.release();
    EXPECT_EQ(book.held(), 0U);
  }
  EXPECT_EQ(book.held(), 0U);
}

}  // namespace
}  // namespace di::account
