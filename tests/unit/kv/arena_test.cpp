#include "kv/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/clock.h"
#include "kv/slots.h"

namespace di::kv {
namespace {

struct ArenaTest : testing::Test {
  ArenaTest() : layout(layout_v41()) {
    auto made = ArenaOwner::create({.name = "arena-test",
                                    .generation = 5,
                                    .payload_bytes = layout.page_bytes(8) * 4,
                                    .slots_max = 16,
                                    .entries_max = 8});
    EXPECT_TRUE(made.ok()) << made.error().message;
    owner = *std::move(made);
    auto mapped = ArenaClient::map(owner->fd(), owner->bytes());
    EXPECT_TRUE(mapped.ok()) << mapped.error().message;
    client = *std::move(mapped);
  }

  SlotRef assign(std::uint32_t slot, std::uint32_t generation, std::uint32_t blocks, std::uint64_t offset,
                 SlotState state = SlotState::granted) {
    owner->slot_assign({slot, generation, blocks, offset, layout.page_bytes(blocks), state});
    return {slot, generation, blocks, 0, blocks};
  }

  Layout layout;
  std::unique_ptr<ArenaOwner> owner;
  std::shared_ptr<ArenaClient> client;
};

TEST_F(ArenaTest, both_sides_see_the_same_bytes) {
  EXPECT_EQ(client->generation(), 5u);
  const SlotRef ref = assign(3, 1, 2, 8192);
  auto page = client->page_to_write(layout, ref);
  ASSERT_TRUE(page.ok()) << page.error().message;
  ASSERT_EQ(page->size(), layout.page_bytes(2));
  (*page)[0] = std::byte{17};
  page->back() = std::byte{18};
  const MutableByteView seen = owner->payload(8192, layout.page_bytes(2));
  EXPECT_EQ(seen.front(), std::byte{17});
  EXPECT_EQ(seen.back(), std::byte{18});
}

TEST_F(ArenaTest, segment_is_there_when_its_bit_is_set) {
  const SlotRef ref = assign(0, 1, 8, 0, SlotState::filling);
  EXPECT_EQ(client->segment(layout, ref, 0).error().code, Code::busy);
  owner->slot_segments(0, 0b0101);
  EXPECT_TRUE(client->segment(layout, ref, 0).ok());
  EXPECT_EQ(client->segment(layout, ref, 1).error().code, Code::busy);
  const auto third = client->segment(layout, ref, 2);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(third->size(), layout.segment_bytes(2, 8));
  EXPECT_EQ(third->data() - client->page(layout, ref)->data(),
            static_cast<std::ptrdiff_t>(layout.segment_offset(2, 8)));
  EXPECT_EQ(client->segment(layout, ref, 4).error().code, Code::invalid);
}

TEST_F(ArenaTest, stale_references_are_refused) {
  const SlotRef ref = assign(1, 7, 1, 0);
  EXPECT_TRUE(client->current(ref));
  owner->slot_free(1);
  EXPECT_FALSE(client->current(ref));
  EXPECT_EQ(client->page(layout, ref).error().code, Code::stale);
  assign(1, 8, 1, 0);
  EXPECT_FALSE(client->current(ref));
  EXPECT_EQ(client->page_to_write(layout, ref).error().code, Code::stale);
  SlotRef none = ref;
  none.generation = 0;
  EXPECT_FALSE(client->current(none));
  none.slot = 1000;
  EXPECT_FALSE(client->current(none));
}

TEST_F(ArenaTest, sealed_slots_are_not_written) {
  const SlotRef ref = assign(2, 1, 1, 0);
  EXPECT_TRUE(client->page_to_write(layout, ref).ok());
  owner->slot_state(2, SlotState::sealed);
  EXPECT_EQ(client->page_to_write(layout, ref).error().code, Code::denied);
  EXPECT_TRUE(client->page(layout, ref).ok());
}

TEST_F(ArenaTest, wrong_lengths_are_refused) {
  const SlotRef ref = assign(2, 1, 2, 0);
  SlotRef longer = ref;
  longer.page_blocks = 8;
  longer.count = 8;
  EXPECT_EQ(client->page(layout, longer).error().code, Code::corrupt);
  SlotRef past = ref;
  past.first = 1;
  past.count = 2;
  EXPECT_EQ(client->page(layout, past).error().code, Code::corrupt);
  // A slot shorter than its page: an index page that lies.
  owner->slot_assign({9, 1, 8, 0, 4096, SlotState::granted});
  EXPECT_EQ(client->page(layout, {9, 1, 8, 0, 8}).error().code, Code::corrupt);
  EXPECT_EQ(client->slot_to_write(ref, layout.page_bytes(2) + 1).error().code, Code::corrupt);
}

TEST_F(ArenaTest, index_that_points_outside_is_refused) {
  const SlotRef ref = assign(0, 1, 1, 0);
  // What a broken owner would do; the owner's own functions assert.
  void* base = ::mmap(nullptr, owner->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, owner->fd(), 0);
  ASSERT_NE(base, MAP_FAILED);
  auto* entry = reinterpret_cast<SlotEntry*>(static_cast<std::byte*>(base) + sizeof(ArenaHeader));
  entry->offset = owner->bytes();
  EXPECT_EQ(client->page(layout, ref).error().code, Code::corrupt);
  entry->offset = 100;
  EXPECT_EQ(client->page(layout, ref).error().code, Code::corrupt);
  entry->offset = 4096;
  entry->bytes = ~std::uint64_t{0};
  EXPECT_EQ(client->page(layout, ref).error().code, Code::corrupt);
  ::munmap(base, owner->bytes());
}

TEST_F(ArenaTest, broken_regions_are_refused) {
  EXPECT_EQ(ArenaClient::map(owner->fd(), owner->bytes() + 4096).error().code, Code::corrupt);
  Fd plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), 8192), 0);
  EXPECT_EQ(ArenaClient::map(plain.get(), 8192).error().code, Code::corrupt);  // could shrink
  ASSERT_EQ(::fcntl(plain.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(ArenaClient::map(plain.get(), 8192).error().code, Code::corrupt);  // no header
  ArenaHeader header{};
  ASSERT_EQ(::pread(owner->fd(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  ++header.slots_max;
  ASSERT_EQ(::pwrite(plain.get(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  EXPECT_EQ(ArenaClient::map(plain.get(), 8192).error().code, Code::corrupt);  // does not fit
  --header.slots_max;
  ++header.format;
  ASSERT_EQ(::pwrite(plain.get(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  EXPECT_EQ(ArenaClient::map(plain.get(), 8192).error().code, Code::unsupported);
}

TEST_F(ArenaTest, owner_refuses_senseless_options) {
  EXPECT_EQ(
      ArenaOwner::create({.name = "x", .payload_bytes = 4096, .slots_max = 0, .entries_max = 1}).error().code,
      Code::invalid);
  EXPECT_EQ(
      ArenaOwner::create({.name = "x", .payload_bytes = 0, .slots_max = 1, .entries_max = 1}).error().code,
      Code::invalid);
}

TEST_F(ArenaTest, readiness_moves_and_goes_stale) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  EXPECT_EQ(client->readiness(handle).failed_block, 0u);  // not open
  owner->entry_open(handle);
  EXPECT_EQ(client->readiness(handle).groups, 0u);
  EXPECT_EQ(client->readiness(handle).failed_block, wire::block_none);
  owner->entry_set(handle, {3, wire::block_none});
  EXPECT_EQ(client->readiness(handle).groups, 3u);
  owner->entry_set(handle, {3, 12});
  EXPECT_EQ(client->readiness(handle).failed_block, 12u);
  owner->entry_close(handle);
  entries.give_back(handle);
  const std::uint32_t next = *entries.take();
  ASSERT_EQ(entry_index(next), entry_index(handle));
  owner->entry_open(next);
  EXPECT_EQ(client->readiness(handle).failed_block, 0u);
  EXPECT_EQ(client->readiness(next).failed_block, wire::block_none);
  EXPECT_EQ(client->readiness(0xffffffff).failed_block, 0u);
}

// The waits below would take this long if nobody woke them.
constexpr Duration far_away = seconds(60);

TEST_F(ArenaTest, waiter_is_woken_by_readiness) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  std::thread writer([&] {
    for (std::uint32_t groups = 1; groups <= 4; ++groups)
      owner->entry_set(handle, {groups, wire::block_none});
  });
  client->wait(handle, 3, far_away);
  EXPECT_EQ(client->readiness(handle).groups, 4u);
  writer.join();
}

TEST_F(ArenaTest, waiter_is_woken_by_failure_of_a_block) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  std::thread writer([&] { owner->entry_set(handle, {1, 2}); });
  client->wait(handle, 3, far_away);
  EXPECT_EQ(client->readiness(handle).failed_block, 2u);
  writer.join();
}

TEST_F(ArenaTest, waiter_is_woken_by_closing) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  std::thread writer([&] { owner->entry_close(handle); });
  client->wait(handle, 0, far_away);
  EXPECT_EQ(client->readiness(handle).failed_block, 0u);
  writer.join();
}

TEST_F(ArenaTest, end_of_the_owner_fails_everything_and_wakes) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  owner->entry_set(handle, {2, wire::block_none});
  std::thread loop_thread([&] { client->fail(); });
  client->wait(handle, 2, far_away);
  EXPECT_TRUE(client->failed());
  EXPECT_EQ(client->readiness(handle).failed_block, 0u);
  loop_thread.join();
}

TEST_F(ArenaTest, wait_ends_at_its_bound) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  client->wait(handle, 0, milliseconds(1));
  EXPECT_EQ(client->readiness(handle).groups, 0u);
}

// The futex is shared, not private: a waiter in another process wakes.
TEST_F(ArenaTest, waiter_in_another_process_is_woken) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    client->wait(handle, 7, far_away);
    ::_exit(client->readiness(handle).groups == 8 ? 0 : 1);
  }
  owner->entry_set(handle, {8, wire::block_none});
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace di::kv
