#include "config/param.h"

#include <gtest/gtest.h>

#include "config/toml.h"
#include "tests/unit/config/sample.h"

namespace di::config {
namespace {

TEST(Units, DurationsReadAndPrint) {
  EXPECT_EQ(*duration_parse("250ms"), milliseconds(250));
  EXPECT_EQ(*duration_parse("0s"), Duration(0));
  EXPECT_EQ(*duration_parse("2h"), std::chrono::hours(2));
  for (const char* bad : {"", "ms", "5", "1.5s", "-1s", "5 s", "5S", "99999999999999999999s", "300000d1"}) {
    EXPECT_FALSE(duration_parse(bad).ok()) << bad;
  }
  EXPECT_EQ(duration_print(milliseconds(1500)), "1500ms");
  EXPECT_EQ(duration_print(seconds(60)), "1m");
  EXPECT_EQ(duration_print(Duration(0)), "0ns");
}

TEST(Units, SizesReadAndPrint) {
  using namespace literals;
  EXPECT_EQ(*size_parse("64GiB"), 64_GiB);
  EXPECT_EQ(*size_parse("17B"), 17u);
  for (const char* bad : {"", "GiB", "64", "64GB", "1.5GiB", "-1B", "99999999TiB"}) {
    EXPECT_FALSE(size_parse(bad).ok()) << bad;
  }
  EXPECT_EQ(size_print(1536 * 1024), "1536KiB");
  EXPECT_EQ(size_print(0), "0B");
}

TEST(Params, BindingWritesDefaults) {
  Sample sample;
  Params params;
  bind_sample(params, sample);
  EXPECT_TRUE(sample.flag);
  EXPECT_EQ(sample.port, 80);
  EXPECT_EQ(sample.hold, seconds(60));
  EXPECT_EQ(sample.colour, Colour::green);
  EXPECT_EQ(sample.tags, (std::vector<std::string>{"a", "b"}));
}

TEST(Print, ParsesBackToTheSameStruct) {
  Sample sample;
  Params params;
  bind_sample(params, sample);
  ASSERT_EQ(
      parse_text(params,
                 "flag = false\nname = \"tab\\there\\u0001\"\ncolour = 'blue'\ntags = []\n"
                 "[kv]\nratio = 1e-3\npool = \"3GiB\"\nhold = \"90s\"\ndelay_ms = 7\n"
                 "[[auth.keys]]\nkey = \"k1\"\n[[auth.keys]]\nkey = \"k2\"\ntenant = \"t\"\nlimit = 9\n",
                 "x"),
      std::vector<std::string>{});
  ASSERT_EQ(sample.keys.size(), 2u);
  EXPECT_EQ(sample.keys[1].limit, 9);
  for (const bool describe : {false, true}) {
    const std::string text = print(params, describe);
    Sample again;
    Params rows;
    bind_sample(rows, again);
    ASSERT_EQ(parse_text(rows, text, "printed"), std::vector<std::string>{}) << text;
    EXPECT_EQ(changed(params, rows), std::vector<std::string>{});
    EXPECT_EQ(again.keys.size(), 2u);
    EXPECT_EQ(again.keys[1].tenant, "t");
    EXPECT_EQ(again.name, sample.name);
  }
}

TEST(Changed, NamesTheRowsThatDiffer) {
  Sample a;
  Sample b;
  Params running;
  Params fresh;
  bind_sample(running, a);
  bind_sample(fresh, b);
  ASSERT_EQ(parse_text(fresh, "kv.pool = \"1GiB\"\n[[auth.keys]]\nkey = \"k\"\n", "x"),
            std::vector<std::string>{});
  EXPECT_EQ(changed(running, fresh), (std::vector<std::string>{"kv.pool", "auth.keys"}));
}

TEST(ParamsDeathTest, TwoRowsWithOnePathAreABug) {
  EXPECT_DEATH(
      {
        Params params;
        bool flag = false;
        params.boolean("a.b", flag, {});
        params.boolean("a.b", flag, {});
      },
      "assertion failed");
}

}  // namespace
}  // namespace di::config
