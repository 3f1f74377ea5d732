#include "data_plane.h"

#include <gtest/gtest.h>

namespace di::kvd {
namespace {

struct AdvertiseTest : testing::Test {
  AdvertiseTest() { data_params(params, config); }
  Code given(const std::string& text) {
    const Status set = params.find("transfer.advertise")->set(config::Value{text});
    return set.ok() ? Code::ok : set.error().code;
  }
  config::Params params;
  DataConfig config;
};

TEST_F(AdvertiseTest, what_nobody_can_connect_to_is_a_wrong_configuration) {
  for (const char* text :
       {"tcp://10.0.0.5:7400", "10.0.0.5:7400", "tcp://[fd00::5]:7400", "tcp://10.0.0.5:0", ""})
    EXPECT_EQ(given(text), Code::ok) << text;
  for (const char* text :
       {"tcp://store5.example.org:7400", "tcp://10.0.0.5", "10.0.0.5", "tcp://0.0.0.0:7400",
        "tcp://[::]:7400", "tcp://*:7400", ":7400", "tcp://10.0.0.5:70000", "nonsense"})
    EXPECT_EQ(given(text), Code::invalid) << text;
}

TEST_F(AdvertiseTest, port_0_is_the_one_that_was_bound) {
  EXPECT_EQ(data_advertised("tcp://10.0.0.5:0", "tcp://0.0.0.0:41234"), "tcp://10.0.0.5:41234");
  EXPECT_EQ(data_advertised("[fd00::5]:0", "tcp://[::]:41234"), "[fd00::5]:41234");
  EXPECT_EQ(data_advertised("tcp://10.0.0.5:7400", "tcp://0.0.0.0:41234"), "tcp://10.0.0.5:7400");
  EXPECT_EQ(data_advertised("", "tcp://10.0.0.5:41234"), "tcp://10.0.0.5:41234");
}

}  // namespace
}  // namespace di::kvd
