// cmd/di-router/frontend.h: the HTTP face: routes, authentication, and the answer of each request.
//
// Owner: the loop thread.  Bounds: as many open answers as the router core has flights, and those of the
// prompt reader before them; charges_waiting_max and one for each open answer of records that the journal
// did not take.  A request that passes here becomes a request::NewRequest; tokens and the ending come back
// by id.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "account/journal.h"
#include "account/key.h"
#include "account/quota.h"
#include "api/render.h"
#include "api/text.h"
#include "base/histogram.h"
#include "config.h"
#include "daemon/metrics.h"
#include "http/server.h"
#include "http/sse.h"
#include "loop/loop.h"
#include "prompt_reader.h"
#include "request/core.h"

namespace di::router {

// Charge records that wait for a journal that cannot be written; with as many, no request is admitted.
inline constexpr std::size_t charges_waiting_max = 1 << 16;
// Written in one turn once it can be.
inline constexpr std::size_t charges_at_once_max = 4096;
// Requests that `explain` finds by a client's own x-request-id.
inline constexpr std::size_t explain_ids_max = 4096;

Result<ServedModel> served_model_load(const Config& config);

// What the front asks of the router behind it.
class Backend {
 public:
  virtual ~Backend() = default;
  // Fills root and keys, and submits.  `who` isolates the cache.
  virtual Status submit(request::NewRequest request, const std::string& tenant, const std::string& user_id,
                        const std::string& cache_salt) = 0;
  virtual void cancel(const RequestId& id, Code reason) = 0;
  [[nodiscard]] virtual bool serves() const = 0;
};

class Frontend final : public http::Handler {
 public:
  Frontend(const Config& config, ServedModel model, account::KeyTable keys, Backend& backend,
           daemon::Metrics& metrics);
  ~Frontend() override;

  // Listens on http.listen and admin.listen; returns the address of the API.
  Result<std::string> listen(loop::Loop& loop);
  Status open_journal(const std::string& dir);
  void set_keys(account::KeyTable keys) { keys_ = std::move(keys); }

  // Tokens of one turn and endings, in order.
  void emitted(const std::vector<request::Emission>& emissions);
  void ended(const request::Ending& ending);
  // Once a second: keep-alive comments that are due, and charge records that could not be written.
  void on_time();

  // Health says no from now on, requests are taken until http.settle has passed.  `on_drained` is called,
  // perhaps more than once, when the last connection has gone.
  void drain(std::function<void()> on_drained);
  // Everything is with its client, and every charge in the journal.
  [[nodiscard]] bool drained() const { return empty_ && unwritten_.empty(); }
  // Why the journal takes no charge records, which wait; empty: it takes them.
  [[nodiscard]] const std::string& journal_refuses() const { return unwritten_why_; }
  // The id under which `explain` finds a request: our own or the client's x-request-id.
  [[nodiscard]] std::optional<RequestId> find_id(const std::string& text) const;
  [[nodiscard]] std::size_t open() const { return answers_.size(); }
  [[nodiscard]] const account::Concurrency& concurrency() const { return concurrency_; }
  [[nodiscard]] http::Server& server() { return *server_; }

  Verdict on_head(const http::Request& head) override;
  void on_request(http::ExchangeId exchange, http::Request request) override;
  http::Headers own_headers(const http::Request* head) override;
  void on_gone(http::ExchangeId exchange, http::Gone why) override;
  void on_empty() override;

 private:
  struct Answer {
    RequestId id;
    std::string request_id;  // x-request-id
    http::ExchangeId exchange;
    bool client_here = true;
    bool stream = false;
    bool started = false;   // the status line is out
    bool finished = false;  // the client has everything
    std::unique_ptr<api::AnswerText> text;
    std::unique_ptr<api::StreamRenderer> renderer;
    api::AnswerHead head;
    std::string whole;    // text of an answer that is not streamed
    std::string pending;  // text of this turn
    std::optional<api::Finish> finish;
    std::int64_t prompt_tokens = 0;
    std::int64_t output_tokens = 0;
    account::Ticket ticket;
    account::Charge charge;
    Instant arrived;
    Instant last_token;
    http::KeepAlive keep_alive{Duration{0}, Instant{}};
  };

  // A body that is long is read elsewhere first; then comes body_read().
  void take_body(Task task, http::ExchangeId exchange, std::string body, const std::string& request_id,
                 const account::KeyEntry& key);
  void body_read(http::ExchangeId exchange, const std::string& request_id, const account::KeyEntry& key,
                 account::Ticket ticket, ReadBody&& read);
  void start(http::ExchangeId exchange, const std::string& request_id, const account::KeyEntry& key,
             account::Ticket ticket, Prompt prompt);
  void fail(http::ExchangeId exchange, const std::string& request_id, const api::ApiError& error);
  void send_json(http::ExchangeId exchange, const std::string& request_id, std::string body,
                 bool charged = false);
  // Sends what this turn gave; ends the answer when it has a finish.
  void flush(Answer& answer);
  void settle(Answer& answer, const request::Ending& ending, std::string_view status);
  void write_charges();
  void stop_taking();
  [[nodiscard]] api::Usage usage(const Answer& answer) const;
  [[nodiscard]] const account::KeyEntry* authenticate(const http::Request& head, api::ApiError& error) const;

  class Admin;

  Config config_;
  ServedModel model_;
  account::KeyTable keys_;
  Backend& backend_;
  daemon::Metrics& metrics_;
  loop::Loop* loop_ = nullptr;
  std::unique_ptr<http::Server> server_;
  std::unique_ptr<Admin> admin_;
  std::unique_ptr<http::Server> admin_server_;
  std::unique_ptr<account::Journal> journal_;
  std::deque<account::Charge> unwritten_;
  std::string unwritten_why_;  // of the last that was not; empty: it was
  account::Concurrency concurrency_;
  std::map<RequestId, Answer> answers_;
  // Exchanges whose body is being read, with their x-request-id.
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::string> reading_;
  std::unique_ptr<PromptReader> reader_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, RequestId> by_exchange_;
  std::map<std::string, RequestId> by_request_id_;  // the last explain_ids_max
  std::vector<std::pair<std::string, RequestId>> request_id_ring_;
  std::size_t request_id_next_ = 0;
  std::unique_ptr<loop::Timer> settle_timer_;
  std::function<void()> on_drained_;
  bool leaving_ = false;   // health says no
  bool draining_ = false;  // nothing new is taken
  bool empty_ = false;     // and the last connection has gone

  daemon::Counter& chat_requests_;
  daemon::Counter& completion_requests_;
  daemon::Counter& prompt_tokens_;
  daemon::Counter& cached_tokens_;
  daemon::Counter& output_tokens_;
  daemon::Counter& failed_;
  daemon::Counter& cancelled_;
  Histogram& ttft_us_;
  Histogram& tpot_us_;
};

}  // namespace di::router
