#include "api/tokens.h"

#include <gtest/gtest.h>

#include "base/json.h"

namespace di::api {
namespace {

TokenizeRequest tokenize(const std::string& body) {
  auto parsed = tokenize_request_parse(body);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    ADD_FAILURE() << body << ": " << error->message;
    return {};
  }
  return std::get<TokenizeRequest>(std::move(parsed));
}

DetokenizeRequest detokenize(const std::string& body) {
  auto parsed = detokenize_request_parse(body);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    ADD_FAILURE() << body << ": " << error->message;
    return {};
  }
  return std::get<DetokenizeRequest>(std::move(parsed));
}

template <typename Request>
void expect_refused(const std::variant<Request, ApiError>& parsed, const std::string& param) {
  const auto* error = std::get_if<ApiError>(&parsed);
  ASSERT_NE(error, nullptr) << "accepted where " << param << " is wrong";
  EXPECT_EQ(error->status, 400);
  EXPECT_EQ(error->param, param) << error->message;
}

TEST(TokenizeRequest, PromptsAndMessages) {
  const TokenizeRequest plain = tokenize(R"({"prompt":"hi"})");
  EXPECT_EQ(plain.prompts, std::vector<std::string>{"hi"});
  EXPECT_TRUE(plain.model.empty() && !plain.several && plain.add_special_tokens && !plain.return_token_strs);
  const TokenizeRequest list =
      tokenize(R"({"model":"m","prompt":["a",""],"add_special_tokens":false,"return_token_strs":true})");
  EXPECT_EQ(list.model, "m");
  EXPECT_EQ(list.prompts, (std::vector<std::string>{"a", ""}));
  EXPECT_TRUE(list.several && !list.add_special_tokens && list.return_token_strs);
  const TokenizeRequest chat =
      tokenize(R"({"messages":[{"role":"user","content":"a"}],"prompt":null,"add_generation_prompt":false})");
  EXPECT_TRUE(chat.prompts.empty());
  ASSERT_EQ(chat.messages.size(), 1U);
  EXPECT_FALSE(chat.add_generation_prompt);
}

TEST(TokenizeRequest, WrongOnesAreNamed) {
  const auto refused = [](const std::string& body, const std::string& param) {
    SCOPED_TRACE(body);
    expect_refused(tokenize_request_parse(body), param);
  };
  refused("{", "");
  refused("{\"prompt\":\"\xc3\"}", "");
  refused(R"({"prompt":"\udc00"})", "");
  refused("{}", "prompt");
  refused(R"({"prompt":5})", "prompt");
  refused(R"({"prompt":[]})", "prompt");
  refused(R"({"prompt":[5]})", "prompt[0]");
  refused(R"({"prompt":"a","messages":[{"role":"user","content":"a"}]})", "prompt");
  refused(R"({"messages":[]})", "messages");
  refused(R"({"messages":[{"role":"user"}]})", "messages[0].content");
  refused(R"({"messages":[{"role":"user","content":"a"}],"add_special_tokens":true})", "add_special_tokens");
  refused(R"({"prompt":"a","add_special_tokens":1})", "add_special_tokens");
  refused(R"({"prompt":"a","model":""})", "model");
  refused(R"({"prompt":"a","tools":[{}]})", "tools");
  std::string many = R"({"prompt":[""])";
  many.pop_back();
  for (std::size_t i = 0; i < token_lists_max; ++i) many += R"(,"")";
  refused(many + "]}", "prompt");
}

TEST(DetokenizeRequest, ListsAndTheirErrors) {
  const DetokenizeRequest plain = detokenize(R"({"tokens":[1,2]})");
  EXPECT_EQ(plain.lists, (std::vector<std::vector<std::uint32_t>>{{1, 2}}));
  EXPECT_FALSE(plain.several || plain.skip_special_tokens);
  EXPECT_EQ(detokenize(R"({"tokens":[]})").lists.size(), 1U);
  const DetokenizeRequest lists = detokenize(R"({"model":"m","tokens":[[1],[]],"skip_special_tokens":true})");
  EXPECT_EQ(lists.lists, (std::vector<std::vector<std::uint32_t>>{{1}, {}}));
  EXPECT_TRUE(lists.several && lists.skip_special_tokens);

  const auto refused = [](const std::string& body, const std::string& param) {
    SCOPED_TRACE(body);
    expect_refused(detokenize_request_parse(body), param);
  };
  refused("[1]", "");
  refused("{}", "tokens");
  refused(R"({"tokens":"a"})", "tokens");
  refused(R"({"tokens":[1,"a"]})", "tokens[1]");
  refused(R"({"tokens":[1,[2]]})", "tokens[1]");
  refused(R"({"tokens":[-1]})", "tokens[0]");
  refused(R"({"tokens":[1e3]})", "tokens[0]");
  refused(R"({"tokens":[99999999999999999999]})", "");
  refused(R"({"tokens":[9999999999]})", "tokens[0]");
  refused(R"({"tokens":[[1],2]})", "tokens[1]");
  refused(R"({"tokens":[[1],[2,-2]]})", "tokens[1][1]");
}

TEST(Tokens, AnswersHaveTheFieldsOfBothServices) {
  const TokenizedText one{{1, 2, 3}, {"a", "\xef\xbf\xbd", "b"}, 4};
  TokenizeRequest request;
  EXPECT_EQ(tokenize_json(request, std::span(&one, 1), 99),
            R"({"count":3,"max_model_len":99,"tokens":[1,2,3],"char_count":4})");
  request.return_token_strs = true;
  EXPECT_NE(tokenize_json(request, std::span(&one, 1), 99).find("\"token_strs\":[\"a\","), std::string::npos);
  request = {};
  request.several = true;
  const TokenizedText two[] = {one, {}};
  EXPECT_EQ(tokenize_json(request, two, 99),
            R"({"count":[3,0],"max_model_len":99,"tokens":[[1,2,3],[]],"char_count":[4,0]})");
  EXPECT_EQ(tokenize_json(request, {}, 99), R"({"count":[],"max_model_len":99,"tokens":[],"char_count":[]})");

  DetokenizeRequest back;
  const std::string texts[] = {"a\n", ""};
  EXPECT_EQ(detokenize_json(back, std::span(texts, 1)), R"({"prompt":"a\n","text":"a\n"})");
  back.several = true;
  EXPECT_EQ(detokenize_json(back, texts), R"({"prompt":["a\n",""],"text":["a\n",""]})");
}

TEST(Tokens, CharactersAreNotBytes) {
  EXPECT_EQ(characters_count(""), 0);
  EXPECT_EQ(characters_count("a삼🦙"), 3);
}

}  // namespace
}  // namespace di::api
