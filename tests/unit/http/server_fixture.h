// A server on real sockets, and a handler that notes what it is told.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "http/server.h"
#include "tests/support/http_peer.h"
#include "tests/support/manual_loop.h"

namespace di::http {

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

inline const std::string get = "GET /x HTTP/1.1\r\nHost: di\r\n\r\n";
inline const std::string post_head = "POST /p HTTP/1.1\r\nHost: di\r\n";

inline std::string error_message(const std::string& answer) {
  const auto json = Json::parse(body_of(answer));
  if (!json || json->find("error") == nullptr) return "no JSON error in: " + answer;
  EXPECT_NE(answer.find("Content-Type: application/json"), std::string::npos);
  return json->find("error")->find("message")->as_string();
}

inline int occurrences(const std::string& text, std::string_view word) {
  int count = 0;
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

}  // namespace di::http
