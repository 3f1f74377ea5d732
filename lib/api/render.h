// api/render.h: answers in the shapes clients expect (spec/api.md 2.3), as JSON text.  Framing as
// events is http/sse.h's.
//
// Pure; one StreamRenderer per stream, owned by the thread of the answer.  Bounds: each call makes
// one text whose length is that of its input plus about 300 bytes.
//
// The rules of 2.3 that live here: 3 (no chunk before there is something to say, the role in the
// first), 4 (one chunk per step: text and finish of the same step share it), 5 (usage only when
// asked for, alone and last, null in all others), and the two spellings of usage.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace di::api {

enum class Finish : std::uint8_t { stop, length };
[[nodiscard]] std::string_view finish_name(Finish finish);

// Whose answer: /v1/chat/completions or /v1/completions.
enum class Shape : std::uint8_t { chat, completion };

struct Usage {
  std::int64_t prompt_tokens = 0;      // hit and miss together
  std::int64_t completion_tokens = 0;  // reasoning included
  std::int64_t cached_tokens = 0;      // of the prompt; what a worker reports above the prompt is cut
  std::int64_t reasoning_tokens = 0;
};

// What every chunk of an answer repeats.
struct AnswerHead {
  std::string id;     // "chatcmpl-...", "cmpl-..."
  std::string model;  // as the client spelled it
  std::int64_t created_s = 0;
  std::string system_fingerprint;  // empty: null
  Shape shape = Shape::chat;
};

// The whole of an answer that is not streamed.
[[nodiscard]] std::string answer_json(const AnswerHead& head, std::string_view text, Finish finish,
                                      const Usage& usage);

class StreamRenderer {
 public:
  struct Options {
    bool include_usage = false;
    bool continuous_usage = false;
  };

  StreamRenderer(const AnswerHead& head, Options options);

  // The chunk of one step.  Empty when there is nothing to tell (text still held back): send no
  // event then.  `running` counts the tokens so far.
  std::string step(std::string_view text, std::optional<Finish> finish, const Usage& running);
  // The chunk after the finish; empty when the client did not ask for usage.
  [[nodiscard]] std::string usage(const Usage& total) const;

 private:
  std::string before_text_;   // up to and with the choice's "delta": or "text":
  std::string before_usage_;  // the chunk without choices
  Options options_;
  Shape shape_;
  bool role_sent_ = false;
};

struct ModelEntry {
  std::string id;
  std::int64_t created_s = 0;
  std::string owned_by = "di";
  std::string root;  // what stands behind an alias; usually the id
  std::int64_t max_model_len = 0;
};

[[nodiscard]] std::string model_json(const ModelEntry& model);
[[nodiscard]] std::string models_json(std::span<const ModelEntry> models);

}  // namespace di::api
