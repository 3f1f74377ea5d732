#include "loop/signal.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace di::loop {
namespace {

TEST(Signals, ArriveAsEvents) {
  signals_block({SIGUSR2});
  Loop loop;
  int seen = 0;
  Signals signals(loop, {SIGUSR2}, [&](int signal) { seen = signal; });
  EXPECT_FALSE(signals_waiting({SIGUSR1, SIGUSR2}));
  ASSERT_EQ(::raise(SIGUSR2), 0);
  EXPECT_TRUE(signals_waiting({SIGUSR1, SIGUSR2}));
  EXPECT_FALSE(signals_waiting({SIGUSR1}));
  EXPECT_TRUE(loop.run_until([&] { return seen == SIGUSR2; }, seconds(10)));
  EXPECT_FALSE(signals_waiting({SIGUSR2}));
}

}  // namespace
}  // namespace di::loop
