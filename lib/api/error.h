// api/error.h: what a client is told when a request fails (spec/api.md 2.4): one value per failure,
// with its status, its place in the table and the headers the SDKs obey.
//
// Plain values and pure functions; any thread.  SDKs retry by status alone (408, 409, 429, 500 and
// above), so the status of each row is a decision about load and not about taste.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace di::api {

struct ApiError {
  int status = 500;
  std::string type;
  std::string code;   // empty: null
  std::string param;  // empty: null
  std::string message;
  std::int64_t retry_after_s = 0;  // 0: no Retry-After
  std::string allow;               // the methods a 405 names

  friend bool operator==(const ApiError&, const ApiError&) = default;
};

using Headers = std::vector<std::pair<std::string, std::string>>;

// {"error":{"message":..,"type":..,"param":..,"code":..}}: the body of an error answer, and the data
// of the error event inside a stream.
[[nodiscard]] std::string error_body(const ApiError& error);
// The headers of the row: WWW-Authenticate, Retry-After and retry-after-ms, x-should-retry, Allow,
// Connection.
[[nodiscard]] Headers error_headers(const ApiError& error);

// 400.  Malformed JSON has no `param`.
[[nodiscard]] ApiError error_invalid(std::string_view param, std::string_view message);
// `param` is the field with the prompt: messages, or prompt.  `counted` is false when it was not read to its
// end: it has more than `prompt_tokens`.
[[nodiscard]] ApiError error_context_length(std::string_view param, std::int64_t prompt_tokens,
                                            std::int64_t window_tokens, bool counted = true);
// 401: no key, or one that is unknown, expired or revoked.
[[nodiscard]] ApiError error_key(std::string_view message);
// 402
[[nodiscard]] ApiError error_balance();
// 403: the key lacks the scope, or may not use the model.
[[nodiscard]] ApiError error_permission(std::string_view message);
// 404, 404 and 405
[[nodiscard]] ApiError error_model(std::string_view model);
[[nodiscard]] ApiError error_route(std::string_view path);
[[nodiscard]] ApiError error_method(std::string_view method, std::string_view allow);
// 409
[[nodiscard]] ApiError error_idempotency(std::string_view message);
// 413: the body; the same row as the parser's own 413 and 431.
[[nodiscard]] ApiError error_too_large(std::int64_t limit_bytes);
// 429: the client's own limit.
[[nodiscard]] ApiError error_rate(std::string_view message, std::int64_t retry_after_s);
// 503: the whole service is busy, draining or has no worker.
[[nodiscard]] ApiError error_overloaded(std::string_view message, std::int64_t retry_after_s);
// 502: a worker failed before the first byte and no other could take over; in a stream also after it.
[[nodiscard]] ApiError error_worker(std::string_view message);
// 504
[[nodiscard]] ApiError error_deadline(std::string_view message);
// 500
[[nodiscard]] ApiError error_internal(std::string_view message);

// True for a client's x-request-id that may be echoed: 1 to 128 printable ASCII characters.
[[nodiscard]] bool request_id_sane(std::string_view id);

}  // namespace di::api
