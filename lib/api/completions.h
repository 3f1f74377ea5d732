// api/completions.h: POST /v1/completions (OpenAI's legacy completions), from the body's bytes to a checked
// request.
//
// Pure functions; any thread.  The rules and the fields that all answers share are those of
// api/answer_options.h.  Beside them: suffix may be "", logprobs and prompt_embeds only null.
//
// Decisions where the sources differ:
//  - One prompt for each request: a string, token ids, or an array of one of these.  Several prompts would
//    share one ending, one charge and one place in the queue.
//  - A text prompt is the model's own input: what spells a mark of the chat format is that mark, and it
//    begins with the mark for a beginning unless it has one or add_special_tokens is false, as with vLLM.
//  - max_tokens is 16 when absent, as OpenAI has it, or min_tokens when that is more.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "api/answer_options.h"

namespace di::api {

inline constexpr std::int64_t completion_tokens_default = 16;

struct CompletionRequest : AnswerOptions {
  std::variant<std::string, std::vector<std::uint32_t>>
      prompt;                      // ids: at least one; the caller checks the vocabulary
  bool add_special_tokens = true;  // of a text prompt
};

[[nodiscard]] std::variant<CompletionRequest, ApiError> completion_request_parse(std::string_view body);

}  // namespace di::api
