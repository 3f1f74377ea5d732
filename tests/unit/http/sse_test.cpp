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

std::vector<std::string> events_of(std::string_view body, std::size_t piece) {
  std::vector<std::string> events;
  SseReader reader([&](std::string_view data) { events.emplace_back(data); });
  for (std::size_t at = 0; at < body.size(); at += piece)
    EXPECT_TRUE(reader.push(body.substr(at, piece)).ok());
  return events;
}

TEST(SseReader, EventsHoweverTheyAreCut) {
  const std::string body = sse_event("{\"a\":1}") + std::string(sse_keep_alive) +
                           "event: x\nid: 7\ndata:2\ndata: 3\n\n\n\ndata:\n\ndata: 4\r\n\r\n" +
                           std::string(sse_done) + "data: cut";
  for (const std::size_t piece : {std::size_t{1}, std::size_t{2}, std::size_t{7}, body.size()}) {
    EXPECT_EQ(events_of(body, piece), (std::vector<std::string>{"{\"a\":1}", "2\n3", "", "4", "[DONE]"}))
        << piece;
  }
}

TEST(SseReader, AnEventIsBounded) {
  int events = 0;
  SseReader reader([&](std::string_view) { ++events; });
  const std::string half = "data: " + std::string(sse_event_bytes_max / 2, 'a') + "\n";
  EXPECT_TRUE(reader.push(half + "\n" + half).ok());
  EXPECT_EQ(events, 1);
  EXPECT_EQ(reader.push(half).error().code, Code::no_space);
  SseReader endless([](std::string_view) {});
  EXPECT_EQ(endless.push(std::string(sse_event_bytes_max + 1, 'a')).error().code, Code::no_space);
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
