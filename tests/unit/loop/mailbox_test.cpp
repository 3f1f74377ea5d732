#include "loop/mailbox.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace di::loop {
namespace {

TEST(Mailbox, RefusesWhenFullAndLeavesTheItem) {
  Mailbox<std::unique_ptr<int>> box(2);
  EXPECT_TRUE(box.try_push(std::make_unique<int>(1)));
  EXPECT_TRUE(box.try_push(std::make_unique<int>(2)));
  auto third = std::make_unique<int>(3);
  EXPECT_FALSE(box.try_push(std::move(third)));
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(**box.try_pop(), 1);
  EXPECT_TRUE(box.try_push(std::move(third)));
}

TEST(Mailbox, ClosedRefusesPushesAndGivesWhatIsInside) {
  Mailbox<int> box(4);
  EXPECT_TRUE(box.try_push(1));
  box.close();
  EXPECT_FALSE(box.try_push(2));
  EXPECT_EQ(box.pop_wait(), 1);
  EXPECT_EQ(box.pop_wait(), std::nullopt);
}

TEST(Mailbox, ManyThreadsToOneWorker) {
  constexpr int senders = 4;
  constexpr int each = 2000;
  Mailbox<int> box(64);
  std::int64_t sum = 0;
  std::thread worker([&] {
    while (std::optional<int> item = box.pop_wait()) sum += *item;
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < senders; ++t) {
    threads.emplace_back([&] {
      for (int i = 1; i <= each;) {
        if (box.try_push(int{i})) {
          ++i;
        } else {
          std::this_thread::yield();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  box.close();
  worker.join();
  EXPECT_EQ(sum, std::int64_t{senders} * each * (each + 1) / 2);
}

TEST(MailboxReader, HandsItemsToTheLoopThreadInOrder) {
  constexpr int count = 1000;
  Loop loop;
  Mailbox<int> box(16);
  int next = 0;
  MailboxReader<int> reader(loop, box, "box", [&](int&& item) {
    EXPECT_EQ(item, next);
    ++next;
  });
  std::thread sender([&] {
    for (int i = 0; i < count;) {
      if (box.try_push(int{i})) {
        ++i;
      } else {
        std::this_thread::yield();
      }
    }
  });
  EXPECT_TRUE(loop.run_until([&] { return next == count; }, seconds(20)));
  sender.join();
}

TEST(MailboxReader, ClosedAndEmptyDoesNotSpin) {
  Loop loop;
  Mailbox<int> box(4);
  int seen = 0;
  MailboxReader<int> reader(loop, box, "box", [&](int&& item) { seen += item; });
  EXPECT_TRUE(box.try_push(7));
  box.close();
  EXPECT_TRUE(loop.run_until([&] { return seen == 7; }, seconds(10)));
  for (int i = 0; i < 3; ++i) loop.run_ready();
  EXPECT_EQ(loop.run_ready(), 0);
}

}  // namespace
}  // namespace di::loop
