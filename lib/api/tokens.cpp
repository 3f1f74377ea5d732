#include "api/tokens.h"

#include <algorithm>

#include "api/fields.h"
#include "api/messages.h"
#include "base/assert.h"

namespace di::api {

namespace {

constexpr std::size_t model_name_bytes_max = 256;

constexpr NeutralRow tokenize_rows[] = {
    {"tools", Neutral::empty_array},
    {"continue_final_message", Neutral::only_false},
    {"chat_template", Neutral::only_null},
};

bool few_enough(FieldReader& fields, std::string_view name, std::size_t count) {
  if (count <= token_lists_max) return true;
  return fields.fail(
      name, "'" + std::string(name) + "' must hold at most " + std::to_string(token_lists_max) + " elements");
}

bool prompts_read(FieldReader& fields, const Json& prompt, TokenizeRequest& out) {
  if (prompt.is_string()) {
    out.prompts.push_back(prompt.as_string());
    return true;
  }
  if (!prompt.is_array()) return fields.wrong_type("prompt", "a string or an array of strings", prompt);
  const Json::Array& list = prompt.as_array();
  if (list.empty()) return fields.fail("prompt", "'prompt' must hold at least one string");
  if (!few_enough(fields, "prompt", list.size())) return false;
  out.several = true;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string())
      return fields.wrong_type("prompt[" + std::to_string(i) + "]", "a string", list[i]);
    out.prompts.push_back(list[i].as_string());
  }
  return true;
}

bool tokenize_read(FieldReader& fields, const Json& top, TokenizeRequest& out) {
  if (!fields.string(top, "model", model_name_bytes_max, out.model) ||
      !fields.boolean(top, "", "add_generation_prompt", out.add_generation_prompt) ||
      !fields.boolean(top, "", "return_token_strs", out.return_token_strs) ||
      !fields.neutral_all(top, tokenize_rows)) {
    return false;
  }
  const Json* prompt = top.find("prompt");
  const Json* messages = top.find("messages");
  const bool has_prompt = prompt != nullptr && !prompt->is_null();
  const bool has_messages = messages != nullptr && !messages->is_null();
  if (has_prompt && has_messages) return fields.fail("prompt", "'prompt' and 'messages' exclude each other");
  if (has_messages) {
    // The chat format places its marks itself; a second beginning would be no prompt of this model.
    return fields.neutral(top, "", {"add_special_tokens", Neutral::only_false}) &&
           messages_read(fields, top, out.messages);
  }
  if (!has_prompt) return fields.fail("prompt", "'prompt' or 'messages' is required");
  return fields.boolean(top, "", "add_special_tokens", out.add_special_tokens) &&
         prompts_read(fields, *prompt, out);
}

bool list_read(FieldReader& fields, const Json::Array& list, const std::string& at,
               std::vector<std::uint32_t>& out) {
  out.resize(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!fields.token_id(list[i], at + "[" + std::to_string(i) + "]", out[i])) return false;
  }
  return true;
}

bool detokenize_read(FieldReader& fields, const Json& top, DetokenizeRequest& out) {
  if (!fields.string(top, "model", model_name_bytes_max, out.model) ||
      !fields.boolean(top, "", "skip_special_tokens", out.skip_special_tokens)) {
    return false;
  }
  const Json* tokens = top.find("tokens");
  if (tokens == nullptr || tokens->is_null()) return fields.fail("tokens", "'tokens' is required");
  if (!tokens->is_array()) return fields.wrong_type("tokens", "an array of token ids", *tokens);
  const Json::Array& list = tokens->as_array();
  out.several = !list.empty() && list[0].is_array();
  if (!out.several) return list_read(fields, list, "tokens", out.lists.emplace_back());
  if (!few_enough(fields, "tokens", list.size())) return false;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string at = "tokens[" + std::to_string(i) + "]";
    if (!list[i].is_array()) return fields.wrong_type(at, "an array of token ids", list[i]);
    if (!list_read(fields, list[i].as_array(), at, out.lists.emplace_back())) return false;
  }
  return true;
}

// One value, or an array of one for each element.
template <typename Element, typename Write>
void write_each(JsonWriter& writer, std::string_view key, bool several, std::span<const Element> elements,
                const Write& write) {
  writer.key(key);
  if (several) writer.open_array();
  for (const Element& element : elements) write(element);
  if (several) writer.close_array();
}

}  // namespace

std::variant<TokenizeRequest, ApiError> tokenize_request_parse(std::string_view body) {
  FieldReader fields;
  TokenizeRequest request;
  const Json* top = fields.object(body);
  if (top == nullptr || !tokenize_read(fields, *top, request)) return fields.error();
  return request;
}

std::variant<DetokenizeRequest, ApiError> detokenize_request_parse(std::string_view body) {
  FieldReader fields;
  DetokenizeRequest request;
  const Json* top = fields.object(body);
  if (top == nullptr || !detokenize_read(fields, *top, request)) return fields.error();
  return request;
}

std::string tokenize_json(const TokenizeRequest& request, std::span<const TokenizedText> texts,
                          std::int64_t max_model_len) {
  DI_ASSERT(request.several || texts.size() == 1);
  JsonWriter writer;
  writer.open_object();
  write_each(writer, "count", request.several, texts,
             [&](const TokenizedText& text) { writer.number(static_cast<std::int64_t>(text.ids.size())); });
  writer.key("max_model_len");
  writer.number(max_model_len);
  write_each(writer, "tokens", request.several, texts, [&](const TokenizedText& text) {
    writer.open_array();
    for (const std::uint32_t id : text.ids) writer.number(id);
    writer.close_array();
  });
  if (request.return_token_strs) {
    write_each(writer, "token_strs", request.several, texts, [&](const TokenizedText& text) {
      writer.open_array();
      for (const std::string& string : text.strings) writer.string(string);
      writer.close_array();
    });
  }
  write_each(writer, "char_count", request.several, texts,
             [&](const TokenizedText& text) { writer.number(text.characters); });
  writer.close_object();
  return writer.take();
}

std::string detokenize_json(const DetokenizeRequest& request, std::span<const std::string> texts) {
  DI_ASSERT(request.several || texts.size() == 1);
  JsonWriter writer;
  writer.open_object();
  for (const std::string_view key : {"prompt", "text"}) {
    write_each(writer, key, request.several, texts, [&](const std::string& text) { writer.string(text); });
  }
  writer.close_object();
  return writer.take();
}

std::int64_t characters_count(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

}  // namespace di::api
