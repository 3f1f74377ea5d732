// The requests on any bytes: one within its bounds, or an error that can be shown.
#include <cstdint>
#include <string_view>
#include <variant>

#include "api/completions.h"
#include "api/openai.h"
#include "api/text.h"
#include "api/tokens.h"
#include "base/assert.h"
#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

namespace {

using namespace di::api;  // NOLINT: a program of one file

bool refused_well(const ApiError& error) {
  DI_ASSERT(error.status == 400 && !error.message.empty());
  DI_ASSERT(di::Json::parse(error_body(error)).ok());
  return true;
}

template <typename Request>
const Request* accepted(const std::variant<Request, ApiError>& parsed) {
  const auto* error = std::get_if<ApiError>(&parsed);
  return error != nullptr && refused_well(*error) ? nullptr : &std::get<Request>(parsed);
}

void check_options(const AnswerOptions& options) {
  DI_ASSERT(options.max_tokens.value_or(1) >= 1);
  DI_ASSERT(options.min_tokens >= 0 && options.min_tokens <= options.max_tokens.value_or(INT64_MAX));
  DI_ASSERT(options.temperature >= 0 && options.temperature <= 2);
  DI_ASSERT(options.top_p >= 0 && options.top_p <= 1 && options.min_p >= 0 && options.min_p <= 1);
  DI_ASSERT(options.top_k >= 0);
  DI_ASSERT(options.include_usage || !options.continuous_usage);
  DI_ASSERT(options.stop_token_ids.size() <= stop_token_ids_max);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string_view input(reinterpret_cast<const char*>(data), bytes);
  const auto completion = completion_request_parse(input);
  if (const auto* request = accepted(completion)) {
    check_options(*request);
    DI_ASSERT(request->max_tokens.has_value());
    DI_ASSERT(request->prompt.index() == 0 || !std::get<1>(request->prompt).empty());
  }
  const auto tokenize = tokenize_request_parse(input);
  if (const auto* request = accepted(tokenize)) {
    DI_ASSERT(request->prompts.empty() != request->messages.empty() &&
              request->prompts.size() <= token_lists_max);
    DI_ASSERT(request->several || request->prompts.size() <= 1);
    std::vector<TokenizedText> texts(request->several ? request->prompts.size() : 1);
    DI_ASSERT(di::Json::parse(tokenize_json(*request, texts, 1)).ok());
  }
  const auto detokenize = detokenize_request_parse(input);
  if (const auto* request = accepted(detokenize)) {
    DI_ASSERT(!request->lists.empty() && request->lists.size() <= token_lists_max);
    DI_ASSERT(request->several || request->lists.size() == 1);
  }
  const auto chat = chat_request_parse(input);
  const auto* request = accepted(chat);
  if (request == nullptr) return 0;
  DI_ASSERT(!request->messages.empty());
  check_options(*request);
  // The input itself as an answer, in tokens of seven bytes, through the stop strings it asked for.
  AnswerText answer({.stops = request->stop, .min_tokens = 0});
  std::string text;
  for (std::size_t at = 0; at < input.size(); at += 7) answer.token(input.substr(at, 7), text);
  answer.finish(text);
  for (const std::string& stop : request->stop) DI_ASSERT(text.find(stop) == std::string::npos);
  return 0;
}
