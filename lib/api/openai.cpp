#include "api/openai.h"

#include <algorithm>
#include <string>

namespace di::api {

namespace {

constexpr NeutralRow neutral_rows[] = {
    {"top_logprobs", Neutral::integer_zero},
    {"thinking_token_budget", Neutral::integer_zero},
    {"logprobs", Neutral::only_false},
    {"continue_final_message", Neutral::only_false},
    {"add_generation_prompt", Neutral::only_true},
    {"tools", Neutral::empty_array},
    {"functions", Neutral::empty_array},
    {"documents", Neutral::empty_array},
    {"prediction", Neutral::only_null},
    {"audio", Neutral::only_null},
    {"web_search_options", Neutral::only_null},
    {"chat_template", Neutral::only_null},
    {"tool_choice", Neutral::none_or_auto},
    {"function_call", Neutral::none_or_auto},
    {"parallel_tool_calls", Neutral::any_bool},
    {"include_reasoning", Neutral::any_bool},
    {"separate_reasoning", Neutral::any_bool},
};

// The names chat clients give to levels of reasoning.
constexpr std::string_view effort_names[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
constexpr std::int64_t effort_max = 100;

bool modalities_read(FieldReader& fields, const Json& top) {
  const Json* list = top.find("modalities");
  if (list == nullptr || list->is_null()) return true;
  if (!list->is_array()) return fields.wrong_type("modalities", "an array", *list);
  for (const Json& item : list->as_array()) {
    if (!item.is_string()) return fields.wrong_type("modalities", "an array of strings", item);
    if (item.as_string() != "text") return fields.fail("modalities", "'modalities' must be [\"text\"]");
  }
  return true;
}

bool thinking_read(FieldReader& fields, const Json& top) {
  const Json* json = top.find("thinking");
  if (json == nullptr || json->is_null()) return true;
  if (!json->is_object()) return fields.wrong_type("thinking", "an object", *json);
  const Json* type = json->find("type");
  if (type == nullptr) return fields.fail("thinking.type", "'thinking.type' is required");
  if (!type->is_string()) return fields.wrong_type("thinking.type", "a string", *type);
  if (type->as_string() == "disabled") return true;
  if (type->as_string() == "enabled") return fields.fail("thinking", "this model has no thinking mode");
  return fields.fail("thinking.type", "'thinking.type' must be enabled or disabled");
}

// A name, a number from 0 to 100, or such a number in a string.
bool effort_read(FieldReader& fields, const Json& object, std::string_view prefix, std::string_view name) {
  const Json* json = object.find(name);
  if (json == nullptr || json->is_null()) return true;
  const std::string at = std::string(prefix) + std::string(name);
  bool known = false;
  bool none = false;
  if (json->is_integer()) {
    known = json->as_i64() >= 0 && json->as_i64() <= effort_max;
    none = json->as_i64() == 0;
  } else if (json->is_string()) {
    const std::string& text = json->as_string();
    const bool digits = !text.empty() && text.size() <= 3 &&
                        std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    known = digits
                ? std::stoi(text) <= effort_max
                : std::find(std::begin(effort_names), std::end(effort_names), text) != std::end(effort_names);
    none = digits ? std::stoi(text) == 0 : text == "none";
  } else {
    return fields.wrong_type(at, "a string or an integer", *json);
  }
  if (!known)
    return fields.fail(at, "'" + at + "' must be none, minimal, low, medium, high, xhigh, max or 0 to 100");
  if (!none) return fields.fail(at, "this model has no thinking mode");
  return true;
}

bool template_kwargs_read(FieldReader& fields, const Json& top) {
  constexpr std::string_view prefix = "chat_template_kwargs.";
  const Json* json = top.find("chat_template_kwargs");
  if (json == nullptr || json->is_null()) return true;
  if (!json->is_object()) return fields.wrong_type("chat_template_kwargs", "an object", *json);
  for (const std::string_view name : {"thinking", "enable_thinking"}) {
    bool wanted = false;
    if (!fields.boolean(*json, prefix, name, wanted)) return false;
    if (wanted)
      return fields.fail(std::string(prefix) + std::string(name), "this model has no thinking mode");
  }
  return effort_read(fields, *json, prefix, "reasoning_effort");
}

bool chat_read(FieldReader& fields, const Json& top, ChatRequest& out) {
  return answer_options_read(fields, top, out) && messages_read(fields, top, out.messages) &&
         modalities_read(fields, top) && thinking_read(fields, top) &&
         effort_read(fields, top, "", "reasoning_effort") && template_kwargs_read(fields, top) &&
         fields.neutral_all(top, neutral_rows);
}

}  // namespace

std::variant<ChatRequest, ApiError> chat_request_parse(std::string_view body) {
  FieldReader fields;
  ChatRequest request;
  const Json* top = fields.object(body);
  if (top == nullptr || !chat_read(fields, *top, request)) return fields.error();
  return request;
}

}  // namespace di::api
