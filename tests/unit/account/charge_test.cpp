#include "account/charge.h"

#include <gtest/gtest.h>

#include <string>

namespace di::account {
namespace {

TEST(Charge, UuidIsVersion7AndOrderedByTime) {
  const std::string early = uuid_v7(1'700'000'000'000);
  const std::string late = uuid_v7(1'700'000'000'001);
  ASSERT_EQ(early.size(), 36U);
  EXPECT_EQ(early[14], '7');
  EXPECT_TRUE(early[19] == '8' || early[19] == '9' || early[19] == 'a' || early[19] == 'b');
  EXPECT_LT(early.substr(0, 13), late.substr(0, 13));
  EXPECT_EQ(early.substr(0, 13), "018bcfe5-6800");
  EXPECT_NE(uuid_v7(1), uuid_v7(1));
}

TEST(Charge, LinesReadBackEqual) {
  Charge charge = charge_open(1'700'000'000'000);
  charge.request_id = "req-1";
  charge.tenant = "a\"b\n";
  charge.key_id = "abcdefgh";
  charge.model = "demo";
  charge.status = "ok";
  charge.cached_tokens = 1920;
  charge.uncached_tokens = 80;
  charge.output_tokens = 7;
  charge.attempts = 2;
  charge.finished_ms = 1'700'000'000'500;
  const std::string line = charge_json(charge);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto back = charge_parse(line);
  ASSERT_TRUE(back);
  EXPECT_EQ(*back, charge);
}

TEST(Charge, DamagedLinesAreInvalid) {
  const std::string line = charge_json(charge_open(1));
  EXPECT_FALSE(charge_parse(line.substr(0, line.size() / 2)));
  EXPECT_FALSE(charge_parse(""));
  EXPECT_FALSE(charge_parse("[]"));
  EXPECT_EQ(charge_parse("{}").error().message, "charge record without a usable 'charge_id'");
  std::string negative = line;
  negative.replace(negative.find("\"output_tokens\":0"), 17, "\"output_tokens\":-1");
  EXPECT_FALSE(charge_parse(negative));
}

}  // namespace
}  // namespace di::account
