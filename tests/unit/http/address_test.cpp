#include "http/address.h"

#include <gtest/gtest.h>

namespace di::http {
namespace {

TEST(Address, Spellings) {
  for (const char* text : {"127.0.0.1:8080", "[::1]:0", "0.0.0.0:65535"}) {
    const auto address = address_parse(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(address_text(*address), text);
    EXPECT_FALSE(address->is_unix());
  }
  const auto path = address_parse("unix:/run/di/x.http");
  ASSERT_TRUE(path);
  EXPECT_TRUE(path->is_unix());
  EXPECT_EQ(path->path, "/run/di/x.http");
}

TEST(Address, WrongOnesSayWhy) {
  for (const std::string& text :
       {std::string("8080"), std::string("host:"), std::string(":80"), std::string("a:b"),
        std::string("127.0.0.1:65536"), std::string("unix:"), "unix:/" + std::string(200, 'x')}) {
    const auto address = address_parse(text);
    ASSERT_FALSE(address) << text;
    EXPECT_EQ(address.error().code, Code::invalid);
    EXPECT_NE(address.error().message.find(text), std::string::npos);
  }
}

}  // namespace
}  // namespace di::http
