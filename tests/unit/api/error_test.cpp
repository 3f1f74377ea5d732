#include "api/error.h"

#include <gtest/gtest.h>

#include "base/json.h"

namespace di::api {
namespace {

std::string header_of(const ApiError& error, std::string_view name) {
  for (const auto& [key, value] : error_headers(error)) {
    if (key == name) return value;
  }
  return "";
}

TEST(ApiError, EveryRowHasItsShape) {
  struct Row {
    ApiError error;
    int status;
    const char* type;
    const char* code;  // "": null
  };
  const Row rows[] = {
      {error_invalid("temperature", "m"), 400, "invalid_request_error", ""},
      {error_context_length("messages", 300, 256), 400, "invalid_request_error", "context_length_exceeded"},
      {error_key("m"), 401, "authentication_error", "invalid_api_key"},
      {error_balance(), 402, "insufficient_quota", "insufficient_balance"},
      {error_permission("m"), 403, "permission_error", ""},
      {error_model("gpt-9"), 404, "invalid_request_error", "model_not_found"},
      {error_route("/v2"), 404, "invalid_request_error", ""},
      {error_method("PUT", "GET"), 405, "invalid_request_error", ""},
      {error_idempotency("m"), 409, "idempotency_conflict", ""},
      {error_too_large(10), 413, "request_too_large", ""},
      {error_rate("m", 3), 429, "rate_limit_error", "rate_limit_exceeded"},
      {error_overloaded("m", 2), 503, "service_unavailable_error", "server_is_overloaded"},
      {error_worker("m"), 502, "server_error", ""},
      {error_deadline("m"), 504, "timeout", ""},
      {error_internal("m"), 500, "server_error", ""},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(row.error.status, row.status);
    const auto body = Json::parse(error_body(row.error));
    ASSERT_TRUE(body);
    ASSERT_EQ(body->as_object().size(), 1U);
    const Json* inner = body->find("error");
    ASSERT_NE(inner, nullptr);
    ASSERT_EQ(inner->as_object().size(), 4U);
    EXPECT_FALSE(inner->find("message")->as_string().empty());
    EXPECT_EQ(inner->find("type")->as_string(), row.type);
    if (*row.code == '\0') {
      EXPECT_TRUE(inner->find("code")->is_null());
    } else {
      EXPECT_EQ(inner->find("code")->as_string(), row.code);
    }
  }
}

TEST(ApiError, APromptThatWasNotCountedIsLonger) {
  EXPECT_NE(error_context_length("messages", 300, 256).message.find("messages take 300,"), std::string::npos);
  EXPECT_NE(error_context_length("messages", 300, 256, false).message.find("take more than 300,"),
            std::string::npos);
}

TEST(ApiError, APromptThatIsTooLongIsNamedAsItWasSent) {
  for (const char* param : {"messages", "prompt"}) {
    const ApiError error = error_context_length(param, 300, 256);
    EXPECT_EQ(error.param, param);
    EXPECT_NE(error.message.find(param), std::string::npos);
  }
}

TEST(ApiError, ParamIsNamedOrNull) {
  EXPECT_EQ(Json::parse(error_body(error_invalid("stop", "m")))->find("error")->find("param")->as_string(),
            "stop");
  EXPECT_TRUE(Json::parse(error_body(error_invalid("", "m")))->find("error")->find("param")->is_null());
}

TEST(ApiError, HeadersTheSdksObey) {
  EXPECT_EQ(header_of(error_key("m"), "WWW-Authenticate"), "Bearer");
  EXPECT_EQ(header_of(error_balance(), "x-should-retry"), "false");
  EXPECT_EQ(header_of(error_rate("m", 3), "Retry-After"), "3");
  EXPECT_EQ(header_of(error_rate("m", 3), "retry-after-ms"), "3000");
  EXPECT_EQ(header_of(error_overloaded("m", 0), "Retry-After"), "1") << "every 503 carries one";
  EXPECT_EQ(header_of(error_too_large(1), "Connection"), "close");
  EXPECT_EQ(header_of(error_method("PUT", "GET, HEAD"), "Allow"), "GET, HEAD");
  EXPECT_TRUE(error_headers(error_internal("m")).empty());
}

TEST(ApiError, ALongNameIsCutAtACharacter) {
  std::string name(99, 'm');
  name += "🦙🦙🦙";
  const ApiError error = error_model(name);
  EXPECT_NE(error.message.find(std::string(99, 'm') + "..."), std::string::npos);
  EXPECT_EQ(error.message.find('\xf0'), std::string::npos);
}

TEST(RequestId, OnlySaneOnesAreEchoed) {
  EXPECT_TRUE(request_id_sane("a1b2-c3"));
  EXPECT_TRUE(request_id_sane(std::string(128, 'x')));
  for (const std::string& bad : {std::string(), std::string(129, 'x'), std::string("a b"),
                                 std::string("a\tb"), std::string("é"), std::string("a\r\nX: y")}) {
    EXPECT_FALSE(request_id_sane(bad)) << bad;
  }
}

}  // namespace
}  // namespace di::api
