// api/answer_options.h: what a request may ask of its answer, whatever the shape of its prompt.
//
// Plain values and pure functions; any thread.  Bounds: the body is bounded by the HTTP server; stop
// strings and ids by the constants below and in api/text.h.
//
// The rules (spec/api.md 2.2).  An unknown field is ignored.  A known field that is null counts as
// absent.  A known field of a wrong type is a 400 that names it in `param`, and so is a value out of
// range.  A field for something the engine cannot do yet is accepted with the value that asks for
// nothing ("neutral") and is otherwise a 400 that names it: never taken and dropped.
//
//   neutral                        fields
//   0                              presence_penalty frequency_penalty priority
//   1                              n repetition_penalty length_penalty best_of stream_interval
//   false                          echo use_beam_search include_stop_str_in_output return_token_ids
//                                  return_tokens_as_token_ids
//   true                           skip_special_tokens
//   [] {}                          logit_bias allowed_token_ids bad_words logprob_token_ids
//   only null                      prompt_logprobs truncate_prompt_tokens structured_outputs guided_*
//                                  regex ebnf json_schema lora_path repetition_detection
//   {"type":"text"}                response_format
//   anything of the type           store metadata service_tier prompt_cache_key safety_identifier
//                                  verbosity user request_id rid session_id
//   not looked at                  kv_transfer_params ec_transfer_params (they steer our own transfers)
//
// Decisions where the sources differ:
//  - temperature 0..2, top_p 0..1 (0 keeps the one likeliest token), min_p 0..1, top_k -1 or 0 for off.
//  - max_completion_tokens wins over max_tokens; both are capped to the window later (context_fit).
//  - stream_options without stream has no effect.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "api/error.h"
#include "api/fields.h"

namespace di::api {

inline constexpr std::size_t stop_token_ids_max = 64;
inline constexpr std::size_t salt_bytes_max = 1024;  // cache_salt and user_id, as vLLM

struct AnswerOptions {
  std::string model;
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

// False once an error is set.
bool answer_options_read(FieldReader& fields, const Json& top, AnswerOptions& out);

// How many tokens the answer may have: max_tokens, or what the window leaves when that is less or
// when there is no max_tokens (the answer then ends with finish_reason length).  A prompt that fills
// the window is an error, of the field `param`.
[[nodiscard]] std::variant<std::int64_t, ApiError> context_fit(std::string_view param,
                                                               std::int64_t prompt_tokens,
                                                               std::optional<std::int64_t> max_tokens,
                                                               std::int64_t window_tokens);

}  // namespace di::api
