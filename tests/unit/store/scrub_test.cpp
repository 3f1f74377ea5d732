#include "store/scrub.h"

#include <gtest/gtest.h>

#include "tests/unit/store/shelf.h"

namespace di::store {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr Duration far_away = seconds(60);
constexpr auto hour = std::chrono::hours(1);

// A volume with pages of eight blocks, all written behind, and a scrub of it on a clock of ours.
struct ScrubTest : testing::Test {
  ScrubTest() : loop({.name = "scrub", .manual = &clock}), shelf(64 * mib, 4 * mib) {}

  void fill(std::uint64_t count) {
    for (std::uint64_t stripe = 1; stripe <= count; ++stripe) ASSERT_TRUE(shelf.put(stripe, 8).ok());
    shelf.sync_until_clean();
    column_bytes =
        slot_class_of(shelf.layout, shelf.layout.page_bytes(8)).header_bytes + shelf.layout.page_bytes(8);
  }
  void start(const Scrub::Options& options) {
    pool = *IoPool::create(loop, shelf.disk, {.mode = IoMode::threads, .threads = 1});
    scrub = std::make_unique<Scrub>(
        loop, *shelf.volume, *pool, options,
        Scrub::Hooks{[this] { return busy; },
                     [this](const Read& read, Code code) { bad.emplace_back(read.stripe, code); },
                     [this] { ++beats; }, [] {}});
    settle();
  }
  // What is due runs, and the reads that it began end.
  void settle() { advance(Duration{0}); }
  void advance(Duration by) {
    bool done = false;
    loop.advance(by, [&] { done = true; });
    EXPECT_TRUE(loop.run_until([&] { return done && !scrub->reading(); }, far_away));
  }
  [[nodiscard]] std::uint64_t columns() const { return scrub->counters().columns; }

  ManualClock clock;
  loop::Loop loop;
  Shelf shelf;
  std::unique_ptr<Scrub> scrub;
  std::unique_ptr<IoPool> pool;
  std::vector<std::pair<std::uint64_t, Code>> bad;
  std::uint64_t column_bytes = 0;
  bool busy = false;
  int beats = 0;
};

TEST_F(ScrubTest, a_pass_is_spread_over_its_interval_and_the_next_follows) {
  fill(10);
  start({.interval = 10 * hour});
  // Slots are a little longer than what is read of them, so that a pass ends a little before its interval.
  const Duration step = hour + milliseconds(1);
  EXPECT_EQ(columns(), 1u);
  for (std::uint64_t read = 2; read <= 10; ++read) {
    advance(step / 2);
    EXPECT_EQ(columns(), read - 1);
    advance(step - step / 2);
    EXPECT_EQ(columns(), read);
  }
  EXPECT_EQ(scrub->pass().slots, 10u);
  EXPECT_EQ(scrub->pass().slots_done, 10u);
  advance(step);
  EXPECT_EQ(scrub->counters().passes, 1u);
  EXPECT_EQ(scrub->pass().number, 2u);
  EXPECT_EQ(shelf.volume->stats().reading, 0u);
}

TEST_F(ScrubTest, one_that_was_asked_for_keeps_to_its_rate_and_others_go_first) {
  fill(4);
  start({.interval = Duration{0}, .bytes_per_s = column_bytes});
  advance(24 * hour);
  EXPECT_EQ(columns(), 0u);
  EXPECT_EQ(scrub->pass().number, 0u);
  scrub->start();
  settle();
  EXPECT_EQ(columns(), 1u);
  advance(milliseconds(999));
  EXPECT_EQ(columns(), 1u);
  advance(milliseconds(2));
  EXPECT_EQ(columns(), 2u);
  busy = true;
  advance(seconds(9));
  EXPECT_EQ(columns(), 2u);
  // It does not wait for ever.
  advance(seconds(3));
  EXPECT_EQ(columns(), 3u);
  busy = false;
  advance(seconds(3));
  EXPECT_EQ(columns(), 4u);
  advance(seconds(3));
  EXPECT_FALSE(scrub->pass().running);
  EXPECT_EQ(scrub->counters().passes, 1u);
}

TEST_F(ScrubTest, every_column_is_read_once_wherever_a_pass_begins) {
  fill(13);
  for (int epoch = 0; epoch < 5; ++epoch) {
    scrub.reset();
    pool.reset();
    shelf.sync_until_clean();
    shelf.reopen();  // the next pass begins somewhere else
    start({.interval = 13 * hour});
    for (int i = 0; i < 13; ++i) advance(hour + milliseconds(1));
    EXPECT_EQ(scrub->counters().passes, 1u);
    EXPECT_EQ(columns(), 14u);  // and the first one of the next pass
    EXPECT_TRUE(bad.empty());
  }
}

TEST_F(ScrubTest, it_moves_while_it_has_nothing_to_do_and_counts_what_stays_damaged) {
  fill(3);
  start({.interval = Duration{0}});
  const int before = beats;
  advance(hour);
  EXPECT_GE(beats - before, hour / Scrub::tick_max);
  EXPECT_LT(Scrub::tick_max, Scrub::late_after);
  shelf.disk.flip_bit(shelf.volume->geometry().segment_offset(0) + 4096 + 123456, 2);
  scrub->start();
  for (int i = 0; i < 5; ++i) advance(seconds(1));
  EXPECT_EQ(bad, (std::vector<std::pair<std::uint64_t, Code>>{{1, Code::corrupt}}));
  EXPECT_EQ(scrub->counters().corrupt, 1u);
  EXPECT_EQ(scrub->counters().columns, 3u);
  // Another pass ends the one under way.
  scrub->start();
  settle();
  scrub->start();
  for (int i = 0; i < 5; ++i) advance(seconds(1));
  EXPECT_EQ(scrub->pass().number, 3u);
  EXPECT_EQ(scrub->counters().passes, 2u);
  EXPECT_EQ(scrub->pass().slots_done, 3u);
  scrub->stop();
  scrub->start();
  settle();
  EXPECT_FALSE(scrub->pass().running);
}

}  // namespace
}  // namespace di::store
