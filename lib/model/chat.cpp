#include "model/chat.h"

#include <array>
#include <utility>

#include "base/file.h"
#include "base/json.h"

namespace di::model {

namespace {

constexpr std::string_view user_mark = "<｜User｜>";
constexpr std::string_view assistant_mark = "<｜Assistant｜>";
constexpr std::string_view end_mark = "<｜end▁of▁sentence｜>";

Error invalid(std::string message) {
  return Error{Code::invalid, 0, std::move(message)};
}

// A token is named by a string or by an object with its "content".
Result<std::string> token_name(const Json& root, std::string_view key) {
  const Json* member = root.find(key);
  if (member != nullptr && member->is_object()) member = member->find("content");
  if (member == nullptr || !member->is_string()) return invalid("'" + std::string(key) + "' is missing");
  return member->as_string();
}

Result<TokenId> mark_id(const Tokenizer& tokenizer, std::string_view mark) {
  const auto id = tokenizer.added_to_id(mark);
  if (!id) return invalid("the tokenizer has no added token '" + std::string(mark) + "'");
  return *id;
}

}  // namespace

Result<ChatRole> chat_role_parse(std::string_view name) {
  if (name == "system" || name == "developer") return ChatRole::system;
  if (name == "user") return ChatRole::user;
  if (name == "assistant") return ChatRole::assistant;
  if (name == "tool") return ChatRole::tool;
  return invalid("unknown role '" + std::string(name) + "', want system, developer, user, assistant or tool");
}

Result<ChatFormat> ChatFormat::parse(std::string_view json, std::string_view path,
                                     const Tokenizer& tokenizer) {
  const auto root = Json::parse(json);
  if (!root) return root.error().in(path);
  if (!root->is_object())
    return invalid("is a JSON " + std::string(root->type_name()) + ", want an object").in(path);
  const Json* chat_template = root->find("chat_template");
  if (chat_template == nullptr || !chat_template->is_string()) {
    return Error{Code::unsupported, 0, "no 'chat_template' as a string"}.in(path);
  }
  const std::string& text = chat_template->as_string();
  for (const std::string_view mark : {user_mark, assistant_mark, end_mark}) {
    if (text.find(mark) == std::string::npos) {
      return Error{Code::unsupported, 0,
                   "'chat_template' is not DeepSeek-V3's: it does not place " + std::string(mark)}
          .in(path);
    }
  }
  // Later templates place the same marks otherwise: R1 and V3.1 write <think>, V3-0324 and V3.1 put
  // <｜Assistant｜> directly behind the user's text.
  for (const std::string_view other : {std::string_view("think>"), std::string_view("is_last_user")}) {
    if (text.find(other) != std::string::npos) {
      return Error{Code::unsupported, 0,
                   "'chat_template' is not DeepSeek-V3's: it has '" + std::string(other) + "'"}
          .in(path);
    }
  }
  const auto begin_name = token_name(*root, "bos_token");
  if (!begin_name) return begin_name.error().in(path);
  const auto end_name = token_name(*root, "eos_token");
  if (!end_name) return end_name.error().in(path);
  if (*end_name != end_mark) {
    return invalid("'eos_token' is '" + *end_name + "', but the template ends a turn with " +
                   std::string(end_mark))
        .in(path);
  }
  ChatFormat format;
  const std::array<std::pair<std::string_view, TokenId*>, 4> marks{{{*begin_name, &format.begin_},
                                                                    {end_mark, &format.end_},
                                                                    {user_mark, &format.user_},
                                                                    {assistant_mark, &format.assistant_}}};
  for (const auto& [mark, id] : marks) {
    const auto found = mark_id(tokenizer, mark);
    if (!found) return found.error().in(path);
    *id = *found;
  }
  return format;
}

Result<ChatFormat> ChatFormat::load(const std::string& path, const Tokenizer& tokenizer) {
  const auto text = file_read(path, chat_config_bytes_max);
  if (!text) return text.error();
  return parse(*text, path, tokenizer);
}

Result<ChatPrompt> ChatFormat::render(std::span<const ChatMessage> messages, const Tokenizer& tokenizer,
                                      bool answer, std::size_t tokens_max) const {
  ChatPrompt prompt;
  std::size_t tokens_min = 0;
  for (const ChatMessage& message : messages) tokens_min += tokenizer.tokens_min(message.content.size());
  if (tokens_min > tokens_max) return ChatPrompt{{}, {}, true};
  const auto place = [&](TokenId id) {
    prompt.ids.push_back(id);
    prompt.text.append(tokenizer.id_to_bytes(id));
  };
  const auto say = [&](std::string_view content) -> Status {
    if (prompt.ids.size() > tokens_max) return Ok{};
    const auto ids = tokenizer.encode(content, {.tokens_max = tokens_max - prompt.ids.size()});
    if (!ids) return ids.error();
    prompt.ids.insert(prompt.ids.end(), ids->begin(), ids->end());
    prompt.text.append(content);
    return Ok{};
  };
  // System texts go to the front wherever they stand, as the published template has it.
  std::string system;
  bool first_system = true;
  for (const ChatMessage& message : messages) {
    if (message.role != ChatRole::system) continue;
    if (!std::exchange(first_system, false)) system.append("\n\n");
    system.append(message.content);
  }
  place(begin_);
  DI_TRY(say(system));
  for (const ChatMessage& message : messages) {
    switch (message.role) {
      case ChatRole::system:
        break;
      case ChatRole::user:
        place(user_);
        DI_TRY(say(message.content));
        break;
      case ChatRole::assistant:
        place(assistant_);
        DI_TRY(say(message.content));
        place(end_);
        break;
      case ChatRole::tool:
        return Error{Code::unsupported, 0, "messages of role 'tool' are not supported"};
    }
  }
  if (answer) place(assistant_);
  if (prompt.ids.size() > tokens_max) return ChatPrompt{{}, {}, true};
  return prompt;
}

}  // namespace di::model
