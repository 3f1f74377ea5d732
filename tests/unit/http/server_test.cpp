#include "http/server.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <vector>

#include "base/fd.h"
#include "base/json.h"
#include "http/address.h"
#include "http/sse.h"
#include "tests/support/http_peer.h"
#include "tests/support/manual_loop.h"

namespace di::http {
namespace {

struct Recorder final : Handler {
  std::size_t body_bytes_max = 1 << 20;
  std::optional<Reply> refuse;
  int heads = 0;
  std::deque<std::pair<ExchangeId, Request>> requests;
  std::vector<std::pair<ExchangeId, Gone>> gone;
  std::function<void(ExchangeId, const Request&)> at_once;

  int emptied = 0;

  Headers own_headers(const Request* head) override {
    return {{"x-request-id",
             std::string(head == nullptr ? "own" : head->header("x-request-id").value_or("own"))}};
  }
  Verdict on_head(const Request& head) override {
    ++heads;
    EXPECT_FALSE(head.peer.empty());
    return {.refuse = refuse, .body_bytes_max = body_bytes_max};
  }
  void on_request(ExchangeId id, Request request) override {
    requests.emplace_back(id, std::move(request));
    if (at_once) at_once(id, requests.back().second);
  }
  void on_gone(ExchangeId id, Gone why) override { gone.emplace_back(id, why); }
  void on_empty() override { ++emptied; }
};

class ServerTest : public loop::ManualLoopTest {
 protected:
  void make(Server::Options options = {}) {
    server_ = std::make_unique<Server>(loop_, handler_, options);
    auto address = server_->listen("127.0.0.1:0");
    ASSERT_TRUE(address) << address.error().message;
    address_ = *address;
  }
  void SetUp() override { make(); }

  // The exchange of the next request that comes.
  ExchangeId request() {
    EXPECT_TRUE(until([&] { return !handler_.requests.empty(); }));
    if (handler_.requests.empty()) return {};
    const ExchangeId id = handler_.requests.front().first;
    last_ = std::move(handler_.requests.front().second);
    handler_.requests.pop_front();
    return id;
  }
  void answer_at_once() {
    handler_.at_once = [this](ExchangeId id, const Request& got) {
      EXPECT_TRUE(server_->respond(id, {.status = 200, .headers = {}, .body = "\"" + got.path + "\""}));
    };
  }

  Recorder handler_;
  std::unique_ptr<Server> server_;
  std::string address_;
  Request last_;
};

const std::string get = "GET /x HTTP/1.1\r\nHost: di\r\n\r\n";
const std::string post_head = "POST /p HTTP/1.1\r\nHost: di\r\n";

std::string error_message(const std::string& answer) {
  const auto json = Json::parse(body_of(answer));
  if (!json || json->find("error") == nullptr) return "no JSON error in: " + answer;
  EXPECT_NE(answer.find("Content-Type: application/json"), std::string::npos);
  return json->find("error")->find("message")->as_string();
}

int occurrences(const std::string& text, std::string_view word) {
  int count = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST_F(ServerTest, AnswersOnOneConnection) {
  Peer peer(loop_, address_);
  for (int i = 0; i < 3; ++i) {
    peer.send(post_head + "Content-Length: 5\r\n\r\nhello");
    const ExchangeId id = request();
    EXPECT_EQ(last_.body, "hello");
    EXPECT_EQ(last_.path, "/p");
    EXPECT_EQ(last_.peer.substr(0, 10), "127.0.0.1:");
    EXPECT_EQ(server_->exchanges(), 1U);
    EXPECT_TRUE(
        server_->respond(id, {.status = 200, .headers = {{"x-request-id", "r"}}, .body = "{\"i\":1}"}));
    EXPECT_FALSE(server_->respond(id, {})) << "an exchange is answered once";
    EXPECT_EQ(server_->exchanges(), 0U);
    const std::string answer = peer.read_answer();
    EXPECT_EQ(answer.substr(0, 17), "HTTP/1.1 200 OK\r\n");
    EXPECT_NE(answer.find("x-request-id: r\r\n"), std::string::npos);
    EXPECT_EQ(answer.find("Connection:"), std::string::npos);
    EXPECT_EQ(answer.substr(answer.size() - 7), "{\"i\":1}");
    // A18: each of these at most once.
    for (const char* name : {"Content-Length:", "Content-Type:", "Date:"})
      EXPECT_EQ(occurrences(answer, name), 1);
    for (const char* name : {"Content-Encoding:", "Transfer-Encoding:", "Server:"})
      EXPECT_EQ(occurrences(answer, name), 0);
  }
  EXPECT_EQ(server_->counters().accepted, 1U);
  EXPECT_EQ(server_->counters().requests, 3U);
  EXPECT_EQ(server_->bodies_bytes(), 0U);
}

TEST_F(ServerTest, PipelinedRequestsAreAnsweredInOrder) {
  Peer peer(loop_, address_);
  std::string bytes;
  for (int i = 0; i < 20; ++i) bytes += "GET /" + std::to_string(i) + " HTTP/1.1\r\nHost: di\r\n\r\n";
  peer.send(bytes);
  for (int i = 0; i < 10; ++i) {  // later, one by one
    const ExchangeId id = request();
    EXPECT_EQ(last_.path, "/" + std::to_string(i));
    EXPECT_TRUE(handler_.requests.empty()) << "one at a time";
    server_->respond(id, {.status = 200, .headers = {}, .body = "1"});
    peer.read_answer();
  }
  answer_at_once();
  const ExchangeId id = request();
  server_->respond(id, {.status = 200, .headers = {}, .body = "1"});
  peer.read_answer();
  for (int i = 11; i < 20; ++i)
    EXPECT_NE(peer.read_answer().find("\"/" + std::to_string(i) + "\""), std::string::npos);
}

// Bytes that arrive between an answer and the request kept behind it do not overtake that request.
TEST_F(ServerTest, NewBytesDoNotOvertakePipelinedOnes) {
  answer_at_once();
  Peer peer(loop_, address_);
  handler_.at_once = nullptr;
  peer.send(get + "GET /half HT");
  const ExchangeId id = request();
  ASSERT_TRUE(until([&] { return peer.received().empty(); }));
  server_->respond(id, {.status = 200, .headers = {}, .body = "1"});
  peer.send("TP/1.1\r\nHost: di\r\n\r\n");
  request();
  EXPECT_EQ(last_.path, "/half");
}

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

TEST_F(ServerTest, ParserFailuresAreAnsweredInJson) {
  const std::pair<std::string, const char*> cases[] = {
      {"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"},
      {"GET / HTTP/1.1\nHost: x\n\n", "HTTP/1.1 400 Bad Request\r\n"},
      {post_head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
       "HTTP/1.1 501 Not Implemented\r\n"},
      {"GET / HTTP/1.1\r\nHost: x\r\nX: " + std::string(40000, 'a') + "\r\n\r\n",
       "HTTP/1.1 431 Request Header Fields Too Large\r\n"},
      {post_head + "Content-Length: 99999999\r\n\r\n" + std::string(100000, 'x'),
       "HTTP/1.1 413 Content Too Large\r\n"},
  };
  for (const auto& [bytes, status] : cases) {
    Peer peer(loop_, address_);
    peer.send(bytes);
    const std::string answer = peer.read_all();
    EXPECT_EQ(answer.substr(0, std::string_view(status).size()), status) << answer;
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
    EXPECT_NE(answer.find("x-request-id: own\r\n"), std::string::npos) << answer;
    EXPECT_EQ(error_message(answer).find("no JSON"), std::string::npos) << answer;
    EXPECT_EQ(occurrences(answer, "HTTP/1.1 "), 1) << "what follows a failure is not read as a request";
  }
  EXPECT_TRUE(handler_.requests.empty());
  EXPECT_EQ(server_->counters().malformed, 5U);
}

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

TEST_F(ServerTest, ConnectionsAreBounded) {
  server_.reset();
  make({.connections_max = 2});
  Peer one(loop_, address_), two(loop_, address_);
  ASSERT_TRUE(until([&] { return server_->connections() == 2; }));
  Peer three(loop_, address_);
  const std::string answer = three.read_all();
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 503");
  EXPECT_NE(answer.find("Retry-After"), std::string::npos);
  one.leave();
  ASSERT_TRUE(until([&] { return server_->connections() == 1; }));
  Peer four(loop_, address_);
  four.send(get);
  EXPECT_TRUE(server_->respond(request(), {.status = 200, .headers = {}, .body = "1"}));
  four.read_answer();
}

TEST_F(ServerTest, CloseIsHonoured) {
  answer_at_once();
  for (const char* bytes :
       {"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "GET / HTTP/1.0\r\n\r\n"}) {
    Peer peer(loop_, address_);
    peer.send(bytes);
    const std::string answer = peer.read_all();
    EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 200");
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  }
  handler_.at_once = nullptr;
  handler_.requests.clear();
  Peer peer(loop_, address_);
  peer.send(get);
  server_->respond(request(), {.status = 413, .headers = {{"connection", "close"}}, .body = "{}"});
  EXPECT_EQ(occurrences(peer.read_all(), "onnection: close"), 1);
}

TEST_F(ServerTest, HttpOneZero) {
  Peer peer(loop_, address_);
  for (int i = 0; i < 2; ++i) {
    peer.send("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    server_->respond(request(), {.status = 200, .headers = {}, .body = "1"});
    EXPECT_NE(peer.read_answer().find("Connection: keep-alive\r\n"), std::string::npos);
  }
  peer.send("GET / HTTP/1.0\r\n\r\n");
  const ExchangeId id = request();
  server_->start_stream(id, 200, sse_headers(), sse_event("1"));
  server_->write(id, sse_event("2"));
  server_->finish(id, sse_done);
  const std::string all = peer.read_all();
  EXPECT_EQ(all.find("chunked"), std::string::npos);
  EXPECT_EQ(all.substr(all.find("\r\n\r\n") + 4), "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
}

TEST_F(ServerTest, HeadAnswersWithoutABody) {
  answer_at_once();
  Peer peer(loop_, address_);
  peer.send("HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n" + get);
  const std::string first = peer.read_to("\r\n\r\n");
  EXPECT_NE(first.find("Content-Length: 4\r\n"), std::string::npos);
  EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 200") << "the next answer follows at once";
}

TEST_F(ServerTest, AHeaderValueCannotBeginAnotherHeader) {
  Peer peer(loop_, address_);
  peer.send(get);
  server_->respond(request(), {.status = 200, .headers = {{"x-model", "a\r\nSet-Cookie: b"}}, .body = "1"});
  EXPECT_NE(peer.read_answer().find("x-model: a  Set-Cookie: b\r\n"), std::string::npos);
}

TEST_F(ServerTest, Drain) {
  Peer idle(loop_, address_), busy(loop_, address_), streaming(loop_, address_);
  busy.send(get);
  const ExchangeId busy_id = request();
  streaming.send(get);
  const ExchangeId stream_id = request();
  server_->start_stream(stream_id, 200, sse_headers(), sse_event("1"));
  server_->announce_drain();
  Peer late(loop_, address_);
  late.send(get);
  server_->respond(request(), {.status = 503, .headers = {}, .body = "{}"});
  EXPECT_NE(late.read_all().find("Connection: close\r\n"), std::string::npos);
  EXPECT_FALSE(idle.closed());
  server_->stop_listening();
  EXPECT_EQ(idle.read_all(), "");
  EXPECT_EQ(server_->exchanges(), 2U);
  server_->respond(busy_id, {.status = 200, .headers = {}, .body = "1"});
  EXPECT_NE(busy.read_all().find("Connection: close\r\n"), std::string::npos);
  EXPECT_TRUE(server_->write(stream_id, sse_event("2")));
  EXPECT_TRUE(server_->finish(stream_id));
  EXPECT_NE(streaming.read_all().find("0\r\n\r\n"), std::string::npos);
  ASSERT_TRUE(until([&] { return server_->connections() == 0; }));
}

TEST_F(ServerTest, WhatHasComeBeforeAStopIsAnswered) {
  Peer idle(loop_, address_), kept(loop_, address_);
  ASSERT_TRUE(until([&] { return server_->connections() == 2; }));
  kept.put(get);
  Peer waiting(loop_, address_);  // connected, not accepted
  waiting.put(get);
  server_->stop_listening();
  EXPECT_EQ(handler_.requests.size(), 2U);
  while (!handler_.requests.empty())
    server_->respond(request(), {.status = 503, .headers = {}, .body = "{}"});
  EXPECT_EQ(kept.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(waiting.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(idle.read_all(), "");
}

// It held the stop for as long as it came, and was cut off then.
TEST_F(ServerTest, ARequestThatIsHereInPartIsAnsweredAtAStop) {
  Peer body(loop_, address_), head(loop_, address_), whole(loop_, address_), refused(loop_, address_);
  body.send(post_head + "x-request-id: b\r\nContent-Length: 5\r\n\r\nhel");
  head.send("GET /x HT");
  whole.send(post_head + "Content-Length: 5\r\n\r\nhel");
  ASSERT_TRUE(until([&] { return handler_.heads == 2; }));
  handler_.refuse = Reply{.status = 401, .headers = {}, .body = "{}"};
  refused.send(post_head + "Content-Length: 5\r\n\r\nhel");
  ASSERT_TRUE(until([&] { return handler_.heads == 3 && server_->connections() == 4; }));
  for (int i = 0; i < 50; ++i) loop_.run_ready();
  whole.put("lo");
  server_->stop_listening();
  ASSERT_EQ(handler_.requests.size(), 1U) << "its rest had come";
  server_->respond(request(), {.status = 200, .headers = {}, .body = "1"});
  EXPECT_EQ(whole.read_all().substr(0, 12), "HTTP/1.1 200");
  const std::string answer = body.read_all();
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 503");
  EXPECT_NE(answer.find("x-request-id: b\r\n"), std::string::npos);
  EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  EXPECT_EQ(head.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(refused.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(server_->bodies_bytes(), 0U);
  for (Peer* peer : {&body, &head, &refused}) peer->leave();
  ASSERT_TRUE(until([&] { return server_->connections() == 0; }));
}

TEST_F(ServerTest, TheEndOfTheLastAnswerIsTold) {
  Peer peer(loop_, address_, 4096);
  peer.send(get);
  const ExchangeId id = request();
  const std::string body(16 << 20, '1');
  server_->stop_listening();
  EXPECT_TRUE(server_->respond(id, {.status = 200, .headers = {}, .body = body}));
  for (int i = 0; i < 50; ++i) loop_.run_ready();
  EXPECT_EQ(handler_.emptied, 0) << "the answer is not with the client";
  EXPECT_NE(peer.read_all().find(body), std::string::npos);
  ASSERT_TRUE(until([&] { return handler_.emptied > 0; }));
  EXPECT_EQ(server_->connections(), 0U);
  for (int i = 0; i < 50; ++i) loop_.run_ready();
  EXPECT_EQ(handler_.emptied, 1);
  server_.reset();
  make();
  server_->stop_listening();
  EXPECT_EQ(handler_.emptied, 1) << "never from within a call";
  ASSERT_TRUE(until([&] { return handler_.emptied == 2; })) << "also when nobody was there";
}

// The answer may only be read once the body is sent.
TEST_F(ServerTest, ALingeringEndWaitsForSilence) {
  handler_.refuse = Reply{.status = 401, .headers = {}, .body = "{}"};
  Peer pausing(loop_, address_), endless(loop_, address_);
  for (Peer* peer : {&pausing, &endless}) peer->send(post_head + "Content-Length: 9999999\r\n\r\nhello");
  for (Peer* peer : {&pausing, &endless}) EXPECT_EQ(peer->read_all().substr(0, 12), "HTTP/1.1 401");
  const auto read_on = [&] {
    for (int i = 0; i < 50; ++i) loop_.run_ready();
  };
  for (Duration passed{}; passed < linger_all_limit - seconds(3); passed += seconds(3)) {
    endless.put("more");
    if (passed < seconds(9)) pausing.put("more");
    read_on();
    advance(seconds(3));
    const bool pausing_there = passed + seconds(3) < seconds(6) + linger_limit;
    EXPECT_EQ(server_->connections(), pausing_there ? 2U : 1U) << to_ms(passed);
  }
  endless.put("more");
  read_on();
  advance(seconds(4));
  EXPECT_EQ(server_->connections(), 0U) << "but not for ever";
}

TEST_F(ServerTest, AFileThatIsNoSocketIsKept) {
  char folder[] = "/tmp/di-http-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/notes";
  std::ofstream(path) << "keep me";
  const auto refused = server_->listen("unix:" + path);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find(path), std::string::npos);
  std::string text;
  std::getline(std::ifstream(path), text);
  EXPECT_EQ(text, "keep me");
  ::unlink(path.c_str());
  ::rmdir(folder);
}

TEST_F(ServerTest, ListensOnAUnixSocket) {
  char folder[] = "/tmp/di-http-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/x.http";
  {
    const Fd stale(::socket(AF_UNIX, SOCK_STREAM, 0));
    const auto address = address_parse("unix:" + path);
    ASSERT_EQ(::bind(stale.get(), address->get(), address->bytes), 0);
  }
  ASSERT_TRUE(server_->listen("unix:" + path)) << "the file of a dead process is replaced";
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0660U);
  answer_at_once();
  Peer peer(loop_, "unix:" + path);
  peer.send(get);
  EXPECT_EQ(peer.read_answer().substr(0, 12), "HTTP/1.1 200");
  EXPECT_EQ(handler_.requests.front().second.peer, "unix");
  Recorder other;
  Server second(loop_, other, {});
  const auto busy = second.listen("unix:" + path);
  ASSERT_FALSE(busy);
  EXPECT_EQ(busy.error().code, Code::busy);
  server_.reset();
  EXPECT_NE(::stat(path.c_str(), &info), 0) << "the file goes with the listener";
  ::rmdir(folder);
}

TEST_F(ServerTest, APortInUseIsBusyAndNamed) {
  Recorder other;
  Server second(loop_, other, {});
  const auto busy = second.listen(address_);
  ASSERT_FALSE(busy);
  EXPECT_EQ(busy.error().code, Code::busy);
  EXPECT_NE(busy.error().message.find(address_), std::string::npos);
}

TEST_F(ServerTest, GoesAwayWithEverythingOpen) {
  Peer one(loop_, address_), two(loop_, address_);
  one.send(get);
  two.send(post_head + "Content-Length: 5\r\n\r\nhe");
  const ExchangeId id = request();
  server_->start_stream(id, 200, {}, "1");
  server_.reset();
  EXPECT_NE(one.read_all().find("1"), std::string::npos);
  two.read_all();
  EXPECT_TRUE(handler_.gone.empty());
}

}  // namespace
}  // namespace di::http
