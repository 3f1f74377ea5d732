// The chat request on any bytes: a request within its bounds, or an error that can be shown.
#include <cstdint>
#include <string_view>
#include <variant>

#include "api/openai.h"
#include "api/text.h"
#include "base/assert.h"
#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string_view input(reinterpret_cast<const char*>(data), bytes);
  const auto parsed = di::api::chat_request_parse(input);
  if (const auto* error = std::get_if<di::api::ApiError>(&parsed)) {
    DI_ASSERT(error->status == 400 && !error->message.empty());
    DI_ASSERT(di::Json::parse(di::api::error_body(*error)).ok());
    return 0;
  }
  const auto& request = std::get<di::api::ChatRequest>(parsed);
  DI_ASSERT(!request.messages.empty());
  DI_ASSERT(request.max_tokens.value_or(1) >= 1);
  DI_ASSERT(request.min_tokens >= 0 && request.min_tokens <= request.max_tokens.value_or(INT64_MAX));
  DI_ASSERT(request.temperature >= 0 && request.temperature <= 2);
  DI_ASSERT(request.top_p >= 0 && request.top_p <= 1 && request.min_p >= 0 && request.min_p <= 1);
  DI_ASSERT(request.top_k >= 0);
  DI_ASSERT(request.include_usage || !request.continuous_usage);
  DI_ASSERT(request.stop_token_ids.size() <= di::api::stop_token_ids_max);
  // The input itself as an answer, in tokens of seven bytes, through the stop strings it asked for.
  di::api::AnswerText answer({.stops = request.stop, .min_tokens = 0});
  std::string text;
  for (std::size_t at = 0; at < input.size(); at += 7) answer.token(input.substr(at, 7), text);
  answer.finish(text);
  for (const std::string& stop : request.stop) DI_ASSERT(text.find(stop) == std::string::npos);
  return 0;
}
