// api/openai.h: POST /v1/chat/completions, from the body's bytes to a checked request.
//
// Pure functions; any thread.  The rules and the fields that all answers share are those of
// api/answer_options.h, the messages those of api/messages.h.  Beside them:
//
//   neutral                        fields
//   0                              top_logprobs thinking_token_budget
//   false                          logprobs continue_final_message
//   true                           add_generation_prompt
//   []                             tools functions documents
//   only null                      prediction audio web_search_options chat_template
//   "none", "auto"                 tool_choice function_call (without tools both mean no call)
//   ["text"]                       modalities
//   {"type":"disabled"}            thinking
//   "none", 0, "0"                 reasoning_effort
//   thinking false                 chat_template_kwargs (thinking, enable_thinking, reasoning_effort)
//   anything of the type           parallel_tool_calls include_reasoning separate_reasoning
//
// A decision: `thinking:{"type":"enabled"}` is a 400.  DeepSeek's default is enabled, so absence must
// mean "what the model does", but a client that asks in so many words for reasoning the model cannot do
// should learn it from an error and not from an answer without reasoning_content.
#pragma once

#include <string_view>
#include <variant>
#include <vector>

#include "api/answer_options.h"
#include "api/messages.h"

namespace di::api {

struct ChatRequest : AnswerOptions {
  std::vector<model::ChatMessage> messages;  // at least one; roles system, user, assistant
};

[[nodiscard]] std::variant<ChatRequest, ApiError> chat_request_parse(std::string_view body);

}  // namespace di::api
