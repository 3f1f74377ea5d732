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

}  // namespace
}  // namespace di::router
