#include "api/openai.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "api/text.h"
#include "base/json.h"

namespace di::api {

namespace {

// What a field that the engine does not serve may hold.
enum class Neutral : std::uint8_t {
  number_zero,
  integer_zero,
  number_one,
  integer_one,
  only_false,
  only_true,
  empty_array,
  empty_object,
  only_null,
  none_or_auto,
  any_bool,
  any_string,
  any_object,
};

struct NeutralRow {
  std::string_view name;
  Neutral neutral;
};

constexpr NeutralRow neutral_rows[] = {
    {"presence_penalty", Neutral::number_zero},
    {"frequency_penalty", Neutral::number_zero},
    {"top_logprobs", Neutral::integer_zero},
    {"priority", Neutral::integer_zero},
    {"thinking_token_budget", Neutral::integer_zero},
    {"n", Neutral::integer_one},
    {"repetition_penalty", Neutral::number_one},
    {"length_penalty", Neutral::number_one},
    {"best_of", Neutral::integer_one},
    {"stream_interval", Neutral::integer_one},
    {"logprobs", Neutral::only_false},
    {"echo", Neutral::only_false},
    {"use_beam_search", Neutral::only_false},
    {"include_stop_str_in_output", Neutral::only_false},
    {"return_token_ids", Neutral::only_false},
    {"return_tokens_as_token_ids", Neutral::only_false},
    {"continue_final_message", Neutral::only_false},
    {"skip_special_tokens", Neutral::only_true},
    {"add_generation_prompt", Neutral::only_true},
    {"tools", Neutral::empty_array},
    {"functions", Neutral::empty_array},
    {"allowed_token_ids", Neutral::empty_array},
    {"bad_words", Neutral::empty_array},
    {"logprob_token_ids", Neutral::empty_array},
    {"documents", Neutral::empty_array},
    {"logit_bias", Neutral::empty_object},
    {"prompt_logprobs", Neutral::only_null},
    {"truncate_prompt_tokens", Neutral::only_null},
    {"structured_outputs", Neutral::only_null},
    {"guided_json", Neutral::only_null},
    {"guided_regex", Neutral::only_null},
    {"guided_choice", Neutral::only_null},
    {"guided_grammar", Neutral::only_null},
    {"regex", Neutral::only_null},
    {"ebnf", Neutral::only_null},
    {"json_schema", Neutral::only_null},
    {"lora_path", Neutral::only_null},
    {"repetition_detection", Neutral::only_null},
    {"prediction", Neutral::only_null},
    {"audio", Neutral::only_null},
    {"web_search_options", Neutral::only_null},
    {"chat_template", Neutral::only_null},
    {"tool_choice", Neutral::none_or_auto},
    {"function_call", Neutral::none_or_auto},
    {"store", Neutral::any_bool},
    {"parallel_tool_calls", Neutral::any_bool},
    {"include_reasoning", Neutral::any_bool},
    {"separate_reasoning", Neutral::any_bool},
    {"metadata", Neutral::any_object},
    {"service_tier", Neutral::any_string},
    {"prompt_cache_key", Neutral::any_string},
    {"safety_identifier", Neutral::any_string},
    {"verbosity", Neutral::any_string},
    {"user", Neutral::any_string},
    {"request_id", Neutral::any_string},
    {"rid", Neutral::any_string},
    {"session_id", Neutral::any_string},
};

// The names chat clients give to levels of reasoning.
constexpr std::string_view effort_names[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
constexpr std::int64_t effort_max = 100;

// Reads one request.  Each function returns false once `error` is set; absent and null fields leave
// the output as it is.
class ChatParse {
 public:
  std::variant<ChatRequest, ApiError> run(std::string_view body) {
    const auto json = Json::parse(body, request_values_max);
    if (!json) return error_invalid("", "the request body is not valid JSON: " + json.error().message);
    if (!json->is_object()) {
      return error_invalid("",
                           "the request body must be a JSON object, not " + std::string(json->type_name()));
    }
    if (!fields(*json)) return *error_;
    return std::move(request_);
  }

 private:
  bool fields(const Json& top) {
    if (!required_string(top, "model", request_.model)) return false;
    if (!messages(top)) return false;
    if (!boolean(top, "", "stream", request_.stream) || !stream_options(top)) return false;
    if (!limits(top) || !sampling(top) || !stops(top)) return false;
    if (!salt(top, "cache_salt", request_.cache_salt) || !salt(top, "user_id", request_.user_id))
      return false;
    if (!response_format(top) || !modalities(top) || !thinking(top) || !effort(top, "", "reasoning_effort") ||
        !template_kwargs(top)) {
      return false;
    }
    return std::all_of(std::begin(neutral_rows), std::end(neutral_rows),
                       [&](const NeutralRow& row) { return neutral(top, "", row); });
  }

  bool messages(const Json& top) {
    const Json* list = top.find("messages");
    if (list == nullptr || list->is_null()) return fail("messages", "'messages' is required");
    if (!list->is_array()) return wrong_type("messages", "an array", *list);
    if (list->as_array().empty()) return fail("messages", "'messages' must hold at least one message");
    request_.messages.reserve(list->as_array().size());
    for (std::size_t i = 0; i < list->as_array().size(); ++i) {
      if (!message(list->as_array()[i], "messages[" + std::to_string(i) + "]")) return false;
    }
    return true;
  }

  bool message(const Json& json, const std::string& at) {
    if (!json.is_object()) return wrong_type(at, "an object", json);
    const std::string dot = at + ".";
    model::ChatMessage out;
    const Json* role = json.find("role");
    if (role == nullptr) return fail(dot + "role", "'" + dot + "role' is required");
    if (!role->is_string()) return wrong_type(dot + "role", "a string", *role);
    if (!role_parse(role->as_string(), dot + "role", out.role)) return false;
    const Json* content = json.find("content");
    if (content == nullptr) return fail(dot + "content", "'" + dot + "content' is required");
    if (content->is_string()) {
      out.content = content->as_string();
    } else if (content->is_array()) {
      if (!parts(content->as_array(), dot + "content", out.content)) return false;
    } else if (!content->is_null()) {
      return wrong_type(dot + "content", "a string, null or an array of parts", *content);
    }
    // History carries these back to us; without tool calls none of them changes the prompt.
    for (const NeutralRow& row :
         {NeutralRow{"name", Neutral::any_string}, NeutralRow{"reasoning_content", Neutral::any_string},
          NeutralRow{"reasoning", Neutral::any_string}, NeutralRow{"refusal", Neutral::any_string},
          NeutralRow{"tool_calls", Neutral::empty_array}, NeutralRow{"function_call", Neutral::only_null},
          NeutralRow{"audio", Neutral::only_null}, NeutralRow{"prefix", Neutral::only_false}}) {
      if (!neutral(json, dot, row)) return false;
    }
    request_.messages.push_back(std::move(out));
    return true;
  }

  bool role_parse(const std::string& name, const std::string& at, model::ChatRole& out) {
    if (name == "tool" || name == "function") {
      return fail(at, "'" + at + "' is '" + name + "', but this service does not support tools");
    }
    const auto role = model::chat_role_parse(name);
    if (!role) return fail(at, "'" + at + "' must be one of system, developer, user, assistant");
    out = *role;
    return true;
  }

  bool parts(const Json::Array& list, const std::string& at, std::string& out) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string here = at + "[" + std::to_string(i) + "]";
      if (!list[i].is_object()) return wrong_type(here, "an object", list[i]);
      const Json* type = list[i].find("type");
      if (type == nullptr) return fail(here + ".type", "'" + here + ".type' is required");
      if (!type->is_string()) return wrong_type(here + ".type", "a string", *type);
      if (type->as_string() != "text") {
        return fail(here, "'" + here + "' is not a text part, and this model takes only text");
      }
      const Json* text = list[i].find("text");
      if (text == nullptr) return fail(here + ".text", "'" + here + ".text' is required");
      if (!text->is_string()) return wrong_type(here + ".text", "a string", *text);
      if (i > 0) out.push_back('\n');
      out.append(text->as_string());
    }
    return true;
  }

  bool stream_options(const Json& top) {
    const Json* options = top.find("stream_options");
    if (options == nullptr || options->is_null()) return true;
    if (!options->is_object()) return wrong_type("stream_options", "an object", *options);
    bool obfuscation = false;  // padding against side channels: it may be asked for, none is added
    bool usage = false;
    bool continuous = false;
    if (!boolean(*options, "stream_options.", "include_usage", usage) ||
        !boolean(*options, "stream_options.", "continuous_usage_stats", continuous) ||
        !boolean(*options, "stream_options.", "include_obfuscation", obfuscation)) {
      return false;
    }
    request_.include_usage = usage;
    request_.continuous_usage = usage && continuous;
    return true;
  }

  bool limits(const Json& top) {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    std::int64_t value = 0;
    for (const std::string_view name : {"max_tokens", "max_completion_tokens"}) {  // the latter wins
      value = 0;
      if (!integer(top, name, 1, most, value)) return false;
      if (value > 0) request_.max_tokens = value;
    }
    if (!integer(top, "min_tokens", 0, most, request_.min_tokens)) return false;
    if (request_.max_tokens && request_.min_tokens > *request_.max_tokens) {
      return fail("min_tokens", "'min_tokens' must not be above the maximum of tokens");
    }
    return boolean(top, "", "ignore_eos", request_.ignore_eos);
  }

  bool sampling(const Json& top) {
    if (!number(top, "temperature", 0, 2, request_.temperature) ||
        !number(top, "top_p", 0, 1, request_.top_p) || !number(top, "min_p", 0, 1, request_.min_p) ||
        !integer(top, "top_k", -1, std::numeric_limits<std::int32_t>::max(), request_.top_k)) {
      return false;
    }
    request_.top_k = std::max<std::int64_t>(0, request_.top_k);
    const Json* seed = top.find("seed");
    if (seed == nullptr || seed->is_null()) return true;
    std::int64_t value = 0;
    using Limits = std::numeric_limits<std::int64_t>;
    if (!integer(top, "seed", Limits::min(), Limits::max(), value)) return false;
    request_.seed = value;
    return true;
  }

  bool stops(const Json& top) {
    const Json* stop = top.find("stop");
    if (stop != nullptr && !stop->is_null()) {
      if (stop->is_string()) {
        if (!stop_string(*stop, "stop")) return false;
      } else if (stop->is_array()) {
        if (stop->as_array().size() > stop_strings_max) {
          return fail("stop", "'stop' must hold at most " + std::to_string(stop_strings_max) + " strings");
        }
        for (std::size_t i = 0; i < stop->as_array().size(); ++i) {
          if (!stop_string(stop->as_array()[i], "stop[" + std::to_string(i) + "]")) return false;
        }
      } else {
        return wrong_type("stop", "a string or an array of strings", *stop);
      }
    }
    const Json* ids = top.find("stop_token_ids");
    if (ids == nullptr || ids->is_null()) return true;
    if (!ids->is_array()) return wrong_type("stop_token_ids", "an array of integers", *ids);
    if (ids->as_array().size() > stop_token_ids_max) {
      return fail("stop_token_ids",
                  "'stop_token_ids' must hold at most " + std::to_string(stop_token_ids_max) + " ids");
    }
    for (std::size_t i = 0; i < ids->as_array().size(); ++i) {
      const Json& id = ids->as_array()[i];
      const std::string at = "stop_token_ids[" + std::to_string(i) + "]";
      if (!id.is_integer()) return wrong_type(at, "an integer", id);
      if (id.as_i64() < 0 || id.as_i64() > std::numeric_limits<std::int32_t>::max()) {
        return fail(at, "'" + at + "' is not a token id");
      }
      request_.stop_token_ids.push_back(static_cast<std::int32_t>(id.as_i64()));
    }
    return true;
  }

  bool stop_string(const Json& json, const std::string& at) {
    if (!json.is_string()) return wrong_type(at, "a string", json);
    if (json.as_string().empty()) return fail(at, "'" + at + "' must not be empty");
    if (json.as_string().size() > stop_bytes_max) {
      return fail(at, "'" + at + "' must not be longer than " + std::to_string(stop_bytes_max) + " bytes");
    }
    request_.stop.push_back(json.as_string());
    return true;
  }

  bool salt(const Json& top, std::string_view name, std::string& out) {
    const Json* json = top.find(name);
    if (json == nullptr || json->is_null()) return true;
    if (!json->is_string()) return wrong_type(name, "a string", *json);
    if (json->as_string().empty() || json->as_string().size() > salt_bytes_max) {
      return fail(name,
                  "'" + std::string(name) + "' must be 1 to " + std::to_string(salt_bytes_max) + " bytes");
    }
    out = json->as_string();
    return true;
  }

  bool response_format(const Json& top) {
    const Json* format = top.find("response_format");
    if (format == nullptr || format->is_null()) return true;
    if (!format->is_object()) return wrong_type("response_format", "an object", *format);
    const Json* type = format->find("type");
    if (type == nullptr) return fail("response_format.type", "'response_format.type' is required");
    if (!type->is_string()) return wrong_type("response_format.type", "a string", *type);
    if (type->as_string() == "text") return true;
    return fail("response_format",
                "'response_format' must be of type text: this service does not constrain answers");
  }

  bool modalities(const Json& top) {
    const Json* list = top.find("modalities");
    if (list == nullptr || list->is_null()) return true;
    if (!list->is_array()) return wrong_type("modalities", "an array", *list);
    for (const Json& item : list->as_array()) {
      if (!item.is_string()) return wrong_type("modalities", "an array of strings", item);
      if (item.as_string() != "text") return fail("modalities", "'modalities' must be [\"text\"]");
    }
    return true;
  }

  bool thinking(const Json& top) {
    const Json* json = top.find("thinking");
    if (json == nullptr || json->is_null()) return true;
    if (!json->is_object()) return wrong_type("thinking", "an object", *json);
    const Json* type = json->find("type");
    if (type == nullptr) return fail("thinking.type", "'thinking.type' is required");
    if (!type->is_string()) return wrong_type("thinking.type", "a string", *type);
    if (type->as_string() == "disabled") return true;
    if (type->as_string() == "enabled") return fail("thinking", "this model has no thinking mode");
    return fail("thinking.type", "'thinking.type' must be enabled or disabled");
  }

  // A name, a number from 0 to 100, or such a number in a string.
  bool effort(const Json& object, std::string_view prefix, std::string_view name) {
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
      known = digits ? std::stoi(text) <= effort_max
                     : std::find(std::begin(effort_names), std::end(effort_names), text) !=
                           std::end(effort_names);
      none = digits ? std::stoi(text) == 0 : text == "none";
    } else {
      return wrong_type(at, "a string or an integer", *json);
    }
    if (!known)
      return fail(at, "'" + at + "' must be none, minimal, low, medium, high, xhigh, max or 0 to 100");
    if (!none) return fail(at, "this model has no thinking mode");
    return true;
  }

  bool template_kwargs(const Json& top) {
    constexpr std::string_view prefix = "chat_template_kwargs.";
    const Json* json = top.find("chat_template_kwargs");
    if (json == nullptr || json->is_null()) return true;
    if (!json->is_object()) return wrong_type("chat_template_kwargs", "an object", *json);
    for (const std::string_view name : {"thinking", "enable_thinking"}) {
      bool wanted = false;
      if (!boolean(*json, prefix, name, wanted)) return false;
      if (wanted) return fail(std::string(prefix) + std::string(name), "this model has no thinking mode");
    }
    return effort(*json, prefix, "reasoning_effort");
  }

  bool neutral(const Json& object, std::string_view prefix, const NeutralRow& row) {
    const Json* json = object.find(row.name);
    if (json == nullptr || json->is_null()) return true;
    const std::string at = std::string(prefix) + std::string(row.name);
    switch (row.neutral) {
      case Neutral::number_zero:
      case Neutral::number_one: {
        if (!json->is_number()) return wrong_type(at, "a number", *json);
        const bool zero = row.neutral == Neutral::number_zero;
        if (json->as_double() == (zero ? 0.0 : 1.0)) return true;
        return unsupported(at, zero ? "0" : "1");
      }
      case Neutral::integer_zero:
      case Neutral::integer_one: {
        if (!json->is_integer()) return wrong_type(at, "an integer", *json);
        const bool zero = row.neutral == Neutral::integer_zero;
        if (json->as_i64() == (zero ? 0 : 1)) return true;
        return unsupported(at, zero ? "0" : "1");
      }
      case Neutral::only_false:
      case Neutral::only_true: {
        if (!json->is_bool()) return wrong_type(at, "a boolean", *json);
        const bool wanted = row.neutral == Neutral::only_true;
        if (json->as_bool() == wanted) return true;
        return unsupported(at, wanted ? "true" : "false");
      }
      case Neutral::empty_array:
        if (!json->is_array()) return wrong_type(at, "an array", *json);
        if (json->as_array().empty()) return true;
        return unsupported(at, "[]");
      case Neutral::empty_object:
        if (!json->is_object()) return wrong_type(at, "an object", *json);
        if (json->as_object().empty()) return true;
        return unsupported(at, "{}");
      case Neutral::only_null:
        return unsupported(at, "null");
      case Neutral::none_or_auto:
        if (!json->is_string() && !json->is_object()) return wrong_type(at, "a string or an object", *json);
        if (json->is_string() && (json->as_string() == "none" || json->as_string() == "auto")) return true;
        return unsupported(at, "none or auto");
      case Neutral::any_bool:
        if (!json->is_bool()) return wrong_type(at, "a boolean", *json);
        return true;
      case Neutral::any_string:
        if (!json->is_string()) return wrong_type(at, "a string", *json);
        return true;
      case Neutral::any_object:
        if (!json->is_object()) return wrong_type(at, "an object", *json);
        return true;
    }
    return true;
  }

  bool required_string(const Json& top, std::string_view name, std::string& out) {
    const Json* json = top.find(name);
    if (json == nullptr || json->is_null()) return fail(name, "'" + std::string(name) + "' is required");
    if (!json->is_string()) return wrong_type(name, "a string", *json);
    out = json->as_string();
    return true;
  }

  bool boolean(const Json& object, std::string_view prefix, std::string_view name, bool& out) {
    const Json* json = object.find(name);
    if (json == nullptr || json->is_null()) return true;
    if (!json->is_bool()) return wrong_type(std::string(prefix) + std::string(name), "a boolean", *json);
    out = json->as_bool();
    return true;
  }

  bool integer(const Json& top, std::string_view name, std::int64_t min, std::int64_t max,
               std::int64_t& out) {
    const Json* json = top.find(name);
    if (json == nullptr || json->is_null()) return true;
    if (!json->is_integer()) return wrong_type(name, "an integer", *json);
    const std::int64_t value = json->as_i64();
    if (value < min || value > max || !json->is_i64()) {
      if (value < min) {
        return fail(name, "'" + std::string(name) + "' must be at least " + std::to_string(min));
      }
      return fail(name, "'" + std::string(name) + "' must be at most " + std::to_string(max));
    }
    out = value;
    return true;
  }

  bool number(const Json& top, std::string_view name, int min, int max, double& out) {
    const Json* json = top.find(name);
    if (json == nullptr || json->is_null()) return true;
    if (!json->is_number()) return wrong_type(name, "a number", *json);
    const double value = json->as_double();
    if (value < min || value > max) {
      return fail(name, "'" + std::string(name) + "' must be from " + std::to_string(min) + " to " +
                            std::to_string(max));
    }
    out = value;
    return true;
  }

  bool fail(std::string_view param, std::string_view message) {
    error_ = error_invalid(param, message);
    return false;
  }
  bool wrong_type(std::string_view param, std::string_view want, const Json& got) {
    return fail(param, "'" + std::string(param) + "' must be " + std::string(want) + ", not " +
                           std::string(got.type_name()));
  }
  bool unsupported(std::string_view param, std::string_view only) {
    return fail(param, "'" + std::string(param) + "' is not supported by this service: only " +
                           std::string(only) + " is accepted");
  }

  ChatRequest request_;
  std::optional<ApiError> error_;
};

}  // namespace

std::variant<ChatRequest, ApiError> chat_request_parse(std::string_view body) {
  return ChatParse().run(body);
}

std::variant<std::int64_t, ApiError> context_fit(std::int64_t prompt_tokens,
                                                 std::optional<std::int64_t> max_tokens,
                                                 std::int64_t window_tokens) {
  if (prompt_tokens >= window_tokens) return error_context_length(prompt_tokens, window_tokens);
  const std::int64_t room = window_tokens - prompt_tokens;
  return std::min(max_tokens.value_or(room), room);
}

}  // namespace di::api
