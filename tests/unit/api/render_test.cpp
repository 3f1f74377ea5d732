#include "api/render.h"

#include <gtest/gtest.h>

#include "api/text.h"
#include "base/json.h"

namespace di::api {
namespace {

const AnswerHead head{
    .id = "chatcmpl-1", .model = "demo \"x\"", .created_s = 1700000000, .system_fingerprint = "fp"};

Json parsed(const std::string& text) {
  auto json = Json::parse(text);
  EXPECT_TRUE(json) << text;
  return json ? *json : Json();
}

const Json& choice(const Json& chunk) {
  return chunk.find("choices")->as_array().at(0);
}

void expect_usage(const Json& usage, std::int64_t prompt, std::int64_t completion, std::int64_t cached) {
  EXPECT_EQ(usage.find("prompt_tokens")->as_i64(), prompt);
  EXPECT_EQ(usage.find("completion_tokens")->as_i64(), completion);
  EXPECT_EQ(usage.find("total_tokens")->as_i64(), prompt + completion);
  EXPECT_EQ(usage.find("prompt_tokens_details")->find("cached_tokens")->as_i64(), cached);
  EXPECT_EQ(usage.find("prompt_cache_hit_tokens")->as_i64(), cached);
  EXPECT_EQ(usage.find("prompt_cache_miss_tokens")->as_i64(), prompt - cached);
  EXPECT_EQ(usage.find("completion_tokens_details")->find("reasoning_tokens")->as_i64(), 0);
}

TEST(Completion, HasEveryField) {
  const Json json = parsed(answer_json(head, "hi \"you\"\n", Finish::stop,
                                       {.prompt_tokens = 220, .completion_tokens = 3, .cached_tokens = 192}));
  EXPECT_EQ(json.find("id")->as_string(), "chatcmpl-1");
  EXPECT_EQ(json.find("object")->as_string(), "chat.completion");
  EXPECT_EQ(json.find("created")->as_i64(), 1700000000);
  EXPECT_EQ(json.find("model")->as_string(), "demo \"x\"");
  EXPECT_EQ(json.find("system_fingerprint")->as_string(), "fp");
  ASSERT_EQ(json.find("choices")->as_array().size(), 1U);
  EXPECT_EQ(choice(json).find("index")->as_i64(), 0);
  EXPECT_EQ(choice(json).find("finish_reason")->as_string(), "stop");
  EXPECT_TRUE(choice(json).find("logprobs")->is_null());
  const Json& message = *choice(json).find("message");
  EXPECT_EQ(message.find("role")->as_string(), "assistant");
  EXPECT_EQ(message.find("content")->as_string(), "hi \"you\"\n");
  EXPECT_TRUE(message.find("refusal")->is_null());
  expect_usage(*json.find("usage"), 220, 3, 192);  // A19
}

TEST(Completion, A19HitNeverExceedsThePrompt) {
  const Json json = parsed(answer_json(head, "", Finish::length, {.prompt_tokens = 10, .cached_tokens = 64}));
  expect_usage(*json.find("usage"), 10, 0, 10);
}

TEST(Stream, RoleAndFirstTextShareADelta) {
  StreamRenderer renderer(head, {});
  EXPECT_EQ(renderer.step("", std::nullopt, {}), "") << "a chunk before there is text";
  const Json first = parsed(renderer.step("Hel", std::nullopt, {}));
  EXPECT_EQ(first.find("object")->as_string(), "chat.completion.chunk");
  EXPECT_EQ(choice(first).find("delta")->find("role")->as_string(), "assistant");
  EXPECT_EQ(choice(first).find("delta")->find("content")->as_string(), "Hel");
  EXPECT_TRUE(choice(first).find("finish_reason")->is_null());
  const Json second = parsed(renderer.step("lo", std::nullopt, {}));
  EXPECT_EQ(choice(second).find("delta")->find("role"), nullptr);
  EXPECT_EQ(choice(second).find("delta")->find("content")->as_string(), "lo");
  for (const char* key : {"id", "created", "model", "system_fingerprint"}) {
    EXPECT_NE(second.find(key), nullptr) << key;
  }
}

TEST(Stream, TextAndFinishOfOneStepShareAChunk) {
  StreamRenderer renderer(head, {});
  renderer.step("a", std::nullopt, {});
  const Json last = parsed(renderer.step("b", Finish::length, {}));
  EXPECT_EQ(choice(last).find("delta")->find("content")->as_string(), "b");
  EXPECT_EQ(choice(last).find("finish_reason")->as_string(), "length");
}

TEST(Stream, FinishAloneAfterTextIsAnEmptyDelta) {
  StreamRenderer renderer(head, {});
  renderer.step("a", std::nullopt, {});
  const Json last = parsed(renderer.step("", Finish::stop, {}));
  EXPECT_TRUE(choice(last).find("delta")->as_object().empty());
  EXPECT_EQ(choice(last).find("finish_reason")->as_string(), "stop");
}

TEST(Stream, AnAnswerWithoutTextStillHasARole) {
  StreamRenderer renderer(head, {});
  const Json only = parsed(renderer.step("", Finish::stop, {}));
  EXPECT_EQ(choice(only).find("delta")->find("role")->as_string(), "assistant");
  EXPECT_EQ(choice(only).find("delta")->find("content")->as_string(), "");
}

// A05 (a), (b) and A06: no usage anywhere unless it was asked for.
TEST(Stream, A05NoUsageUnasked) {
  StreamRenderer renderer(head, {});
  EXPECT_EQ(parsed(renderer.step("a", std::nullopt, {.prompt_tokens = 4})).find("usage"), nullptr);
  EXPECT_EQ(parsed(renderer.step("", Finish::stop, {.prompt_tokens = 4})).find("usage"), nullptr);
  EXPECT_EQ(renderer.usage({.prompt_tokens = 26, .completion_tokens = 9}), "");
}

// A05 (c)
TEST(Stream, A05UsageAloneAndLast) {
  StreamRenderer renderer(head, {.include_usage = true});
  for (const std::string& chunk : {renderer.step("a", std::nullopt, {.prompt_tokens = 4}),
                                   renderer.step("", Finish::stop, {.prompt_tokens = 4})}) {
    const Json json = parsed(chunk);
    ASSERT_NE(json.find("usage"), nullptr);
    EXPECT_TRUE(json.find("usage")->is_null());
    EXPECT_EQ(json.find("choices")->as_array().size(), 1U);
  }
  const Json usage =
      parsed(renderer.usage({.prompt_tokens = 26, .completion_tokens = 9, .cached_tokens = 16}));
  ASSERT_TRUE(usage.find("choices")->is_array());
  EXPECT_TRUE(usage.find("choices")->as_array().empty());
  EXPECT_EQ(usage.find("object")->as_string(), "chat.completion.chunk");
  expect_usage(*usage.find("usage"), 26, 9, 16);
}

TEST(Stream, ContinuousUsageIsInEveryChunk) {
  StreamRenderer renderer(head, {.include_usage = true, .continuous_usage = true});
  expect_usage(
      *parsed(renderer.step("a", std::nullopt, {.prompt_tokens = 5, .completion_tokens = 1})).find("usage"),
      5, 1, 0);
  expect_usage(
      *parsed(renderer.step("b", Finish::stop, {.prompt_tokens = 5, .completion_tokens = 2})).find("usage"),
      5, 2, 0);
}

// A03 and A04 through the whole of text and rendering: stream and answer agree.
TEST(Stream, A04StreamAndAnswerAgreeAfterAStopString) {
  const std::vector<std::string> pieces = {"one, ", "two, ", "three", " four"};
  AnswerText answer({.stops = {"three"}, .min_tokens = 0});
  StreamRenderer renderer(head, {});
  std::string streamed, whole;
  int finishes = 0;
  for (const std::string& piece : pieces) {
    if (answer.stopped()) break;
    std::string text;
    const bool stopped = answer.token(piece, text);
    whole += text;
    const std::string chunk = renderer.step(text, stopped ? std::optional(Finish::stop) : std::nullopt, {});
    if (chunk.empty()) continue;
    const Json json = parsed(chunk);
    if (const Json* content = choice(json).find("delta")->find("content")) streamed += content->as_string();
    if (!choice(json).find("finish_reason")->is_null()) ++finishes;
  }
  EXPECT_EQ(streamed, "one, two, ");
  EXPECT_EQ(finishes, 1);
  const Json json = parsed(answer_json(head, whole, Finish::stop, {}));
  EXPECT_EQ(choice(json).find("message")->find("content")->as_string(), streamed);
}

const AnswerHead completion_head{
    .id = "cmpl-1", .model = "demo", .created_s = 5, .system_fingerprint = "fp", .shape = Shape::completion};

TEST(Completion, TextCompletionHasEveryField) {
  const Json json = parsed(answer_json(completion_head, "a\"", Finish::length,
                                       {.prompt_tokens = 20, .completion_tokens = 3, .cached_tokens = 16}));
  EXPECT_EQ(json.find("id")->as_string(), "cmpl-1");
  EXPECT_EQ(json.find("object")->as_string(), "text_completion");
  ASSERT_EQ(json.find("choices")->as_array().size(), 1U);
  EXPECT_EQ(choice(json).find("text")->as_string(), "a\"");
  EXPECT_EQ(choice(json).find("index")->as_i64(), 0);
  EXPECT_TRUE(choice(json).find("logprobs")->is_null());
  EXPECT_EQ(choice(json).find("finish_reason")->as_string(), "length");
  EXPECT_EQ(choice(json).find("message"), nullptr);
  expect_usage(*json.find("usage"), 20, 3, 16);
}

TEST(Stream, TextCompletionChunks) {
  StreamRenderer renderer(completion_head, {.include_usage = true});
  EXPECT_EQ(renderer.step("", std::nullopt, {}), "") << "a chunk before there is text";
  for (const std::string& chunk :
       {renderer.step("a", std::nullopt, {}), renderer.step("b", std::nullopt, {})}) {
    const Json json = parsed(chunk);
    EXPECT_EQ(json.find("object")->as_string(), "text_completion");
    EXPECT_EQ(choice(json).find("text")->as_string().size(), 1U);
    EXPECT_EQ(choice(json).find("delta"), nullptr);
    EXPECT_TRUE(choice(json).find("finish_reason")->is_null());
    EXPECT_TRUE(json.find("usage")->is_null());
  }
  const Json last = parsed(renderer.step("", Finish::stop, {}));
  EXPECT_EQ(choice(last).find("text")->as_string(), "");
  EXPECT_EQ(choice(last).find("finish_reason")->as_string(), "stop");
  const Json usage = parsed(renderer.usage({.prompt_tokens = 26, .completion_tokens = 9}));
  EXPECT_EQ(usage.find("object")->as_string(), "text_completion");
  EXPECT_TRUE(usage.find("choices")->as_array().empty());
  expect_usage(*usage.find("usage"), 26, 9, 0);
}

TEST(Models, ListAndOne) {
  const ModelEntry entry{
      .id = "di-demo", .created_s = 5, .owned_by = "di", .root = "", .max_model_len = 16384};
  const Json list = parsed(models_json(std::span(&entry, 1)));
  EXPECT_EQ(list.find("object")->as_string(), "list");
  ASSERT_EQ(list.find("data")->as_array().size(), 1U);
  for (const Json& one : {list.find("data")->as_array()[0], parsed(model_json(entry))}) {
    EXPECT_EQ(one.find("id")->as_string(), "di-demo");
    EXPECT_EQ(one.find("object")->as_string(), "model");
    EXPECT_EQ(one.find("created")->as_i64(), 5);
    EXPECT_EQ(one.find("owned_by")->as_string(), "di");
    EXPECT_EQ(one.find("root")->as_string(), "di-demo");
    EXPECT_EQ(one.find("max_model_len")->as_i64(), 16384);
  }
  EXPECT_TRUE(parsed(models_json({})).find("data")->as_array().empty());
}

}  // namespace
}  // namespace di::api
