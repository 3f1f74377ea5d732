// Clients that read a stream or a long answer, slowly or not at all, and that leave.
#include "http/sse.h"
#include "tests/unit/http/server_fixture.h"

namespace di::http {
namespace {

TEST_F(ServerTest, AStreamIsChunkedWithOneSendPerEvent) {
  Peer peer(loop_, address_);
  peer.send(get);
  const ExchangeId id = request();
  EXPECT_TRUE(server_->start_stream(id, 200, sse_headers(), sse_event("1")));
  const std::string head = peer.read_to("\r\n\r\n");
  EXPECT_EQ(head.substr(0, 17), "HTTP/1.1 200 OK\r\n");
  EXPECT_NE(head.find("Content-Type: text/event-stream\r\n"), std::string::npos);
  EXPECT_NE(head.find("Transfer-Encoding: chunked\r\n"), std::string::npos);
  EXPECT_EQ(head.find("Content-Length"), std::string::npos);
  EXPECT_EQ(peer.read_to("\n\n\r\n"), "9\r\ndata: 1\n\n\r\n");
  EXPECT_TRUE(server_->write(id, sse_event("22")));
  EXPECT_EQ(peer.read_to("\n\n\r\n"), "a\r\ndata: 22\n\n\r\n");
  EXPECT_TRUE(server_->write(id, "")) << "no bytes are no chunk: an empty one would end the body";
  EXPECT_TRUE(server_->finish(id, sse_done));
  EXPECT_EQ(peer.read_to("0\r\n\r\n"), "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
  EXPECT_FALSE(server_->write(id, "late"));
  peer.send(get);  // the connection lives on
  EXPECT_TRUE(server_->respond(request(), {.status = 200, .headers = {}, .body = "1"}));
  peer.read_answer();
  EXPECT_TRUE(handler_.gone.empty());
}

// A10: an error after the first byte is an event, and the body ends without its end.
TEST_F(ServerTest, A10AnAbortedStreamIsTruncated) {
  Peer peer(loop_, address_);
  peer.send(get);
  const ExchangeId id = request();
  server_->start_stream(id, 200, sse_headers(), sse_event("1"));
  server_->abort(id, sse_event("{\"error\":{}}"));
  const std::string all = peer.read_all();
  EXPECT_NE(all.find("data: {\"error\":{}}\n\n\r\n"), std::string::npos);
  EXPECT_EQ(all.find("0\r\n\r\n"), std::string::npos);
  EXPECT_EQ(all.find("[DONE]"), std::string::npos);
  EXPECT_EQ(server_->exchanges(), 0U);
  EXPECT_TRUE(handler_.gone.empty()) << "the handler ended it itself";
}

TEST_F(ServerTest, AbortBeforeAnAnswerClosesTheConnection) {
  Peer peer(loop_, address_);
  peer.send(get);
  EXPECT_TRUE(server_->abort(request()));
  EXPECT_EQ(peer.read_all(), "");
}

TEST_F(ServerTest, AClientThatLeavesIsNoticedWhileNothingIsSent) {
  for (const bool reset : {false, true}) {
    for (const bool streaming : {false, true}) {
      Peer peer(loop_, address_);
      peer.send(get);
      const ExchangeId id = request();
      if (streaming) {
        server_->start_stream(id, 200, sse_headers(), sse_event("1"));
        peer.read_to("\n\n\r\n");
      }
      handler_.gone.clear();
      reset ? peer.reset() : peer.leave();
      ASSERT_TRUE(until([&] { return !handler_.gone.empty(); }));
      EXPECT_EQ(handler_.gone[0].first, id);
      EXPECT_EQ(handler_.gone[0].second, Gone::client_left);
      EXPECT_EQ(handler_.gone.size(), 1U);
      EXPECT_FALSE(server_->write(id, "x"));
      EXPECT_FALSE(server_->respond(id, {}));
      EXPECT_EQ(server_->exchanges(), 0U);
      EXPECT_EQ(server_->connections(), 0U);
    }
  }
  EXPECT_EQ(server_->counters().clients_left, 4U);
}

TEST_F(ServerTest, ALeaveBehindAFullPipelineIsNoticedWithTheTick) {
  Peer peer(loop_, address_);
  peer.send(get);
  const ExchangeId id = request();
  peer.send(std::string(100 << 10, 'G'));
  peer.leave();
  ASSERT_TRUE(until([&] {
    loop_.advance(milliseconds(100), [] {});
    return !handler_.gone.empty();
  }));
  EXPECT_EQ(handler_.gone[0].first, id);
}

TEST_F(ServerTest, AHalfCloseIsALeaveUnlessConfiguredOtherwise) {
  {
    Peer peer(loop_, address_);
    peer.send(get);
    request();
    peer.half_close();
    ASSERT_TRUE(until([&] { return handler_.gone.size() == 1; }));
  }
  server_.reset();
  make({.half_close_is_leave = false});
  Peer peer(loop_, address_);
  peer.send(get);
  const ExchangeId id = request();
  peer.half_close();
  for (int i = 0; i < 50; ++i) loop_.run_ready();
  EXPECT_TRUE(server_->start_stream(id, 200, sse_headers(), sse_event("1")));
  EXPECT_TRUE(server_->finish(id));
  EXPECT_NE(peer.read_all().find("0\r\n\r\n"), std::string::npos);
  EXPECT_EQ(handler_.gone.size(), 1U);
}

TEST_F(ServerTest, ASlowReaderIsCutOffAboveItsBacklog) {
  Peer peer(loop_, address_, 4096);
  peer.send(get);
  const ExchangeId id = request();
  ASSERT_TRUE(server_->start_stream(id, 200, sse_headers(), sse_event("1")));
  const std::string event = sse_event(std::string(1000, 'x'));
  std::size_t most = 0;
  int written = 0;
  while (server_->write(id, event)) {
    most = std::max(most, server_->backlog_bytes(id));
    ASSERT_LT(++written, 100000);
  }
  EXPECT_TRUE(handler_.gone.empty()) << "never from within a call";
  EXPECT_GT(most, stream_backlog_bytes_max - 2 * event.size());
  EXPECT_LE(most, stream_backlog_bytes_max);
  ASSERT_TRUE(until([&] { return !handler_.gone.empty(); }));
  EXPECT_EQ(handler_.gone[0].first, id);
  EXPECT_EQ(handler_.gone[0].second, Gone::slow_client);
  EXPECT_EQ(server_->counters().slow_clients, 1U);
}

TEST_F(ServerTest, AReaderWithoutProgressIsCutOffAfterAMinute) {
  Peer peer(loop_, address_, 4096);
  peer.send(get);
  const ExchangeId id = request();
  ASSERT_TRUE(server_->start_stream(id, 200, sse_headers(), sse_event("1")));
  while (server_->backlog_bytes(id) < 1000)
    ASSERT_TRUE(server_->write(id, sse_event(std::string(1000, 'x'))));
  advance(stall_limit - seconds(1));
  EXPECT_TRUE(handler_.gone.empty());
  advance(seconds(2));
  ASSERT_TRUE(until([&] { return !handler_.gone.empty(); }));
  EXPECT_EQ(handler_.gone[0].second, Gone::slow_client);
}

TEST_F(ServerTest, ASlowReaderThatReadsGetsEverythingInOrder) {
  Peer peer(loop_, address_, 4096);
  peer.send(get);
  const ExchangeId id = request();
  std::string want;
  ASSERT_TRUE(server_->start_stream(id, 200, {}, "start"));
  for (int i = 0; i < 4000; ++i) {
    const std::string piece = std::to_string(i) + std::string(500, 'x');
    want += piece;
    ASSERT_TRUE(until([&] { return server_->backlog_bytes(id) < 100'000 || !peer.received().empty(); }));
    ASSERT_TRUE(server_->write(id, piece));
    if (i % 50 == 0) peer.received();
  }
  ASSERT_TRUE(server_->finish(id));
  const std::string all = peer.read_to("\r\n0\r\n\r\n");
  std::string got;
  for (std::size_t at = all.find("\r\n\r\n") + 4; at < all.size();) {
    const std::size_t line = all.find("\r\n", at);
    const std::size_t count = std::stoul(all.substr(at, line - at), nullptr, 16);
    if (count == 0) break;
    got += all.substr(line + 2, count);
    at = line + 2 + count + 2;
  }
  EXPECT_EQ(got, "start" + want);
}

TEST_F(ServerTest, TheSumOfUnreadAnswersIsBounded) {
  constexpr std::size_t mib = 1 << 20;
  server_.reset();
  make({.answers_bytes_max = 32 * mib});
  const Reply answer{.status = 200, .headers = {{"x-request-id", "r"}}, .body = std::string(28 * mib, '1')};
  Peer slow(loop_, address_, 4096);
  slow.send(get);
  EXPECT_TRUE(server_->respond(request(), answer));
  EXPECT_GT(server_->unsent_bytes(), 8 * mib) << "the kernel took more than it can";
  Peer second(loop_, address_);
  second.send(get);
  EXPECT_TRUE(server_->respond(request(), answer));
  const std::string busy = second.read_answer();
  EXPECT_EQ(busy.substr(0, 12), "HTTP/1.1 503");
  EXPECT_NE(busy.find("x-request-id: r\r\n"), std::string::npos);
  EXPECT_NE(busy.find("Retry-After: 1\r\n"), std::string::npos);
  second.send(get);
  EXPECT_TRUE(server_->respond(request(), {.status = 200, .headers = {}, .body = "1"}));
  EXPECT_EQ(second.read_answer().substr(0, 12), "HTTP/1.1 200") << "a short one passes";
  Reply charged = answer;
  charged.charged = true;
  second.send(get);
  EXPECT_TRUE(server_->respond(request(), charged));
  EXPECT_EQ(second.read_answer().substr(0, 12), "HTTP/1.1 200") << "and what was paid for";
  EXPECT_GT(slow.read_answer().size(), answer.body.size());
  EXPECT_EQ(server_->unsent_bytes(), 0U);
  second.send(get);
  EXPECT_TRUE(server_->respond(request(), answer));
  EXPECT_EQ(second.read_answer().substr(0, 12), "HTTP/1.1 200");
  Peer leaves(loop_, address_, 4096);
  leaves.send(get);
  EXPECT_TRUE(server_->respond(request(), answer));
  EXPECT_GT(server_->unsent_bytes(), 0U);
  leaves.reset();
  ASSERT_TRUE(until([&] { return server_->unsent_bytes() == 0; }));
}

// 1 MiB in 50 s is below the rate, 4 MiB is above it.
TEST_F(ServerTest, AReaderOfALongAnswerKeepsARate) {
  constexpr std::size_t mib = 1 << 20;
  const Reply answer{.status = 200, .headers = {}, .body = std::string(24 * mib, '1')};
  for (const bool slow : {false, true}) {
    Peer peer(loop_, address_, 4096);
    peer.send(get);
    EXPECT_TRUE(server_->respond(request(), answer));
    std::size_t taken = 0;
    const std::size_t piece = slow ? mib : 4 * mib;
    for (std::size_t got = piece; got == piece && taken < (slow ? 10 : 24) * mib; taken += got) {
      got = peer.take(piece);
      advance(seconds(50));
    }
    if (slow) {
      EXPECT_EQ(server_->connections(), 0U);
      EXPECT_LT(taken, answer.body.size());
    } else {
      EXPECT_EQ(taken, 24 * mib);
      EXPECT_GT(peer.take(100), 0U) << "the head's length is left";
    }
    EXPECT_EQ(server_->counters().slow_clients, slow ? 1U : 0U);
    peer.leave();
    ASSERT_TRUE(until([&] { return server_->connections() == 0; }));
  }
}

}  // namespace
}  // namespace di::http
