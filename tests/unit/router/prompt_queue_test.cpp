#include "prompt_queue.h"

#include <gtest/gtest.h>

#include <vector>

namespace di::router {
namespace {

ReadJob job(const std::string& tenant, std::uint64_t number, std::size_t bytes = 100) {
  ReadJob out;
  out.exchange = {1, number};
  out.key = {tenant, "key"};
  out.body = std::string(bytes, 'x');
  return out;
}

std::uint64_t number_of(const ReadJob& read) {
  return read.exchange.generation;
}

// The order in which one free thread would read what waits.
std::vector<std::uint64_t> order(PromptQueue& queue) {
  std::vector<std::uint64_t> numbers;
  while (auto read = queue.next()) {
    numbers.push_back(number_of(*read));
    queue.done(*read);
  }
  return numbers;
}

TEST(PromptQueue, TenantsTakeTurns) {
  PromptQueue queue;
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(queue.push(job("many", i)));
  ASSERT_TRUE(queue.push(job("one", 10)));
  ASSERT_TRUE(queue.push(job("two", 20)));
  ASSERT_TRUE(queue.push(job("two", 21)));
  EXPECT_EQ(order(queue), (std::vector<std::uint64_t>{0, 10, 20, 1, 21, 2, 3}));
  EXPECT_EQ(queue.jobs(), 0U);
  EXPECT_EQ(queue.bytes(), 0U);
}

TEST(PromptQueue, OneThreadIsKeptFromLongBodies) {
  PromptQueue queue;
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(queue.push(job("long", i, long_body_bytes + 1)));
  std::vector<ReadJob> running;
  while (auto read = queue.next()) running.push_back(*std::move(read));
  ASSERT_EQ(running.size(), static_cast<std::size_t>(reader_threads - 1));
  ASSERT_TRUE(queue.push(job("short", 10, long_body_bytes)));
  const auto short_one = queue.next();
  ASSERT_TRUE(short_one.has_value());
  EXPECT_EQ(number_of(*short_one), 10U);
  ASSERT_TRUE(queue.push(job("short", 11)));
  EXPECT_FALSE(queue.next().has_value()) << "every thread reads";
  queue.done(running.front());
  const auto next_long = queue.next();
  ASSERT_TRUE(next_long.has_value());
  EXPECT_EQ(number_of(*next_long), static_cast<std::uint64_t>(reader_threads - 1))
      << "long ones are not starved";
  queue.done(*short_one);
  EXPECT_EQ(number_of(queue.next().value()), 11U);
}

TEST(PromptQueue, ATenantHoldsAsManyBytesAsItLeaves) {
  constexpr std::size_t piece = reader_bytes_max / 16;
  PromptQueue queue;
  std::size_t held = 0;
  for (std::uint64_t i = 0; queue.push(job("loop", i, piece)); ++i) held += piece;
  EXPECT_EQ(held, reader_bytes_max / 2);
  ReadJob other = job("other", 100, reader_bytes_max / 4);
  ASSERT_TRUE(queue.push(std::move(other))) << "a long body of somebody else still fits";
  ReadJob refused = job("other", 101, piece);
  ASSERT_FALSE(queue.push(std::move(refused)));
  EXPECT_EQ(refused.body.size(), piece);  // NOLINT(bugprone-use-after-move): untouched when refused
  ASSERT_TRUE(queue.push(job("third", 102, piece)));
  EXPECT_EQ(queue.bytes(), reader_bytes_max * 3 / 4 + piece);
}

TEST(PromptQueue, ATenantHoldsAsManyJobsAsItLeaves) {
  PromptQueue queue;
  std::size_t held = 0;
  for (std::uint64_t i = 0; queue.push(job("loop", i, 1)); ++i) ++held;
  EXPECT_EQ(held, reader_jobs_max / 2);
  ASSERT_TRUE(queue.push(job("other", 5000)));
  EXPECT_EQ(queue.jobs(), held + 1);
}

TEST(PromptQueue, WhoLeftIsNotRead) {
  PromptQueue queue;
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(queue.push(job("a", i)));
  ASSERT_TRUE(queue.push(job("b", 10)));
  ASSERT_TRUE(queue.push(job("c", 20, long_body_bytes + 1)));
  queue.drop({1, 1});
  queue.drop({1, 10});
  queue.drop({1, 20});
  queue.drop({1, 99});
  EXPECT_EQ(queue.bytes(), 200U);
  EXPECT_EQ(order(queue), (std::vector<std::uint64_t>{0, 2}));
  ASSERT_TRUE(queue.push(job("b", 11)));
  auto running = queue.next();
  ASSERT_TRUE(running.has_value());
  queue.drop({1, 11});
  EXPECT_EQ(queue.jobs(), 1U) << "what is being read is still held";
  queue.done(*running);
  EXPECT_EQ(queue.jobs(), 0U);
  EXPECT_EQ(queue.bytes(), 0U);
}

// A place of the tenant's goes back with the job, wherever the job ends.
TEST(PromptQueue, AJobOwnsItsTicket) {
  account::Concurrency tickets(2);
  {
    PromptQueue queue;
    for (std::uint64_t i = 0; i < 2; ++i) {
      ReadJob one = job("a", i);
      one.ticket = *tickets.acquire("a");
      ASSERT_TRUE(queue.push(std::move(one)));
    }
    EXPECT_FALSE(tickets.acquire("a").has_value());
    queue.drop({1, 0});
    EXPECT_EQ(tickets.held(), 1U);
  }
  EXPECT_EQ(tickets.held(), 0U);
}

}  // namespace
}  // namespace di::router
