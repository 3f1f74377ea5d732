#include "prompt_reader.h"

#include <utility>

namespace di::router {

std::variant<Prompt, api::ApiError> read_prompt(const ServedModel& model, std::string_view body) {
  auto parsed = api::chat_request_parse(body);
  if (auto* error = std::get_if<api::ApiError>(&parsed)) return std::move(*error);
  Prompt prompt{std::get<api::ChatRequest>(std::move(parsed)), {}, 0};
  if (prompt.chat.model != model.name) return api::error_model(prompt.chat.model);
  const std::size_t tokens_max = counted_windows_max * model.context_tokens_max;
  auto rendered = model.chat.render(prompt.chat.messages, model.tokenizer, true, tokens_max);
  if (!rendered) return api::error_invalid("messages", rendered.error().message);
  if (rendered->cut) {
    return api::error_context_length(static_cast<std::int64_t>(tokens_max), model.context_tokens_max, false);
  }
  const auto fits = api::context_fit(static_cast<std::int64_t>(rendered->ids.size()), prompt.chat.max_tokens,
                                     model.context_tokens_max);
  if (const auto* error = std::get_if<api::ApiError>(&fits)) return *error;
  prompt.ids = std::move(rendered->ids);
  prompt.output_tokens_max = std::get<std::int64_t>(fits);
  return prompt;
}

PromptReader::PromptReader(loop::Loop& loop, const ServedModel& model, std::function<void(Read&&)> done)
    : model_(model), done_(std::move(done)), reader_(loop, out_, "prompt read", [this](Done&& one) {
        --jobs_;
        bytes_ -= one.bytes;
        done_(std::move(one.read));
      }) {
  for (int i = 0; i < reader_threads; ++i) threads_.emplace_back([this] { work(); });
}

PromptReader::~PromptReader() {
  in_.close();
  for (std::thread& thread : threads_) thread.join();
}

bool PromptReader::submit(Job&& job) {
  const std::size_t bytes = job.body.size();
  if (jobs_ >= reader_jobs_max || bytes > reader_bytes_max - bytes_) return false;
  if (!in_.try_push(Work{std::move(job), bytes})) return false;
  ++jobs_;
  bytes_ += bytes;
  return true;
}

void PromptReader::work() {
  while (std::optional<Work> work = in_.pop_wait()) {
    auto prompt = read_prompt(model_, work->job.body);
    work->job.body = std::string();
    // There is room: out_ holds as many as submit() lets in.
    const bool pushed = out_.try_push(Done{{std::move(work->job), std::move(prompt)}, work->bytes});
    DI_ASSERT(pushed);
  }
}

}  // namespace di::router
