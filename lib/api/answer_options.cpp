#include "api/answer_options.h"

#include <algorithm>
#include <limits>

#include "api/text.h"

namespace di::api {

namespace {

// What every kind of answer has in common of what the engine does not serve; the table is in the header.
constexpr NeutralRow neutral_rows[] = {
    {"presence_penalty", Neutral::number_zero},
    {"frequency_penalty", Neutral::number_zero},
    {"priority", Neutral::integer_zero},
    {"n", Neutral::integer_one},
    {"repetition_penalty", Neutral::number_one},
    {"length_penalty", Neutral::number_one},
    {"best_of", Neutral::integer_one},
    {"stream_interval", Neutral::integer_one},
    {"echo", Neutral::only_false},
    {"use_beam_search", Neutral::only_false},
    {"include_stop_str_in_output", Neutral::only_false},
    {"return_token_ids", Neutral::only_false},
    {"return_tokens_as_token_ids", Neutral::only_false},
    {"skip_special_tokens", Neutral::only_true},
    {"allowed_token_ids", Neutral::empty_array},
    {"bad_words", Neutral::empty_array},
    {"logprob_token_ids", Neutral::empty_array},
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
    {"store", Neutral::any_bool},
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

bool stream_options_read(FieldReader& fields, const Json& top, AnswerOptions& out) {
  const Json* options = top.find("stream_options");
  if (options == nullptr || options->is_null()) return true;
  if (!options->is_object()) return fields.wrong_type("stream_options", "an object", *options);
  bool obfuscation = false;  // padding against side channels: it may be asked for, none is added
  bool usage = false;
  bool continuous = false;
  if (!fields.boolean(*options, "stream_options.", "include_usage", usage) ||
      !fields.boolean(*options, "stream_options.", "continuous_usage_stats", continuous) ||
      !fields.boolean(*options, "stream_options.", "include_obfuscation", obfuscation)) {
    return false;
  }
  out.include_usage = usage;
  out.continuous_usage = usage && continuous;
  return true;
}

bool limits_read(FieldReader& fields, const Json& top, AnswerOptions& out) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  std::int64_t value = 0;
  for (const std::string_view name : {"max_tokens", "max_completion_tokens"}) {  // the latter wins
    value = 0;
    if (!fields.integer(top, name, 1, most, value)) return false;
    if (value > 0) out.max_tokens = value;
  }
  if (!fields.integer(top, "min_tokens", 0, most, out.min_tokens)) return false;
  if (out.max_tokens && out.min_tokens > *out.max_tokens) {
    return fields.fail("min_tokens", "'min_tokens' must not be above the maximum of tokens");
  }
  return fields.boolean(top, "", "ignore_eos", out.ignore_eos);
}

bool sampling_read(FieldReader& fields, const Json& top, AnswerOptions& out) {
  if (!fields.number(top, "temperature", 0, 2, out.temperature) ||
      !fields.number(top, "top_p", 0, 1, out.top_p) || !fields.number(top, "min_p", 0, 1, out.min_p) ||
      !fields.integer(top, "top_k", -1, std::numeric_limits<std::int32_t>::max(), out.top_k)) {
    return false;
  }
  out.top_k = std::max<std::int64_t>(0, out.top_k);
  const Json* seed = top.find("seed");
  if (seed == nullptr || seed->is_null()) return true;
  std::int64_t value = 0;
  using Limits = std::numeric_limits<std::int64_t>;
  if (!fields.integer(top, "seed", Limits::min(), Limits::max(), value)) return false;
  out.seed = value;
  return true;
}

bool stop_string_read(FieldReader& fields, const Json& json, const std::string& at,
                      std::vector<std::string>& out) {
  if (!json.is_string()) return fields.wrong_type(at, "a string", json);
  if (json.as_string().empty()) return fields.fail(at, "'" + at + "' must not be empty");
  if (json.as_string().size() > stop_bytes_max) {
    return fields.fail(at,
                       "'" + at + "' must not be longer than " + std::to_string(stop_bytes_max) + " bytes");
  }
  out.push_back(json.as_string());
  return true;
}

bool stops_read(FieldReader& fields, const Json& top, AnswerOptions& out) {
  const Json* stop = top.find("stop");
  if (stop != nullptr && !stop->is_null()) {
    if (stop->is_string()) {
      if (!stop_string_read(fields, *stop, "stop", out.stop)) return false;
    } else if (stop->is_array()) {
      if (stop->as_array().size() > stop_strings_max) {
        return fields.fail("stop",
                           "'stop' must hold at most " + std::to_string(stop_strings_max) + " strings");
      }
      for (std::size_t i = 0; i < stop->as_array().size(); ++i) {
        if (!stop_string_read(fields, stop->as_array()[i], "stop[" + std::to_string(i) + "]", out.stop))
          return false;
      }
    } else {
      return fields.wrong_type("stop", "a string or an array of strings", *stop);
    }
  }
  const Json* ids = top.find("stop_token_ids");
  if (ids == nullptr || ids->is_null()) return true;
  if (!ids->is_array()) return fields.wrong_type("stop_token_ids", "an array of integers", *ids);
  if (ids->as_array().size() > stop_token_ids_max) {
    return fields.fail("stop_token_ids",
                       "'stop_token_ids' must hold at most " + std::to_string(stop_token_ids_max) + " ids");
  }
  for (std::size_t i = 0; i < ids->as_array().size(); ++i) {
    std::uint32_t id = 0;
    if (!fields.token_id(ids->as_array()[i], "stop_token_ids[" + std::to_string(i) + "]", id)) return false;
    out.stop_token_ids.push_back(static_cast<std::int32_t>(id));
  }
  return true;
}

bool response_format_read(FieldReader& fields, const Json& top) {
  const Json* format = top.find("response_format");
  if (format == nullptr || format->is_null()) return true;
  if (!format->is_object()) return fields.wrong_type("response_format", "an object", *format);
  const Json* type = format->find("type");
  if (type == nullptr) return fields.fail("response_format.type", "'response_format.type' is required");
  if (!type->is_string()) return fields.wrong_type("response_format.type", "a string", *type);
  if (type->as_string() == "text") return true;
  return fields.fail("response_format",
                     "'response_format' must be of type text: this service does not constrain answers");
}

}  // namespace

bool answer_options_read(FieldReader& fields, const Json& top, AnswerOptions& out) {
  return fields.required_string(top, "model", out.model) && fields.boolean(top, "", "stream", out.stream) &&
         stream_options_read(fields, top, out) && limits_read(fields, top, out) &&
         sampling_read(fields, top, out) && stops_read(fields, top, out) &&
         fields.string(top, "cache_salt", salt_bytes_max, out.cache_salt) &&
         fields.string(top, "user_id", salt_bytes_max, out.user_id) && response_format_read(fields, top) &&
         fields.neutral_all(top, neutral_rows);
}

std::variant<std::int64_t, ApiError> context_fit(std::string_view param, std::int64_t prompt_tokens,
                                                 std::optional<std::int64_t> max_tokens,
                                                 std::int64_t window_tokens) {
  if (prompt_tokens >= window_tokens) return error_context_length(param, prompt_tokens, window_tokens);
  const std::int64_t room = window_tokens - prompt_tokens;
  return std::min(max_tokens.value_or(room), room);
}

}  // namespace di::api
