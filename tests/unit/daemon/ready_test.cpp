#include "daemon/ready.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/fd_packet.h"

namespace di::daemon {
namespace {

// Out of the way of the numbers that systemd passes.
Fd high(Fd fd) {
  return Fd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 32));
}

ino_t inode_of(int fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd, &status), 0);
  return status.st_ino;
}

struct Systemd : testing::Test {
  Systemd() {
    path = testing::TempDir() + "di-notify-" + std::to_string(::getpid());
    const Result<sockaddr_un> address = unix_address(path);
    manager = high(Fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)));
    EXPECT_EQ(::bind(manager.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address), 0);
    ::setenv("NOTIFY_SOCKET", path.c_str(), 1);
  }
  ~Systemd() override {
    std::filesystem::remove(path);
    for (const char* name : {"NOTIFY_SOCKET", "FDSTORE", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"})
      ::unsetenv(name);
  }
  std::string path;
  Fd manager;
};

TEST_F(Systemd, keeps_descriptors_when_it_says_so) {
  EXPECT_FALSE(supervisor_stores_fds());
  ::setenv("FDSTORE", "0", 1);
  EXPECT_FALSE(supervisor_stores_fds());
  ::setenv("FDSTORE", "1", 1);
  EXPECT_TRUE(supervisor_stores_fds());
  ::unsetenv("NOTIFY_SOCKET");
  EXPECT_FALSE(supervisor_stores_fds());
  EXPECT_EQ(supervisor_store_fd("arena", 0).error().code, Code::unsupported);
}

TEST_F(Systemd, gets_the_descriptor_with_its_name) {
  const Fd memory(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_TRUE(supervisor_store_fd("arena", memory.get()).ok());
  Result<FdPacket> packet = fd_packet_receive(manager.get(), 256);
  ASSERT_TRUE(packet.ok()) << packet.error().message;
  EXPECT_EQ(as_text(packet->bytes), "FDSTORE=1\nFDPOLL=0\nFDNAME=arena");
  ASSERT_TRUE(packet->fd.valid());
  EXPECT_EQ(inode_of(packet->fd.get()), inode_of(memory.get()));
  supervisor_drop_fd("arena");
  packet = fd_packet_receive(manager.get(), 256);
  ASSERT_TRUE(packet.ok());
  EXPECT_EQ(as_text(packet->bytes), "FDSTOREREMOVE=1\nFDNAME=arena");
  EXPECT_FALSE(packet->fd.valid());
}

TEST_F(Systemd, gives_back_the_one_of_that_name_to_this_process_only) {
  const Fd memory = high(Fd(::memfd_create("test", MFD_CLOEXEC)));
  ASSERT_EQ(::dup2(memory.get(), 4), 4);  // the second of two, from 3 on
  ::setenv("LISTEN_FDS", "2", 1);
  ::setenv("LISTEN_FDNAMES", "other:arena", 1);
  EXPECT_FALSE(supervisor_stored_fd("arena").valid());  // no LISTEN_PID
  ::setenv("LISTEN_PID", "1", 1);
  EXPECT_FALSE(supervisor_stored_fd("arena").valid());
  ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
  EXPECT_FALSE(supervisor_stored_fd("somebody else's").valid());
  const Fd found = supervisor_stored_fd("arena");
  ASSERT_EQ(found.get(), 4);
  EXPECT_EQ(inode_of(4), inode_of(memory.get()));
  EXPECT_NE(::fcntl(4, F_GETFD) & FD_CLOEXEC, 0);
}

}  // namespace
}  // namespace di::daemon
