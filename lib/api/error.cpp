#include "api/error.h"

#include <algorithm>

#include "base/json.h"

namespace di::api {

namespace {

// Names from a request are quoted in messages only up to here.
constexpr std::size_t quoted_bytes_max = 100;

// Cut at a character's first byte, so that the message stays UTF-8.
std::string quoted(std::string_view name) {
  std::size_t count = std::min(name.size(), quoted_bytes_max);
  while (count > 0 && count < name.size() && (static_cast<unsigned char>(name[count]) & 0xc0) == 0x80)
    --count;
  std::string out = "'";
  out.append(name.substr(0, count));
  if (count < name.size()) out.append("...");
  out.push_back('\'');
  return out;
}

void member(JsonWriter& writer, std::string_view key, std::string_view value) {
  writer.key(key);
  if (value.empty()) {
    writer.null();
  } else {
    writer.string(value);
  }
}

ApiError make(int status, std::string_view type, std::string_view code, std::string message) {
  ApiError error;
  error.status = status;
  error.type = type;
  error.code = code;
  error.message = std::move(message);
  return error;
}

}  // namespace

std::string error_body(const ApiError& error) {
  JsonWriter writer;
  writer.open_object();
  writer.key("error");
  writer.open_object();
  writer.key("message");
  writer.string(error.message);
  writer.key("type");
  writer.string(error.type);
  member(writer, "param", error.param);
  member(writer, "code", error.code);
  writer.close_object();
  writer.close_object();
  return writer.take();
}

Headers error_headers(const ApiError& error) {
  Headers headers;
  if (error.status == 401) headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.status == 402) headers.emplace_back("x-should-retry", "false");
  if (error.status == 413 || error.status == 431) headers.emplace_back("Connection", "close");
  if (!error.allow.empty()) headers.emplace_back("Allow", error.allow);
  if (error.retry_after_s > 0) {
    headers.emplace_back("Retry-After", std::to_string(error.retry_after_s));
    headers.emplace_back("retry-after-ms", std::to_string(error.retry_after_s * 1000));
  }
  return headers;
}

ApiError error_invalid(std::string_view param, std::string_view message) {
  ApiError error = make(400, "invalid_request_error", "", std::string(message));
  error.param = param;
  return error;
}

ApiError error_context_length(std::string_view param, std::int64_t prompt_tokens, std::int64_t window_tokens,
                              bool counted) {
  ApiError error =
      make(400, "invalid_request_error", "context_length_exceeded",
           "this model's context window is " + std::to_string(window_tokens) + " tokens and the " +
               (param == "messages" ? "messages take " : "prompt takes ") + (counted ? "" : "more than ") +
               std::to_string(prompt_tokens) + ", which leaves no room for an answer");
  error.param = param;
  return error;
}

ApiError error_key(std::string_view message) {
  return make(401, "authentication_error", "invalid_api_key", std::string(message));
}

ApiError error_balance() {
  return make(402, "insufficient_quota", "insufficient_balance", "the balance of this account is used up");
}

ApiError error_permission(std::string_view message) {
  return make(403, "permission_error", "", std::string(message));
}

ApiError error_model(std::string_view model) {
  ApiError error = make(404, "invalid_request_error", "model_not_found",
                        "the model " + quoted(model) + " does not exist or this key may not use it");
  error.param = "model";
  return error;
}

ApiError error_route(std::string_view path) {
  return make(404, "invalid_request_error", "", "there is no " + quoted(path) + " here");
}

ApiError error_method(std::string_view method, std::string_view allow) {
  ApiError error = make(405, "invalid_request_error", "",
                        "the method " + quoted(method) + " is not allowed here, only " + std::string(allow));
  error.allow = allow;
  return error;
}

ApiError error_idempotency(std::string_view message) {
  return make(409, "idempotency_conflict", "", std::string(message));
}

ApiError error_too_large(std::int64_t limit_bytes) {
  return make(413, "request_too_large", "",
              "the request body is larger than the limit of " + std::to_string(limit_bytes) + " bytes");
}

ApiError error_rate(std::string_view message, std::int64_t retry_after_s) {
  ApiError error = make(429, "rate_limit_error", "rate_limit_exceeded", std::string(message));
  error.retry_after_s = std::max<std::int64_t>(1, retry_after_s);
  return error;
}

ApiError error_overloaded(std::string_view message, std::int64_t retry_after_s) {
  ApiError error = make(503, "service_unavailable_error", "server_is_overloaded", std::string(message));
  error.retry_after_s = std::max<std::int64_t>(1, retry_after_s);
  return error;
}

ApiError error_worker(std::string_view message) {
  return make(502, "server_error", "", std::string(message));
}

ApiError error_deadline(std::string_view message) {
  return make(504, "timeout", "", std::string(message));
}

ApiError error_internal(std::string_view message) {
  return make(500, "server_error", "", std::string(message));
}

bool request_id_sane(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

}  // namespace di::api
