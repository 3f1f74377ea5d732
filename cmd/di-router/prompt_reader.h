// cmd/di-router/prompt_reader.h: from the bytes of a request to its tokens, off the loop thread.
//
// Reading a body takes time that grows with it, a quarter of a second for a megabyte, and everything else
// of the router would wait: tokens of other streams, heartbeats.  Small bodies are read at once by
// read_body(), longer ones by a few threads of the reader.
//
// Owner: the loop thread.  The threads see only their job and the model, which does not change.  Bounds:
// reader_jobs_max and reader_bytes_max of bodies that wait or are being read.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "account/key.h"
#include "api/answer_options.h"
#include "api/error.h"
#include "api/render.h"
#include "http/server.h"
#include "loop/mailbox.h"
#include "model/chat.h"
#include "model/tokenizer.h"

namespace di::router {

inline constexpr std::size_t read_at_once_bytes_max = 16 << 10;  // about 5 ms
inline constexpr std::size_t reader_jobs_max = 1024;
inline constexpr std::size_t reader_bytes_max = std::size_t{256} << 20;
inline constexpr int reader_threads = 2;
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

// Bytes of text that one /detokenize may make: what the answers that are being read hold is bounded by it.
inline constexpr std::size_t detokenized_bytes_max = std::size_t{16} << 20;

// What the body of a route is read as.
enum class Task : std::uint8_t { chat, completion, tokenize, detokenize };

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
  struct Job {
    Task task = Task::chat;
    http::ExchangeId exchange;
    std::string request_id;
    account::KeyEntry key;
    std::string body;
  };
  struct Read {
    Job job;  // its body is gone
    ReadBody result;
  };

  // `done` runs on the loop thread, in no particular order.  `model` outlives the reader.
  PromptReader(loop::Loop& loop, const ServedModel& model, std::function<void(Read&&)> done);
  ~PromptReader();
  PromptReader(const PromptReader&) = delete;
  PromptReader& operator=(const PromptReader&) = delete;

  // False when there is no room.
  [[nodiscard]] bool submit(Job&& job);

 private:
  struct Work {
    Job job;
    std::size_t bytes = 0;
  };
  struct Done {
    Read read;
    std::size_t bytes = 0;
  };
  void work();

  const ServedModel& model_;
  std::function<void(Read&&)> done_;
  std::size_t jobs_ = 0;
  std::size_t bytes_ = 0;
  loop::Mailbox<Work> in_{reader_jobs_max};
  loop::Mailbox<Done> out_{reader_jobs_max};
  loop::MailboxReader<Done> reader_;
  std::vector<std::thread> threads_;
};

}  // namespace di::router
