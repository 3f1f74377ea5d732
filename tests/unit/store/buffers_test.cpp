#include "store/buffers.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

namespace di::store {
namespace {

TEST(BufferPool, a_buffer_is_used_again) {
  const auto pool = BufferPool::create(1 << 20);
  const std::byte* memory = nullptr;
  {
    Buffer buffer = pool->take(100'000);
    memory = buffer.first(100'000).data();
    EXPECT_EQ(pool->kept_bytes(), 0u);
  }
  EXPECT_GE(pool->kept_bytes(), 100'000u);
  Buffer smaller = pool->take(5000);
  EXPECT_EQ(smaller.first(5000).data(), memory);
  EXPECT_EQ(pool->kept_bytes(), 0u);
  // One that is kept is too small for this, and stays.
  smaller = pool->take(200'000);
  EXPECT_EQ(smaller.first(200'000).size(), 200'000u);
  EXPECT_GE(pool->kept_bytes(), 100'000u);
}

TEST(BufferPool, keeps_no_more_than_its_bound) {
  const auto pool = BufferPool::create(3 * 8192);
  {
    std::vector<Buffer> buffers;
    for (int i = 0; i < 10; ++i) buffers.push_back(pool->take(8192));
  }
  EXPECT_EQ(pool->kept_bytes(), 3u * 8192);
  { const Buffer large = pool->take(4 * 8192); }
  EXPECT_EQ(pool->kept_bytes(), 3u * 8192);
}

TEST(BufferPool, the_last_user_may_be_another_thread_and_later_than_its_owner) {
  auto pool = BufferPool::create(1 << 20);
  std::optional<Buffer> buffer(pool->take(8192));
  pool.reset();
  std::thread([&] { buffer.reset(); }).join();
}

}  // namespace
}  // namespace di::store
