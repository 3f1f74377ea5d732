#include "store/io.h"

#include <gtest/gtest.h>

#include <future>

namespace di::store {
namespace {

TEST(IoPool, reports_of_a_task_come_in_order_on_the_loop_thread) {
  loop::Loop loop;
  IoPool pool(loop, {.readers = 3, .queue_max = 64});
  const auto here = std::this_thread::get_id();
  std::vector<std::vector<int>> seen(20);
  for (std::size_t task = 0; task < seen.size(); ++task) {
    ASSERT_TRUE(pool.read(1,
                          [&, task](IoPool::Context& context) {
                            for (int i = 0; i < 8; ++i) {
                              context.report([&, task, i] {
                                EXPECT_EQ(std::this_thread::get_id(), here);
                                seen[task].push_back(i);
                              });
                            }
                          })
                    .ok());
  }
  ASSERT_TRUE(loop.run_until(
      [&] { return std::all_of(seen.begin(), seen.end(), [](const auto& s) { return s.size() == 8; }); },
      seconds(30)));
  for (const auto& s : seen) EXPECT_EQ(s, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
}

// The order of writes carries meaning: one thread, first in first out.
TEST(IoPool, writes_run_in_order) {
  loop::Loop loop;
  IoPool pool(loop, {.readers = 1, .queue_max = 256});
  std::vector<int> ran;
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(pool.write([&ran, i](IoPool::Context&) { ran.push_back(i); }).ok());
  }
  bool ended = false;
  ASSERT_TRUE(pool.write([&](IoPool::Context& context) { context.report([&] { ended = true; }); }).ok());
  ASSERT_TRUE(loop.run_until([&] { return ended; }, seconds(30)));
  ASSERT_EQ(ran.size(), 200u);
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
}

TEST(IoPool, urgent_reads_overtake_bulk_and_a_full_queue_is_busy) {
  loop::Loop loop;
  IoPool pool(loop, {.readers = 1, .queue_max = 4});
  std::promise<void> started;
  std::promise<void> gate;
  auto opened = gate.get_future();
  std::vector<int> order;
  ASSERT_TRUE(pool.read(0,
                        [&](IoPool::Context&) {
                          started.set_value();
                          opened.wait();
                        })
                  .ok());
  started.get_future().wait();
  int done = 0;
  const auto task = [&](int number) {
    return [&, number](IoPool::Context& context) {
      order.push_back(number);
      context.report([&] { ++done; });
    };
  };
  EXPECT_TRUE(pool.read(2, task(22)).ok());
  EXPECT_TRUE(pool.read(1, task(11)).ok());
  EXPECT_TRUE(pool.read(0, task(1)).ok());
  EXPECT_TRUE(pool.read(200, task(23)).ok());  // unknown priorities are bulk
  EXPECT_EQ(pool.read(0, task(99)).error().code, Code::busy);
  gate.set_value();
  ASSERT_TRUE(loop.run_until([&] { return done == 4; }, seconds(30)));
  EXPECT_EQ(order, (std::vector<int>{1, 11, 22, 23}));
}

TEST(IoPool, destruction_runs_what_is_queued) {
  std::atomic<int> ran{0};
  {
    loop::Loop loop;
    IoPool pool(loop, {.readers = 2, .queue_max = 64});
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(pool.read(1,
                            [&](IoPool::Context& context) {
                              ++ran;
                              context.report([] {});
                            })
                      .ok());
    }
  }
  EXPECT_EQ(ran.load(), 50);
}

}  // namespace
}  // namespace di::store
