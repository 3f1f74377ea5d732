// api/openai.h: POST /v1/chat/completions, from the body's bytes to a checked request.
//
// Pure functions; any thread.  Bounds: the body is bounded by the HTTP server; stop strings and ids
// by the constants below and in api/text.h.
//
// The rules (spec/api.md 2.2).  An unknown field is ignored.  A known field that is null counts as
// absent.  A known field of a wrong type is a 400 that names it in `param`, and so is a value out of
// range.  A field for something the engine cannot do yet is accepted with the value that asks for
// nothing ("neutral") and is otherwise a 400 that names it: never taken and dropped.
//
//   neutral                        fields
//   0                              presence_penalty frequency_penalty top_logprobs priority
//                                  thinking_token_budget
//   1                              n repetition_penalty length_penalty best_of stream_interval
//   false                          logprobs echo use_beam_search include_stop_str_in_output
//                                  return_token_ids continue_final_message return_tokens_as_token_ids
//   true                           skip_special_tokens add_generation_prompt
//   [] {}                          tools functions logit_bias allowed_token_ids bad_words
//                                  logprob_token_ids documents
//   only null                      prompt_logprobs truncate_prompt_tokens structured_outputs guided_*
//                                  regex ebnf json_schema lora_path repetition_detection prediction audio
//                                  web_search_options chat_template
//   "none", "auto"                 tool_choice function_call (without tools both mean no call)
//   ["text"]                       modalities
//   {"type":"text"}                response_format
//   {"type":"disabled"}            thinking
//   "none", 0, "0"                 reasoning_effort
//   thinking false                 chat_template_kwargs (thinking, enable_thinking, reasoning_effort)
//   anything of the type           store metadata service_tier prompt_cache_key safety_identifier
//                                  verbosity user request_id rid session_id parallel_tool_calls
//                                  include_reasoning separate_reasoning
//   not looked at                  kv_transfer_params ec_transfer_params (they steer our own transfers)
//
// Decisions where the sources differ:
//  - `thinking:{"type":"enabled"}` is a 400.  DeepSeek's default is enabled, so absence must mean "what
//    the model does", but a client that asks in so many words for reasoning the model cannot do
//    should learn it from an error and not from an answer without reasoning_content.
//  - temperature 0..2, top_p 0..1 (0 keeps the one likeliest token), min_p 0..1, top_k -1 or 0 for off.
//  - max_completion_tokens wins over max_tokens; both are capped to the window later (context_fit).
//  - The role developer is another word for system.
//  - Text parts of one message are joined by a newline, as vLLM does.
//  - content may be null for every role and is then empty; it may be missing for none.
//  - stream_options without stream has no effect.
//  - Tool calls in the history and the role `tool` are refused until tools exist, warm or cold alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "api/error.h"
#include "model/chat.h"

namespace di::api {

// JSON values of one request, all counted: hundreds of thousands of messages.
inline constexpr std::size_t request_values_max = 1 << 20;
inline constexpr std::size_t stop_token_ids_max = 64;
inline constexpr std::size_t salt_bytes_max = 1024;  // cache_salt and user_id, as vLLM

struct ChatRequest {
  std::string model;
  std::vector<model::ChatMessage> messages;  // at least one; roles system, user, assistant
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;           // only with include_usage
  std::optional<std::int64_t> max_tokens;  // at least 1
  double temperature = 1;
  double top_p = 1;
  std::int64_t top_k = 0;  // 0: off
  double min_p = 0;
  std::vector<std::string> stop;  // fit for StopMatcher
  std::optional<std::int64_t> seed;
  bool ignore_eos = false;
  std::int64_t min_tokens = 0;
  std::vector<std::int32_t> stop_token_ids;  // not negative; the caller checks the vocabulary
  std::string cache_salt;                    // empty: none
  std::string user_id;                       // empty: none; isolates the cache like cache_salt
};

[[nodiscard]] std::variant<ChatRequest, ApiError> chat_request_parse(std::string_view body);

// How many tokens the answer may have: max_tokens, or what the window leaves when that is less or
// when there is no max_tokens (the answer then ends with finish_reason length).  A prompt that fills
// the window is an error.
[[nodiscard]] std::variant<std::int64_t, ApiError> context_fit(std::int64_t prompt_tokens,
                                                               std::optional<std::int64_t> max_tokens,
                                                               std::int64_t window_tokens);

}  // namespace di::api
