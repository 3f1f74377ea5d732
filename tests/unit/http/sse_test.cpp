#include "http/sse.h"

#include <gtest/gtest.h>

namespace di::http {
namespace {

TEST(Sse, AnEventIsOneLineAndAnEmptyOne) {
  EXPECT_EQ(sse_event("{\"a\":1}"), "data: {\"a\":1}\n\n");
  EXPECT_EQ(sse_done, "data: [DONE]\n\n");
  EXPECT_EQ(sse_keep_alive.substr(0, 1), ":");
  EXPECT_EQ(sse_keep_alive.substr(sse_keep_alive.size() - 2), "\n\n");
}

TEST(Sse, HeadersAreExact) {
  Headers lower;
  for (const auto& [name, value] : sse_headers()) {
    std::string key;
    for (const char c : name) key.push_back(static_cast<char>(std::tolower(c)));
    lower.emplace_back(key, value);
  }
  EXPECT_EQ(header_find(lower, "content-type"), "text/event-stream") << "aiperf compares the whole value";
  EXPECT_EQ(header_find(lower, "cache-control"), "no-cache");
  EXPECT_EQ(header_find(lower, "x-accel-buffering"), "no");
}

// A11: 25 s of silence with an interval of 5 s.
TEST(KeepAlive, A11CommentsComeAtEachInterval) {
  const Instant start{1'000'000'000};
  KeepAlive keep_alive(seconds(5), start);
  int comments = 0;
  for (Instant now = start; now < start + seconds(25); now = now + milliseconds(100)) {
    if (now < keep_alive.due()) continue;
    ++comments;
    keep_alive.sent(now);
  }
  EXPECT_EQ(comments, 4);
}

TEST(KeepAlive, BytesPutTheCommentOff) {
  const Instant start{0};
  KeepAlive keep_alive(keep_alive_interval_default, start);
  EXPECT_EQ(keep_alive.due(), start + seconds(15)) << "none before 15 s";
  keep_alive.sent(start + seconds(14));
  EXPECT_EQ(keep_alive.due(), start + seconds(29));
}

TEST(KeepAlive, ZeroTurnsThemOff) {
  EXPECT_EQ(KeepAlive(Duration(0), Instant{5}).due(), instant_never);
}

}  // namespace
}  // namespace di::http
