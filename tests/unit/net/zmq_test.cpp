#include "net/zmq.h"

#include <gtest/gtest.h>

#include "tests/unit/net/fleet.h"

namespace di::net {
namespace {

class ZmqTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!zmq_testable) GTEST_SKIP() << "libzmq is not instrumented for the thread sanitizer";
  }
  loop::Loop loop;
};

TEST_F(ZmqTest, PortZeroIsResolved) {
  const auto transport = make_zmq_transport(loop);
  const Result<std::string> address = transport->bind("tcp://127.0.0.1:0");
  ASSERT_TRUE(address.ok()) << address.error().message;
  EXPECT_TRUE(address->starts_with("tcp://127.0.0.1:"));
  EXPECT_FALSE(address->ends_with(":0"));
}

TEST_F(ZmqTest, PortInUseIsOneClearError) {
  const auto first = make_zmq_transport(loop);
  const std::string address = *first->bind("tcp://127.0.0.1:0");
  const auto second = make_zmq_transport(loop);
  const Result<std::string> taken = second->bind(address);
  ASSERT_FALSE(taken.ok());
  EXPECT_EQ(taken.error().message, "bind " + address + ": Address already in use");
}

TEST_F(ZmqTest, AddressThatIsNoneIsInvalid) {
  const auto transport = make_zmq_transport(loop);
  EXPECT_EQ(transport->connect("nonsense").error().code, Code::invalid);
  EXPECT_EQ(transport->bind("ipc:///nonexistent/folder/x.sock").error().os_errno, ENOENT);
}

}  // namespace
}  // namespace di::net
