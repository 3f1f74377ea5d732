#include "loop/loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace di::loop {
namespace {

struct Pipe {
  Pipe() {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    read = Fd(ends[0]);
    write = Fd(ends[1]);
  }
  Fd read;
  Fd write;
};

TEST(Loop, PostsRunInOrderAndInALaterTurn) {
  Loop loop;
  std::string seen;
  loop.post("a", [&] {
    seen += 'a';
    loop.post("c", [&] { seen += 'c'; });
  });
  loop.post("b", [&] { seen += 'b'; });
  EXPECT_EQ(seen, "");
  while (loop.run_ready() > 0) {
  }
  EXPECT_EQ(seen, "abc");
}

TEST(Loop, StopFromAnotherThreadEndsRunEvenBeforeItBegan) {
  Loop loop;
  loop.stop();
  loop.run();
  std::thread other([&] { loop.stop(); });
  loop.run();
  other.join();
}

TEST(Loop, TurnEndHookRunsOncePerTurnNotPerHandler) {
  Loop loop;
  int handlers = 0;
  int ends = 0;
  loop.on_turn_end([&] { ++ends; });
  for (int i = 0; i < 10; ++i) loop.post("p", [&] { ++handlers; });
  loop.run_ready();
  EXPECT_EQ(handlers, 10);
  EXPECT_EQ(ends, 1);
  loop.run_ready();
  EXPECT_EQ(ends, 1) << "a turn without handlers has no end";
}

TEST(Loop, ATurnIsBounded) {
  Loop loop;
  int ran = 0;
  for (int i = 0; i < loop_turn_handlers_max * 2; ++i) loop.post("p", [&] { ++ran; });
  EXPECT_EQ(loop.run_ready(), loop_turn_handlers_max);
  EXPECT_EQ(ran, loop_turn_handlers_max);
}

TEST(Loop, LongTurnIsCountedAsStall) {
  Loop::Options options;
  options.stall = Duration(0);
  Loop loop(options);
  loop.post("slow", [] {});
  loop.run_ready();
  EXPECT_EQ(loop.stalls(), 1u);
  EXPECT_EQ(loop.turn_us().count(), 1u);
}

TEST(Timer, RealTimersFireInOrderOfDeadline) {
  Loop loop;
  std::string seen;
  Timer late(loop, TimerKind::product, "late", [&] { seen += 'l'; });
  Timer early(loop, TimerKind::liveness, "early", [&] { seen += 'e'; });
  late.start_after(milliseconds(3));
  early.start_after(milliseconds(1));
  EXPECT_TRUE(loop.run_until([&] { return seen.size() == 2; }, seconds(10)));
  EXPECT_EQ(seen, "el");
  EXPECT_FALSE(late.armed());
}

TEST(Timer, RestartAndDestructionForgetTheEarlierDeadline) {
  Loop loop;
  int fired = 0;
  Timer end(loop, TimerKind::liveness, "end", [&] { fired += 100; });
  Timer moved(loop, TimerKind::liveness, "moved", [&] { ++fired; });
  {
    Timer gone(loop, TimerKind::liveness, "gone", [&] { fired += 10; });
    gone.start_after(Duration(0));
  }
  moved.start_after(Duration(0));
  moved.start_after(std::chrono::hours(1));
  end.start_after(milliseconds(1));
  EXPECT_TRUE(loop.run_until([&] { return fired >= 100; }, seconds(10)));
  EXPECT_EQ(fired, 100);
  moved.start_at(instant_never);
  EXPECT_FALSE(moved.armed());
}

TEST(Timer, CallbackMayDestroyItsTimer) {
  Loop loop;
  bool fired = false;
  std::unique_ptr<Timer> timer;
  timer = std::make_unique<Timer>(loop, TimerKind::liveness, "self", [&] {
    timer.reset();
    fired = true;
  });
  timer->start_after(Duration(0));
  EXPECT_TRUE(loop.run_until([&] { return fired; }, seconds(10)));
}

TEST(Timer, PeriodicRepeatsUntilCancelled) {
  Loop loop;
  int fired = 0;
  Timer timer(loop, TimerKind::liveness, "tick", [&] {
    if (++fired == 3) timer.cancel();
  });
  timer.start_every(microseconds(200));
  EXPECT_TRUE(loop.run_until([&] { return fired == 3; }, seconds(10)));
  EXPECT_FALSE(timer.armed());
}

struct ManualLoop : testing::Test {
  ManualClock clock;
  Loop loop{[this] {
    Loop::Options options;
    options.manual = &clock;
    return options;
  }()};

  void advance(Duration by) {
    bool done = false;
    loop.advance(by, [&] { done = true; });
    ASSERT_TRUE(loop.run_until([&] { return done; }, seconds(10)));
  }
};

TEST_F(ManualLoop, ProductTimersWaitForAdvanceAndSeeTheirOwnTime) {
  std::vector<std::int64_t> seen_ms;
  const Instant start = loop.now();
  Timer a(loop, TimerKind::product, "a", [&] { seen_ms.push_back(to_ms(loop.now() - start)); });
  Timer b(loop, TimerKind::product, "b", [&] { seen_ms.push_back(to_ms(loop.now() - start)); });
  a.start_after(milliseconds(20));
  b.start_after(milliseconds(10));
  while (loop.run_ready() > 0) {
  }
  EXPECT_TRUE(seen_ms.empty());
  advance(milliseconds(15));
  EXPECT_EQ(seen_ms, (std::vector<std::int64_t>{10}));
  advance(milliseconds(15));
  EXPECT_EQ(seen_ms, (std::vector<std::int64_t>{10, 20}));
  EXPECT_EQ(to_ms(loop.now() - start), 30);
}

TEST_F(ManualLoop, AdvanceRunsWhatTimersPostAndArmOnTheWay) {
  int fired = 0;
  Timer chain(loop, TimerKind::product, "chain", [&] {
    ++fired;
    loop.post("again", [&] { chain.start_after(milliseconds(1)); });
  });
  chain.start_after(milliseconds(1));
  advance(milliseconds(5));
  EXPECT_EQ(fired, 5);
}

TEST_F(ManualLoop, PeriodicFiresOncePerPeriod) {
  int fired = 0;
  Timer tick(loop, TimerKind::product, "tick", [&] { ++fired; });
  tick.start_every(milliseconds(10));
  advance(milliseconds(100));
  EXPECT_EQ(fired, 10);
}

TEST_F(ManualLoop, DueTimerNeedsNoAdvance) {
  bool fired = false;
  Timer now(loop, TimerKind::product, "now", [&] { fired = true; });
  now.start_after(Duration(0));
  EXPECT_TRUE(loop.run_until([&] { return fired; }, seconds(10)));
}

TEST_F(ManualLoop, LivenessTimersIgnoreTheManualClock) {
  bool live = false;
  Timer alive(loop, TimerKind::liveness, "alive", [&] { live = true; });
  alive.start_after(std::chrono::hours(1));
  advance(std::chrono::hours(2));
  EXPECT_FALSE(live);
  alive.start_after(milliseconds(1));
  EXPECT_TRUE(loop.run_until([&] { return live; }, seconds(10)));
}

TEST_F(ManualLoop, AdvancesQueueUp) {
  std::string seen;
  const Instant start = loop.now();
  loop.advance(milliseconds(1), [&] { seen += 'a'; });
  loop.advance(milliseconds(2), [&] { seen += 'b'; });
  EXPECT_TRUE(loop.run_until([&] { return seen == "ab"; }, seconds(10)));
  EXPECT_EQ(to_ms(loop.now() - start), 3);
}

TEST(Watch, UnreadBytesCallAgain) {
  Loop loop;
  Pipe pipe;
  ASSERT_EQ(::write(pipe.write.get(), "abc", 3), 3);
  std::string seen;
  Watch watch(loop, pipe.read.get(), "pipe");
  watch.on_readable([&] {
    char c = 0;
    if (::read(pipe.read.get(), &c, 1) == 1) seen += c;
  });
  EXPECT_TRUE(loop.run_until([&] { return seen == "abc"; }, seconds(10)));
}

// E03: what has arrived counts before the deadline that has passed meanwhile.
TEST(Watch, WhatIsReadableComesBeforeATimerThatIsDue) {
  Loop loop;
  Pipe pipe;
  std::string order;
  Watch watch(loop, pipe.read.get(), "pipe");
  watch.on_readable([&] {
    char c;
    if (::read(pipe.read.get(), &c, 1) == 1) order += c;
  });
  while (loop.run_ready() > 0) {
  }
  Timer deadline(loop, TimerKind::liveness, "deadline", [&] { order += 'T'; });
  deadline.start_after(milliseconds(1));
  const Instant due = deadline.at();
  ASSERT_EQ(::write(pipe.write.get(), "a", 1), 1);
  while (loop.monotonic_now() < due + milliseconds(5)) {  // the loop is busy elsewhere
  }
  ASSERT_TRUE(loop.run_until([&] { return order.size() == 2; }, seconds(10)));
  EXPECT_EQ(order, "aT");
}

TEST(Watch, StoppedSideIsSilentAndCanComeBack) {
  Loop loop;
  Pipe pipe;
  int calls = 0;
  Watch watch(loop, pipe.read.get(), "pipe");
  watch.on_readable([&] { ++calls; });
  watch.on_readable(nullptr);
  ASSERT_EQ(::write(pipe.write.get(), "a", 1), 1);
  while (loop.run_ready() > 0) {
  }
  EXPECT_EQ(calls, 0);
  watch.on_readable([&] {
    ++calls;
    watch.on_readable(nullptr);
  });
  EXPECT_TRUE(loop.run_until([&] { return calls == 1; }, seconds(10)));
}

TEST(Watch, HangUpShowsAsReadable) {
  Loop loop;
  Pipe pipe;
  bool called = false;
  Watch watch(loop, pipe.read.get(), "pipe");
  watch.on_readable([&] {
    called = true;
    watch.on_readable(nullptr);
  });
  pipe.write.reset();
  EXPECT_TRUE(loop.run_until([&] { return called; }, seconds(10)));
}

TEST(Watch, WritableAndReadableOnOneDescriptor) {
  Loop loop;
  Pipe pipe;
  bool writable = false;
  Watch watch(loop, pipe.write.get(), "pipe");
  watch.on_writable([&] {
    writable = true;
    watch.on_writable(nullptr);
  });
  EXPECT_TRUE(loop.run_until([&] { return writable; }, seconds(10)));
}

TEST(Watch, CallbackMayDestroyItsWatchAndTheDescriptorStaysOpen) {
  Loop loop;
  Pipe pipe;
  ASSERT_EQ(::write(pipe.write.get(), "a", 1), 1);
  int calls = 0;
  auto watch = std::make_unique<Watch>(loop, pipe.read.get(), "pipe");
  watch->on_readable([&] {
    ++calls;
    watch.reset();
  });
  EXPECT_TRUE(loop.run_until([&] { return calls == 1; }, seconds(10)));
  while (loop.run_ready() > 0) {
  }
  EXPECT_EQ(calls, 1);
  char c = 0;
  EXPECT_EQ(::read(pipe.read.get(), &c, 1), 1);
  // The same descriptor can be watched again.
  Watch again(loop, pipe.read.get(), "pipe");
  again.on_readable([&] {
    ++calls;
    again.on_readable(nullptr);
  });
  ASSERT_EQ(::write(pipe.write.get(), "a", 1), 1);
  EXPECT_TRUE(loop.run_until([&] { return calls == 2; }, seconds(10)));
}

}  // namespace
}  // namespace di::loop
