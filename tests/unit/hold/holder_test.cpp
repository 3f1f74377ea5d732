#include "holder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "base/fd_packet.h"

namespace di::hold {
namespace {

ino_t inode_of(int fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd, &status), 0);
  return status.st_ino;
}

struct HolderTest : testing::Test {
  HolderTest() {
    path = testing::TempDir() + "di-hold-" + std::to_string(::getpid());
    address = *unix_address(path);
    Fd listening(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listening.get(), 8), 0);
    signals = Fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    holder =
        std::make_unique<Holder>("di-kvd.host0", seconds(600), std::move(listening), signals.get(), clock);
  }
  ~HolderTest() override { std::filesystem::remove(path); }

  Fd connect() {
    Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_TRUE(goes_on());
    return fd;
  }
  // Handles what has happened; false when the holder has ended.
  bool goes_on() {
    const Result<bool> more = holder->round();
    EXPECT_TRUE(more.ok());
    return more && *more;
  }
  std::string ask(int connection, const std::string& line, int fd = -1) {
    EXPECT_TRUE(fd_packet_send(connection, as_bytes(line), fd).ok());
    EXPECT_TRUE(goes_on());
    Result<FdPacket> packet = fd_packet_receive(connection, 64);
    if (!packet) return "end";
    received = std::move(packet->fd);
    return std::string(as_text(packet->bytes));
  }

  std::string path;
  sockaddr_un address{};
  ManualClock clock;
  Fd signals;
  std::unique_ptr<Holder> holder;
  Fd received;
};

TEST_F(HolderTest, keeps_one_descriptor_until_it_is_dropped) {
  const Fd memory(::memfd_create("test", MFD_CLOEXEC));
  const Fd connection = connect();
  EXPECT_EQ(ask(connection.get(), "get di-kvd.host0"), "none");
  EXPECT_EQ(ask(connection.get(), "put di-kvd.host0", memory.get()), "ok");
  EXPECT_EQ(ask(connection.get(), "get di-kvd.host0"), "ok");
  EXPECT_EQ(inode_of(received.get()), inode_of(memory.get()));
  EXPECT_EQ(ask(connection.get(), "drop di-kvd.host0"), "ok");
  EXPECT_EQ(ask(connection.get(), "get di-kvd.host0"), "none");
  EXPECT_EQ(ask(connection.get(), "get di-kvd.host1"), "end");
}

// A di-kvd says nothing while it runs, for days; then it is killed.
TEST_F(HolderTest, a_long_silence_does_not_count_as_being_alone) {
  const Fd memory(::memfd_create("test", MFD_CLOEXEC));
  Fd connection = connect();
  EXPECT_EQ(ask(connection.get(), "put di-kvd.host0", memory.get()), "ok");
  clock.advance(seconds(86400));
  connection.reset();
  ASSERT_TRUE(goes_on());
  clock.advance(seconds(599));
  connection = connect();
  EXPECT_EQ(ask(connection.get(), "get di-kvd.host0"), "ok");
  EXPECT_EQ(inode_of(received.get()), inode_of(memory.get()));
}

TEST_F(HolderTest, ends_when_nobody_comes_back) {
  Fd connection = connect();
  connection.reset();
  ASSERT_TRUE(goes_on());
  clock.advance(seconds(600));
  EXPECT_FALSE(goes_on());
}

TEST_F(HolderTest, ends_when_it_is_told_to) {
  const Fd connection = connect();
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(signals.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  EXPECT_FALSE(goes_on());
}

}  // namespace
}  // namespace di::hold
