#include "recovery.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace di::kvd {
namespace {

struct ArenaMakeTest : testing::Test {
  ArenaMakeTest() {
    options.name = "arena-make-test";
    options.payload_bytes = 1 << 20;
    options.slots_max = 8;
    options.entries_max = 8;
  }
  kv::ArenaOwner::Options options;
  Parking parking{Park::off, "", "di-kvd.host0"};
};

// A rank that waits for its di-kvd keeps its mapping, and the memory with it.
TEST_F(ArenaMakeTest, there_is_never_memory_for_two) {
  auto former = *kv::ArenaOwner::create(options);
  auto client = *kv::ArenaClient::map(former->fd(), former->bytes());
  std::shared_ptr<kv::ArenaMapping> mapping = client->mapping();
  client.reset();
  Fd parked(::fcntl(former->fd(), F_DUPFD_CLOEXEC, 0));
  former.reset();
  std::atomic<bool> let_go = false;
  std::jthread rank([&](const std::stop_token& stop) {
    while (!mapping->given_up() && !stop.stop_requested()) std::this_thread::yield();
    mapping.reset();
    let_go = true;
  });
  const auto made = arena_make(parking, options, std::move(parked));
  EXPECT_TRUE(let_go);
  ASSERT_TRUE(made.ok()) << made.error().message;
  EXPECT_EQ(made->arena->epoch(), 1u);
}

// A stop had to wait as long as a start waits for those who keep the former arena.
TEST_F(ArenaMakeTest, a_stop_ends_the_wait_for_who_keeps_the_former_arena) {
  auto former = *kv::ArenaOwner::create(options);
  auto client = *kv::ArenaClient::map(former->fd(), former->bytes());
  const std::shared_ptr<kv::ArenaMapping> mapping = client->mapping();
  client.reset();
  Fd parked(::fcntl(former->fd(), F_DUPFD_CLOEXEC, 0));
  former.reset();
  options.stopped = [&] { return mapping->given_up(); };
  const auto made = arena_make(parking, options, std::move(parked));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code, Code::cancelled);
}

}  // namespace
}  // namespace di::kvd
