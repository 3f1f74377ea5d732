// cmd/di-router/prompt_reader.h: from the bytes of a request to its tokens, off the loop thread.
//
// Reading a body takes time that grows with it, a quarter of a second for a megabyte, and everything else
// of the router would wait: tokens of other streams, heartbeats.  Small bodies are read at once by
// read_body(), longer ones by a few threads of the reader.
//
// Owner: the loop thread.  The threads see only their job and the model, which does not change.  Bounds:
// those of prompt_queue.h, which says whose turn it is; a thread is given a job when it is free, so that
// what has not begun can be dropped.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "api/answer_options.h"
#include "api/error.h"
#include "api/render.h"
#include "http/server.h"
#include "loop/mailbox.h"
#include "model/chat.h"
#include "model/tokenizer.h"
#include "prompt_queue.h"

namespace di::router {

inline constexpr std::size_t read_at_once_bytes_max = 16 << 10;  // about 5 ms
// A prompt is counted up to so many windows; a longer one is only known to be longer.
inline constexpr std::size_t counted_windows_max = 4;

// What a served model is to the front: names, text and limits.
struct ServedModel {
  std::string name;
  model::Tokenizer tokenizer;
  model::ChatFormat chat;
  std::uint32_t context_tokens_max = 0;
  std::int64_t created_s = 0;
};

// Bytes of text that one /detokenize may make, and of the answer of it or of /tokenize: the text comes twice,
// and JSON may make more of it.
inline constexpr std::size_t detokenized_bytes_max = std::size_t{16} << 20;
inline constexpr std::size_t counted_json_bytes_max = std::size_t{48} << 20;

// A request for an answer of the model.
struct Prompt {
  api::AnswerOptions options;
  api::Shape shape = api::Shape::chat;
  std::vector<model::TokenId> ids;
  std::int64_t output_tokens_max = 0;  // max_tokens, or what the window leaves
  std::string debug;  // what a script engine matches: the last user message, or the prompt's text
};

// An answer that needs no model.
struct Counted {
  std::string json;
};

using ReadBody = std::variant<Prompt, Counted, api::ApiError>;

// Pure; any thread.
[[nodiscard]] ReadBody read_body(const ServedModel& model, Task task, std::string_view body);

class PromptReader {
 public:
  struct Read {
    ReadJob job;  // its body is gone
    ReadBody result;
  };

  // `done` runs on the loop thread, in no particular order.  `model` outlives the reader.
  PromptReader(loop::Loop& loop, const ServedModel& model, std::function<void(Read&&)> done);
  ~PromptReader();
  PromptReader(const PromptReader&) = delete;
  PromptReader& operator=(const PromptReader&) = delete;

  // False, and `job` untouched, when there is no room.
  [[nodiscard]] bool submit(ReadJob&& job);
  // Nobody waits for it any more.  When it is being read already, `done` still comes.
  void drop(http::ExchangeId exchange) { queue_.drop(exchange); }

 private:
  void feed();
  void work();

  const ServedModel& model_;
  std::function<void(Read&&)> done_;
  PromptQueue queue_;
  loop::Mailbox<ReadJob> in_{reader_threads};
  loop::Mailbox<Read> out_{reader_threads};
  loop::MailboxReader<Read> reader_;
  std::vector<std::thread> threads_;
};

}  // namespace di::router
