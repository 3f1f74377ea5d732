// Bodies that come: their limits, and how long one is waited for.
#include "tests/unit/http/server_fixture.h"

namespace di::http {
namespace {

TEST_F(ServerTest, ContinueIsSentAfterTheHeadWasJudged) {
  const std::string head = post_head + "Content-Length: 5\r\nExpect: 100-continue\r\n\r\n";
  {
    Peer peer(loop_, address_);
    peer.send(head);
    EXPECT_EQ(peer.read_to("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    EXPECT_EQ(handler_.heads, 1);
    EXPECT_TRUE(handler_.requests.empty());
    peer.send("hello");
    const ExchangeId id = request();
    EXPECT_EQ(last_.body, "hello");
    server_->respond(id, {.status = 200, .headers = {}, .body = "1"});
    EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 200");
  }
  {
    Peer peer(loop_, address_);
    peer.send(head + "hello");  // did not wait: nothing to tell it
    server_->respond(request(), {.status = 200, .headers = {}, .body = "1"});
    EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 200");
  }
  {
    handler_.body_bytes_max = 4;
    Peer peer(loop_, address_);
    peer.send(head);
    EXPECT_EQ(peer.read_all().substr(0, 12), "HTTP/1.1 413");
  }
  {
    handler_.refuse = Reply{.status = 401, .headers = {{"WWW-Authenticate", "Bearer"}}, .body = "{}"};
    Peer peer(loop_, address_);
    peer.send(head);
    const std::string answer = peer.read_all();
    EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 401");
    EXPECT_EQ(answer.find("100 Continue"), std::string::npos);
  }
}

TEST_F(ServerTest, ARefusedRequestKeepsTheConnectionIfItsBodyIsShort) {
  handler_.refuse = Reply{.status = 401, .headers = {}, .body = "{}"};
  Peer peer(loop_, address_);
  peer.send(post_head + "Content-Length: 5\r\n\r\nhello" + get);
  EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 401");
  EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 401");
  peer.send(post_head + "Content-Length: 9999999\r\n\r\nhello");
  const std::string answer = peer.read_all();
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 401");
  EXPECT_NE(answer.find("Connection: close"), std::string::npos);
  EXPECT_TRUE(handler_.requests.empty());
}

// A16: more than a library's usual limit passes, above ours it is a 413 that the client can read.
TEST_F(ServerTest, A16LargeBodies) {
  handler_.body_bytes_max = 4 << 20;
  const std::string body(3 << 20, 'x');
  Peer peer(loop_, address_);
  peer.send(post_head + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  const ExchangeId id = request();
  EXPECT_EQ(last_.body, body);
  server_->respond(id, {.status = 200, .headers = {}, .body = "1"});
  peer.read_answer();
  const std::string more(5 << 20, 'x');
  peer.send(post_head + "Content-Length: " + std::to_string(more.size()) + "\r\n\r\n" + more);
  EXPECT_EQ(peer.read_all().substr(0, 12), "HTTP/1.1 413");
  EXPECT_EQ(server_->bodies_bytes(), 0U);
}

TEST_F(ServerTest, TheSumOfBodiesIsBounded) {
  server_.reset();
  make({.bodies_bytes_max = 100'000});
  Peer first(loop_, address_);
  first.send(post_head + "Content-Length: 90000\r\n\r\n" + std::string(80000, 'x'));
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 80000; }));
  Peer promised(loop_, address_);
  promised.send(post_head + "Content-Length: 30000\r\n\r\n");
  const std::string refused = promised.read_all();
  EXPECT_EQ(refused.substr(0, 12), "HTTP/1.1 503");
  EXPECT_NE(refused.find("Retry-After: 1\r\n"), std::string::npos);
  Peer chunked(loop_, address_);
  chunked.send(post_head + "Transfer-Encoding: chunked\r\n\r\nFFFF\r\n" + std::string(30000, 'x'));
  EXPECT_EQ(chunked.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(server_->bodies_bytes(), 80000U);
  first.send(std::string(10000, 'x'));
  server_->respond(request(), {.status = 200, .headers = {}, .body = "1"});
  EXPECT_EQ(first.read_answer().substr(0, 12), "HTTP/1.1 200");
  EXPECT_EQ(server_->bodies_bytes(), 0U);
}

TEST_F(ServerTest, LongBodiesLeaveRoomForShortOnes) {
  constexpr std::size_t mib = 1 << 20;
  handler_.body_bytes_max = 64 * mib;
  server_.reset();
  make({.bodies_bytes_max = 8 * mib});
  Peer first(loop_, address_);
  first.send(post_head + "Content-Length: " + std::to_string(6 * mib) + "\r\n\r\n" +
             std::string(5 * mib, 'x'));
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 5 * mib; }));
  Peer second(loop_, address_);
  second.send(post_head + "Content-Length: " + std::to_string(2 * mib) + "\r\n\r\n");
  EXPECT_EQ(second.read_all().substr(0, 12), "HTTP/1.1 503");
  Peer unmeasured(loop_, address_);
  unmeasured.send(post_head + "Transfer-Encoding: chunked\r\n\r\n200000\r\n" + std::string(2 * mib, 'x'));
  EXPECT_EQ(unmeasured.read_all().substr(0, 12), "HTTP/1.1 503");
  Peer never(loop_, address_);
  never.send(post_head + "Content-Length: " + std::to_string(7 * mib) + "\r\n\r\n");
  EXPECT_EQ(never.read_all().substr(0, 12), "HTTP/1.1 413") << "it would not fit later either";
  Peer short_one(loop_, address_);
  short_one.send(post_head + "Content-Length: " + std::to_string(mib) + "\r\n\r\n" + std::string(mib, 'x'));
  EXPECT_TRUE(server_->respond(request(), {.status = 200, .headers = {}, .body = "1"}));
  EXPECT_EQ(short_one.read_answer().substr(0, 12), "HTTP/1.1 200");
}

TEST_F(ServerTest, ARefusedBodyTakesNoRoom) {
  server_.reset();
  make({.bodies_bytes_max = 100'000});
  handler_.refuse = Reply{.status = 401, .headers = {}, .body = "{}"};
  std::deque<Peer> peers;
  for (int i = 0; i < 4; ++i) {
    peers.emplace_back(loop_, address_)
        .send(post_head + "Content-Length: 60000\r\n\r\n" + std::string(50000, 'x'));
    ASSERT_TRUE(until([&] { return handler_.heads == i + 1; }));
  }
  for (Peer& peer : peers) {
    EXPECT_EQ(server_->bodies_bytes(), 0U);
    peer.send(std::string(10000, 'x') + get);
    EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 401");
    EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 401") << "the connection lives";
  }
}

// What the server says by itself has the client's own id once the head is there.
TEST_F(ServerTest, OwnAnswersKnowTheHead) {
  const std::string named = "POST /p HTTP/1.1\r\nHost: di\r\nx-request-id: mine\r\n";
  handler_.body_bytes_max = 10;
  Peer large(loop_, address_);
  large.send(named + "Transfer-Encoding: chunked\r\n\r\nff\r\n" + std::string(255, 'x'));
  const std::string too_large = large.read_all();
  EXPECT_EQ(too_large.substr(0, 12), "HTTP/1.1 413");
  EXPECT_NE(too_large.find("x-request-id: mine\r\n"), std::string::npos) << too_large;
  Peer late(loop_, address_);
  late.send(named + "Content-Length: 5\r\n\r\nhe");
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 2; }));
  advance(body_limit + milliseconds(200));
  const std::string timeout = late.read_all();
  EXPECT_EQ(timeout.substr(0, 12), "HTTP/1.1 408");
  EXPECT_NE(timeout.find("x-request-id: mine\r\n"), std::string::npos) << timeout;
}

TEST_F(ServerTest, ABodyThatNeverComesIsGivenBack) {
  Peer peer(loop_, address_);
  peer.send(post_head + "Content-Length: 90000\r\n\r\n" + std::string(50000, 'x'));
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 50000; }));
  peer.leave();
  ASSERT_TRUE(until([&] { return server_->connections() == 0; }));
  EXPECT_EQ(server_->bodies_bytes(), 0U);
  EXPECT_TRUE(handler_.gone.empty());
}

// F21.
TEST_F(ServerTest, Deadlines) {
  Peer idle(loop_, address_);
  Peer head(loop_, address_);
  head.send("GET / HT");
  Peer body(loop_, address_);
  body.send(post_head + "Content-Length: 200000\r\n\r\nx");
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 1 && server_->connections() == 3; }));
  advance(header_limit - milliseconds(200));
  EXPECT_FALSE(head.closed());
  advance(milliseconds(400));
  EXPECT_EQ(head.read_all().substr(0, 12), "HTTP/1.1 408");
  body.send(std::string(131072, 'x'));  // 2 s more for two times 64 KiB
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 131073; }));
  advance(body_limit + milliseconds(1500) - header_limit);
  EXPECT_FALSE(body.closed());
  advance(milliseconds(700));
  EXPECT_EQ(body.read_all().substr(0, 12), "HTTP/1.1 408");
  EXPECT_FALSE(idle.closed());
  advance(idle_limit - body_limit);
  EXPECT_EQ(idle.read_all(), "") << "an idle connection is closed without a word";
  EXPECT_EQ(server_->counters().timeouts, 2U);
  head.leave();
  body.leave();
  ASSERT_TRUE(until([&] { return server_->connections() == 0; }));
}

TEST_F(ServerTest, ABodyThatCameFastBuysNoSilence) {
  server_.reset();
  make({.bodies_bytes_max = 1'000'000});
  const std::string head = post_head + "Content-Length: 900000\r\n\r\n";
  Peer silent(loop_, address_), dribbling(loop_, address_);
  silent.send(head + std::string(400'000, 'x'));  // six seconds' worth
  dribbling.send(head + std::string(400'000, 'x'));
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 800'000; }));
  advance(body_limit / 2);
  dribbling.send("x");
  ASSERT_TRUE(until([&] { return server_->bodies_bytes() == 800'001; }));
  advance(body_limit / 2 - milliseconds(200));
  EXPECT_FALSE(silent.closed());
  EXPECT_FALSE(dribbling.closed());
  advance(milliseconds(600));
  EXPECT_EQ(silent.read_all().substr(0, 12), "HTTP/1.1 408");
  EXPECT_EQ(dribbling.read_all().substr(0, 12), "HTTP/1.1 408");
  EXPECT_EQ(server_->bodies_bytes(), 0U);
}

TEST_F(ServerTest, ABodyAtTheRateIsReadToItsEnd) {
  handler_.body_bytes_max = 8 << 20;
  Peer peer(loop_, address_);
  const std::string second(static_cast<std::size_t>(client_rate_bytes), 'x');
  peer.send(post_head + "Content-Length: " + std::to_string(100 * second.size()) + "\r\n\r\n");
  for (std::size_t i = 1; i <= 100; ++i) {
    advance(seconds(1));
    peer.send(second);
    ASSERT_TRUE(
        until([&] { return server_->bodies_bytes() == i * second.size() || !handler_.requests.empty(); }));
  }
  EXPECT_TRUE(server_->respond(request(), {.status = 200, .headers = {}, .body = "1"}));
  EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 200");
}

TEST_F(ServerTest, EmptyLinesDoNotKeepAConnectionAlive) {
  Peer peer(loop_, address_);
  ASSERT_TRUE(until([&] { return server_->connections() == 1; }));
  for (int i = 0; i < 9; ++i) {
    peer.send("\r\n");
    advance(idle_limit / 10);
  }
  EXPECT_FALSE(peer.closed());
  advance(idle_limit / 9);
  EXPECT_EQ(peer.read_all(), "");
}

TEST_F(ServerTest, NoDeadlineWhileTheHandlerWorks) {
  Peer peer(loop_, address_);
  peer.send(get);
  const ExchangeId id = request();
  advance(seconds(600));
  EXPECT_TRUE(server_->start_stream(id, 200, {}, "1"));
  advance(seconds(600));
  EXPECT_TRUE(server_->finish(id));
  peer.read_to("0\r\n\r\n");
  advance(idle_limit - seconds(1));
  EXPECT_FALSE(peer.closed());
  advance(seconds(2));
  EXPECT_TRUE(peer.wait([&] { return peer.closed(); }));
}

}  // namespace
}  // namespace di::http
