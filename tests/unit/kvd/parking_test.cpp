// Against a holder of the test, which answers when it likes.
#include "parking.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "base/fd_packet.h"

namespace di::kvd {
namespace {

constexpr std::string_view instance = "di-kvd.host0";
constexpr int patience_ms = 10000;

ino_t inode_of(int fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd, &status), 0);
  return status.st_ino;
}

struct ParkingTest : testing::Test {
  ParkingTest() {
    std::string name = testing::TempDir() + "di-park-XXXXXX";
    directory = ::mkdtemp(name.data());
    path = directory + "/di-hold.host0.sock";
    const sockaddr_un address = *unix_address(path);
    listening = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listening.get(), 8), 0);
    memory = Fd(::memfd_create("test", MFD_CLOEXEC));
  }
  ~ParkingTest() override { std::filesystem::remove_all(directory); }

  // The holder's side; each waits.
  Fd accept() {
    pollfd wait{listening.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&wait, 1, patience_ms), 1);
    return Fd(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  std::string hear(const Fd& connection) {
    pollfd wait{connection.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&wait, 1, patience_ms), 1);
    Result<FdPacket> packet = fd_packet_receive(connection.get(), 256);
    if (!packet) return "end";
    if (packet->fd.valid()) kept = std::move(packet->fd);
    return std::string(as_text(packet->bytes));
  }
  static void say(const Fd& connection, std::string_view line) {
    static_cast<void>(fd_packet_send(connection.get(), as_bytes(line), -1));
  }
  // One put, taken.
  Fd take() {
    Fd connection = accept();
    EXPECT_EQ(hear(connection), "put di-kvd.host0");
    say(connection, "ok");
    return connection;
  }
  // The memory is with the holder and is watched; the holder's end of the connection.
  Fd park(Parking& parking, loop::Loop& loop) {
    Fd connection;
    std::jthread holder([&] { connection = take(); });
    EXPECT_TRUE(parking.put(memory.get()).ok());
    holder.join();
    parking.watch(loop, memory.get());
    return connection;
  }
  // Nobody has unlinked the name and made another socket of it.
  [[nodiscard]] bool name_is_ours() const {
    struct stat status {};
    return ::stat(path.c_str(), &status) == 0 && status.st_ino == inode;
  }
  void remember_name() {
    struct stat status {};
    ASSERT_EQ(::stat(path.c_str(), &status), 0);
    inode = status.st_ino;
  }

  std::string directory;
  std::string path;
  Fd listening;
  Fd memory;
  Fd kept;
  ino_t inode = 0;
};

// It was busy with the memory of the arena that it dropped.
TEST_F(ParkingTest, a_late_answer_is_not_taken_for_that_to_the_next_question) {
  remember_name();
  Fd first;
  Fd second;
  std::jthread holder([&] {
    first = accept();
    EXPECT_EQ(hear(first), "drop di-kvd.host0");
    second = accept();
    say(first, "ok");
    EXPECT_EQ(hear(second), "put di-kvd.host0");
    say(second, "no");
  });
  Parking parking(Park::holder, directory, std::string(instance), milliseconds(300));
  parking.drop();
  EXPECT_EQ(parking.put(memory.get()).error().code, Code::io);
  holder.join();
  EXPECT_EQ(hear(first), "end");
  EXPECT_TRUE(name_is_ours());
}

TEST_F(ParkingTest, what_nobody_asked_for_is_not_the_end_of_the_holder) {
  loop::Loop loop;
  Parking parking(Park::holder, directory, std::string(instance));
  const Fd connection = park(parking, loop);
  say(connection, "ok");
  // It is read, or the connection is ended for it.
  const auto told = [&] {
    pollfd look{connection.get(), POLLIN, 0};
    if (::poll(&look, 1, 0) == 1) return true;
    int unread = 0;
    return ::ioctl(connection.get(), SIOCOUTQ, &unread) == 0 && unread == 0;
  };
  ASSERT_TRUE(loop.run_until(told, milliseconds(patience_ms)));
  pollfd look{connection.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&look, 1, 0), 0) << "the connection was ended";
}

// One whose connection ended, for whatever reason, and that listens still.
TEST_F(ParkingTest, a_holder_that_listens_is_asked_again_and_not_replaced) {
  remember_name();
  loop::Loop loop;
  Parking parking(Park::holder, directory, std::string(instance));
  const Fd connection = park(parking, loop);
  kept.reset();
  Fd next;
  std::atomic<bool> parked = false;
  std::jthread holder([&] {
    next = take();
    parked = true;
  });
  ::shutdown(connection.get(), SHUT_RDWR);
  EXPECT_TRUE(loop.run_until([&] { return parked.load(); }, milliseconds(patience_ms)));
  holder.join();
  EXPECT_TRUE(kept.valid() && inode_of(kept.get()) == inode_of(memory.get()));
  EXPECT_TRUE(name_is_ours());
}

}  // namespace
}  // namespace di::kvd
