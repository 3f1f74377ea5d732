#include "config.h"

#include <gtest/gtest.h>

#include "account/key.h"
#include "config/toml.h"

namespace di::router {
namespace {

std::vector<std::string> errors_of(const std::string& text) {
  Config config;
  config::Params rows;
  params(rows, config);
  return config::parse_text(rows, text, "r.toml");
}

std::string row_of(const std::string& key) {
  return "[[auth.keys]]\nkey = \"" + key + "\"\ntenant = \"lab\"\n";
}

TEST(RouterConfig, AKeyThatIsNoneIsRefusedWhereItStands) {
  const std::string good = account::key_generate();
  EXPECT_EQ(errors_of(row_of(good) + row_of(account::key_hash_text(account::key_generate()))),
            std::vector<std::string>{});
  for (const std::string bad : {"plain-secret", "sha256:zz", ""}) {
    const auto errors = errors_of(row_of(good) + row_of(bad));
    ASSERT_EQ(errors.size(), 1U) << bad;
    EXPECT_TRUE(errors[0].starts_with("r.toml:5:7: key: an API key ")) << errors[0];
  }
}

TEST(RouterConfig, AKeyGivenTwiceIsNotShown) {
  const std::string key = account::key_generate();
  const auto errors = errors_of(row_of(key) + row_of(key));
  EXPECT_EQ(errors, std::vector<std::string>{"r.toml:5:7: auth.keys: key: it is given twice"});
}

TEST(RouterConfig, WhatIsWrongBetweenRowsHasAPlace) {
  const auto wrong = [](const std::string& text) {
    Config config;
    config::Params rows;
    params(rows, config);
    EXPECT_TRUE(config::parse_text(rows, text, "r.toml").empty());
    const Status status = validate(config, rows);
    return status.ok() ? "" : status.error().message;
  };
  EXPECT_EQ(wrong(""), "");
  EXPECT_EQ(wrong("auth.required = false\nhttp.listen = \"0.0.0.0:80\"\n"),
            "r.toml:1:17: auth.required: false is allowed on a loopback http.listen only");
  EXPECT_EQ(wrong("\ndrain.timeout = \"5s\"\nhttp.settle = \"5s\"\n"),
            "r.toml:3:15: http.settle: http.settle must be below drain.timeout, which begins with it");
}

}  // namespace
}  // namespace di::router
