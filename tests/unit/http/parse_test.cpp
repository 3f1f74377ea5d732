#include "http/parse.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/json.h"
#include "base/rng.h"

namespace di::http {
namespace {

using State = RequestParser::State;

struct Outcome {
  State state = State::head;
  Request request;
  int status = 0;         // of a failure
  std::size_t taken = 0;  // bytes
};

// Feeds `bytes` in pieces of `piece` and accepts any body up to `body_bytes_max`.
Outcome parse(const std::string& bytes, std::size_t piece = SIZE_MAX, std::size_t body_bytes_max = 1 << 20,
              std::size_t header_bytes_max = header_bytes_max_default) {
  RequestParser parser(header_bytes_max);
  Outcome outcome;
  std::size_t fed = 0;
  while (fed < bytes.size() || parser.state() == State::head_done) {
    if (parser.state() == State::head_done) parser.accept_body(body_bytes_max);
    if (parser.state() == State::done || parser.state() == State::failed) break;
    const std::string_view next = std::string_view(bytes).substr(fed, piece);
    const std::size_t taken = parser.feed(next);
    EXPECT_LE(taken, next.size()) << "a failure in bytes kept from before takes no more than was given";
    fed += taken;
    if (taken < next.size() && (parser.state() == State::head || parser.state() == State::body)) {
      ADD_FAILURE() << "the parser stopped without a reason";
      break;
    }
  }
  outcome.state = parser.state();
  outcome.taken = fed;
  if (outcome.state == State::failed) {
    outcome.status = parser.failure().status;
    const auto body = Json::parse(parser.failure().body);
    EXPECT_TRUE(body) << parser.failure().body;
    if (body) {
      EXPECT_FALSE(body->find("error")->find("message")->as_string().empty());
      EXPECT_TRUE(body->find("error")->find("type")->is_string());
      EXPECT_TRUE(body->find("error")->find("param")->is_null());
      EXPECT_NE(body->find("error")->find("code"), nullptr);
    }
  } else if (outcome.state != State::head) {
    outcome.request = parser.request();
  }
  return outcome;
}

int status_of(const std::string& bytes) {
  const Outcome whole = parse(bytes);
  const Outcome slow = parse(bytes, 1);
  EXPECT_EQ(whole.state, slow.state) << bytes;
  EXPECT_EQ(whole.status, slow.status) << bytes;
  return whole.status;
}

const std::string host = "Host: di\r\n";

TEST(RequestParser, AGet) {
  const Outcome outcome = parse("GET /v1/models?x=1&y HTTP/1.1\r\nHost: di:8080\r\nX-Thing:  a b \r\n\r\n");
  ASSERT_EQ(outcome.state, State::done);
  EXPECT_EQ(outcome.request.method, "GET");
  EXPECT_EQ(outcome.request.path, "/v1/models");
  EXPECT_EQ(outcome.request.query, "x=1&y");
  EXPECT_EQ(outcome.request.header("x-thing"), "a b");
  EXPECT_EQ(outcome.request.header("missing"), std::nullopt);
  EXPECT_TRUE(outcome.request.keep_alive);
  EXPECT_EQ(outcome.request.version_minor, 1);
}

TEST(RequestParser, BodiesByLengthAndChunksHoweverCut) {
  const std::string by_length = "POST /p HTTP/1.1\r\n" + host + "Content-Length: 11\r\n\r\nhello world";
  const std::string by_chunks = "POST /p HTTP/1.1\r\n" + host +
                                "Transfer-Encoding: chunked\r\n\r\n6;name=\"va\\\"l\"\r\nhello "
                                "\r\n05\r\nworld\r\n0\r\nTrailer: x\r\n\r\n";
  const std::string next = "GET /next HTTP/1.1\r\n" + host + "\r\n";
  for (const std::string& bytes : {by_length, by_chunks}) {
    for (std::size_t piece = 1; piece <= bytes.size() + next.size(); ++piece) {
      const Outcome outcome = parse(bytes + next, piece);
      ASSERT_EQ(outcome.state, State::done) << piece;
      EXPECT_EQ(outcome.request.body, "hello world") << piece;
      EXPECT_EQ(outcome.taken, bytes.size()) << "the next request's bytes stay, piece " << piece;
      EXPECT_EQ(outcome.request.header("trailer"), std::nullopt);
    }
  }
}

TEST(RequestParser, OneAfterTheOther) {
  RequestParser parser;
  const std::string one = "GET /1 HTTP/1.1\r\n" + host + "\r\n";
  const std::string both = one + "\r\nGET /2 HTTP/1.0\r\n\r\n";
  EXPECT_FALSE(parser.started());
  EXPECT_EQ(parser.feed(both), one.size());
  EXPECT_TRUE(parser.started());
  parser.accept_body(0);
  ASSERT_EQ(parser.state(), State::done);
  EXPECT_EQ(parser.request().path, "/1");
  parser.reset();
  EXPECT_FALSE(parser.started());
  parser.feed(std::string_view(both).substr(one.size()));
  parser.accept_body(0);
  ASSERT_EQ(parser.state(), State::done);
  EXPECT_EQ(parser.request().path, "/2");
  EXPECT_FALSE(parser.request().keep_alive);
}

TEST(RequestParser, KeepAlive) {
  const auto keeps = [](const std::string& version, const std::string& fields) {
    const Outcome outcome = parse("GET / HTTP/" + version + "\r\n" + host + fields + "\r\n");
    EXPECT_EQ(outcome.state, State::done);
    return outcome.request.keep_alive;
  };
  EXPECT_TRUE(keeps("1.1", ""));
  EXPECT_FALSE(keeps("1.1", "Connection: close\r\n"));
  EXPECT_FALSE(keeps("1.1", "Connection: x, Close\r\n"));
  EXPECT_FALSE(keeps("1.0", ""));
  EXPECT_TRUE(keeps("1.0", "Connection: keep-alive\r\n"));
}

TEST(RequestParser, AbsoluteTargets) {
  EXPECT_EQ(parse("GET http://di/a/b?c HTTP/1.1\r\n" + host + "\r\n").request.path, "/a/b");
  EXPECT_EQ(parse("GET http://di/a/b?c HTTP/1.1\r\n" + host + "\r\n").request.query, "c");
  EXPECT_EQ(parse("GET HTTP://di HTTP/1.1\r\n" + host + "\r\n").request.path, "/");
  EXPECT_EQ(parse("GET http://di?q HTTP/1.1\r\n" + host + "\r\n").request.query, "q");
  EXPECT_EQ(parse("OPTIONS * HTTP/1.1\r\n" + host + "\r\n").request.path, "*");
  EXPECT_EQ(status_of("GET di/a HTTP/1.1\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of("GET ftp://di/a HTTP/1.1\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of("GET /a#b HTTP/1.1\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of("GET /\xc3\xa9 HTTP/1.1\r\n" + host + "\r\n"), 400);
}

// The table of spec/api.md 1.6, and its relatives.
TEST(RequestParser, WhatTwoReadersCouldReadDifferently) {
  const std::string post = "POST / HTTP/1.1\r\n" + host;
  const std::string chunks = "\r\n\r\n0\r\n\r\n";
  EXPECT_EQ(status_of(post + "Content-Length: 5\r\nTransfer-Encoding: chunked" + chunks), 400);
  EXPECT_EQ(status_of(post + "Transfer-Encoding: chunked\r\nContent-Length: 5" + chunks), 400);
  EXPECT_EQ(status_of(post + "Content-Length: 5\r\nTransfer-Encoding: xchunked" + chunks), 400);
  EXPECT_EQ(status_of(post + "Transfer-Encoding: xchunked\r\nContent-Length: 5" + chunks), 400);
  EXPECT_EQ(status_of(post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"), 400);
  EXPECT_EQ(status_of(post + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"), 400);
  EXPECT_EQ(status_of(post + "Content-Length: 5, 5\r\n\r\nhello"), 400);
  for (const char* length : {"+2", "-1", "0x2", "2 2", "", "1e1", "99999999999999999999999", "2;2"}) {
    EXPECT_EQ(status_of(post + "Content-Length: " + length + "\r\n\r\nhi"), 400) << length;
  }
  for (const char* coding : {"xchunked", "gzip", "gzip, chunked", "chunked, chunked", "chunked;q=1",
                             "identity", "", "\"chunked\"", "chunked, identity"}) {
    EXPECT_EQ(status_of(post + "Transfer-Encoding: " + coding + chunks), 501) << coding;
  }
  EXPECT_EQ(status_of(post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked" + chunks), 400);
  EXPECT_EQ(status_of(post + "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked" + chunks), 400);
  EXPECT_EQ(status_of("POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked" + chunks), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\nHost: di\n\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: d\ri\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost : di\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\r\nX: a\r\n b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\n Host: di\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\r\nX:\r\n\tb\r\n\r\n"), 400);
  EXPECT_EQ(status_of(std::string("GET / HTTP/1.1\r\nHost: di\r\nX: a") + '\0' + "b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\r\nX: a\vb\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\r\nX: a\x7f\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: a, b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: a@b\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\r\n: x\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\nHost: di\r\nnocolon\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET  / HTTP/1.1\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of("GET /\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of(" GET / HTTP/1.1\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/2.0\r\n" + host + "\r\n"), 505);
  EXPECT_EQ(status_of("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505);
  EXPECT_EQ(status_of("GET / HTP/1.1\r\n" + host + "\r\n"), 400);
  EXPECT_EQ(status_of("\x16\x03\x01\x02"), 400) << "a TLS hello";
  EXPECT_EQ(status_of("GET / HTTP/1.0\r\n\r\n"), 0) << "HTTP/1.0 needs no Host";
}

TEST(RequestParser, BrokenChunks) {
  const std::string head = "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n";
  for (const char* body :
       {"x\r\n\r\n", "5\nhello\r\n0\r\n\r\n", "5\r\nhelloX\r\n0\r\n\r\n", "-1\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n", "5 \r\nhello\r\n0\r\n\r\n", "5;\r\nhello\r\n0\r\n\r\n",
        "FFFFFFFFFFFFFFFFFF\r\n", "5\r\nhello0\r\n\r\n", "0\r\nContent-Length: 5\r\n\r\n",
        "0\r\nTransfer-Encoding: chunked\r\n\r\n", "0\r\nbad trailer\r\n\r\n"}) {
    EXPECT_EQ(status_of(head + body), 400) << body;
  }
}

// Nothing else comes: whoever waits for more answers 408 in the end.
TEST(RequestParser, AMalformedChunkSizeOfFewBytesWasTakenForOneThatIsSlow) {
  const std::string head = "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n";
  for (const std::string before : {"", "3\r\nhel\r\n"}) {
    for (const char* size :
         {"z", "zz\r\n", "-1\r\n", "+1", "\r\n", ";", "0x", "0x\r\n", "0\n", "0\rx", "00z\r\n"}) {
      EXPECT_EQ(status_of(head + before + size), 400) << before << size;
    }
    for (const char* size :
         {"", "0", "0\r", "0\r\n", "0\r\n\r", "5;", "5;a=b\r", "00000005\r", "fF", "0 ;a"}) {
      EXPECT_EQ(status_of(head + before + size), 0) << before << size;
    }
  }
  for (const char* end : {"x", "\rx", "\n", "0"}) EXPECT_EQ(status_of(head + "3\r\nhel" + end), 400) << end;
  EXPECT_EQ(status_of(head + "3\r\nzz"), 0) << "bytes of a chunk are no header";
}

TEST(RequestParser, CodingsAndExpectations) {
  const std::string post = "POST / HTTP/1.1\r\n" + host + "Content-Length: 2\r\n";
  EXPECT_EQ(status_of(post + "Content-Encoding: gzip\r\n\r\nhi"), 415);
  EXPECT_EQ(status_of(post + "Content-Encoding: identity\r\n\r\nhi"), 0);
  EXPECT_EQ(status_of(post + "Expect: magic\r\n\r\nhi"), 417);
  RequestParser parser;
  parser.feed(post + "Expect: 100-Continue\r\n\r\n");
  ASSERT_EQ(parser.state(), State::head_done);
  EXPECT_TRUE(parser.request().expects_continue);
  EXPECT_EQ(parser.request().content_length, 2U);
  EXPECT_FALSE(parse("GET / HTTP/1.1\r\n" + host + "Expect: 100-continue\r\n\r\n").request.expects_continue)
      << "there is no body to wait for";
}

TEST(RequestParser, HeadLimit) {
  const std::string start = "GET / HTTP/1.1\r\n" + host + "X: ";
  const std::string end = "\r\n\r\n";
  const std::size_t room = header_bytes_max_default - start.size() - end.size();
  EXPECT_EQ(status_of(start + std::string(room, 'x') + end), 0);
  EXPECT_EQ(status_of(start + std::string(room + 1, 'x') + end), 431);
  EXPECT_EQ(status_of(std::string(header_bytes_max_default + 1, 'G')), 431);
  std::string many = "GET / HTTP/1.1\r\n" + host;
  for (std::size_t i = 0; i < header_count_max; ++i) many += "A: b\r\n";
  EXPECT_EQ(status_of(many + "\r\n"), 431);
  std::string lines;
  for (int i = 0; i < 40000; ++i) lines += "\r\n";
  EXPECT_EQ(status_of(lines), 0) << "empty lines before a request take no room";
}

TEST(RequestParser, BodyLimit) {
  const std::string post = "POST / HTTP/1.1\r\n" + host;
  const auto status = [](const std::string& bytes, std::size_t limit) {
    const Outcome whole = parse(bytes, SIZE_MAX, limit);
    EXPECT_EQ(whole.status, parse(bytes, 1, limit).status);
    return whole.status;
  };
  const std::string five = post + "Content-Length: 5\r\n\r\nhello";
  EXPECT_EQ(status(five, 5), 0);
  EXPECT_EQ(status(five, 4), 413);
  EXPECT_EQ(status(post + "Content-Length: 18446744073709551615\r\n\r\n", 4), 413);
  const std::string chunked = post + "Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n";
  EXPECT_EQ(status(chunked, 5), 0);
  EXPECT_EQ(status(chunked, 4), 413);
  EXPECT_EQ(status(post + "Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n", 4), 413);
}

TEST(RequestParser, A16ThreeMebibytesAreABodyLikeAnyOther) {
  const std::string body(3 << 20, 'x');
  const Outcome outcome = parse(
      "POST / HTTP/1.1\r\n" + host + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body,
      64 << 10, 48 << 20);
  ASSERT_EQ(outcome.state, State::done);
  EXPECT_EQ(outcome.request.body, body);
}

TEST(RequestParser, ChunkHeadersAreBounded) {
  const std::string head = "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(status_of(head + "5;" + std::string(40000, 'a')), 400);
  EXPECT_EQ(status_of(head + "0\r\nT: " + std::string(40000, 'a')), 400);
  std::string extensions;
  for (int i = 0; i < 40; ++i) extensions += "1;" + std::string(500, 'a') + "\r\nx\r\n";
  EXPECT_EQ(status_of(head + extensions), 400);
}

// Random cuts of random streams of requests: the same requests, whatever the cuts.
TEST(RequestParser, StreamsOfRequestsHoweverCut) {
  constexpr std::uint64_t seed = 7;
  SCOPED_TRACE("seed=" + std::to_string(seed));
  Rng rng(seed);
  for (int round = 0; round < 300; ++round) {
    std::string bytes;
    std::vector<std::string> bodies;
    for (std::uint64_t i = rng.below(5) + 1; i > 0; --i) {
      std::string body;
      for (std::uint64_t n = rng.below(200); n > 0; --n) body.push_back(static_cast<char>(rng.below(256)));
      bytes += "POST /" + std::to_string(i) + " HTTP/1.1\r\n" + host;
      if (rng.chance(0.5)) {
        bytes += "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
      } else {
        bytes += "Transfer-Encoding: chunked\r\n\r\n";
        for (std::size_t at = 0; at < body.size();) {
          const std::size_t count = std::min<std::size_t>(body.size() - at, 1 + rng.below(60));
          char hex[20];
          snprintf(hex, sizeof hex, "%zx", count);
          bytes += std::string(hex) + "\r\n" + body.substr(at, count) + "\r\n";
          at += count;
        }
        bytes += "0\r\n\r\n";
      }
      bodies.push_back(std::move(body));
    }
    RequestParser parser;
    std::vector<std::string> got;
    std::size_t at = 0;
    std::string_view piece;
    while (at < bytes.size() || !piece.empty()) {
      if (piece.empty()) {
        piece = std::string_view(bytes).substr(at, 1 + rng.below(120));
        at += piece.size();
      }
      piece.remove_prefix(parser.feed(piece));
      if (parser.state() == State::head_done) parser.accept_body(1 << 20);
      ASSERT_NE(parser.state(), State::failed) << parser.failure().body;
      if (parser.state() == State::done) {
        got.push_back(parser.request().body);
        parser.reset();
      }
    }
    ASSERT_EQ(got, bodies);
  }
}

}  // namespace
}  // namespace di::http
