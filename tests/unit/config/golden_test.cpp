// Every tests/golden/config/NAME.in yields exactly NAME.ok: its errors, or what -nv would print.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "config/toml.h"
#include "tests/unit/config/sample.h"

namespace di::config {
namespace {

std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(Golden, EveryFileYieldsItsMessages) {
  const std::filesystem::path folder = std::filesystem::path(DI_SOURCE_DIR) / "tests/golden/config";
  std::vector<std::filesystem::path> inputs;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".in") inputs.push_back(entry.path());
  }
  std::sort(inputs.begin(), inputs.end());
  ASSERT_GE(inputs.size(), 8u);
  for (const std::filesystem::path& input : inputs) {
    Sample sample;
    Params params;
    bind_sample(params, sample);
    std::vector<std::string> errors = parse_text(params, contents(input), input.filename().string());
    for (std::string& error : check_required(params, input.filename().string())) errors.push_back(error);
    std::string got;
    for (const std::string& error : errors) got += error + "\n";
    if (errors.empty()) got = print(params, false);
    const std::filesystem::path ok = std::filesystem::path(input).replace_extension(".ok");
    EXPECT_EQ(got, contents(ok)) << input;
  }
}

}  // namespace
}  // namespace di::config
