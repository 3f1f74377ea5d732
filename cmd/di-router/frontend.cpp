#include "frontend.h"

#include <algorithm>

#include "base/assert.h"
#include "base/clock.h"
#include "base/crypto.h"
#include "base/log.h"
#include "model/shape.h"

namespace di::router {

namespace {

// What a client is told to wait when the service has no room (spec/api.md 2.4).
constexpr std::int64_t retry_after_s = 1;

struct Route {
  std::string_view path;
  std::string_view method;
  bool open = false;                        // without a key
  std::optional<Task> task = std::nullopt;  // what its body is
};
constexpr Route routes[] = {
    {"/v1/chat/completions", "POST", false, Task::chat},
    {"/chat/completions", "POST", false, Task::chat},
    {"/v1/completions", "POST", false, Task::completion},
    {"/completions", "POST", false, Task::completion},
    {"/tokenize", "POST", false, Task::tokenize},
    {"/v1/tokenize", "POST", false, Task::tokenize},
    {"/detokenize", "POST", false, Task::detokenize},
    {"/v1/detokenize", "POST", false, Task::detokenize},
    {"/v1/models", "GET"},
    {"/models", "GET"},
    {"/health", "GET", true},
    {"/health/live", "GET", true},
    {"/health/ready", "GET", true},
};

const Route* route_find(std::string_view path) {
  for (const Route& route : routes) {
    if (route.path == path) return &route;
  }
  return nullptr;
}

// "/v1/models/NAME" and "/models/NAME"; empty when it is neither.
std::string_view model_of_path(std::string_view path) {
  for (const std::string_view prefix : {std::string_view("/v1/models/"), std::string_view("/models/")}) {
    if (path.starts_with(prefix) && path.size() > prefix.size()) return path.substr(prefix.size());
  }
  return {};
}

RequestId new_request_id() {
  RequestId id;
  random_bytes(id.raw);
  return id;
}

// The x-request-id that the client gave its request.
std::optional<std::string> id_of_client(const http::Request& head) {
  const auto given = head.header("x-request-id");
  if (!given.has_value() || !api::request_id_sane(*given)) return std::nullopt;
  return std::string(*given);
}

http::Headers to_http(const api::Headers& headers) {
  http::Headers out;
  for (const auto& [name, value] : headers) out.emplace_back(name, value);
  return out;
}

std::string_view code_status(Code code) {
  return code == Code::ok ? "ok" : code == Code::cancelled ? "cancelled" : "failed";
}

}  // namespace

Result<ServedModel> served_model_load(const Config& config) {
  auto shape = model::shape_load(config.model_path);
  if (!shape) return shape.error();
  auto tokenizer = model::Tokenizer::load(config.model_path + "/tokenizer.json");
  if (!tokenizer) return tokenizer.error();
  auto chat = model::ChatFormat::load(config.model_path + "/tokenizer_config.json", *tokenizer);
  if (!chat) return chat.error();
  if (tokenizer->vocab_size() > shape->vocab) {
    return Error{Code::invalid, 0,
                 config.model_path + "/tokenizer.json: has more tokens than the model's vocabulary"};
  }
  const std::uint32_t context = config.context_tokens_max == 0
                                    ? shape->positions_max
                                    : std::min(config.context_tokens_max, shape->positions_max);
  return ServedModel{config.model_name, *std::move(tokenizer), *std::move(chat), context,
                     wall_clock_ms() / 1000};
}

// Metrics and the status page, on an address of their own.
class Frontend::Admin final : public http::Handler {
 public:
  explicit Admin(Frontend& front) : front_(front) {}
  void serve(http::Server& server) { server_ = &server; }

  Verdict on_head(const http::Request&) override { return {std::nullopt, 0}; }
  void on_request(http::ExchangeId exchange, http::Request request) override {
    http::Reply reply;
    if (request.method != "GET") {
      const api::ApiError error = api::error_method(request.method, "GET");
      reply = {error.status, to_http(api::error_headers(error)), api::error_body(error)};
    } else if (request.path == "/metrics") {
      reply.headers = {{"Content-Type", "text/plain; version=0.0.4; charset=utf-8"}};
      reply.body = front_.metrics_.prometheus();
    } else if (request.path == "/") {
      reply.headers = {{"Content-Type", "text/plain; charset=utf-8"}};
      reply.body = "di-router\nmodel " + front_.model_.name + "\nserves " +
                   (front_.backend_.serves() ? "yes" : "no") + "\nopen answers " +
                   std::to_string(front_.open()) + "\nsee /metrics\n";
    } else {
      const api::ApiError error = api::error_route(request.path);
      reply = {error.status, to_http(api::error_headers(error)), api::error_body(error)};
    }
    server_->respond(exchange, reply);
  }
  void on_gone(http::ExchangeId, http::Gone) override {}

 private:
  Frontend& front_;
  http::Server* server_ = nullptr;
};

Frontend::Frontend(const Config& config, ServedModel model, account::KeyTable keys, Backend& backend,
                   daemon::Metrics& metrics)
    : config_(config),
      model_(std::move(model)),
      keys_(std::move(keys)),
      backend_(backend),
      metrics_(metrics),
      concurrency_(config.concurrency_max),
      request_id_ring_(explain_ids_max),
      chat_requests_(metrics.counter("di_http_chat_requests_total", "Chat requests admitted")),
      completion_requests_(
          metrics.counter("di_http_completion_requests_total", "Completion requests admitted")),
      prompt_tokens_(metrics.counter("di_prompt_tokens_total", "Prompt tokens of finished requests")),
      cached_tokens_(metrics.counter("di_cached_tokens_total", "Prompt tokens that came from the cache")),
      output_tokens_(metrics.counter("di_output_tokens_total", "Tokens produced for clients")),
      failed_(metrics.counter("di_requests_failed_total", "Requests that ended with an error")),
      cancelled_(metrics.counter("di_requests_cancelled_total", "Requests whose client left")),
      ttft_us_(metrics.histogram("di_ttft_us", "Arrival to first token")),
      tpot_us_(metrics.histogram("di_tpot_us", "Time between tokens of a stream")) {
  metrics.gauge_from("di_charge_records_waiting", "Charge records that the journal has not taken",
                     [this] { return static_cast<std::int64_t>(unwritten_.size()); });
}

Frontend::~Frontend() {
  while (!unwritten_.empty()) {
    const std::size_t before = unwritten_.size();
    write_charges();
    if (unwritten_.size() < before) continue;
    log_error("account", "charge records lost", {{"records", before}});
    return;
  }
}

Result<std::string> Frontend::listen(loop::Loop& loop) {
  loop_ = &loop;
  reader_ = std::make_unique<PromptReader>(loop, model_, [this](PromptReader::Read&& read) {
    const http::ExchangeId exchange = read.job.exchange;
    // Its client may have left meanwhile.
    if (reading_.erase({exchange.slot, exchange.generation}) == 0) return;
    body_read(exchange, read.job.request_id, read.job.key, std::move(read.job.ticket),
              std::move(read.result));
  });
  settle_timer_ =
      std::make_unique<loop::Timer>(loop, loop::TimerKind::product, "settle", [this] { stop_taking(); });
  http::Server::Options options;
  options.connections_max = config_.connections_max;
  server_ = std::make_unique<http::Server>(loop, *this, options);
  auto address = server_->listen(config_.http_listen);
  if (!address) return address.error().in("http.listen");
  if (!config_.admin_listen.empty()) {
    admin_ = std::make_unique<Admin>(*this);
    http::Server::Options admin_options;
    admin_options.connections_max = 64;
    admin_server_ = std::make_unique<http::Server>(loop, *admin_, admin_options);
    admin_->serve(*admin_server_);
    auto admin_address = admin_server_->listen(config_.admin_listen);
    if (!admin_address) return admin_address.error().in("admin.listen");
    log_info("http", "admin listens", {{"address", *admin_address}});
  }
  log_info("http", "listens", {{"address", *address}});
  return address;
}

Status Frontend::open_journal(const std::string& dir) {
  auto journal = account::Journal::open(dir);
  if (!journal) return journal.error();
  journal_ = std::make_unique<account::Journal>(*std::move(journal));
  return {};
}

const account::KeyEntry* Frontend::authenticate(const http::Request& head, api::ApiError& error) const {
  static const account::KeyEntry anonymous{"anonymous", "none"};
  const auto secret = account::key_of_headers(head.header("authorization"), head.header("x-api-key"));
  if (!secret) {
    error = api::error_invalid("", secret.error().message);
    return nullptr;
  }
  if (secret->has_value()) {
    if (const account::KeyEntry* entry = keys_.find(**secret)) return entry;
  }
  if (!config_.auth_required) return &anonymous;
  error = api::error_key(secret->has_value() ? "the API key is not known"
                                             : "no API key: send it as 'Authorization: Bearer ...'");
  return nullptr;
}

http::Handler::Verdict Frontend::on_head(const http::Request& head) {
  const auto refuse = [&](const api::ApiError& error) {
    http::Reply reply{error.status, to_http(api::error_headers(error)), api::error_body(error)};
    reply.headers.emplace_back("x-request-id", id_of_client(head).value_or(new_request_id().text()));
    return Verdict{std::move(reply), 0};
  };
  const Route* route = route_find(head.path);
  const bool one_model = route == nullptr && !model_of_path(head.path).empty();
  if (route == nullptr && !one_model) return refuse(api::error_route(head.path));
  const std::string_view method = one_model ? "GET" : route->method;
  if (head.method != method) return refuse(api::error_method(head.method, method));
  if (one_model || !route->open) {
    api::ApiError error;
    if (authenticate(head, error) == nullptr) return refuse(error);
  }
  const std::size_t limit = method == "POST" ? config_.body_bytes_max : 0;
  if (head.content_length.value_or(0) > limit) {
    return refuse(api::error_too_large(static_cast<std::int64_t>(limit)));
  }
  return {std::nullopt, limit};
}

void Frontend::on_request(http::ExchangeId exchange, http::Request request) {
  const std::string request_id = id_of_client(request).value_or(new_request_id().text());
  if (request.path.starts_with("/health")) {
    // Liveness never depends on workers; readiness and plain health need one usable path.
    const bool healthy = request.path == "/health/live" || (backend_.serves() && !leaving_);
    if (!healthy)
      return fail(
          exchange, request_id,
          api::error_overloaded(leaving_ ? "the service is draining" : "no prefill and decode path is up",
                                retry_after_s));
    return send_json(exchange, request_id, "{\"status\":\"ok\"}");
  }
  api::ApiError error;
  const account::KeyEntry* key = authenticate(request, error);
  if (key == nullptr) return fail(exchange, request_id, error);
  const api::ModelEntry entry{model_.name, model_.created_s, "di", model_.name, model_.context_tokens_max};
  if (request.path == "/v1/models" || request.path == "/models") {
    return send_json(exchange, request_id, api::models_json(std::span(&entry, 1)));
  }
  if (const std::string_view name = model_of_path(request.path); !name.empty()) {
    if (name != model_.name) return fail(exchange, request_id, api::error_model(name));
    return send_json(exchange, request_id, api::model_json(entry));
  }
  const Route* route = route_find(request.path);
  DI_ASSERT(route != nullptr && route->task.has_value());  // on_head() lets nothing else through
  take_body(*route->task, exchange, std::move(request.body), request_id, *key);
}

http::Headers Frontend::own_headers(const http::Request* head) {
  const std::optional<std::string> given = head == nullptr ? std::nullopt : id_of_client(*head);
  return {{"x-request-id", given.value_or(new_request_id().text())}};
}

void Frontend::send_json(http::ExchangeId exchange, const std::string& request_id, std::string body,
                         bool charged) {
  http::Reply reply;
  reply.headers = {{"x-request-id", request_id}};
  reply.body = std::move(body);
  reply.charged = charged;
  server_->respond(exchange, reply);
}

void Frontend::fail(http::ExchangeId exchange, const std::string& request_id, const api::ApiError& error) {
  http::Reply reply{error.status, to_http(api::error_headers(error)), api::error_body(error)};
  reply.headers.emplace_back("x-request-id", request_id);
  server_->respond(exchange, reply);
}

void Frontend::take_body(Task task, http::ExchangeId exchange, std::string body,
                         const std::string& request_id, const account::KeyEntry& key) {
  if (draining_)
    return fail(exchange, request_id, api::error_overloaded("the service is draining", retry_after_s));
  // Reading is work for the tenant, too.
  auto ticket = concurrency_.acquire(key.tenant);
  if (!ticket.has_value()) {
    return fail(exchange, request_id,
                api::error_rate("too many requests of this tenant at a time", retry_after_s));
  }
  if (body.size() <= read_at_once_bytes_max) {
    return body_read(exchange, request_id, key, *std::move(ticket), read_body(model_, task, body));
  }
  if (!reader_->submit({task, exchange, request_id, key, *std::move(ticket), std::move(body), 0})) {
    return fail(exchange, request_id,
                api::error_overloaded("too many long prompts are being read", retry_after_s));
  }
  reading_.emplace(std::pair{exchange.slot, exchange.generation}, request_id);
}

void Frontend::body_read(http::ExchangeId exchange, const std::string& request_id,
                         const account::KeyEntry& key, account::Ticket ticket, ReadBody&& read) {
  if (const auto* error = std::get_if<api::ApiError>(&read)) return fail(exchange, request_id, *error);
  if (auto* counted = std::get_if<Counted>(&read))
    return send_json(exchange, request_id, std::move(counted->json));
  start(exchange, request_id, key, std::move(ticket), std::get<Prompt>(std::move(read)));
}

void Frontend::start(http::ExchangeId exchange, const std::string& request_id, const account::KeyEntry& key,
                     account::Ticket ticket, Prompt prompt) {
  auto& [options, shape, ids, output_max, debug] = prompt;
  if (unwritten_.size() >= charges_waiting_max) {
    return fail(exchange, request_id,
                api::error_overloaded("what requests cost cannot be written", retry_after_s));
  }
  const auto prompt_tokens = static_cast<std::int64_t>(ids.size());
  if (!options.max_tokens.has_value())
    output_max = std::min<std::int64_t>(output_max, config_.output_tokens_default);
  for (const std::int32_t stop : options.stop_token_ids) {
    if (static_cast<std::uint32_t>(stop) >= model_.tokenizer.vocab_size()) {
      return fail(exchange, request_id,
                  api::error_invalid("stop_token_ids", "an id is outside the vocabulary"));
    }
  }

  request::NewRequest fresh;
  fresh.id = new_request_id();
  fresh.model = model_.name;
  fresh.prompt = std::move(ids);
  wire::Sampling& sampling = fresh.sampling;
  sampling.temperature = static_cast<float>(options.temperature);
  sampling.top_p = static_cast<float>(options.top_p);
  sampling.top_k = options.top_k < 0 ? 0 : static_cast<std::uint32_t>(options.top_k);
  sampling.min_p = static_cast<float>(options.min_p);
  sampling.seed = options.seed.has_value() ? static_cast<std::uint64_t>(*options.seed) : random_u64();
  sampling.max_tokens = static_cast<std::uint32_t>(output_max);
  sampling.min_tokens = static_cast<std::uint32_t>(std::min<std::int64_t>(options.min_tokens, output_max));
  if (!options.ignore_eos) sampling.stop_ids.push_back(model_.chat.end_id());
  for (const std::int32_t stop : options.stop_token_ids)
    sampling.stop_ids.push_back(static_cast<std::uint32_t>(stop));
  fresh.debug = std::move(debug);

  Answer answer;
  answer.id = fresh.id;
  answer.request_id = request_id;
  answer.exchange = exchange;
  answer.stream = options.stream;
  answer.text = std::make_unique<api::AnswerText>(api::AnswerText::Options{options.stop, options.min_tokens});
  const bool is_chat = shape == api::Shape::chat;
  answer.head = {(is_chat ? "chatcmpl-" : "cmpl-") + fresh.id.text(), options.model, wall_clock_ms() / 1000,
                 "di-0", shape};
  if (options.stream) {
    answer.renderer = std::make_unique<api::StreamRenderer>(
        answer.head, api::StreamRenderer::Options{options.include_usage, options.continuous_usage});
  }
  answer.prompt_tokens = prompt_tokens;
  answer.ticket = std::move(ticket);
  answer.arrived = loop_->monotonic_now();
  answer.last_token = answer.arrived;
  answer.keep_alive = http::KeepAlive(config_.keep_alive, loop_->now());
  answer.charge = account::charge_open(wall_clock_ms());
  answer.charge.request_id = request_id;
  answer.charge.tenant = key.tenant;
  answer.charge.key_id = key.key_id;
  answer.charge.model = model_.name;
  const RequestId id = fresh.id;
  by_exchange_.emplace(std::pair{exchange.slot, exchange.generation}, id);
  // Its tokens may come from within submit's own turn: the answer is there first.
  answers_.emplace(id, std::move(answer));
  const Status submitted = backend_.submit(std::move(fresh), key.tenant, options.user_id, options.cache_salt);
  if (!submitted.ok()) {
    answers_.erase(id);
    by_exchange_.erase({exchange.slot, exchange.generation});
    return fail(exchange, request_id, api::error_overloaded(submitted.error().message, retry_after_s));
  }
  (is_chat ? chat_requests_ : completion_requests_).add();
  // The ring forgets the oldest name, unless a newer request has it.
  auto& oldest = request_id_ring_[request_id_next_];
  if (const auto named = by_request_id_.find(oldest.first);
      named != by_request_id_.end() && named->second == oldest.second) {
    by_request_id_.erase(named);
  }
  oldest = {request_id, id};
  request_id_next_ = (request_id_next_ + 1) % request_id_ring_.size();
  by_request_id_.insert_or_assign(request_id, id);
}

std::optional<RequestId> Frontend::find_id(const std::string& text) const {
  if (const auto found = by_request_id_.find(text); found != by_request_id_.end()) return found->second;
  std::string_view hex = text;
  for (const std::string_view prefix : {std::string_view("chatcmpl-"), std::string_view("cmpl-")}) {
    if (!hex.starts_with(prefix)) continue;
    hex.remove_prefix(prefix.size());
    break;
  }
  Bytes raw;
  if (hex.size() != 32 || !from_hex(hex, raw)) return std::nullopt;
  RequestId id;
  std::copy(raw.begin(), raw.end(), id.raw.begin());
  return id;
}

api::Usage Frontend::usage(const Answer& answer) const {
  return {answer.prompt_tokens, answer.output_tokens, answer.charge.cached_tokens, 0};
}

void Frontend::emitted(const std::vector<request::Emission>& emissions) {
  const Instant now = loop_->monotonic_now();
  std::vector<RequestId> touched;
  for (const request::Emission& emission : emissions) {
    const auto found = answers_.find(emission.id);
    if (found == answers_.end() || found->second.finish.has_value()) continue;
    Answer& answer = found->second;
    if (answer.output_tokens == 0) {
      ttft_us_.record(static_cast<std::uint64_t>(to_us(now - answer.arrived)));
    } else {
      tpot_us_.record(static_cast<std::uint64_t>(to_us(now - answer.last_token)));
    }
    answer.last_token = now;
    ++answer.output_tokens;
    if (touched.empty() || !(touched.back() == emission.id)) touched.push_back(emission.id);
    std::string_view bytes;
    if (emission.token.id >= wire::script_token_base) {
      bytes = as_text(emission.token.bytes);
    } else if (emission.finish != wire::Finish::stop && !model_.tokenizer.id_special(emission.token.id)) {
      bytes = model_.tokenizer.id_to_bytes(emission.token.id);  // a stop token itself is not shown
    }
    if (answer.text->token(bytes, answer.pending)) {
      // A stop string is complete: what the engine still makes is not the client's.
      answer.finish = api::Finish::stop;
      backend_.cancel(answer.id, Code::ok);
      continue;
    }
    if (emission.finish == wire::Finish::none) continue;
    answer.text->finish(answer.pending);
    answer.finish = emission.finish == wire::Finish::length ? api::Finish::length : api::Finish::stop;
  }
  for (const RequestId& id : touched) {
    const auto found = answers_.find(id);
    if (found != answers_.end()) flush(found->second);
  }
}

void Frontend::flush(Answer& answer) {
  if (!answer.client_here || answer.finished) {
    answer.pending.clear();
    return;
  }
  if (!answer.stream) {
    answer.whole += std::exchange(answer.pending, {});
    return;
  }
  // The finish waits for the ending, which brings the final counts, in the same turn.
  if (answer.finish.has_value()) return;
  const std::string chunk =
      answer.renderer->step(std::exchange(answer.pending, {}), std::nullopt, usage(answer));
  if (chunk.empty()) return;
  const std::string event = http::sse_event(chunk);
  if (!answer.started) {
    answer.started = true;
    http::Headers headers = http::sse_headers();
    headers.emplace_back("x-request-id", answer.request_id);
    server_->start_stream(answer.exchange, 200, headers, event);
  } else {
    server_->write(answer.exchange, event);
  }
  answer.keep_alive.sent(loop_->now());
}

void Frontend::ended(const request::Ending& ending) {
  const auto found = answers_.find(ending.id);
  if (found == answers_.end()) return;
  Answer& answer = found->second;
  answer.charge.cached_tokens = std::min<std::int64_t>(ending.cached_tokens, answer.prompt_tokens);
  const bool complete = answer.finish.has_value();
  if (answer.client_here && complete) {
    if (answer.stream) {
      std::string tail;
      const std::string chunk =
          answer.renderer->step(std::exchange(answer.pending, {}), answer.finish, usage(answer));
      if (!chunk.empty()) tail += http::sse_event(chunk);
      if (const std::string usage_chunk = answer.renderer->usage(usage(answer)); !usage_chunk.empty()) {
        tail += http::sse_event(usage_chunk);
      }
      tail += http::sse_done;
      if (!answer.started) {
        http::Headers headers = http::sse_headers();
        headers.emplace_back("x-request-id", answer.request_id);
        server_->start_stream(answer.exchange, 200, headers, tail);
        server_->finish(answer.exchange);
      } else {
        server_->finish(answer.exchange, tail);
      }
    } else {
      answer.whole += std::exchange(answer.pending, {});
      send_json(answer.exchange, answer.request_id,
                api::answer_json(answer.head, answer.whole, *answer.finish, usage(answer)), true);
    }
  } else if (answer.client_here) {
    api::ApiError error;
    if (ending.code == Code::timeout) {
      error = api::error_deadline(ending.reason);
    } else if (ending.code == Code::invalid || ending.code == Code::unsupported) {
      error = api::error_invalid("", ending.reason);
    } else if (ending.code == Code::busy) {
      error = api::error_overloaded(ending.reason, retry_after_s);
    } else {
      error = api::error_worker(ending.reason);
    }
    if (answer.started) {
      server_->abort(answer.exchange, http::sse_event(api::error_body(error)));
    } else {
      fail(answer.exchange, answer.request_id, error);
    }
  }
  answer.finished = true;
  settle(answer, ending,
         complete ? "ok" : code_status(ending.code == Code::ok ? Code::cancelled : ending.code));
  by_exchange_.erase({answer.exchange.slot, answer.exchange.generation});
  answers_.erase(found);
}

void Frontend::settle(Answer& answer, const request::Ending& ending, std::string_view status) {
  account::Charge& charge = answer.charge;
  charge.status = status;
  // What was read: a request that no rank began costs nothing.
  const std::int64_t read_tokens = std::min<std::int64_t>(ending.read_tokens, answer.prompt_tokens);
  charge.uncached_tokens = std::max<std::int64_t>(0, read_tokens - charge.cached_tokens);
  charge.output_tokens = answer.output_tokens;
  charge.attempts = ending.attempts;
  charge.finished_ms = wall_clock_ms();
  prompt_tokens_.add(static_cast<std::uint64_t>(answer.prompt_tokens));
  cached_tokens_.add(static_cast<std::uint64_t>(charge.cached_tokens));
  output_tokens_.add(static_cast<std::uint64_t>(charge.output_tokens));
  if (status == "cancelled") cancelled_.add();
  if (status == "failed") failed_.add();
  if (journal_ != nullptr) {
    unwritten_.push_back(charge);
    // Those before it are tried again once a second.
    if (unwritten_.size() == 1) write_charges();
  }
  log_info("access", "request",
           {{"req", answer.request_id},
            {"tenant", charge.tenant},
            {"key", charge.key_id},
            {"status", status},
            {"cached_tokens", charge.cached_tokens},
            {"uncached_tokens", charge.uncached_tokens},
            {"output_tokens", charge.output_tokens},
            {"attempts", ending.attempts},
            {"took_ms", to_ms(loop_->monotonic_now() - answer.arrived)}});
  if (status == "failed") {
    log_warn("access", "request failed",
             {{"req", answer.request_id}, {"code", code_name(ending.code)}, {"reason", ending.reason}});
  }
}

void Frontend::write_charges() {
  for (std::size_t i = 0; i < charges_at_once_max && !unwritten_.empty(); ++i) {
    if (const Status written = journal_->append(unwritten_.front()); !written.ok()) {
      unwritten_why_ = written.error().message;
      return log_error("account", "cannot write charge record",
                       {{"error", written.error()}, {"waiting", unwritten_.size()}});
    }
    unwritten_why_.clear();
    unwritten_.pop_front();
  }
}

void Frontend::on_gone(http::ExchangeId exchange, http::Gone why) {
  if (reading_.erase({exchange.slot, exchange.generation}) > 0) return reader_->drop(exchange);
  const auto found = by_exchange_.find({exchange.slot, exchange.generation});
  if (found == by_exchange_.end()) return;
  const RequestId id = found->second;
  Answer& answer = answers_.at(id);
  answer.client_here = false;
  DI_LOG_DEBUG("http", "client gone", {{"req", answer.request_id}, {"why", http::gone_name(why)}});
  // The ending that follows settles what was produced.
  backend_.cancel(id, Code::cancelled);
}

void Frontend::on_time() {
  if (!unwritten_.empty()) write_charges();
  const Instant now = loop_->now();
  for (auto& [id, answer] : answers_) {
    if (!answer.stream || !answer.client_here || answer.keep_alive.due() > now) continue;
    if (!answer.started) {
      answer.started = true;
      http::Headers headers = http::sse_headers();
      headers.emplace_back("x-request-id", answer.request_id);
      server_->start_stream(answer.exchange, 200, headers, http::sse_keep_alive);
    } else {
      server_->write(answer.exchange, http::sse_keep_alive);
    }
    answer.keep_alive.sent(now);
  }
}

void Frontend::drain(std::function<void()> on_drained) {
  on_drained_ = std::move(on_drained);
  leaving_ = true;
  server_->announce_drain();
  if (config_.settle > Duration(0)) return settle_timer_->start_after(config_.settle);
  stop_taking();
}

void Frontend::stop_taking() {
  draining_ = true;
  server_->stop_listening();
  // What is not a request yet does not become one.
  for (const auto& [exchange, request_id] : std::exchange(reading_, {})) {
    reader_->drop({exchange.first, exchange.second});
    fail({exchange.first, exchange.second}, request_id,
         api::error_overloaded("the service is draining", retry_after_s));
  }
}

void Frontend::on_empty() {
  empty_ = true;
  on_drained_();
}

}  // namespace di::router
