#include "base/log.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace di {
namespace {

TEST(Log, LevelsByModule) {
  log_set_level("", LogLevel::info);
  EXPECT_FALSE(log_enabled("kv", LogLevel::debug));
  log_set_level("kv", LogLevel::debug);
  EXPECT_TRUE(log_enabled("kv", LogLevel::debug));
  EXPECT_FALSE(log_enabled("net", LogLevel::debug));
  log_set_level("", LogLevel::info);
  EXPECT_FALSE(log_enabled("kv", LogLevel::debug));
}

TEST(Log, QuotesValuesThatNeedIt) {
  testing::internal::CaptureStderr();
  log_info("test", "quoted value", {{"path", "a b"}, {"count", 3}, {"empty", ""}});
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_NE(line.find("test: quoted value path=\"a b\" count=3 empty=\"\"\n"), std::string::npos) << line;
}

TEST(Log, RepeatsAreHeldBack) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 1000; ++i) log_warn("test", "storm of lines");
  const std::string out = testing::internal::GetCapturedStderr();
  const auto lines = std::count(out.begin(), out.end(), '\n');
  EXPECT_LT(lines, 1000 / 4);
  EXPECT_GE(lines, log_burst_per_s);
}

TEST(Log, ParsesLevels) {
  EXPECT_EQ(*log_level_parse("debug"), LogLevel::debug);
  EXPECT_FALSE(log_level_parse("loud"));
}

}  // namespace
}  // namespace di
