#include "base/result.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>

namespace di {
namespace {

Status fails() {
  return Error{Code::busy, 0, "no block free"};
}
Result<int> passes_on() {
  DI_TRY(fails());
  return 1;
}

TEST(Result, ValueOrError) {
  const Result<std::string> good = std::string("x");
  EXPECT_TRUE(good.ok());
  EXPECT_EQ(*good, "x");
  EXPECT_EQ(passes_on().error().code, Code::busy);
  EXPECT_DEATH((void)good.error(), "assertion failed");
}

TEST(Error, GrowsOutwardAndMapsErrno) {
  EXPECT_EQ(errno_error("open /x", ENOENT).in("di-kvd").message,
            "di-kvd: open /x: No such file or directory");
  EXPECT_EQ(errno_error("write", ENOSPC).code, Code::no_space);
  EXPECT_EQ(errno_error("write", EIO).code, Code::io);
}

TEST(Code, EveryCodeHasAName) {
  for (int i = 0; i <= static_cast<int>(Code::stale); ++i)
    EXPECT_NE(code_name(static_cast<Code>(i)), "unknown");
}

}  // namespace
}  // namespace di
