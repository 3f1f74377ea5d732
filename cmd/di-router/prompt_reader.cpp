#include "prompt_reader.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "api/completions.h"
#include "api/openai.h"
#include "api/text.h"
#include "api/tokens.h"
#include "base/assert.h"

namespace di::router {

namespace {

std::size_t counted_tokens_max(const ServedModel& model) {
  return counted_windows_max * model.context_tokens_max;
}

// `param` is the field that holds the prompt.
api::ApiError too_long(const ServedModel& model, std::string_view param) {
  return api::error_context_length(param, static_cast<std::int64_t>(counted_tokens_max(model)),
                                   model.context_tokens_max, false);
}

ReadBody counted(std::string json, std::string_view param) {
  if (json.size() <= counted_json_bytes_max) return Counted{std::move(json)};
  return api::error_invalid(
      param, "the answer would be longer than " + std::to_string(counted_json_bytes_max) + " bytes");
}

// The model's input as somebody wrote it: marks in it are marks.  It ends early at the bound.
Result<std::vector<model::TokenId>> encode(const ServedModel& model, std::string_view text,
                                           bool add_special_tokens) {
  auto ids = model.tokenizer.encode(text, {.allow_special = true, .tokens_max = counted_tokens_max(model)});
  if (!ids || !add_special_tokens) return ids;
  const model::TokenId begin = model.chat.begin_id();
  if (ids->empty() || ids->front() != begin) ids->insert(ids->begin(), begin);
  return ids;
}

std::optional<api::ApiError> outside_vocabulary(const ServedModel& model, std::span<const std::uint32_t> ids,
                                                const std::string& at) {
  const auto found =
      std::ranges::find_if(ids, [&](std::uint32_t id) { return id >= model.tokenizer.vocab_size(); });
  if (found == ids.end()) return std::nullopt;
  return api::error_invalid(at, "'" + at + "[" + std::to_string(found - ids.begin()) + "]' is " +
                                    std::to_string(*found) + ", but the vocabulary has " +
                                    std::to_string(model.tokenizer.vocab_size()) + " tokens");
}

std::string decode(const ServedModel& model, std::span<const model::TokenId> ids, bool skip_special) {
  std::string text;
  api::Utf8Assembler utf8;
  utf8.push(model.tokenizer.decode(ids, skip_special), text);
  utf8.finish(text);
  return text;
}

// What the two kinds of prompts have in common once their tokens are known.
ReadBody fitted(const ServedModel& model, Prompt prompt) {
  const std::string_view param = prompt.shape == api::Shape::chat ? "messages" : "prompt";
  if (prompt.ids.size() > counted_tokens_max(model)) return too_long(model, param);
  const auto fits = api::context_fit(param, static_cast<std::int64_t>(prompt.ids.size()),
                                     prompt.options.max_tokens, model.context_tokens_max);
  if (const auto* error = std::get_if<api::ApiError>(&fits)) return *error;
  prompt.output_tokens_max = std::get<std::int64_t>(fits);
  return prompt;
}

ReadBody read_chat(const ServedModel& model, std::string_view body) {
  auto parsed = api::chat_request_parse(body);
  if (auto* error = std::get_if<api::ApiError>(&parsed)) return std::move(*error);
  auto& request = std::get<api::ChatRequest>(parsed);
  if (request.model != model.name) return api::error_model(request.model);
  auto rendered = model.chat.render(request.messages, model.tokenizer, true, counted_tokens_max(model));
  if (!rendered) return api::error_invalid("messages", rendered.error().message);
  if (rendered->cut) return too_long(model, "messages");
  Prompt prompt;
  const auto user = std::find_if(request.messages.rbegin(), request.messages.rend(),
                                 [](const auto& message) { return message.role == model::ChatRole::user; });
  if (user != request.messages.rend()) prompt.debug = std::move(user->content);
  prompt.options = std::move(request);
  prompt.ids = std::move(rendered->ids);
  return fitted(model, std::move(prompt));
}

ReadBody read_completion(const ServedModel& model, std::string_view body) {
  auto parsed = api::completion_request_parse(body);
  if (auto* error = std::get_if<api::ApiError>(&parsed)) return std::move(*error);
  auto& request = std::get<api::CompletionRequest>(parsed);
  if (request.model != model.name) return api::error_model(request.model);
  Prompt prompt;
  prompt.shape = api::Shape::completion;
  if (auto* text = std::get_if<std::string>(&request.prompt)) {
    auto ids = encode(model, *text, request.add_special_tokens);
    if (!ids) return api::error_invalid("prompt", ids.error().message);
    if (ids->empty()) return api::error_invalid("prompt", "'prompt' must hold at least one token");
    prompt.ids = *std::move(ids);
    prompt.debug = std::move(*text);
  } else {
    prompt.ids = std::get<std::vector<std::uint32_t>>(std::move(request.prompt));
    if (auto error = outside_vocabulary(model, prompt.ids, "prompt")) return *std::move(error);
    if (prompt.ids.size() < model.context_tokens_max) prompt.debug = decode(model, prompt.ids, true);
  }
  prompt.options = std::move(request);
  return fitted(model, std::move(prompt));
}

ReadBody read_tokenize(const ServedModel& model, std::string_view body) {
  auto parsed = api::tokenize_request_parse(body);
  if (auto* error = std::get_if<api::ApiError>(&parsed)) return std::move(*error);
  const auto& request = std::get<api::TokenizeRequest>(parsed);
  if (!request.model.empty() && request.model != model.name) return api::error_model(request.model);
  std::vector<api::TokenizedText> texts;
  std::size_t tokens = 0;
  const auto add = [&](std::vector<model::TokenId> ids, std::string_view text) {
    tokens += ids.size();
    if (tokens > counted_tokens_max(model)) return false;
    api::TokenizedText& one = texts.emplace_back();
    one.characters = api::characters_count(text);
    if (request.return_token_strs) {
      for (const model::TokenId& id : ids) one.strings.push_back(decode(model, std::span(&id, 1), false));
    }
    one.ids = std::move(ids);
    return true;
  };
  for (const std::string& text : request.prompts) {
    auto ids = encode(model, text, request.add_special_tokens);
    if (!ids) return api::error_invalid("prompt", ids.error().message);
    if (!add(*std::move(ids), text)) return too_long(model, "prompt");
  }
  if (request.prompts.empty()) {
    auto rendered = model.chat.render(request.messages, model.tokenizer, request.add_generation_prompt,
                                      counted_tokens_max(model));
    if (!rendered) return api::error_invalid("messages", rendered.error().message);
    if (rendered->cut || !add(std::move(rendered->ids), rendered->text)) return too_long(model, "messages");
  }
  return counted(api::tokenize_json(request, texts, model.context_tokens_max),
                 request.prompts.empty() ? "messages" : "prompt");
}

ReadBody read_detokenize(const ServedModel& model, std::string_view body) {
  auto parsed = api::detokenize_request_parse(body);
  if (auto* error = std::get_if<api::ApiError>(&parsed)) return std::move(*error);
  const auto& request = std::get<api::DetokenizeRequest>(parsed);
  if (!request.model.empty() && request.model != model.name) return api::error_model(request.model);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < request.lists.size(); ++i) {
    const std::string at = request.several ? "tokens[" + std::to_string(i) + "]" : "tokens";
    if (auto error = outside_vocabulary(model, request.lists[i], at)) return *std::move(error);
    for (const std::uint32_t id : request.lists[i]) bytes += model.tokenizer.id_to_bytes(id).size();
  }
  if (bytes > detokenized_bytes_max) {
    return api::error_invalid(
        "tokens", "'tokens' make a text of more than " + std::to_string(detokenized_bytes_max) + " bytes");
  }
  std::vector<std::string> texts;
  for (const auto& ids : request.lists) texts.push_back(decode(model, ids, request.skip_special_tokens));
  return counted(api::detokenize_json(request, texts), "tokens");
}

}  // namespace

ReadBody read_body(const ServedModel& model, Task task, std::string_view body) {
  switch (task) {
    case Task::chat:
      return read_chat(model, body);
    case Task::completion:
      return read_completion(model, body);
    case Task::tokenize:
      return read_tokenize(model, body);
    case Task::detokenize:
      return read_detokenize(model, body);
  }
  DI_ASSERT(false);
  return api::error_internal("");
}

PromptReader::PromptReader(loop::Loop& loop, const ServedModel& model, std::function<void(Read&&)> done)
    : model_(model), done_(std::move(done)), reader_(loop, out_, "prompt read", [this](Read&& read) {
        queue_.done(read.job);
        feed();
        done_(std::move(read));
      }) {
  for (int i = 0; i < reader_threads; ++i) threads_.emplace_back([this] { work(); });
}

PromptReader::~PromptReader() {
  in_.close();
  for (std::thread& thread : threads_) thread.join();
}

bool PromptReader::submit(ReadJob&& job) {
  if (!queue_.push(std::move(job))) return false;
  feed();
  return true;
}

void PromptReader::feed() {
  while (std::optional<ReadJob> job = queue_.next()) {
    const bool pushed = in_.try_push(*std::move(job));
    DI_ASSERT(pushed);
  }
}

void PromptReader::work() {
  while (std::optional<ReadJob> job = in_.pop_wait()) {
    ReadBody result = read_body(model_, job->task, job->body);
    job->body = std::string();
    // There is room: out_ holds as many as next() lets begin.
    const bool pushed = out_.try_push(Read{*std::move(job), std::move(result)});
    DI_ASSERT(pushed);
  }
}

}  // namespace di::router
