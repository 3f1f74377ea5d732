#include "config.h"

#include "account/key.h"
#include "http/address.h"
#include "http/server.h"

namespace di::router {

using namespace config::literals;

namespace {

void key_params(config::Params& params, KeyConfig& key) {
  params.string("key", key.key,
                {.required = true,
                 .secret = true,
                 .check = [](const std::string& text) { return account::key_check(text); },
                 .help = "sk-di-XXXXXXXX-(43 characters), or sha256:HEX of it; di-ctl keygen api makes one"});
  params.string("tenant", key.tenant, {.required = true, .help = "tenant the key belongs to"});
}

Status is_address(const std::string& text) {
  if (text.empty()) return {};
  const Result<http::SocketAddress> address = http::address_parse(text);
  return address ? Status() : address.error();
}

}  // namespace

void params(config::Params& params, Config& config) {
  daemon::common_params(params, config.common, "di-router");
  params.string(
      "http.listen", config.http_listen,
      {.def = "127.0.0.1:8080", .check = is_address, .help = "address of the API; port 0 picks a free one"});
  params.string("admin.listen", config.admin_listen,
                {.def = "127.0.0.1:8081",
                 .check = is_address,
                 .help = "address of metrics and status page; empty: none"});
  params.size("http.body_max", config.body_bytes_max,
              {.def = 48_MiB,
               .min = 1_KiB,
               .max = http::long_bodies_bytes_max(http::bodies_bytes_max_default),
               .help = "longest request body"});
  params.integer("http.connections_max", config.connections_max,
                 {.def = 8192, .min = 1, .max = 1 << 20, .help = "connections at a time"});
  params.duration("http.keep_alive", config.keep_alive,
                  {.def = seconds(15),
                   .max = seconds(3600),
                   .help = "silence of a stream after which a comment is sent; 0s: never"});
  params.duration("http.settle", config.settle,
                  {.def = seconds(0),
                   .max = seconds(3600),
                   .help = "from the request to stop, how long requests are still taken"});
  params.string("model.name", config.model_name, {.def = "demo", .help = "name that requests ask for"});
  params.string("model.path", config.model_path,
                {.def = "etc/model-demo",
                 .path = true,
                 .help = "Hugging Face folder with config.json and the tokenizer"});
  params.integer("model.context_tokens_max", config.context_tokens_max,
                 {.def = 0,
                  .max = 1 << 24,
                  .unit = "tokens",
                  .help = "longest prompt plus answer; 0: what the model allows"});
  params.integer("api.output_tokens_default", config.output_tokens_default,
                 {.def = 2048,
                  .min = 1,
                  .max = 1 << 24,
                  .unit = "tokens",
                  .help = "longest answer when the request sets no max_tokens"});
  params.boolean("auth.required", config.auth_required,
                 {.def = true, .help = "refuse requests without a known key"});
  params.string(
      "auth.key_file", config.auth_key_file,
      {.path = true, .help = "file with one key, of tenant \"default\"; empty: RUNDIR/key when it exists"});
  params.tables("auth.keys", config.auth_keys, key_params,
                {.max = 100000, .reloadable = true, .unique = "key", .help = "further keys"});
  params.integer(
      "limits.concurrency_max", config.concurrency_max,
      {.def = 512, .min = 1, .max = 1 << 20, .unit = "requests", .help = "requests of one tenant at a time"});
  params.integer("limits.requests_max", config.requests_max,
                 {.def = 4096, .min = 1, .max = 1 << 20, .unit = "requests", .help = "requests at a time"});
  params.integer("request.attempts_max", config.attempts_max,
                 {.def = 4, .min = 1, .max = 64, .help = "attempts of one request before it fails"});
  params.duration("request.match_wait", config.match_wait,
                  {.def = milliseconds(200),
                   .min = milliseconds(1),
                   .max = seconds(60),
                   .help = "longest wait for the directory; then the request is served cold"});
  params.duration("request.first_token_wait", config.first_token_wait,
                  {.def = seconds(600), .min = seconds(1), .help = "queue and prefill together"});
  params.duration(
      "request.next_token_wait", config.next_token_wait,
      {.def = seconds(60), .min = seconds(1), .help = "silence between tokens before the request re-enters"});
  params.duration("request.total_wait", config.total_wait,
                  {.def = seconds(1800), .min = seconds(1), .help = "the whole of a request"});
  params.duration("request.seat_ahead", config.seat_ahead,
                  {.def = milliseconds(500), .help = "ask for a decode seat when so much prefill is left"});
  params.string("journal.dir", config.journal_dir,
                {.path = true, .help = "directory of charge records; empty: RUNDIR/journal"});
}

Status validate(const Config& config, const config::Params& rows) {
  if (config.http_listen.empty()) return config::wrong(rows, {"http.listen"}, "must name an address");
  const bool loopback = config.http_listen.starts_with("127.") ||
                        config.http_listen.starts_with("localhost:") ||
                        config.http_listen.starts_with("[::1]") || config.http_listen.starts_with("unix:");
  if (!config.auth_required && !loopback)
    return config::wrong(rows, {"auth.required"}, "false is allowed on a loopback http.listen only");
  if (config.settle > Duration(0) && config.settle >= config.common.drain_timeout) {
    return config::wrong(rows, {"http.settle", "drain.timeout"},
                         "http.settle must be below drain.timeout, which begins with it");
  }
  return {};
}

}  // namespace di::router
