#include "rank/credit.h"

#include <gtest/gtest.h>

namespace di::rank {
namespace {

std::map<std::string, wire::rank_credit> changed(CreditBook& book) {
  std::map<std::string, wire::rank_credit> all;
  book.take_changed([&](const std::string& router, std::uint32_t, const wire::rank_credit& credit) {
    all[router] = credit;
  });
  return all;
}

TEST(CreditBook, GrantsAreTotalsThatFollowTheFreeRoom) {
  CreditBook book;
  book.open("r0", 1);
  book.grant(4, 1000);
  auto credits = changed(book);
  EXPECT_EQ(credits["r0"].granted_requests, 4U);
  EXPECT_EQ(credits["r0"].granted_us, 1000U);
  EXPECT_EQ(credits["r0"].seq, 1U);
  EXPECT_TRUE(changed(book).empty());
  book.take("r0", 1, 300);
  book.grant(3, 700);  // the room it takes is gone
  credits = changed(book);
  EXPECT_EQ(credits["r0"].granted_requests, 4U);
  EXPECT_EQ(credits["r0"].granted_us, 1000U);
  EXPECT_EQ(credits["r0"].last_bind, 1U);
  EXPECT_EQ(book.open_requests(), 3U);
  book.grant(4, 1000);  // and back when the request is over
  credits = changed(book);
  EXPECT_EQ(credits["r0"].granted_requests, 5U);
  EXPECT_EQ(credits["r0"].granted_us, 1300U);
}

TEST(CreditBook, WhatOneRouterFilledStayedOpenForTheOther) {
  CreditBook book;
  book.open("r0", 1);
  book.open("r1", 1);
  book.grant(16, 1600);
  EXPECT_EQ(changed(book)["r1"].granted_requests, 8U);
  std::uint32_t free = 16;
  for (std::uint64_t bind = 1; bind <= 16; ++bind) {
    book.take("r0", bind, 100);
    --free;
    book.grant(free, free * 100);
    // At most what each may try of the rest.
    EXPECT_LE(book.open_requests(), free + 1) << bind;
  }
  const auto full = changed(book);
  EXPECT_EQ(full.at("r1").granted_requests, 0U);
  EXPECT_EQ(full.at("r1").granted_us, 0U);
  EXPECT_EQ(full.at("r0").granted_requests, 16U);
  EXPECT_EQ(full.at("r0").granted_us, 1600U);
  EXPECT_EQ(book.open_requests(), 0U);
  book.grant(1, 100);  // each may try for it
  const auto one = changed(book);
  EXPECT_EQ(one.at("r0").granted_requests, 17U);
  EXPECT_EQ(one.at("r1").granted_requests, 1U);
  // A bind that was on its way is refused, and counts.
  book.take("r1", 1, 100);
  book.grant(0, 0);
  EXPECT_EQ(changed(book).at("r1").granted_requests, 1U);
}

TEST(CreditBook, RoutersShareTheRoomAndEachMayTry) {
  CreditBook book;
  book.open("r0", 1);
  book.open("r1", 1);
  book.open("r2", 1);
  book.grant(4, 10);
  for (const auto& [router, credit] : changed(book)) {
    EXPECT_EQ(credit.granted_requests, 2U) << router;
    EXPECT_EQ(credit.granted_us, 4U) << router;
  }
  book.close("r1");
  book.close("r2");
  book.grant(4, 10);
  EXPECT_EQ(changed(book)["r0"].granted_requests, 4U);
}

TEST(CreditBook, AReturningRouterStartsOver) {
  CreditBook book;
  book.open("r0", 1);
  book.grant(2, 100);
  book.take("r0", 7, 50);
  static_cast<void>(changed(book));
  book.open("r0", 2);
  book.grant(2, 100);
  const auto credit = changed(book)["r0"];
  EXPECT_EQ(credit.seq, 1U);
  EXPECT_EQ(credit.granted_requests, 2U);
  EXPECT_EQ(credit.last_bind, 0U);
  book.take("nobody", 1, 1);  // no account, no effect
  EXPECT_EQ(book.open_requests(), 2U);
}

TEST(CreditBook, RoutersAreBounded) {
  CreditBook book;
  for (std::size_t i = 0; i <= routers_max; ++i) book.open("r" + std::to_string(i), 1);
  book.grant(1, 1);
  EXPECT_EQ(changed(book).size(), routers_max);
}

}  // namespace
}  // namespace di::rank
