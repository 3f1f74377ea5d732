#include "api/messages.h"

#include <string>

namespace di::api {

namespace {

bool role_read(FieldReader& fields, const std::string& name, const std::string& at, model::ChatRole& out) {
  if (name == "tool" || name == "function") {
    return fields.fail(at, "'" + at + "' is '" + name + "', but this service does not support tools");
  }
  const auto role = model::chat_role_parse(name);
  if (!role) return fields.fail(at, "'" + at + "' must be one of system, developer, user, assistant");
  out = *role;
  return true;
}

bool parts_read(FieldReader& fields, const Json::Array& list, const std::string& at, std::string& out) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string here = at + "[" + std::to_string(i) + "]";
    if (!list[i].is_object()) return fields.wrong_type(here, "an object", list[i]);
    const Json* type = list[i].find("type");
    if (type == nullptr) return fields.fail(here + ".type", "'" + here + ".type' is required");
    if (!type->is_string()) return fields.wrong_type(here + ".type", "a string", *type);
    if (type->as_string() != "text") {
      return fields.fail(here, "'" + here + "' is not a text part, and this model takes only text");
    }
    const Json* text = list[i].find("text");
    if (text == nullptr) return fields.fail(here + ".text", "'" + here + ".text' is required");
    if (!text->is_string()) return fields.wrong_type(here + ".text", "a string", *text);
    if (i > 0) out.push_back('\n');
    out.append(text->as_string());
  }
  return true;
}

bool message_read(FieldReader& fields, const Json& json, const std::string& at, model::ChatMessage& out) {
  if (!json.is_object()) return fields.wrong_type(at, "an object", json);
  const std::string dot = at + ".";
  const Json* role = json.find("role");
  if (role == nullptr) return fields.fail(dot + "role", "'" + dot + "role' is required");
  if (!role->is_string()) return fields.wrong_type(dot + "role", "a string", *role);
  if (!role_read(fields, role->as_string(), dot + "role", out.role)) return false;
  const Json* content = json.find("content");
  if (content == nullptr) return fields.fail(dot + "content", "'" + dot + "content' is required");
  if (content->is_string()) {
    out.content = content->as_string();
  } else if (content->is_array()) {
    if (!parts_read(fields, content->as_array(), dot + "content", out.content)) return false;
  } else if (!content->is_null()) {
    return fields.wrong_type(dot + "content", "a string, null or an array of parts", *content);
  }
  // History carries these back to us; without tool calls none of them changes the prompt.
  for (const NeutralRow& row :
       {NeutralRow{"name", Neutral::any_string}, NeutralRow{"reasoning_content", Neutral::any_string},
        NeutralRow{"reasoning", Neutral::any_string}, NeutralRow{"refusal", Neutral::any_string},
        NeutralRow{"tool_calls", Neutral::empty_array}, NeutralRow{"function_call", Neutral::only_null},
        NeutralRow{"audio", Neutral::only_null}, NeutralRow{"prefix", Neutral::only_false}}) {
    if (!fields.neutral(json, dot, row)) return false;
  }
  return true;
}

}  // namespace

bool messages_read(FieldReader& fields, const Json& top, std::vector<model::ChatMessage>& out) {
  const Json* list = top.find("messages");
  if (list == nullptr || list->is_null()) return fields.fail("messages", "'messages' is required");
  if (!list->is_array()) return fields.wrong_type("messages", "an array", *list);
  if (list->as_array().empty()) return fields.fail("messages", "'messages' must hold at least one message");
  out.resize(list->as_array().size());
  for (std::size_t i = 0; i < list->as_array().size(); ++i) {
    if (!message_read(fields, list->as_array()[i], "messages[" + std::to_string(i) + "]", out[i]))
      return false;
  }
  return true;
}

}  // namespace di::api
