#include "transfer/shm.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <filesystem>

namespace di::transfer {
namespace {

struct ShmTest : testing::Test {
  ShmTest() {
    std::string name = testing::TempDir() + "di-shm-XXXXXX";
    directory = ::mkdtemp(name.data());
    path = directory + "/di-kvd.host0.arena";
    memory = Fd(::memfd_create("region", MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(memory.get(), 8192), 0);
    EXPECT_EQ(::pwrite(memory.get(), "bytes", 5, 0), 5);
  }
  ~ShmTest() override { std::filesystem::remove_all(directory); }

  void serve() {
    auto made =
        ShmServer::listen(loop, path, {memory.get(), 8192, 7, "di-kvd.host0"},
                          {[this](const wire::arena_hello& hello) { came.push_back(hello.instance); },
                           [this](const wire::arena_hello& hello) { went.push_back(hello.instance); }});
    ASSERT_TRUE(made.ok()) << made.error().message;
    server = *std::move(made);
  }
  Status attach(const std::string& instance) {
    auto made = ShmClient::connect(loop, path, {instance, 3},
                                   {[this](const wire::arena_region& got, Fd fd) {
                                      region = got;
                                      received = std::move(fd);
                                    },
                                    [this](const Error& why) { ended.push_back(why.code); }});
    if (!made) return made.error();
    client = *std::move(made);
    return {};
  }
  bool until(const std::function<bool()>& done) { return loop.run_until(done, seconds(10)); }

  loop::Loop loop;
  std::string directory;
  std::string path;
  Fd memory;
  std::unique_ptr<ShmServer> server;
  std::unique_ptr<ShmClient> client;
  std::vector<std::string> came;
  std::vector<std::string> went;
  std::vector<Code> ended;
  wire::arena_region region;
  Fd received;
};

TEST_F(ShmTest, client_gets_the_region_and_the_same_memory) {
  serve();
  ASSERT_TRUE(attach("di-decode.0").ok());
  ASSERT_TRUE(until([&] { return received.valid() && !came.empty(); }));
  EXPECT_EQ(came, std::vector<std::string>{"di-decode.0"});
  EXPECT_EQ(server->attached_count(), 1u);
  EXPECT_EQ(region.bytes, 8192u);
  EXPECT_EQ(region.generation, 7u);
  EXPECT_EQ(region.instance, "di-kvd.host0");
  char bytes[5];
  ASSERT_EQ(::pread(received.get(), bytes, 5, 0), 5);
  EXPECT_EQ(std::string(bytes, 5), "bytes");
}

TEST_F(ShmTest, end_of_the_client_is_told_once) {
  serve();
  ASSERT_TRUE(attach("di-decode.0").ok());
  ASSERT_TRUE(until([&] { return !came.empty(); }));
  client.reset();
  ASSERT_TRUE(until([&] { return !went.empty(); }));
  loop.run_ready();
  EXPECT_EQ(went, std::vector<std::string>{"di-decode.0"});
  EXPECT_EQ(server->attached_count(), 0u);
}

TEST_F(ShmTest, end_of_the_server_is_told_and_a_new_one_can_be_attached) {
  serve();
  ASSERT_TRUE(attach("di-decode.0").ok());
  ASSERT_TRUE(until([&] { return received.valid(); }));
  server.reset();
  ASSERT_TRUE(until([&] { return !ended.empty(); }));
  EXPECT_EQ(ended, std::vector<Code>{Code::unreachable});
  EXPECT_EQ(attach("di-decode.0").error().code, Code::unreachable);
  serve();
  received.reset();
  ASSERT_TRUE(attach("di-decode.0").ok());
  EXPECT_TRUE(until([&] { return received.valid(); }));
}

TEST_F(ShmTest, socket_left_by_a_killed_server_is_replaced) {
  {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    Fd stale(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(stale.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  EXPECT_EQ(attach("di-prefill.0").error().code, Code::unreachable);
  serve();
  EXPECT_TRUE(attach("di-prefill.0").ok());
}

TEST_F(ShmTest, dropped_client_sees_the_end) {
  serve();
  ASSERT_TRUE(attach("di-decode.0").ok());
  ASSERT_TRUE(until([&] { return !came.empty() && received.valid(); }));
  server->drop("di-decode.0");
  ASSERT_TRUE(until([&] { return !ended.empty(); }));
  EXPECT_TRUE(went.empty());
}

TEST_F(ShmTest, nonsense_ends_the_connection_without_an_answer) {
  serve();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  Fd raw(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(raw.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::send(raw.get(), "hello", 5, 0), 5);
  ASSERT_TRUE(until([&] {
    char byte;
    return ::recv(raw.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }));
  EXPECT_TRUE(came.empty());
  EXPECT_TRUE(went.empty());
}

TEST_F(ShmTest, without_a_descriptor_the_client_is_taken_later_and_the_loop_does_not_spin) {
  serve();
  ASSERT_TRUE(attach("di-decode.0").ok());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = ::dup(memory.get());
  ::close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  std::size_t turns = 0;
  loop.on_turn_end([&] { ++turns; });
  bool waited = false;
  loop::Timer wait(loop, loop::TimerKind::liveness, "wait", [&] { waited = true; });
  wait.start_after(2 * shm_accept_pause);
  EXPECT_TRUE(until([&] { return waited; }));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LT(turns, 20u);
  EXPECT_TRUE(came.empty());
  EXPECT_TRUE(until([&] { return received.valid() && !came.empty(); }));
}

TEST_F(ShmTest, path_that_no_socket_can_have_is_refused) {
  path = "/" + std::string(200, 'x');
  EXPECT_EQ(attach("di-decode.0").error().code, Code::invalid);
  EXPECT_EQ(ShmServer::listen(loop, path, {}, {}).error().code, Code::invalid);
}

}  // namespace
}  // namespace di::transfer
