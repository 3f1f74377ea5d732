// model/chat.h: messages of a dialogue to the token ids a model was trained on.
//
// A ChatFormat is read once from a model's tokenizer_config.json and is immutable: any thread.  The
// published templates are programs (Jinja); none is run here.  A known template is recognised by the
// marks it places and rendered by code of ours, an unknown one is refused at load.
//
// Rendering is segment by segment: the marks are placed by id and each content is encoded as plain
// text, so that content which spells a mark stays text.
//
// DeepSeek-V3: BEGIN, the system texts joined by an empty line, then in order "<｜User｜>" text and
// "<｜Assistant｜>" text END, and "<｜Assistant｜>" at the end when an answer is wanted.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "model/tokenizer.h"

namespace di::model {

inline constexpr std::size_t chat_config_bytes_max = std::size_t{16} << 20;

enum class ChatRole : std::uint8_t { system, user, assistant, tool };

// "developer" is another word for system.  Errors: invalid for any other name.
[[nodiscard]] Result<ChatRole> chat_role_parse(std::string_view name);

struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;  // UTF-8
};

struct ChatPrompt {
  std::vector<TokenId> ids;
  std::string text;  // the same as text, marks spelt out: for people and for script engines, never encoded
  bool cut = false;  // it has more than `tokens_max` tokens and is not here
};

class ChatFormat {
 public:
  // Reads `path` (tokenizer_config.json); the marks must be added tokens of `tokenizer`.
  // Errors: those of reading; invalid for broken content, unsupported for an unknown template.  Every
  // message begins with the path.
  static Result<ChatFormat> load(const std::string& path, const Tokenizer& tokenizer);
  // The same from text; `path` is for messages only.
  static Result<ChatFormat> parse(std::string_view json, std::string_view path, const Tokenizer& tokenizer);

  // `tokenizer` is the one given at load.  With `answer` the prompt ends where the model is to speak.
  // What has more than `tokens_max` tokens costs no more work than that many.
  // Errors: unsupported for role tool, and those of encode.
  [[nodiscard]] Result<ChatPrompt> render(std::span<const ChatMessage> messages, const Tokenizer& tokenizer,
                                          bool answer = true, std::size_t tokens_max = SIZE_MAX) const;

  [[nodiscard]] TokenId begin_id() const { return begin_; }
  // Ends a turn: the stop id of an answer.
  [[nodiscard]] TokenId end_id() const { return end_; }

 private:
  ChatFormat() = default;
  TokenId begin_ = 0;
  TokenId end_ = 0;
  TokenId user_ = 0;
  TokenId assistant_ = 0;
};

}  // namespace di::model
