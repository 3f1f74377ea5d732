#include "transfer/address.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

namespace di::transfer {
namespace {

int send_bytes(int fd) {
  int value = 0;
  socklen_t length = sizeof value;
  EXPECT_EQ(::getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &value, &length), 0);
  return value;
}

// Bounded, a megabyte goes from one process to the other while it is still in the cache; over a wire the kernel
// has to find out how much is under way.
TEST(DataConnection, only_within_a_machine_its_send_buffer_is_bounded) {
  int allowed = 0;
  ASSERT_TRUE(std::ifstream("/proc/sys/net/core/wmem_max") >> allowed);
  const int bounded = 2 * std::min(512 << 10, allowed);  // the kernel doubles what it is asked for
  auto listener = data_listen("127.0.0.1:0");
  ASSERT_TRUE(listener.ok());
  const auto dialled = data_connect(listener->endpoint);
  ASSERT_TRUE(dialled.ok());
  const auto accepted = data_accept(listener->fd.get());
  ASSERT_TRUE(accepted.ok() && accepted->valid());
  EXPECT_EQ(send_bytes(dialled->get()), bounded);
  EXPECT_EQ(send_bytes(accepted->get()), bounded);

  // From 127.0.0.1, as if from another machine.
  auto elsewhere = data_listen("127.0.0.2:0");
  ASSERT_TRUE(elsewhere.ok());
  const auto far = data_connect(elsewhere->endpoint);
  ASSERT_TRUE(far.ok());
  EXPECT_NE(send_bytes(far->get()), bounded);
}

}  // namespace
}  // namespace di::transfer
