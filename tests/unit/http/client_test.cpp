#include "http/client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>
#include <vector>

#include "http/address.h"
#include "http/server.h"
#include "http/sse.h"

namespace di::http {
namespace {

// Answers by path: /echo, /stream, /open (without an end), /cut, /big.
struct Paths final : Handler {
  Server* server = nullptr;
  Verdict on_head(const Request&) override { return {.refuse = std::nullopt, .body_bytes_max = 1 << 20}; }
  void on_request(ExchangeId id, Request request) override {
    if (request.path == "/echo") {
      server->respond(id, {.status = 200, .headers = {{"X-Method", request.method}}, .body = request.body});
    } else if (request.path == "/stream" || request.path == "/cut") {
      server->start_stream(id, 200, sse_headers(), sse_event("1"));
      server->write(id, sse_event("2"));
      request.path == "/cut" ? server->abort(id) : server->finish(id, sse_done);
    } else if (request.path == "/open") {
      server->start_stream(id, 200, sse_headers(), sse_event("1"));
    } else if (request.path == "/big") {
      server->respond(id, {.status = 200, .headers = {}, .body = std::string(3 << 20, 'b')});
    } else if (request.path == "/none") {
      server->abort(id);
    } else {
      server->respond(id, {.status = 404, .headers = {}, .body = "{}"});
    }
  }
  void on_gone(ExchangeId, Gone) override {}
};

class ClientTest : public testing::Test {
 protected:
  void SetUp() override {
    server_ = std::make_unique<Server>(loop_, paths_, Server::Options{});
    paths_.server = server_.get();
    auto address = server_->listen("127.0.0.1:0");
    ASSERT_TRUE(address);
    address_ = *address;
    thread_ = std::thread([this] { loop_.run(); });
  }
  void TearDown() override {
    loop_.stop();
    thread_.join();
  }
  Client client(int cancel_fd = -1) {
    auto made = Client::connect(address_, seconds(10), cancel_fd);
    EXPECT_TRUE(made);
    return std::move(*made);
  }

  loop::Loop loop_;
  Paths paths_;
  std::unique_ptr<Server> server_;
  std::string address_;
  std::thread thread_;
};

TEST_F(ClientTest, GetAndPostOnOneConnection) {
  Client it = client();
  const auto posted = it.post("/echo", "{\"a\":1}", {{"Authorization", "Bearer k"}});
  ASSERT_TRUE(posted) << posted.error().message;
  EXPECT_EQ(posted->status, 200);
  EXPECT_EQ(posted->body, "{\"a\":1}");
  EXPECT_EQ(posted->header("x-method"), "POST");
  EXPECT_TRUE(posted->complete);
  const auto got = it.get("/missing");
  ASSERT_TRUE(got);
  EXPECT_EQ(got->status, 404);
  const auto big = it.get("/big");
  ASSERT_TRUE(big);
  EXPECT_EQ(big->body.size(), 3U << 20);
}

TEST_F(ClientTest, StreamsAreTakenPieceByPiece) {
  Client it = client();
  std::string all;
  const auto streamed = it.request("POST", "/stream", {}, "{}", [&](std::string_view bytes) {
    all += bytes;
    return true;
  });
  ASSERT_TRUE(streamed);
  EXPECT_EQ(all, "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n");
  EXPECT_TRUE(streamed->complete);
  EXPECT_TRUE(streamed->body.empty());
  EXPECT_EQ(it.get("/echo")->status, 200) << "the connection is still good";
}

TEST_F(ClientTest, ACutStreamIsIncomplete) {
  Client it = client();
  const auto cut = it.get("/cut");
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->body, "data: 1\n\ndata: 2\n\n");
  EXPECT_FALSE(cut->complete);
  EXPECT_FALSE(it.get("/echo")) << "and its connection is closed";
}

TEST_F(ClientTest, AWaitCanBeCancelled) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Fd ours(ends[0]), theirs(ends[1]);
  Client it = client(ours.get());
  std::string all;
  const auto open = it.request("GET", "/open", {}, {}, [&](std::string_view bytes) {
    all += bytes;
    EXPECT_EQ(::send(theirs.get(), "x", 1, 0), 1);
    return true;
  });
  ASSERT_FALSE(open);
  EXPECT_EQ(open.error().code, Code::cancelled);
  EXPECT_EQ(all, "data: 1\n\n") << "what came before is the caller's";
}

// A host that takes no packet keeps whoever calls waiting as long as one that does not answer.
TEST(ClientAlone, TheWaitForAConnectionCanBeCancelled) {
  const Fd full(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof at;
  ASSERT_EQ(::bind(full.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  ASSERT_EQ(::listen(full.get(), 0), 0);
  ASSERT_EQ(::getsockname(full.get(), reinterpret_cast<sockaddr*>(&at), &bytes), 0);
  const std::string address = "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Fd ours(ends[0]), theirs(ends[1]);
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  // Nobody accepts: the first few fill its queue.
  std::vector<Client> taken;
  while (taken.size() < 10) {
    auto next = Client::connect(address, seconds(60), ours.get());
    if (next) {
      taken.push_back(std::move(*next));
      continue;
    }
    EXPECT_EQ(next.error().code, Code::cancelled) << next.error().message;
    return;
  }
  FAIL() << "the queue of the listener has no end";
}

TEST_F(ClientTest, ACallbackMayStop) {
  Client it = client();
  const auto stopped = it.request("GET", "/stream", {}, {}, [](std::string_view) { return false; });
  ASSERT_TRUE(stopped);
  EXPECT_FALSE(stopped->complete);
}

TEST_F(ClientTest, NoAnswerIsUnreachable) {
  Client it = client();
  const auto none = it.get("/none");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::unreachable);
}

TEST(Client, NobodyListens) {
  EXPECT_EQ(Client::connect("unix:/nonexistent/x", seconds(1)).error().code, Code::unreachable);
  EXPECT_EQ(Client::connect("nonsense", seconds(1)).error().code, Code::invalid);
}

// A server that accepts and says nothing.
TEST(Client, WaitsOnlySoLong) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  auto address = address_parse("127.0.0.1:0");
  ASSERT_EQ(::bind(listener.get(), address->get(), address->bytes), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), address->get(), &address->bytes), 0);
  auto it = Client::connect(address_text(*address), milliseconds(30));
  ASSERT_TRUE(it);
  EXPECT_EQ(it->get("/").error().code, Code::timeout);
}

}  // namespace
}  // namespace di::http
