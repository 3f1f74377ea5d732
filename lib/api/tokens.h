// api/tokens.h: POST /tokenize and /detokenize: text to token ids and back, for clients that count.
//
// Pure functions; any thread.  Bounds: the body is bounded by the HTTP server, texts and lists of one request
// by `token_lists_max`; how many tokens and bytes an answer may have is the caller's.
//
// Two services have such routes and clients of both exist (spec/api.md 2.1): vLLM takes {model, prompt |
// messages} and answers {count, max_model_len, tokens}, {prompt}; SGLang's also takes an array of texts or
// of lists, answers with arrays then, and says char_count and text.  Both are understood, and an answer has
// the fields of both.  The model may be missing.  The rules for fields are those of api/answer_options.h.
//
// A prompt is read as /v1/completions reads it, messages as /v1/chat/completions does.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "api/error.h"
#include "model/chat.h"

namespace di::api {

inline constexpr std::size_t token_lists_max = 1024;

struct TokenizeRequest {
  std::string model;                 // empty: not said
  std::vector<std::string> prompts;  // empty: messages are asked for
  bool several = false;              // `prompt` was an array, and so is the answer
  std::vector<model::ChatMessage> messages;
  bool add_special_tokens = true;     // of prompts
  bool add_generation_prompt = true;  // of messages
  bool return_token_strs = false;
};
[[nodiscard]] std::variant<TokenizeRequest, ApiError> tokenize_request_parse(std::string_view body);

struct TokenizedText {
  std::vector<std::uint32_t> ids;
  std::vector<std::string> strings;  // UTF-8; of return_token_strs
  std::int64_t characters = 0;
};
// `texts` has one element unless `several`.
[[nodiscard]] std::string tokenize_json(const TokenizeRequest& request, std::span<const TokenizedText> texts,
                                        std::int64_t max_model_len);

struct DetokenizeRequest {
  std::string model;                              // empty: not said
  std::vector<std::vector<std::uint32_t>> lists;  // the caller checks the vocabulary
  bool several = false;                           // `tokens` was an array of arrays, and so is the answer
  bool skip_special_tokens = false;
};
[[nodiscard]] std::variant<DetokenizeRequest, ApiError> detokenize_request_parse(std::string_view body);

// `texts` (UTF-8) has one element unless `several`.
[[nodiscard]] std::string detokenize_json(const DetokenizeRequest& request,
                                          std::span<const std::string> texts);

// Unicode characters of a UTF-8 text.
[[nodiscard]] std::int64_t characters_count(std::string_view text);

}  // namespace di::api
