#include "config/toml.h"

#include <gtest/gtest.h>

#include "tests/unit/config/sample.h"

namespace di::config {
namespace {

struct Override : testing::Test {
  Sample sample;
  Params params;
  Override() { bind_sample(params, sample); }

  std::string error(std::string_view assignment) {
    const std::vector<std::string> errors = parse_override(params, assignment);
    return errors.empty() ? "" : errors.front();
  }
};

TEST_F(Override, NeedsNoQuotes) {
  EXPECT_EQ(error("kv.pool=8GiB"), "");
  EXPECT_EQ(sample.pool, 8ull << 30);
  EXPECT_EQ(error("kv.hold=\"90s\""), "");
  EXPECT_EQ(sample.hold, seconds(90));
  EXPECT_EQ(error("colour=red"), "");
  EXPECT_EQ(sample.colour, Colour::red);
  EXPECT_EQ(error("name=a=b, c"), "");
  EXPECT_EQ(sample.name, "a=b, c");
  EXPECT_EQ(error("name=123"), "");
  EXPECT_EQ(sample.name, "123");
  EXPECT_EQ(error("name="), "");
  EXPECT_EQ(sample.name, "");
  EXPECT_EQ(error("model.root=/a/b"), "");
  EXPECT_EQ(sample.root, "/a/b");
  EXPECT_EQ(error("net.port=81"), "");
  EXPECT_EQ(sample.port, 81);
  EXPECT_EQ(error("flag=false"), "");
  EXPECT_FALSE(sample.flag);
  EXPECT_EQ(error("kv.delay_ms=50"), "");
  EXPECT_EQ(sample.delay_ms, milliseconds(50));
  EXPECT_EQ(error("tags=x,y"), "");
  EXPECT_EQ(sample.tags, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(error("tags=[\"p\"]"), "");
  EXPECT_EQ(sample.tags, (std::vector<std::string>{"p"}));
  EXPECT_EQ(error("name=[x]{y"), "");
  EXPECT_EQ(sample.name, "[x]{y") << "a bracket begins a list in a row of lists only";
}

TEST_F(Override, HasTheSameChecksAsTheFile) {
  EXPECT_EQ(error("bogus=1"), "-o bogus=1: unknown key 'bogus'");
  EXPECT_EQ(error("kv.pool"), "-o kv.pool: want key=value");
  EXPECT_EQ(error("net.port=0"), "-o net.port=0: 0 is out of range: want 1 to 65535");
  EXPECT_EQ(error("net.port=eighty"), "-o net.port=eighty: want an integer, got a string");
  EXPECT_EQ(error("kv.delay_ms=50ms"), "-o kv.delay_ms=50ms: want a bare number of ms, got a string");
  EXPECT_EQ(
      error("kv.pool=8"),
      "-o kv.pool=8: '8' is not a size: want a whole number with B, KiB, MiB, GiB or TiB, as in \"64MiB\"");
  EXPECT_EQ(error("auth.keys=x"), "-o auth.keys=x: 'auth.keys' is set in the file only");
  EXPECT_EQ(error("flag=true\nname=\"x\""), "-o: want key=value on one line");
  EXPECT_EQ(sample.port, 80);
}

TEST(Path, RelativeOnesInAFileBeginInItsFolder) {
  Sample sample;
  Params params;
  bind_sample(params, sample);
  EXPECT_TRUE(parse_text(params, "model.root = \"../m\"\nname = \"n\"\n", "etc/local/x.toml").empty());
  EXPECT_EQ(sample.root, "etc/local/../m");
  EXPECT_EQ(sample.name, "n") << "not a path";
  EXPECT_TRUE(parse_text(params, "model.root = \"/m\"\n", "etc/local/x.toml").empty());
  EXPECT_EQ(sample.root, "/m");
  EXPECT_TRUE(parse_text(params, "model.root = \"\"\n", "etc/local/x.toml").empty());
  EXPECT_EQ(sample.root, "");
  EXPECT_TRUE(parse_override(params, "model.root=m").empty());
  EXPECT_EQ(sample.root, "m");
}

TEST(Place, OfAValueIsKnownForChecksOverSeveralRows) {
  Sample sample;
  Params params;
  bind_sample(params, sample);
  EXPECT_TRUE(parse_text(params, "name = \"n\"\n[kv]\n  pool = \"2MiB\"\n", "etc/x.toml").empty());
  EXPECT_EQ(params.find("name")->at, "etc/x.toml:1:8");
  EXPECT_EQ(params.find("kv.pool")->at, "etc/x.toml:3:10");
  EXPECT_EQ(params.find("flag")->at, "");
  EXPECT_TRUE(parse_override(params, "name=m").empty());
  EXPECT_TRUE(parse_override(params, "net.port=81").empty());
  EXPECT_EQ(params.find("name")->at, "-o name=m");
  EXPECT_EQ(params.find("net.port")->at, "-o net.port=81");
}

TEST(File, MissingFileSaysSo) {
  Sample sample;
  Params params;
  bind_sample(params, sample);
  const std::vector<std::string> errors = parse_file(params, "/nonexistent/x.toml");
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(errors[0].find("/nonexistent/x.toml"), std::string::npos);
  EXPECT_NE(errors[0].find("No such file or directory"), std::string::npos);
}

}  // namespace
}  // namespace di::config
