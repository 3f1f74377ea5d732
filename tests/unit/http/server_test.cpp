// Answers, connections and the end of the server.
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "base/fd.h"
#include "http/address.h"
#include "http/sse.h"
#include "tests/unit/http/server_fixture.h"

namespace di::http {
namespace {

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

// They were waited for as long as at any other time, and a stop has five seconds.
TEST_F(ServerTest, WhoStaysAfterTheAnswerHoldsNoStop) {
  Peer silent(loop_, address_), sending(loop_, address_), before(loop_, address_);
  silent.send("GET /x HT");
  sending.send(post_head + "Content-Length: 1000000\r\n\r\nhel");
  ASSERT_TRUE(until([&] { return handler_.heads == 1; }));
  handler_.refuse = Reply{.status = 401, .headers = {}, .body = "{}"};
  before.send(post_head + "Content-Length: 1000000\r\n\r\nhel");
  EXPECT_EQ(before.read_all().substr(0, 12), "HTTP/1.1 401");
  EXPECT_EQ(server_->connections(), 3U);
  server_->stop_listening();
  EXPECT_EQ(silent.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(sending.read_all().substr(0, 12), "HTTP/1.1 503");
  EXPECT_EQ(server_->connections(), 3U) << "closing over unread bytes may cost them the answer";
  for (int i = 0; i < 3; ++i) {
    sending.put("lo");
    before.put("lo");
    advance(milliseconds(400));
    for (int turn = 0; turn < 50; ++turn) loop_.run_ready();
  }
  ASSERT_TRUE(until([&] { return server_->connections() == 0; }));
  EXPECT_EQ(handler_.emptied, 1);
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
