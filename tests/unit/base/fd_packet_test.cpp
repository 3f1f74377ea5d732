#include "base/fd_packet.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace di {
namespace {

struct Pair {
  Pair() {
    int both[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, both), 0);
    a = Fd(both[0]);
    b = Fd(both[1]);
  }
  Fd a;
  Fd b;
};

TEST(FdPacket, descriptor_travels_beside_the_bytes) {
  Pair pair;
  const Fd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_TRUE(fd_packet_send(pair.a.get(), as_bytes("put"), memory.get()).ok());
  ASSERT_TRUE(fd_packet_send(pair.a.get(), as_bytes("none"), -1).ok());
  Result<FdPacket> packet = fd_packet_receive(pair.b.get(), 16);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ(as_text(packet->bytes), "put");
  struct stat sent {};
  struct stat got {};
  ASSERT_EQ(::fstat(memory.get(), &sent), 0);
  ASSERT_EQ(::fstat(packet->fd.get(), &got), 0);
  EXPECT_EQ(sent.st_ino, got.st_ino);
  packet = fd_packet_receive(pair.b.get(), 16);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ(as_text(packet->bytes), "none");
  EXPECT_FALSE(packet->fd.valid());
}

TEST(FdPacket, nothing_there_and_the_end_differ) {
  Pair pair;
  EXPECT_EQ(fd_packet_receive(pair.b.get(), 16).error().code, Code::busy);
  ASSERT_TRUE(fd_packet_send(pair.a.get(), as_bytes("longer than that"), -1).ok());
  EXPECT_EQ(fd_packet_receive(pair.b.get(), 8).error().code, Code::corrupt);
  pair.a.reset();
  EXPECT_EQ(fd_packet_receive(pair.b.get(), 16).error().code, Code::unreachable);
  EXPECT_EQ(fd_packet_send(pair.b.get(), as_bytes("x"), -1).error().code, Code::unreachable);
}

TEST(FdPacket, our_own_user_is_the_same_user) {
  Pair pair;
  EXPECT_TRUE(check_same_user(pair.a.get()).ok());
  EXPECT_EQ(unix_address(std::string(200, 'x')).error().code, Code::invalid);
  EXPECT_EQ(unix_address("").error().code, Code::invalid);
}

}  // namespace
}  // namespace di
