#include "api/render.h"

#include <algorithm>

#include "base/json.h"

namespace di::api {

namespace {

void write_head(JsonWriter& writer, const AnswerHead& head, std::string_view object) {
  writer.key("id");
  writer.string(head.id);
  writer.key("object");
  writer.string(object);
  writer.key("created");
  writer.number(head.created_s);
  writer.key("model");
  writer.string(head.model);
  writer.key("system_fingerprint");
  if (head.system_fingerprint.empty()) {
    writer.null();
  } else {
    writer.string(head.system_fingerprint);
  }
}

void write_usage(JsonWriter& writer, const Usage& usage) {
  const std::int64_t hit = std::clamp<std::int64_t>(usage.cached_tokens, 0, usage.prompt_tokens);
  writer.open_object();
  writer.key("prompt_tokens");
  writer.number(usage.prompt_tokens);
  writer.key("completion_tokens");
  writer.number(usage.completion_tokens);
  writer.key("total_tokens");
  writer.number(usage.prompt_tokens + usage.completion_tokens);
  writer.key("prompt_tokens_details");
  writer.open_object();
  writer.key("cached_tokens");
  writer.number(hit);
  writer.close_object();
  writer.key("completion_tokens_details");
  writer.open_object();
  writer.key("reasoning_tokens");
  writer.number(usage.reasoning_tokens);
  writer.close_object();
  writer.key("prompt_cache_hit_tokens");
  writer.number(hit);
  writer.key("prompt_cache_miss_tokens");
  writer.number(usage.prompt_tokens - hit);
  writer.close_object();
}

void write_model(JsonWriter& writer, const ModelEntry& model) {
  writer.open_object();
  writer.key("id");
  writer.string(model.id);
  writer.key("object");
  writer.string("model");
  writer.key("created");
  writer.number(model.created_s);
  writer.key("owned_by");
  writer.string(model.owned_by);
  writer.key("root");
  writer.string(model.root.empty() ? model.id : model.root);
  writer.key("max_model_len");
  writer.number(model.max_model_len);
  writer.close_object();
}

}  // namespace

std::string_view finish_name(Finish finish) {
  switch (finish) {
    case Finish::stop:
      return "stop";
    case Finish::length:
      return "length";
  }
  return "";
}

std::string answer_json(const AnswerHead& head, std::string_view text, Finish finish, const Usage& usage) {
  JsonWriter writer;
  writer.open_object();
  write_head(writer, head, head.shape == Shape::chat ? "chat.completion" : "text_completion");
  writer.key("choices");
  writer.open_array();
  writer.open_object();
  writer.key("index");
  writer.number(0);
  if (head.shape == Shape::chat) {
    writer.key("message");
    writer.open_object();
    writer.key("role");
    writer.string("assistant");
    writer.key("content");
    writer.string(text);
    writer.key("refusal");
    writer.null();
    writer.close_object();
  } else {
    writer.key("text");
    writer.string(text);
  }
  writer.key("logprobs");
  writer.null();
  writer.key("finish_reason");
  writer.string(finish_name(finish));
  writer.close_object();
  writer.close_array();
  writer.key("usage");
  write_usage(writer, usage);
  writer.close_object();
  return writer.take();
}

StreamRenderer::StreamRenderer(const AnswerHead& head, Options options)
    : options_(options), shape_(head.shape) {
  JsonWriter writer;
  writer.open_object();
  write_head(writer, head, shape_ == Shape::chat ? "chat.completion.chunk" : "text_completion");
  writer.key("choices");
  const std::string start = writer.take();
  before_text_ = start + "[{\"index\":0," + (shape_ == Shape::chat ? "\"delta\":" : "\"text\":");
  before_usage_ = start + "[],\"usage\":";
}

std::string StreamRenderer::step(std::string_view text, std::optional<Finish> finish, const Usage& running) {
  if (text.empty() && !finish) return {};
  std::string out;
  out.reserve(before_text_.size() + text.size() + 128);
  out.append(before_text_);
  JsonWriter delta;
  if (shape_ == Shape::completion) {
    delta.string(text);
  } else {
    delta.open_object();
    if (!role_sent_) {
      delta.key("role");
      delta.string("assistant");
    }
    if (!text.empty() || !role_sent_) {  // a finish alone, after text, is an empty delta
      delta.key("content");
      delta.string(text);
    }
    delta.close_object();
    role_sent_ = true;
  }
  out.append(delta.text());
  out.append(",\"logprobs\":null,\"finish_reason\":");
  if (finish) {
    out.push_back('"');
    out.append(finish_name(*finish));
    out.append("\"}]");
  } else {
    out.append("null}]");
  }
  if (options_.include_usage) {
    out.append(",\"usage\":");
    if (options_.continuous_usage) {
      JsonWriter usage;
      write_usage(usage, running);
      out.append(usage.text());
    } else {
      out.append("null");
    }
  }
  out.push_back('}');
  return out;
}

std::string StreamRenderer::usage(const Usage& total) const {
  if (!options_.include_usage) return {};
  JsonWriter writer;
  write_usage(writer, total);
  return before_usage_ + writer.text() + "}";
}

std::string model_json(const ModelEntry& model) {
  JsonWriter writer;
  write_model(writer, model);
  return writer.take();
}

std::string models_json(std::span<const ModelEntry> models) {
  JsonWriter writer;
  writer.open_object();
  writer.key("object");
  writer.string("list");
  writer.key("data");
  writer.open_array();
  for (const ModelEntry& model : models) write_model(writer, model);
  writer.close_array();
  writer.close_object();
  return writer.take();
}

}  // namespace di::api
