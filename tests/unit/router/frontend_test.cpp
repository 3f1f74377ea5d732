#include "frontend.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>
#include <vector>

#include "base/json.h"
#include "tests/support/http_peer.h"
#include "tests/support/manual_loop.h"

namespace di::router {
namespace {

using http::Peer;

struct PlayedBackend final : Backend {
  std::vector<request::NewRequest> submitted;
  std::vector<RequestId> cancelled;

  Status submit(request::NewRequest request, const std::string&, const std::string&,
                const std::string&) override {
    submitted.push_back(std::move(request));
    return {};
  }
  void cancel(const RequestId& id, Code) override { cancelled.push_back(id); }
  bool serves() const override { return true; }
};

// No file grows while it is there.
class FullDisk {
 public:
  FullDisk() {
    std::signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit full{1, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  }
  ~FullDisk() { EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before_), 0); }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
};

class FrontendTest : public loop::ManualLoopTest {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/di-router-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    dir_ = folder;
    config_.common.drain_timeout = seconds(60);
    config_.http_listen = "127.0.0.1:0";
    config_.body_bytes_max = 48 << 20;
    config_.connections_max = 64;
    config_.model_name = "demo";
    config_.model_path = std::string(DI_SOURCE_DIR) + "/etc/model-demo";
    config_.output_tokens_default = 100;
    config_.auth_required = true;
    config_.concurrency_max = 100;
    config_.keep_alive = seconds(15);
  }
  void TearDown() override {
    front_.reset();
    std::filesystem::remove_all(dir_);
  }

  void make() {
    auto model = served_model_load(config_);
    ASSERT_TRUE(model) << model.error().message;
    account::KeyTable keys;
    for (const char* tenant : {"lab", "shop"}) {
      const std::string key = account::key_generate();
      ASSERT_TRUE(keys.add(key, tenant).ok());
      keys_[tenant] = key;
    }
    front_ = std::make_unique<Frontend>(config_, *std::move(model), std::move(keys), backend_, metrics_);
    ASSERT_TRUE(front_->open_journal(dir_).ok());
    auto address = front_->listen(loop_);
    ASSERT_TRUE(address) << address.error().message;
    address_ = *address;
  }

  // A request as it is sent; `more` are further fields of its head, each with its line's end.
  std::string post(const std::string& path, const std::string& body, const std::string& tenant = "lab",
                   const std::string& more = "") const {
    return "POST " + path + " HTTP/1.1\r\nHost: di\r\nAuthorization: Bearer " + keys_.at(tenant) + "\r\n" +
           more + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  static std::string prompt(const std::string& more = "") {
    return R"({"model": "demo", "prompt": "What is di?")" + more + "}";
  }
  // The next request that was admitted.
  RequestId submitted() {
    EXPECT_TRUE(until([&] { return !backend_.submitted.empty(); }));
    if (backend_.submitted.empty()) return {};
    const RequestId id = backend_.submitted.front().id;
    backend_.submitted.erase(backend_.submitted.begin());
    return id;
  }
  // Answers with one token of this text.
  void answer(const RequestId& id, const std::string& text) {
    request::Emission emission;
    emission.id = id;
    emission.token.id = wire::script_token_base;
    const auto bytes = as_bytes(text);
    emission.token.bytes.assign(bytes.begin(), bytes.end());
    emission.finish = wire::Finish::stop;
    front_->emitted({emission});
    request::Ending ending;
    ending.id = id;
    ending.finish = wire::Finish::stop;
    ending.output_tokens = 1;
    front_->ended(ending);
  }
  static int status(const std::string& answer) {
    return answer.size() < 12 ? 0 : std::stoi(answer.substr(9, 3));
  }
  std::set<std::string> charged() const {
    std::set<std::string> ids;
    const auto counts =
        account::journal_read(dir_, [&](const account::Charge& charge) { ids.insert(charge.request_id); });
    EXPECT_TRUE(counts) << counts.error().message;
    if (counts) {
      EXPECT_EQ(counts->records, ids.size()) << "each once";
      EXPECT_EQ(counts->damaged, 0U);
    }
    return ids;
  }

  std::string dir_;
  Config config_;
  daemon::Metrics metrics_;
  PlayedBackend backend_;
  std::map<std::string, std::string> keys_;
  std::unique_ptr<Frontend> front_;
  std::string address_;
};

TEST_F(FrontendTest, CountingTokensTakesATicketOfItsTenant) {
  config_.concurrency_max = 1;
  make();
  Peer running(loop_, address_), counting(loop_, address_);
  running.send(post("/v1/completions", prompt()));
  const RequestId id = submitted();
  for (const auto& [path, body] : {std::pair<std::string, std::string>{"/tokenize", prompt()},
                                   {"/detokenize", R"({"tokens": [1, 2]})"}}) {
    counting.send(post(path, body));
    EXPECT_EQ(status(counting.read_answer()), 429) << path;
    counting.send(post(path, body, "shop"));
    EXPECT_EQ(status(counting.read_answer()), 200) << path;
  }
  answer(id, "done");
  EXPECT_EQ(status(running.read_answer()), 200);
  EXPECT_EQ(front_->concurrency().held(), 0U);
  const std::string at_once = prompt();
  const std::string elsewhere = R"({"prompt": ")" + std::string(2 * read_at_once_bytes_max, 'x') + "\"}";
  for (const std::string& body : {at_once, elsewhere, elsewhere}) {
    counting.send(post("/tokenize", body));
    EXPECT_EQ(status(counting.read_answer()), 200) << "and gives it back";
  }
  EXPECT_EQ(front_->concurrency().held(), 0U);
}

TEST_F(FrontendTest, WhoLeavesWhileItsPromptIsReadGivesItsTicketBack) {
  make();
  const std::string body = R"({"prompt": ")" + std::string(2 * read_at_once_bytes_max, 'x') + "\"}";
  for (int i = 0; i < 10; ++i) {
    Peer peer(loop_, address_);
    peer.send(post("/tokenize", body));
    ASSERT_TRUE(
        until([&] { return front_->server().counters().requests == static_cast<std::uint64_t>(i) + 1; }));
    peer.leave();
  }
  ASSERT_TRUE(
      until([&] { return front_->server().connections() == 0 && front_->concurrency().held() == 0; }));
}

// A planned stop: what a client has not read yet is not cut off.
TEST_F(FrontendTest, IsDrainedWhenEverythingIsWithTheClient) {
  make();
  Peer peer(loop_, address_, 4096);
  Peer late(loop_, address_);
  peer.send(post("/v1/completions", prompt()));
  const RequestId id = submitted();
  const std::string half = post("/v1/completions", prompt());
  late.send(half.substr(0, half.size() - 5));
  ASSERT_TRUE(until([&] { return front_->server().bodies_bytes() > 0; }));
  int told = 0;
  front_->drain([&] { ++told; });
  answer(id, std::string(16 << 20, 'x'));
  EXPECT_EQ(front_->open(), 0U);
  late.send(half.substr(half.size() - 5));
  EXPECT_EQ(status(late.read_all()), 503) << "somebody else will serve it";
  late.leave();
  for (int i = 0; i < 50; ++i) loop_.run_ready();
  EXPECT_FALSE(front_->drained());
  EXPECT_EQ(told, 0);
  const std::string all = peer.read_all();
  EXPECT_EQ(status(all), 200);
  const auto json = Json::parse(http::body_of(all));
  ASSERT_TRUE(json) << "whole";
  ASSERT_TRUE(until([&] { return told > 0; }));
  EXPECT_TRUE(front_->drained());
}

TEST_F(FrontendTest, HealthSaysNoBeforeTheDoorCloses) {
  config_.settle = seconds(5);
  make();
  int told = 0;
  Peer kept(loop_, address_);
  kept.send("GET /health/ready HTTP/1.1\r\nHost: di\r\n\r\n");
  EXPECT_EQ(status(kept.read_answer()), 200);
  front_->drain([&] { ++told; });
  for (const char* path : {"/health", "/health/ready", "/health/live"}) {
    Peer probe(loop_, address_);
    probe.send(std::string("GET ") + path + " HTTP/1.1\r\nHost: di\r\n\r\n");
    EXPECT_EQ(status(probe.read_all()), std::string(path) == "/health/live" ? 200 : 503) << path;
  }
  Peer fresh(loop_, address_);
  fresh.send(post("/v1/completions", prompt()));
  answer(submitted(), "served");
  const std::string served = fresh.read_all();
  EXPECT_EQ(status(served), 200);
  EXPECT_NE(served.find("Connection: close\r\n"), std::string::npos);
  advance(seconds(4));
  EXPECT_FALSE(kept.closed());
  advance(seconds(2));
  EXPECT_EQ(kept.read_all(), "");
  ASSERT_TRUE(until([&] { return told > 0; }));
  EXPECT_TRUE(front_->drained());
}

TEST_F(FrontendTest, ChargesThatCouldNotBeWrittenAreWrittenLater) {
  make();
  const auto serve = [&](int from, int to) {
    Peer peer(loop_, address_);
    for (int i = from; i < to; ++i) {
      peer.send(post("/v1/completions", prompt(), "lab", "x-request-id: r" + std::to_string(i) + "\r\n"));
      answer(submitted(), "x");
      EXPECT_EQ(status(peer.read_answer()), 200);
    }
  };
  serve(0, 3);
  EXPECT_EQ(charged().size(), 3U);
  {
    const FullDisk full;
    EXPECT_EQ(front_->journal_refuses(), "");
    serve(3, 103);
    front_->on_time();
  }
  EXPECT_NE(front_->journal_refuses().find(dir_), std::string::npos) << front_->journal_refuses();
  EXPECT_EQ(charged().size(), 3U);
  serve(103, 104);
  front_->on_time();
  EXPECT_EQ(charged().size(), 104U);
  EXPECT_EQ(front_->journal_refuses(), "");
  int told = 0;
  front_->drain([&] { ++told; });
  ASSERT_TRUE(until([&] { return told > 0; }));
  EXPECT_TRUE(front_->drained());
}

TEST_F(FrontendTest, WithTooManyChargesUnwrittenNothingIsBegunAndAStopWaitsForThem) {
  make();
  Peer peer(loop_, address_);
  Peer open(loop_, address_);
  open.send(post("/v1/completions", prompt()));
  const RequestId begun = submitted();
  const auto serve = [&] {
    peer.send(post("/v1/completions", prompt()));
    answer(submitted(), "x");
    return status(peer.read_answer());
  };
  int told = 0;
  {
    const FullDisk full;
    for (std::size_t i = 0; i < charges_waiting_max; ++i) ASSERT_EQ(serve(), 200) << i;
    peer.send(post("/v1/completions", prompt()));
    const std::string refused = peer.read_answer();
    EXPECT_EQ(status(refused), 503);
    EXPECT_NE(refused.find("Retry-After: "), std::string::npos) << refused;
    EXPECT_NE(refused.find("what requests cost cannot be written"), std::string::npos) << refused;
    EXPECT_TRUE(backend_.submitted.empty());
    EXPECT_EQ(front_->concurrency().held(), 1U) << "that of the open one";
    peer.send(post("/tokenize", prompt()));
    EXPECT_EQ(status(peer.read_answer()), 200) << "costs nothing";
    answer(begun, "x");
    EXPECT_EQ(status(open.read_answer()), 200) << "what was begun goes on";
    front_->on_time();
  }
  EXPECT_TRUE(charged().empty());
  front_->on_time();
  EXPECT_EQ(charged().size(), charges_at_once_max);
  EXPECT_EQ(serve(), 200) << "there is room again";
  front_->drain([&] { ++told; });
  ASSERT_TRUE(until([&] { return told > 0; }));
  for (std::size_t written = charges_at_once_max; written < charges_waiting_max + 2;
       written += charges_at_once_max) {
    EXPECT_FALSE(front_->drained());
    front_->on_time();
  }
  EXPECT_TRUE(front_->drained());
  EXPECT_EQ(charged().size(), charges_waiting_max + 2);
}

TEST_F(FrontendTest, ExplainKnowsTheNewerOfTwoRequestsWithOneName) {
  config_.concurrency_max = 10'000;
  make();
  Peer peer(loop_, address_);
  const auto serve = [&](const std::string& name) {
    peer.send(post("/v1/completions", prompt(), "lab", "x-request-id: " + name + "\r\n"));
    const RequestId id = submitted();
    answer(id, "x");
    peer.read_answer();
    return id;
  };
  const RequestId first = serve("twice");
  EXPECT_EQ(front_->find_id("twice"), first);
  const RequestId second = serve("twice");
  EXPECT_EQ(front_->find_id("twice"), second);
  for (std::size_t i = 2; i < explain_ids_max; ++i) serve("other" + std::to_string(i));
  EXPECT_EQ(front_->find_id("twice"), second);
  serve("in-the-place-of-the-first");
  EXPECT_EQ(front_->find_id("twice"), second);
  serve("in-the-place-of-the-second");
  EXPECT_EQ(front_->find_id("twice"), std::nullopt);
  EXPECT_NE(front_->find_id("other2"), std::nullopt);
}

TEST_F(FrontendTest, APromptThatIsTooLongIsNamedAsItWasSent) {
  config_.context_tokens_max = 64;
  make();
  Peer peer(loop_, address_);
  const std::string some =
      "What is di? What is di? What is di? What is di? What is di? What is di? What is di?";
  std::string text;
  for (int i = 0; i < 20; ++i) text += some;
  for (const std::string& content : {some + some + some, text}) {
    const std::string messages = R"("messages": [{"role": "user", "content": ")" + content + "\"}]";
    const std::string plain = "\"prompt\": \"" + content + "\"";
    const std::tuple<std::string, std::string, std::string> cases[] = {
        {"/v1/chat/completions", messages, "messages"},
        {"/v1/completions", plain, "prompt"},
    };
    for (const auto& [path, fields, param] : cases) {
      peer.send(post(path, R"({"model": "demo", )" + fields + "}"));
      const std::string answer = peer.read_answer();
      EXPECT_EQ(status(answer), 400) << answer;
      const auto json = Json::parse(http::body_of(answer));
      ASSERT_TRUE(json);
      EXPECT_EQ(json->find("error")->find("code")->as_string(), "context_length_exceeded") << answer;
      EXPECT_EQ(json->find("error")->find("param")->as_string(), param);
    }
  }
  for (const auto& [body, param] :
       {std::pair<std::string, std::string>{"{\"prompt\": \"" + text + "\"}", "prompt"},
        {R"({"messages": [{"role": "user", "content": ")" + text + "\"}]}", "messages"}}) {
    peer.send(post("/tokenize", body));
    const std::string answer = peer.read_answer();
    EXPECT_EQ(status(answer), 400) << answer;
    EXPECT_NE(answer.find("\"param\":\"" + param + "\""), std::string::npos) << answer;
  }
}

TEST_F(FrontendTest, AnswersOfTheServerItselfHaveTheClientsId) {
  config_.body_bytes_max = 1024;
  make();
  Peer peer(loop_, address_);
  peer.send("POST /tokenize HTTP/1.1\r\nHost: di\r\nAuthorization: Bearer " + keys_.at("lab") +
            "\r\nx-request-id: mine\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n" + std::string(4096, 'x'));
  const std::string answer = peer.read_all();
  EXPECT_EQ(status(answer), 413);
  EXPECT_NE(answer.find("x-request-id: mine\r\n"), std::string::npos) << answer;
}

}  // namespace
}  // namespace di::router
