#include "base/json.h"

#include <gtest/gtest.h>

namespace di {
namespace {

TEST(Json, ReadsTypes) {
  const auto json = Json::parse(R"({"a":1,"b":-2.5,"c":"x\n","d":[true,null],"e":18446744073709551615})");
  ASSERT_TRUE(json);
  EXPECT_EQ(json->find("a")->as_i64(), 1);
  EXPECT_EQ(json->find("b")->as_double(), -2.5);
  EXPECT_EQ(json->find("c")->as_string(), "x\n");
  EXPECT_TRUE(json->find("d")->as_array()[1].is_null());
  EXPECT_EQ(json->find("e")->as_i64(), INT64_MAX);
  EXPECT_EQ(json->find("missing"), nullptr);
}

TEST(Json, RefusesWhatIsNotJson) {
  for (const char* bad : {"", "{", "{\"x\":tru}", "NaN", "{\"a\":1,}", "\"\\ud800\"", "[1] x"}) {
    const auto json = Json::parse(bad);
    ASSERT_FALSE(json) << bad;
    EXPECT_EQ(json.error().code, Code::invalid);
  }
}

TEST(Json, RefusesDepth) {
  std::string deep(static_cast<std::size_t>(json_depth_max) + 10, '[');
  deep.append(static_cast<std::size_t>(json_depth_max) + 10, ']');
  EXPECT_FALSE(Json::parse(deep));
}

TEST(Json, CountsAllValuesAgainstTheBound) {
  const std::string text = R"([1,{"a":[2,3]},[]])";  // 7 values
  EXPECT_TRUE(Json::parse(text, 7));
  const auto json = Json::parse(text, 6);
  ASSERT_FALSE(json);
  EXPECT_EQ(json.error().code, Code::invalid);
  EXPECT_EQ(json.error().message, "JSON text has more than 6 values");
  EXPECT_FALSE(Json::parse("[" + std::string(2 << 20, ' ') + "1,2,3]", 3));
}

TEST(Json, KnowsWhichIntegersFit) {
  EXPECT_TRUE(Json::parse("9223372036854775807")->is_i64());
  EXPECT_TRUE(Json::parse("-9223372036854775808")->is_i64());
  EXPECT_FALSE(Json::parse("9223372036854775808")->is_i64());
  EXPECT_TRUE(Json::parse("9223372036854775808")->is_integer());
}

TEST(JsonWriter, CommasEscapesNumbers) {
  JsonWriter w;
  w.open_object();
  w.key("a\"");
  w.number(std::int64_t{-1});
  w.key("b");
  w.open_array();
  w.string("x\ty\x01");
  w.number(0.1);
  w.boolean(false);
  w.null();
  w.open_object();
  w.close_object();
  w.close_array();
  w.close_object();
  EXPECT_EQ(w.text(), R"({"a\"":-1,"b":["x\ty\u0001",0.1,false,null,{}]})");
  JsonWriter again;
  again.value(*Json::parse(w.text()));
  EXPECT_EQ(again.text(), w.text());
}

}  // namespace
}  // namespace di
