#include "api/completions.h"

#include <algorithm>
#include <utility>

namespace di::api {

namespace {

constexpr NeutralRow neutral_rows[] = {
    {"suffix", Neutral::empty_string},
    {"logprobs", Neutral::only_null},
    {"prompt_embeds", Neutral::only_null},
};

bool ids_read(FieldReader& fields, const Json::Array& list, const std::string& at,
              std::vector<std::uint32_t>& out) {
  out.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    std::uint32_t id = 0;
    if (!fields.token_id(list[i], at + "[" + std::to_string(i) + "]", id)) return false;
    out.push_back(id);
  }
  return true;
}

bool prompt_read(FieldReader& fields, const Json& top, CompletionRequest& out) {
  const Json* json = top.find("prompt");
  if (json == nullptr || json->is_null()) return fields.fail("prompt", "'prompt' is required");
  std::string at = "prompt";
  if (json->is_array() && !json->as_array().empty() && !json->as_array()[0].is_integer()) {
    if (json->as_array().size() > 1) {
      return fields.fail("prompt", "'prompt' must hold one prompt: send a request for each");
    }
    json = json->as_array().data();
    at = "prompt[0]";
  }
  if (json->is_string()) {
    out.prompt = json->as_string();
    return true;
  }
  if (!json->is_array()) return fields.wrong_type(at, "a string or an array of token ids", *json);
  if (json->as_array().empty()) return fields.fail(at, "'" + at + "' must hold at least one token");
  std::vector<std::uint32_t> ids;
  if (!ids_read(fields, json->as_array(), at, ids)) return false;
  out.prompt = std::move(ids);
  return true;
}

bool completion_read(FieldReader& fields, const Json& top, CompletionRequest& out) {
  if (!answer_options_read(fields, top, out) || !prompt_read(fields, top, out) ||
      !fields.boolean(top, "", "add_special_tokens", out.add_special_tokens) ||
      !fields.neutral_all(top, neutral_rows)) {
    return false;
  }
  if (!out.max_tokens) out.max_tokens = std::max(completion_tokens_default, out.min_tokens);
  return true;
}

}  // namespace

std::variant<CompletionRequest, ApiError> completion_request_parse(std::string_view body) {
  FieldReader fields;
  CompletionRequest request;
  const Json* top = fields.object(body);
  if (top == nullptr || !completion_read(fields, *top, request)) return fields.error();
  return request;
}

}  // namespace di::api
