#include "api/openai.h"

#include <gtest/gtest.h>

#include "api/text.h"

namespace di::api {
namespace {

// A minimal request with `more` put behind its last member.
std::string with(const std::string& more) {
  return R"({"model":"m","messages":[{"role":"user","content":"hi"}])" + (more.empty() ? "" : "," + more) +
         "}";
}

std::string messages(const std::string& list) {
  return R"({"model":"m","messages":)" + list + "}";
}

ChatRequest accepted(const std::string& body) {
  auto parsed = chat_request_parse(body);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    ADD_FAILURE() << body << ": " << error->message;
    return {};
  }
  return std::get<ChatRequest>(std::move(parsed));
}

ApiError refused(const std::string& body) {
  auto parsed = chat_request_parse(body);
  if (std::holds_alternative<ChatRequest>(parsed)) {
    ADD_FAILURE() << "accepted: " << body;
    return {};
  }
  return std::get<ApiError>(std::move(parsed));
}

void expect_refused(const std::string& body, const std::string& param) {
  const ApiError error = refused(body);
  EXPECT_EQ(error.status, 400) << body;
  EXPECT_EQ(error.type, "invalid_request_error") << body;
  EXPECT_EQ(error.param, param) << body;
  EXPECT_FALSE(error.message.empty()) << body;
}

TEST(ChatRequest, Defaults) {
  const ChatRequest request = accepted(with(""));
  EXPECT_EQ(request.model, "m");
  ASSERT_EQ(request.messages.size(), 1U);
  EXPECT_EQ(request.messages[0].role, model::ChatRole::user);
  EXPECT_EQ(request.messages[0].content, "hi");
  EXPECT_FALSE(request.stream);
  EXPECT_FALSE(request.include_usage);
  EXPECT_FALSE(request.max_tokens);
  EXPECT_FALSE(request.seed);
  EXPECT_EQ(request.temperature, 1);
  EXPECT_EQ(request.top_p, 1);
  EXPECT_EQ(request.top_k, 0);
  EXPECT_EQ(request.min_p, 0);
  EXPECT_TRUE(request.stop.empty());
}

TEST(ChatRequest, HonouredFields) {
  const ChatRequest request = accepted(with(
      R"("stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true,"include_obfuscation":false},
         "max_tokens":5,"max_completion_tokens":7,"temperature":0,"top_p":0.9,"top_k":40,"min_p":0.1,
         "stop":["a","b"],"seed":-3,"ignore_eos":true,"min_tokens":2,"stop_token_ids":[7,9],
         "cache_salt":"s","user_id":"u","n":1,"user":"x")"));
  EXPECT_TRUE(request.stream);
  EXPECT_TRUE(request.include_usage);
  EXPECT_TRUE(request.continuous_usage);
  EXPECT_EQ(request.max_tokens, 7) << "max_completion_tokens wins";
  EXPECT_EQ(request.temperature, 0);
  EXPECT_EQ(request.top_p, 0.9);
  EXPECT_EQ(request.top_k, 40);
  EXPECT_EQ(request.min_p, 0.1);
  EXPECT_EQ(request.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(request.seed, -3);
  EXPECT_TRUE(request.ignore_eos);
  EXPECT_EQ(request.min_tokens, 2);
  EXPECT_EQ(request.stop_token_ids, (std::vector<std::int32_t>{7, 9}));
  EXPECT_EQ(request.cache_salt, "s");
  EXPECT_EQ(request.user_id, "u");
  EXPECT_EQ(accepted(with(R"("max_tokens":5)")).max_tokens, 5);
  EXPECT_EQ(accepted(with(R"("stop":"x")")).stop, std::vector<std::string>{"x"});
  EXPECT_EQ(accepted(with(R"("top_k":-1)")).top_k, 0);
}

TEST(ChatRequest, RolesAndContents) {
  const ChatRequest request = accepted(messages(
      R"([{"role":"system","content":"s","name":null},
          {"role":"developer","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]},
          {"role":"assistant","content":null,"reasoning_content":"R","refusal":null,"tool_calls":[],"annotations":[]},
          {"role":"user","content":"q","name":"bob"}])"));
  ASSERT_EQ(request.messages.size(), 4U);
  EXPECT_EQ(request.messages[0].role, model::ChatRole::system);
  EXPECT_EQ(request.messages[1].role, model::ChatRole::system);
  EXPECT_EQ(request.messages[1].content, "one\ntwo");
  EXPECT_EQ(request.messages[2].role, model::ChatRole::assistant);
  EXPECT_EQ(request.messages[2].content, "") << "reasoning of a turn without tools is not part of the prompt";
  EXPECT_EQ(request.messages[3].content, "q");
}

TEST(ChatRequest, MalformedBodies) {
  for (const char* body : {"", "{", "nonsense", "{\"model\":\"m\",}", "[]", "null", "\"x\"", "{\"a\":1} x"}) {
    expect_refused(body, "");
  }
}

TEST(ChatRequest, RequiredFields) {
  expect_refused(R"({"messages":[{"role":"user","content":"x"}]})", "model");
  expect_refused(R"({"model":null,"messages":[{"role":"user","content":"x"}]})", "model");
  expect_refused(R"({"model":7,"messages":[{"role":"user","content":"x"}]})", "model");
  expect_refused(R"({"model":"m"})", "messages");
  expect_refused(messages("[]"), "messages");
  expect_refused(messages("{}"), "messages");
  expect_refused(messages("[7]"), "messages[0]");
  expect_refused(messages(R"([{"content":"x"}])"), "messages[0].role");
  expect_refused(messages(R"([{"role":3,"content":"x"}])"), "messages[0].role");
  expect_refused(messages(R"([{"role":"robot","content":"x"}])"), "messages[0].role");
  expect_refused(messages(R"([{"role":"user"}])"), "messages[0].content");
  expect_refused(messages(R"([{"role":"user","content":5}])"), "messages[0].content");
  expect_refused(messages(R"([{"role":"user","content":[5]}])"), "messages[0].content[0]");
  expect_refused(messages(R"([{"role":"user","content":[{"text":"x"}]}])"), "messages[0].content[0].type");
  expect_refused(messages(R"([{"role":"user","content":[{"type":"text"}]}])"), "messages[0].content[0].text");
  expect_refused(messages(R"([{"role":"user","content":"x","name":5}])"), "messages[0].name");
  expect_refused(messages(R"([{"role":"assistant","content":"x","reasoning_content":5}])"),
                 "messages[0].reasoning_content");
  expect_refused(messages(R"([{"role":"assistant","content":"x","prefix":true}])"), "messages[0].prefix");
}

TEST(ChatRequest, ImagesForATextModel) {
  expect_refused(messages(R"([{"role":"user","content":[{"type":"text","text":"what?"},
                              {"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}]}])"),
                 "messages[0].content[1]");
}

// A20: with or without reasoning_content, the answer to a history with tool calls is the same one.
TEST(ChatRequest, A20HistoryWithToolCallsIsRefusedAlike) {
  for (const char* reasoning : {R"(,"reasoning_content":"R")", ""}) {
    expect_refused(
        messages(R"([{"role":"user","content":"q"},{"role":"assistant","content":null,"tool_calls":[
                               {"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}])" +
                 std::string(reasoning) + R"(},{"role":"tool","tool_call_id":"c","content":"r"}])"),
        "messages[1].tool_calls");
  }
  expect_refused(messages(R"([{"role":"tool","tool_call_id":"c","content":"r"}])"), "messages[0].role");
}

// Every known field: a wrong type is a 400 that names it, null is absent.
TEST(ChatRequest, WrongTypesAreNamedAndNullIsAbsent) {
  const std::pair<const char*, const char*> fields[] = {{"stream", "1"},
                                                        {"stream", "\"true\""},
                                                        {"stream_options", "[]"},
                                                        {"max_tokens", "\"5\""},
                                                        {"max_tokens", "5.5"},
                                                        {"max_completion_tokens", "[]"},
                                                        {"temperature", "\"0\""},
                                                        {"temperature", "true"},
                                                        {"top_p", "{}"},
                                                        {"top_k", "1.5"},
                                                        {"min_p", "\"x\""},
                                                        {"stop", "5"},
                                                        {"stop", "{}"},
                                                        {"seed", "1.5"},
                                                        {"seed", "\"1\""},
                                                        {"ignore_eos", "1"},
                                                        {"min_tokens", "\"1\""},
                                                        {"stop_token_ids", "5"},
                                                        {"cache_salt", "5"},
                                                        {"user_id", "5"},
                                                        {"response_format", "\"text\""},
                                                        {"modalities", "\"text\""},
                                                        {"thinking", "true"},
                                                        {"reasoning_effort", "true"},
                                                        {"reasoning_effort", "0.5"},
                                                        {"chat_template_kwargs", "[]"},
                                                        {"presence_penalty", "\"0\""},
                                                        {"frequency_penalty", "[]"},
                                                        {"top_logprobs", "0.5"},
                                                        {"priority", "\"0\""},
                                                        {"thinking_token_budget", "\"0\""},
                                                        {"n", "\"1\""},
                                                        {"n", "1.0"},
                                                        {"repetition_penalty", "\"1\""},
                                                        {"length_penalty", "\"1\""},
                                                        {"best_of", "\"1\""},
                                                        {"stream_interval", "true"},
                                                        {"logprobs", "0"},
                                                        {"echo", "0"},
                                                        {"use_beam_search", "0"},
                                                        {"include_stop_str_in_output", "0"},
                                                        {"return_token_ids", "0"},
                                                        {"return_tokens_as_token_ids", "0"},
                                                        {"continue_final_message", "0"},
                                                        {"skip_special_tokens", "1"},
                                                        {"add_generation_prompt", "1"},
                                                        {"tools", "{}"},
                                                        {"functions", "{}"},
                                                        {"allowed_token_ids", "5"},
                                                        {"bad_words", "\"x\""},
                                                        {"logprob_token_ids", "5"},
                                                        {"documents", "5"},
                                                        {"logit_bias", "[]"},
                                                        {"tool_choice", "5"},
                                                        {"function_call", "5"},
                                                        {"store", "1"},
                                                        {"parallel_tool_calls", "1"},
                                                        {"include_reasoning", "1"},
                                                        {"separate_reasoning", "1"},
                                                        {"metadata", "[]"},
                                                        {"service_tier", "5"},
                                                        {"prompt_cache_key", "5"},
                                                        {"safety_identifier", "5"},
                                                        {"verbosity", "5"},
                                                        {"user", "5"},
                                                        {"request_id", "5"},
                                                        {"rid", "5"},
                                                        {"session_id", "5"}};
  for (const auto& [name, value] : fields) {
    expect_refused(with("\"" + std::string(name) + "\":" + value), name);
    accepted(with("\"" + std::string(name) + "\":null"));
  }
}

TEST(ChatRequest, OutOfRangeIsNamed) {
  const std::pair<const char*, const char*> fields[] = {{"max_tokens", "0"},
                                                        {"max_tokens", "-1"},
                                                        {"max_completion_tokens", "0"},
                                                        {"temperature", "-0.1"},
                                                        {"temperature", "2.1"},
                                                        {"top_p", "1.1"},
                                                        {"top_p", "-1"},
                                                        {"min_p", "2"},
                                                        {"top_k", "-2"},
                                                        {"top_k", "99999999999"},
                                                        {"seed", "18446744073709551615"},
                                                        {"seed", "9223372036854775808"},
                                                        {"max_tokens", "9223372036854775808"},
                                                        {"min_tokens", "-1"},
                                                        {"cache_salt", "\"\""},
                                                        {"user_id", "\"\""},
                                                        {"n", "2"},
                                                        {"n", "0"}};
  for (const auto& [name, value] : fields)
    expect_refused(with("\"" + std::string(name) + "\":" + value), name);
  expect_refused(with(R"("max_tokens":3,"min_tokens":4)"), "min_tokens");
  expect_refused(with("\"cache_salt\":\"" + std::string(salt_bytes_max + 1, 's') + "\""), "cache_salt");
}

TEST(ChatRequest, NeutralValuesOfWhatTheEngineCannotDo) {
  for (const char* neutral :
       {R"("presence_penalty":0,"frequency_penalty":0.0)", R"("repetition_penalty":1.0,"length_penalty":1)",
        R"("n":1,"best_of":1,"stream_interval":1)", R"("logprobs":false,"top_logprobs":0)",
        R"("logit_bias":{})", R"("tools":[],"tool_choice":"auto","parallel_tool_calls":true)",
        R"("tool_choice":"none","functions":[])",
        R"("response_format":{"type":"text"},"modalities":["text"])", R"("thinking":{"type":"disabled"})",
        R"("reasoning_effort":"none")", R"("reasoning_effort":0)", R"("reasoning_effort":"0")",
        R"("chat_template_kwargs":{"thinking":false,"enable_thinking":false,"other":[1]})",
        R"("skip_special_tokens":true,"add_generation_prompt":true,"echo":false)",
        R"("store":true,"metadata":{"a":"b"},"service_tier":"auto","verbosity":"low")",
        R"("kv_transfer_params":{"do_remote_decode":true},"ec_transfer_params":5)",
        R"("made_up_field":{"x":[1,2]},"another":null)"}) {
    accepted(with(neutral));
  }
}

TEST(ChatRequest, AnythingElseIsRefusedAndNamed) {
  const std::pair<const char*, const char*> fields[] = {
      {"presence_penalty", "0.5"},
      {"frequency_penalty", "-1"},
      {"repetition_penalty", "1.1"},
      {"logprobs", "true"},
      {"top_logprobs", "3"},
      {"logit_bias", R"({"5":1})"},
      {"tools", R"([{"type":"function"}])"},
      {"tool_choice", "\"required\""},
      {"tool_choice", R"({"type":"function","function":{"name":"f"}})"},
      {"best_of", "2"},
      {"echo", "true"},
      {"skip_special_tokens", "false"},
      {"add_generation_prompt", "false"},
      {"continue_final_message", "true"},
      {"include_stop_str_in_output", "true"},
      {"return_token_ids", "true"},
      {"allowed_token_ids", "[1]"},
      {"bad_words", R"(["x"])"},
      {"prompt_logprobs", "1"},
      {"truncate_prompt_tokens", "10"},
      {"structured_outputs", R"({"json":{}})"},
      {"guided_json", "{}"},
      {"guided_regex", "\"a\""},
      {"regex", "\"a\""},
      {"ebnf", "\"a\""},
      {"lora_path", "\"a\""},
      {"priority", "5"},
      {"thinking_token_budget", "100"},
      {"thinking", R"({"type":"enabled"})"},
      {"reasoning_effort", "\"high\""},
      {"reasoning_effort", "75"},
      {"reasoning_effort", "\"75\""},
      {"reasoning_effort", "101"},
      {"reasoning_effort", "\"extreme\""},
      {"modalities", R"(["text","audio"])"},
      {"chat_template", "\"x\""},
      {"use_beam_search", "true"},
      {"stream_interval", "2"}};
  for (const auto& [name, value] : fields)
    expect_refused(with("\"" + std::string(name) + "\":" + value), name);
  expect_refused(with(R"("thinking":{"type":"maybe"})"), "thinking.type");
  expect_refused(with(R"("thinking":{})"), "thinking.type");
  expect_refused(with(R"("chat_template_kwargs":{"thinking":true})"), "chat_template_kwargs.thinking");
  expect_refused(with(R"("chat_template_kwargs":{"reasoning_effort":"max"})"),
                 "chat_template_kwargs.reasoning_effort");
  expect_refused(with(R"("stream_options":{"include_usage":1})"), "stream_options.include_usage");
}

// A13: a constrained format is refused, never ignored.
TEST(ChatRequest, A13SchemasAreRefused) {
  for (const char* schema :
       {R"({"type":"not-a-type"})", R"({"$ref":"#"})", R"({"type":"string","pattern":"("})"}) {
    expect_refused(
        with(R"("response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":)" +
             std::string(schema) + "}}"),
        "response_format");
  }
  expect_refused(with(R"("response_format":{"type":"json_object"})"), "response_format");
  expect_refused(with(R"("response_format":{})"), "response_format.type");
}

// A08: more than one choice is refused rather than answered with one.
TEST(ChatRequest, A08SeveralChoicesAreRefused) {
  expect_refused(with(R"("n":2,"stream":true)"), "n");
}

TEST(ChatRequest, StopStrings) {
  std::string sixteen = "[", seventeen = "[";
  for (int i = 0; i < 17; ++i) {
    if (i < 16) sixteen += (i > 0 ? ",\"s" : "\"s") + std::to_string(i) + "\"";
    seventeen += (i > 0 ? ",\"s" : "\"s") + std::to_string(i) + "\"";
  }
  const ChatRequest request = accepted(with("\"stop\":" + sixteen + "]"));
  EXPECT_EQ(request.stop.size(), stop_strings_max);
  const StopMatcher fits(request.stop);  // asserts its bounds
  expect_refused(with("\"stop\":" + seventeen + "]"), "stop");
  expect_refused(with(R"("stop":"")"), "stop");
  expect_refused(with(R"("stop":["a",""])"), "stop[1]");
  expect_refused(with(R"("stop":["a",5])"), "stop[1]");
  expect_refused(with("\"stop\":\"" + std::string(stop_bytes_max + 1, 'x') + "\""), "stop");
  EXPECT_TRUE(accepted(with(R"("stop":[])")).stop.empty());
}

TEST(ChatRequest, StopTokenIds) {
  expect_refused(with(R"("stop_token_ids":["a"])"), "stop_token_ids[0]");
  expect_refused(with(R"("stop_token_ids":[1,-1])"), "stop_token_ids[1]");
  expect_refused(with(R"("stop_token_ids":[4294967296])"), "stop_token_ids[0]");
  std::string many = "[0";
  for (std::size_t i = 0; i < stop_token_ids_max; ++i) many += ",1";
  expect_refused(with("\"stop_token_ids\":" + many + "]"), "stop_token_ids");
}

TEST(ChatRequest, UsageIsOptIn) {
  EXPECT_FALSE(accepted(with(R"("stream":true,"stream_options":{})")).include_usage);
  EXPECT_FALSE(accepted(with(R"("stream":true,"stream_options":null)")).include_usage);
  EXPECT_TRUE(accepted(with(R"("stream":true,"stream_options":{"include_usage":true})")).include_usage);
  EXPECT_FALSE(
      accepted(with(R"("stream":true,"stream_options":{"continuous_usage_stats":true})")).continuous_usage);
}

// What the three bench clients send (spec/api.md 2.7) passes as it is.
TEST(ChatRequest, BenchClients) {
  accepted(R"({"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],
               "max_completion_tokens":128,"stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,
               "temperature":0.0,"repetition_penalty":1.0,"logprobs":null})");
  accepted(R"({"model":"m","messages":[{"role":"user","name":null,"content":"hi"}],"stream":true,
               "max_completion_tokens":64,"ignore_eos":true,"min_tokens":64})");
  accepted(
      R"({"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"stop":null,"ignore_eos":true,
               "stream_options":{"include_usage":true,"continuous_usage_stats":true},"max_tokens":64,
               "max_completion_tokens":64})");
}

TEST(ChatRequest, SeedsAreAll64Bits) {
  EXPECT_EQ(accepted(with(R"("seed":9223372036854775807)")).seed, INT64_MAX);
  EXPECT_EQ(accepted(with(R"("seed":-9223372036854775808)")).seed, INT64_MIN);
}

TEST(ChatRequest, ValuesAreCounted) {
  std::string zeros = "0";
  for (std::size_t i = 0; i < request_values_max; ++i) zeros += ",0";
  const ApiError error = refused(with("\"ignored\":[" + zeros + "]"));
  EXPECT_EQ(error.status, 400);
  EXPECT_NE(error.message.find("values"), std::string::npos) << error.message;
}

TEST(ChatRequest, TheFirstOfTwoEqualKeysCounts) {
  EXPECT_EQ(accepted(with(R"("temperature":0.5,"temperature":"x")")).temperature, 0.5);
}

// A12
TEST(ContextFit, A12LimitAndSizeAreNamedAndTheRestIsCapped) {
  const auto full = context_fit("messages", 300, std::nullopt, 256);
  ASSERT_TRUE(std::holds_alternative<ApiError>(full));
  const ApiError& error = std::get<ApiError>(full);
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.code, "context_length_exceeded");
  EXPECT_NE(error.message.find("256"), std::string::npos);
  EXPECT_NE(error.message.find("300"), std::string::npos);
  EXPECT_TRUE(std::holds_alternative<ApiError>(context_fit("prompt", 256, 1, 256)));
  EXPECT_EQ(std::get<std::int64_t>(context_fit("prompt", 100, 10000, 256)), 156);
  EXPECT_EQ(std::get<std::int64_t>(context_fit("prompt", 255, std::nullopt, 256)), 1);
  EXPECT_EQ(std::get<std::int64_t>(context_fit("prompt", 100, 10, 256)), 10);
}

}  // namespace
}  // namespace di::api
