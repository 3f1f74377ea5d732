// The memory of an arena over the death of its owner.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include "base/checksum.h"
#include "base/rng.h"
#include "kv/arena.h"

namespace di::kv {
namespace {

constexpr std::uint32_t slots = 8;

struct Kept {
  std::unique_ptr<ArenaOwner> owner;
  Former former;
};

struct ArenaRecoveryTest : testing::Test {
  ArenaRecoveryTest() : layout(layout_v41()) {
    options.name = "arena-test";
    options.generation = 5;
    options.payload_bytes = layout.page_bytes(2) * slots;
    options.slots_max = slots;
    options.entries_max = 8;
    owner = *ArenaOwner::create(options);
    EXPECT_TRUE(owner->set_layout(layout));
  }

  // The owner dies; its memory was parked.
  Kept restart() {
    Fd parked(::dup(owner->fd()));
    owner.reset();
    Kept kept;
    options.generation += 1;
    auto taken = ArenaOwner::take_over(std::move(parked), options, kept.former);
    EXPECT_TRUE(taken.ok()) << taken.error().message;
    kept.owner = *std::move(taken);
    return kept;
  }

  static Key key_of(std::uint64_t number, std::uint32_t block) {
    Key key;
    put_le<std::uint64_t>(key.raw.data(), number + 1);
    put_le<std::uint32_t>(key.raw.data() + 8, block);
    return key;
  }
  PageRecord record_of(std::uint64_t number, std::uint32_t blocks, ByteView page) const {
    PageRecord record;
    record.number = number;
    record.tenant = number * 0x100000001ULL;
    record.parent = key_of(number, 1000);
    for (std::uint32_t block = 0; block < blocks; ++block) record.keys.push_back(key_of(number, block));
    for (std::uint32_t group = 0; group < layout.groups(); ++group) {
      record.crcs.push_back(
          crc32c(page.subspan(layout.segment_offset(group, blocks), layout.segment_bytes(group, blocks))));
    }
    return record;
  }
  static ArenaOwner::Slot slot_of(const Layout& layout, std::uint32_t slot, std::uint32_t generation,
                                  std::uint32_t blocks) {
    return {
        slot, generation, blocks, layout.page_bytes(2) * slot, layout.page_bytes(blocks), SlotState::granted};
  }
  // The steps of a page's life up to `steps` of them; true when it is sealed then.
  bool seal(ArenaOwner& by, std::uint32_t slot, std::uint32_t generation, std::uint64_t number,
            std::uint32_t blocks, int steps = 6) const {
    const ArenaOwner::Slot place = slot_of(layout, slot, generation, blocks);
    if (steps-- <= 0) return false;
    by.slot_assign(place);
    if (steps-- <= 0) return false;
    const MutableByteView page = by.payload(place.offset, place.bytes);
    for (std::size_t i = 0; i < page.size(); i += 512)
      page[i] = static_cast<std::byte>((number * 131 + i / 512) & 0xff);
    const PageRecord record = record_of(number, blocks, page);
    if (steps-- <= 0) return false;
    by.slot_crcs(slot, record.crcs);
    if (steps-- <= 0) return false;
    by.slot_segments(slot, (1u << layout.groups()) - 1);
    if (steps-- <= 0) return false;
    EXPECT_TRUE(by.slot_record(slot, record));
    if (steps-- <= 0) return false;
    by.slot_state(slot, SlotState::sealed);
    return true;
  }
  // Whatever is kept is a whole page, and its bytes are what its checksums say.
  void expect_right(Kept& kept) const {
    for (const FormerSlot& slot : kept.former.slots) {
      if (!slot.record) continue;
      const MutableByteView page = kept.owner->payload(slot.place.offset, slot.place.bytes);
      PageRecord right = record_of(slot.record->number, slot.page_blocks, page);
      right.stored = slot.record->stored;
      EXPECT_TRUE(*slot.record == right) << "page " << slot.record->number;
    }
  }

  Layout layout;
  ArenaOwner::Options options;
  std::unique_ptr<ArenaOwner> owner;
};

TEST_F(ArenaRecoveryTest, sealed_pages_are_found_with_what_they_hold) {
  seal(*owner, 0, 1, 100, 2);
  seal(*owner, 3, 7, 101, 1);
  owner->slot_stored(3);
  owner->slot_assign(slot_of(layout, 5, 2, 1));  // granted: no page
  Kept kept = restart();
  EXPECT_EQ(kept.owner->epoch(), 2u);
  EXPECT_EQ(kept.owner->generation(), 6u);
  ASSERT_TRUE(kept.former.layout.has_value());
  EXPECT_EQ(*kept.former.layout, layout);
  ASSERT_EQ(kept.former.slots.size(), 3u);
  expect_right(kept);
  const FormerSlot& first = kept.former.slots[0];
  EXPECT_EQ(first.place, (SlotPlace{0, 1, 0, layout.page_bytes(2)}));
  ASSERT_TRUE(first.record.has_value());
  EXPECT_EQ(first.record->number, 100u);
  EXPECT_FALSE(first.record->stored);
  ASSERT_TRUE(kept.former.slots[1].record.has_value());
  EXPECT_TRUE(kept.former.slots[1].record->stored);
  EXPECT_FALSE(kept.former.slots[2].record.has_value());
  EXPECT_EQ(kept.former.slots[2].place.slot, 5u);
}

TEST_F(ArenaRecoveryTest, numbers_of_before_are_not_used_again) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  seal(*owner, 2, 9, 1, 1);
  owner->slot_free(2);
  Kept kept = restart();
  EXPECT_EQ(kept.former.slots.size(), 0u);
  EXPECT_EQ(kept.former.slot_generations.at(2), 9u);
  EXPECT_EQ(kept.former.entry_generations.at(entry_index(handle)), entry_generation(handle));
  SlotPool pool = *SlotPool::create({options.payload_bytes, layout.page_bytes(1), slots});
  for (std::uint32_t slot = 0; slot < slots; ++slot)
    pool.restore_generation(slot, kept.former.slot_generations[slot]);
  SlotPlace last;
  for (int i = 0; i < 3; ++i) last = *pool.take(layout.page_bytes(1));
  EXPECT_EQ(last.slot, 2u);
  EXPECT_EQ(last.generation, 10u);
}

TEST_F(ArenaRecoveryTest, readiness_of_before_is_failed_and_its_waiters_wake) {
  EntryPool entries(8);
  const std::uint32_t handle = *entries.take();
  owner->entry_open(handle);
  auto client = *ArenaClient::map(owner->fd(), owner->bytes());
  std::thread taker([&] { EXPECT_EQ(restart().former.entry_generations.size(), 8u); });
  client->wait(handle, 0, seconds(60));
  EXPECT_EQ(client->readiness(handle).failed_block, 0u);
  taker.join();
}

TEST_F(ArenaRecoveryTest, death_between_any_two_steps_of_sealing) {
  for (int steps = 0; steps <= 6; ++steps) {
    SCOPED_TRACE(steps);
    seal(*owner, 0, static_cast<std::uint32_t>(steps) + 1, 10, 2, 6);
    const bool sealed = seal(*owner, 1, static_cast<std::uint32_t>(steps) + 1, 11, 2, steps);
    Kept kept = restart();
    expect_right(kept);
    std::size_t records = 0;
    for (const FormerSlot& slot : kept.former.slots) records += slot.record ? 1 : 0;
    EXPECT_EQ(records, sealed ? 2u : 1u);
    EXPECT_EQ(kept.former.slots.size(), steps == 0 ? 1u : 2u);
    // The next owner goes on with the memory as if nothing had been there.
    owner = std::move(kept.owner);
    for (const FormerSlot& slot : kept.former.slots) owner->slot_free(slot.place.slot);
  }
}

// A process that seals and frees as fast as it can, killed at any instruction.
TEST_F(ArenaRecoveryTest, killed_at_random_while_it_seals) {
  constexpr std::uint64_t seed = 4;
  std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* steps = new (shared) std::atomic<std::uint64_t>(0);
  std::size_t kept_pages = 0;
  std::uint32_t generation = 1;
  for (int round = 0; round < 40; ++round) {
    *steps = 0;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Rng own(seed + static_cast<std::uint64_t>(round));
      std::uint32_t next = generation;
      bool taken[slots] = {};
      while (true) {
        const auto slot = static_cast<std::uint32_t>(own.below(slots));
        if (taken[slot]) owner->slot_free(slot);
        seal(*owner, slot, ++next, own.below(1u << 30), 1 + static_cast<std::uint32_t>(own.below(2)));
        taken[slot] = true;
        steps->fetch_add(1, std::memory_order_release);
      }
    }
    const std::uint64_t until = rng.below(40);
    while (steps->load(std::memory_order_acquire) < until) std::this_thread::yield();
    ::kill(child, SIGKILL);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    Kept kept = restart();
    expect_right(kept);
    for (const FormerSlot& slot : kept.former.slots) kept_pages += slot.record ? 1 : 0;
    for (const std::uint32_t last : kept.former.slot_generations) generation = std::max(generation, last);
    owner = std::move(kept.owner);
    for (const FormerSlot& slot : kept.former.slots) owner->slot_free(slot.place.slot);
  }
  EXPECT_GT(kept_pages, 40u);
  ::munmap(shared, 4096);
}

TEST_F(ArenaRecoveryTest, a_damaged_record_is_dropped_whichever_byte_it_is) {
  seal(*owner, 0, 1, 100, 2);
  const ArenaPlan plan = ArenaPlan::of(slots, options.entries_max, arena_page_bytes);
  void* base = ::mmap(nullptr, owner->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, owner->fd(), 0);
  ASSERT_NE(base, MAP_FAILED);
  auto* bytes = static_cast<std::byte*>(base);
  const std::uint64_t mapped = owner->bytes();
  SlotRecord record;
  std::memcpy(static_cast<void*>(&record), bytes + plan.records, sizeof record);
  std::vector<std::uint64_t> places;
  // Everything of the record but what is outside its checksum, its two keys, and the slot's checksums.
  for (std::uint64_t at = 4; at < sizeof(SlotRecord); ++at) {
    if (at < offsetof(SlotRecord, stored) || at >= offsetof(SlotRecord, checksum))
      places.push_back(plan.records + at);
  }
  for (std::uint64_t at = 0; at < 2 * sizeof(Key); ++at)
    places.push_back(plan.keys + record.key_first * sizeof(Key) + at);
  for (std::uint64_t at = 0; at < 4 * layout.groups(); ++at)
    places.push_back(plan.slots + offsetof(SlotEntry, crcs) + at);
  for (const std::uint64_t place : places) {
    const Bytes index(bytes, bytes + plan.layout);
    bytes[place] ^= std::byte{0x10};
    Kept kept = restart();
    ASSERT_EQ(kept.former.slots.size(), 1u);
    EXPECT_FALSE(kept.former.slots[0].record.has_value()) << "byte " << place;
    EXPECT_EQ(kept.former.records_none, 1u);
    owner = std::move(kept.owner);
    // As it was, but for the owner.
    std::copy(index.begin() + sizeof(ArenaHeader), index.end(), bytes + sizeof(ArenaHeader));
  }
  Kept kept = restart();
  EXPECT_TRUE(kept.former.slots.at(0).record.has_value());
  ::munmap(base, mapped);
}

TEST_F(ArenaRecoveryTest, memory_of_another_kind_is_refused) {
  const auto refused = [&](Fd fd, const ArenaOwner::Options& wanted) {
    Former former;
    return ArenaOwner::take_over(std::move(fd), wanted, former).error().code;
  };
  ArenaOwner::Options other = options;
  other.payload_bytes *= 2;
  EXPECT_EQ(refused(Fd(::dup(owner->fd())), other), Code::invalid);
  other = options;
  other.huge_pages = HugePages::on;
  EXPECT_EQ(refused(Fd(::dup(owner->fd())), other), Code::invalid);
  Fd plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), 8192), 0);
  EXPECT_EQ(refused(Fd(::dup(plain.get())), options), Code::corrupt);  // not sealed
  ASSERT_EQ(::fcntl(plain.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_EQ(refused(Fd(::dup(plain.get())), options), Code::corrupt);  // no header
  ArenaHeader header{};
  ASSERT_EQ(::pread(owner->fd(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  header.id[0] ^= 1;
  ASSERT_EQ(::pwrite(owner->fd(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  EXPECT_EQ(refused(Fd(::dup(owner->fd())), options), Code::corrupt);  // checksum of the header
  header.format += 1;
  ASSERT_EQ(::pwrite(owner->fd(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  EXPECT_EQ(refused(Fd(::dup(owner->fd())), options), Code::unsupported);
}

TEST_F(ArenaRecoveryTest, a_process_of_before_is_seen_until_it_lets_go) {
  auto client = *ArenaClient::map(owner->fd(), owner->bytes());
  EXPECT_FALSE(owner->former_users());  // its clients are of the present owner
  const SlotRef ref{0, 1, 2, 0, 2};
  seal(*owner, 0, 1, 100, 2);
  Kept kept = restart();
  EXPECT_TRUE(kept.owner->former_users());
  EXPECT_TRUE(client->segment(layout, ref, 0).ok());  // what it had pinned stays readable
  auto again = *ArenaClient::map(kept.owner->fd(), kept.owner->bytes(), client->mapping());
  EXPECT_EQ(again->mapping(), client->mapping());
  EXPECT_EQ(again->generation(), 6u);
  EXPECT_TRUE(kept.owner->former_users());
  std::shared_ptr<ArenaClient> engine = client;
  client.reset();
  EXPECT_TRUE(kept.owner->former_users());  // the engine thread still has it
  engine.reset();
  EXPECT_FALSE(kept.owner->former_users());
  EXPECT_TRUE(again->segment(layout, ref, 0).ok());
}

TEST_F(ArenaRecoveryTest, a_process_of_before_that_is_killed_is_gone) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto client = ArenaClient::map(owner->fd(), owner->bytes());
    owner.reset();
    if (!client || ::write(ready[1], "1", 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  char one = 0;
  ASSERT_EQ(::read(ready[0], &one, 1), 1);
  Kept kept = restart();
  EXPECT_TRUE(kept.owner->former_users());
  ::kill(child, SIGSTOP);
  EXPECT_TRUE(kept.owner->former_users());  // frozen: it may go on any time
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(kept.owner->former_users());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(ArenaRecoveryTest, another_memory_is_mapped_anew) {
  auto client = *ArenaClient::map(owner->fd(), owner->bytes());
  auto other = *ArenaOwner::create(options);
  auto mapped = *ArenaClient::map(other->fd(), other->bytes(), client->mapping());
  EXPECT_NE(mapped->mapping(), client->mapping());
}

// A kill while it is written anew, at each rank that comes back, would lose every page.
TEST_F(ArenaRecoveryTest, a_layout_that_is_known_is_not_written_again) {
  const ArenaPlan plan = ArenaPlan::of(options.slots_max, options.entries_max, arena_page_bytes);
  std::byte* index = owner->payload(0, 1).data() - plan.payload;
  ASSERT_EQ(::mprotect(index, plan.payload, PROT_READ), 0);
  EXPECT_TRUE(owner->set_layout(layout));  // or the test is killed here
  ASSERT_EQ(::mprotect(index, plan.payload, PROT_READ | PROT_WRITE), 0);
  const Kept kept = restart();
  EXPECT_TRUE(kept.former.layout == layout);
}

TEST_F(ArenaRecoveryTest, who_keeps_a_mapping_sees_that_it_is_given_up_and_is_seen) {
  auto client = *ArenaClient::map(owner->fd(), owner->bytes());
  std::shared_ptr<ArenaMapping> mapping = client->mapping();
  Fd parked(::dup(owner->fd()));
  owner.reset();
  EXPECT_FALSE(mapping->given_up());
  ArenaOwner::give_up(parked.get());
  EXPECT_TRUE(mapping->given_up());
  Former former;
  EXPECT_EQ(ArenaOwner::take_over(Fd(::dup(parked.get())), options, former).error().code, Code::corrupt);
  EXPECT_TRUE(ArenaOwner::mapped(parked.get()));
  client.reset();
  EXPECT_TRUE(ArenaOwner::mapped(parked.get()));  // nobody uses it, and it takes the memory
  mapping.reset();
  EXPECT_FALSE(ArenaOwner::mapped(parked.get()));
  // What is no arena is left alone.
  const Fd other(::memfd_create("other", MFD_CLOEXEC));
  ArenaOwner::give_up(other.get());
  EXPECT_FALSE(ArenaOwner::mapped(other.get()));
}

TEST_F(ArenaRecoveryTest, prefault_keeps_what_is_there) {
  seal(*owner, 0, 1, 100, 2);
  options.prefault = true;
  options.stopped = [] { return true; };
  Former former;
  EXPECT_EQ(ArenaOwner::take_over(Fd(::dup(owner->fd())), options, former).error().code, Code::cancelled);
  EXPECT_EQ(ArenaOwner::create(options).error().code, Code::cancelled);
  options.stopped = nullptr;
  Kept kept = restart();
  expect_right(kept);
  EXPECT_EQ(kept.former.slots.size(), 1u);
}

TEST_F(ArenaRecoveryTest, huge_pages_are_for_the_owner_and_its_clients_alike) {
  options.huge_pages = HugePages::on;
  Result<std::unique_ptr<ArenaOwner>> made = ArenaOwner::create(options);
  options.huge_pages = HugePages::automatic;
  if (!made) {
    EXPECT_EQ(made.error().code, Code::no_space);
    made = ArenaOwner::create(options);  // small ones will do
    ASSERT_TRUE(made.ok()) << made.error().message;
    EXPECT_FALSE((*made)->huge_pages());
    GTEST_SKIP() << "the pool has no huge pages: see /proc/sys/vm/nr_hugepages";
  }
  owner = *std::move(made);
  EXPECT_TRUE(owner->huge_pages());
  EXPECT_TRUE(owner->set_layout(layout));
  seal(*owner, 0, 1, 100, 2);
  auto client = *ArenaClient::map(owner->fd(), owner->bytes());
  options.prefault = true;
  Kept kept = restart();
  EXPECT_TRUE(kept.owner->huge_pages());
  ASSERT_EQ(kept.former.slots.size(), 1u);
  expect_right(kept);
  EXPECT_TRUE(kept.owner->former_users());
  auto again = *ArenaClient::map(kept.owner->fd(), kept.owner->bytes(), client->mapping());
  EXPECT_EQ(again->mapping(), client->mapping());
  EXPECT_TRUE(again->segment(layout, {0, 1, 2, 0, 2}, 0).ok());
  client.reset();
  EXPECT_FALSE(kept.owner->former_users());
  ArenaOwner::give_up(kept.owner->fd());
  EXPECT_TRUE(again->mapping()->given_up());
}

TEST_F(ArenaRecoveryTest, keys_without_room_are_not_recorded) {
  ArenaOwner::Options small = options;
  small.slots_max = 1;
  auto tight = *ArenaOwner::create(small);
  tight->slot_assign(slot_of(layout, 0, 1, 1));
  PageRecord record = record_of(1, 1, tight->payload(0, layout.page_bytes(1)));
  record.keys.resize(arena_keys(1) + 1);
  EXPECT_FALSE(tight->slot_record(0, record));
  record.keys.resize(arena_keys(1));
  EXPECT_TRUE(tight->slot_record(0, record));
  tight->slot_free(0);
  tight->slot_assign(slot_of(layout, 0, 2, 1));
  EXPECT_TRUE(tight->slot_record(0, record));
}

TEST(BuddyPool, runs_are_taken_where_they_were) {
  for (std::uint32_t first = 0; first < 32; ++first) {
    for (std::uint32_t order = 0; order < 5; ++order) {
      BuddyPool pool(32);
      const bool aligned = first % (1u << order) == 0 && first + (1u << order) <= 32;
      ASSERT_EQ(pool.take_at(first, order), aligned) << first << " " << order;
      if (!aligned) continue;
      EXPECT_EQ(pool.units_free(), 32 - (1u << order));
      EXPECT_FALSE(pool.take_at(first, 0));
      EXPECT_FALSE(pool.take_at(0, 5));
      // Everything else is still there.
      std::uint32_t singles = 0;
      while (pool.take(0)) ++singles;
      EXPECT_EQ(singles, 32 - (1u << order));
    }
  }
}

TEST(SlotPool, slots_that_overlap_are_refused) {
  SlotPool pool = *SlotPool::create({4096 * 8, 4096, 4});
  EXPECT_TRUE(pool.restore({1, 5, 4096 * 2, 4096 * 2}).ok());
  EXPECT_TRUE(pool.current(1, 5));
  EXPECT_EQ(pool.bytes_free(), 4096u * 6);
  EXPECT_EQ(pool.restore({1, 6, 0, 4096}).error().code, Code::corrupt);         // taken
  EXPECT_EQ(pool.restore({2, 6, 4096 * 3, 4096}).error().code, Code::corrupt);  // overlaps
  EXPECT_EQ(pool.restore({2, 6, 4096, 4096 * 2}).error().code, Code::corrupt);  // not aligned
  EXPECT_EQ(pool.restore({2, 6, 100, 4096}).error().code, Code::corrupt);       // no unit
  EXPECT_EQ(pool.restore({2, 6, 0, 4096 * 3}).error().code, Code::corrupt);     // no power of two
  EXPECT_EQ(pool.restore({2, 6, 4096 * 8, 4096}).error().code, Code::corrupt);  // outside
  EXPECT_EQ(pool.restore({2, 0, 0, 4096}).error().code, Code::corrupt);         // free
  EXPECT_EQ(pool.restore({9, 1, 0, 4096}).error().code, Code::corrupt);         // no such slot
  pool.give_back(1);
  EXPECT_EQ(pool.bytes_free(), 4096u * 8);
  EXPECT_EQ(pool.take(4096)->slot, 0u);
}

}  // namespace
}  // namespace di::kv
