#include "api/completions.h"

#include <gtest/gtest.h>

namespace di::api {
namespace {

// A request for the prompt `json` with `more` put behind it.
std::string with(const std::string& json, const std::string& more = "") {
  return R"({"model":"m","prompt":)" + json + (more.empty() ? "" : "," + more) + "}";
}

CompletionRequest accepted(const std::string& body) {
  auto parsed = completion_request_parse(body);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    ADD_FAILURE() << body << ": " << error->message;
    return {};
  }
  return std::get<CompletionRequest>(std::move(parsed));
}

void expect_refused(const std::string& body, const std::string& param) {
  const auto parsed = completion_request_parse(body);
  const auto* error = std::get_if<ApiError>(&parsed);
  ASSERT_NE(error, nullptr) << "accepted: " << body;
  EXPECT_EQ(error->status, 400) << body;
  EXPECT_EQ(error->type, "invalid_request_error") << body;
  EXPECT_EQ(error->param, param) << body << ": " << error->message;
}

TEST(CompletionRequest, PromptsAsTextAndAsTokens) {
  for (const char* text : {R"("Once")", R"(["Once"])"}) {
    EXPECT_EQ(std::get<0>(accepted(with(text)).prompt), "Once") << text;
  }
  EXPECT_EQ(std::get<0>(accepted(with("\"\"")).prompt), "");
  for (const char* ids : {"[5,0,2147483647]", "[[5,0,2147483647]]"}) {
    EXPECT_EQ(std::get<1>(accepted(with(ids)).prompt), (std::vector<std::uint32_t>{5, 0, 2147483647})) << ids;
  }
}

TEST(CompletionRequest, PromptsThatAreNone) {
  expect_refused(R"({"model":"m"})", "prompt");
  expect_refused(with("null"), "prompt");
  expect_refused(with("7"), "prompt");
  expect_refused(with(R"({"a":1})"), "prompt");
  expect_refused(with("[]"), "prompt");
  expect_refused(with("[[]]"), "prompt[0]");
  expect_refused(with("[null]"), "prompt[0]");
  expect_refused(with("[1.5]"), "prompt[0]");
  expect_refused(with("[true]"), "prompt[0]");
  expect_refused(with("[-1]"), "prompt[0]");
  expect_refused(with("[5,2147483648]"), "prompt[1]");
  expect_refused(with("[5,18446744073709551615]"), "prompt[1]");
  expect_refused(with(R"([5,"a"])"), "prompt[1]");
  expect_refused(with(R"([[5,-3]])"), "prompt[0][1]");
  expect_refused(with(R"([[[5]]])"), "prompt[0][0]");
}

TEST(CompletionRequest, SeveralPromptsAreRefusedAndNotCut) {
  expect_refused(with(R"(["a","b"])"), "prompt");
  expect_refused(with("[[1],[2]]"), "prompt");
  expect_refused(with(R"(["a",5])"), "prompt");
}

TEST(CompletionRequest, BodiesThatAreNone) {
  for (const char* body :
       {"", "{", "[]", "null", "{\"model\":\"m\",\"prompt\":\"\xff\"}", "{\"prompt\":\"\\ud800\"}"}) {
    expect_refused(body, "");
  }
  expect_refused(R"({"prompt":"a"})", "model");
}

TEST(CompletionRequest, DefaultsAndSharedFields) {
  const CompletionRequest plain = accepted(with("\"a\""));
  EXPECT_EQ(plain.max_tokens, 16);
  EXPECT_FALSE(plain.stream);
  EXPECT_TRUE(plain.add_special_tokens);
  EXPECT_EQ(accepted(with("\"a\"", R"("max_tokens":null)")).max_tokens, 16);
  EXPECT_EQ(accepted(with("\"a\"", R"("min_tokens":20)")).max_tokens, 20);
  // What vllm bench and guidellm send.
  const CompletionRequest bench = accepted(with(
      "[5]",
      R"("max_tokens":300,"temperature":0.0,"repetition_penalty":1.0,"logprobs":null,"stream":true,"ignore_eos":true,
         "stop":null,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"add_special_tokens":false)"));
  EXPECT_EQ(bench.max_tokens, 300);
  EXPECT_EQ(bench.temperature, 0);
  EXPECT_TRUE(bench.stream && bench.include_usage && bench.continuous_usage && bench.ignore_eos);
  EXPECT_FALSE(bench.add_special_tokens);
  expect_refused(with("\"a\"", R"("max_tokens":0)"), "max_tokens");
  expect_refused(with("\"a\"", R"("stop":5)"), "stop");
  expect_refused(with("\"a\"", R"("add_special_tokens":"no")"), "add_special_tokens");
}

TEST(CompletionRequest, NeutralValuesAndNoOthers) {
  for (const char* neutral :
       {R"("echo":false,"suffix":"","best_of":1,"n":1,"logprobs":null)", R"("suffix":null,"logit_bias":{})",
        R"("user":"x","seed":5,"presence_penalty":0,"frequency_penalty":0)",
        R"("response_format":{"type":"text"})", R"("made_up_field":[1])"}) {
    accepted(with("\"a\"", neutral));
  }
  const std::pair<const char*, const char*> fields[] = {{"echo", "true"},
                                                        {"echo", "1"},
                                                        {"suffix", "\"b\""},
                                                        {"suffix", "3"},
                                                        {"best_of", "2"},
                                                        {"best_of", "\"1\""},
                                                        {"logprobs", "0"},
                                                        {"logprobs", "5"},
                                                        {"logprobs", "true"},
                                                        {"n", "2"},
                                                        {"logit_bias", "[]"},
                                                        {"logit_bias", R"({"5":1})"},
                                                        {"prompt_embeds", "\"x\""},
                                                        {"prompt_logprobs", "1"},
                                                        {"structured_outputs", R"({"json":{}})"}};
  for (const auto& [name, value] : fields) {
    expect_refused(with("\"a\"", "\"" + std::string(name) + "\":" + value), name);
  }
}

}  // namespace
}  // namespace di::api
