#include "kv/arena.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <new>

#include "base/clock.h"
#include "kv/slots.h"

namespace di::kv {

namespace {

constexpr std::uint64_t arena_magic = 0x30414e4552414944;  // "DIARENA0" read as a little-endian number
constexpr std::uint64_t page_align = 4096;
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A waiter cannot write the (read-only) wake word when the owner has died, so fail() may slip in
// between its look and its sleep: it looks again at least this often.
constexpr Duration wait_slice = milliseconds(20);

std::uint64_t index_bytes(std::uint64_t slots, std::uint64_t entries) {
  return align_up(sizeof(ArenaHeader) + slots * sizeof(SlotEntry) + entries * sizeof(ReadyEntry), page_align);
}

// Shared between processes, hence without FUTEX_PRIVATE_FLAG.
void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
            0);
}
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen, Duration at_most) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(at_most.count() / 1'000'000'000);
  limit.tv_nsec = static_cast<long>(at_most.count() % 1'000'000'000);
  ::syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

Error corrupt(std::string what) {
  return Error{Code::corrupt, 0, "arena: " + std::move(what)};
}
Error stale() {
  return Error{Code::stale, 0, "arena: the slot has another generation"};
}

}  // namespace

// ---- owner

Result<std::unique_ptr<ArenaOwner>> ArenaOwner::create(const Options& options) {
  if (options.slots_max == 0 || options.slots_max > slots_max_limit || options.entries_max == 0 ||
      options.entries_max > entries_max_limit || options.payload_bytes < page_align) {
    return Error{Code::invalid, 0, "arena: counts of slots and entries or the payload are out of range"};
  }
  const std::uint64_t payload_offset = index_bytes(options.slots_max, options.entries_max);
  const std::uint64_t bytes = payload_offset + align_up(options.payload_bytes, page_align);
  Fd fd(::memfd_create(options.name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return errno_error("arena: memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return errno_error("arena: ftruncate");
  // A client that could shrink the file would kill everybody else with SIGBUS.
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) return errno_error("arena: seal");
  int flags = MAP_SHARED;
  if (options.prefault) flags |= MAP_POPULATE;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd.get(), 0);
  if (base == MAP_FAILED) return errno_error("arena: mmap");
  return std::unique_ptr<ArenaOwner>(
      new ArenaOwner(std::move(fd), static_cast<std::byte*>(base), bytes, options));
}

ArenaOwner::ArenaOwner(Fd fd, std::byte* base, std::uint64_t bytes, const Options& options)
    : fd_(std::move(fd)),
      base_(base),
      bytes_(bytes),
      slots_max_(options.slots_max),
      entries_max_(options.entries_max),
      payload_offset_(index_bytes(options.slots_max, options.entries_max)),
      payload_bytes_(align_up(options.payload_bytes, page_align)) {
  auto* header = new (base_) ArenaHeader{};
  header->magic = arena_magic;
  header->format = arena_format;
  header->generation = options.generation;
  header->slots_max = slots_max_;
  header->entries_max = entries_max_;
  header->payload_offset = payload_offset_;
  header->payload_bytes = payload_bytes_;
  // The entries are all zero bytes: generation 0 is a free slot and an entry that is not open.
}

ArenaOwner::~ArenaOwner() {
  ::munmap(base_, bytes_);
}

std::uint32_t ArenaOwner::generation() const {
  return reinterpret_cast<const ArenaHeader*>(base_)->generation;
}
void ArenaOwner::set_generation(std::uint32_t generation) {
  reinterpret_cast<ArenaHeader*>(base_)->generation = generation;
}

SlotEntry& ArenaOwner::slot_entry(std::uint32_t slot) {
  DI_ASSERT(slot < slots_max_);
  return reinterpret_cast<SlotEntry*>(base_ + sizeof(ArenaHeader))[slot];
}

ReadyEntry& ArenaOwner::ready_entry(std::uint32_t handle) {
  DI_ASSERT(entry_index(handle) < entries_max_);
  std::byte* first = base_ + sizeof(ArenaHeader) + std::uint64_t{slots_max_} * sizeof(SlotEntry);
  return reinterpret_cast<ReadyEntry*>(first)[entry_index(handle)];
}

void ArenaOwner::slot_assign(const Slot& slot) {
  DI_ASSERT(slot.generation != 0 && slot.page_blocks > 0 && slot.state != SlotState::free);
  DI_ASSERT(slot.offset % page_align == 0 && slot.offset <= payload_bytes_ &&
            slot.bytes <= payload_bytes_ - slot.offset);
  SlotEntry& entry = slot_entry(slot.slot);
  DI_ASSERT(entry.generation.load(std::memory_order_relaxed) == 0);
  entry.segments.store(0, std::memory_order_relaxed);
  entry.state.store(static_cast<std::uint32_t>(slot.state), std::memory_order_relaxed);
  entry.page_blocks.store(slot.page_blocks, std::memory_order_relaxed);
  entry.offset.store(slot.offset, std::memory_order_relaxed);
  entry.bytes.store(slot.bytes, std::memory_order_relaxed);
  for (auto& crc : entry.crcs) crc.store(0, std::memory_order_relaxed);
  entry.generation.store(slot.generation, std::memory_order_release);
}

Result<MutableByteView> ArenaOwner::slot_bytes(std::uint32_t slot, std::uint32_t generation) {
  if (slot >= slots_max_ || generation == 0) return stale();
  const SlotEntry& entry = slot_entry(slot);
  if (entry.generation.load(std::memory_order_acquire) != generation) return stale();
  const std::uint64_t offset = entry.offset.load(std::memory_order_acquire);
  const std::uint64_t bytes = entry.bytes.load(std::memory_order_acquire);
  if (entry.generation.load(std::memory_order_acquire) != generation) return stale();
  return payload(offset, bytes);
}

void ArenaOwner::slot_state(std::uint32_t slot, SlotState state) {
  DI_ASSERT(state != SlotState::free);
  slot_entry(slot).state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
}

void ArenaOwner::slot_crcs(std::uint32_t slot, std::span<const std::uint32_t> crcs) {
  DI_ASSERT(crcs.size() <= groups_max);
  SlotEntry& entry = slot_entry(slot);
  for (std::size_t group = 0; group < crcs.size(); ++group) {
    entry.crcs[group].store(crcs[group], std::memory_order_relaxed);
  }
}

void ArenaOwner::slot_segments(std::uint32_t slot, std::uint32_t segments) {
  slot_entry(slot).segments.store(segments, std::memory_order_release);
}

void ArenaOwner::slot_free(std::uint32_t slot) {
  SlotEntry& entry = slot_entry(slot);
  entry.generation.store(0, std::memory_order_release);
  entry.state.store(static_cast<std::uint32_t>(SlotState::free), std::memory_order_relaxed);
  entry.segments.store(0, std::memory_order_relaxed);
}

void ArenaOwner::entry_open(std::uint32_t handle) {
  ReadyEntry& entry = ready_entry(handle);
  DI_ASSERT(entry_generation(handle) != 0 && entry.generation.load(std::memory_order_relaxed) == 0);
  entry.groups.store(0, std::memory_order_relaxed);
  entry.failed_block.store(wire::block_none, std::memory_order_relaxed);
  entry.generation.store(entry_generation(handle), std::memory_order_release);
}

void ArenaOwner::entry_set(std::uint32_t handle, const Readiness& readiness) {
  ReadyEntry& entry = ready_entry(handle);
  DI_ASSERT(entry.generation.load(std::memory_order_relaxed) == entry_generation(handle));
  if (entry.groups.load(std::memory_order_relaxed) == readiness.groups &&
      entry.failed_block.load(std::memory_order_relaxed) == readiness.failed_block) {
    return;
  }
  entry.failed_block.store(readiness.failed_block, std::memory_order_release);
  entry.groups.store(readiness.groups, std::memory_order_release);
  entry.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(entry.wake);
}

void ArenaOwner::entry_close(std::uint32_t handle) {
  ReadyEntry& entry = ready_entry(handle);
  DI_ASSERT(entry.generation.load(std::memory_order_relaxed) == entry_generation(handle));
  entry.generation.store(0, std::memory_order_release);
  entry.wake.fetch_add(1, std::memory_order_release);
  futex_wake_all(entry.wake);
}

MutableByteView ArenaOwner::payload(std::uint64_t offset, std::uint64_t bytes) {
  DI_ASSERT(offset <= payload_bytes_ && bytes <= payload_bytes_ - offset);
  return {base_ + payload_offset_ + offset, bytes};
}

// ---- client

Result<std::shared_ptr<ArenaClient>> ArenaClient::map(int fd, std::uint64_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno_error("arena: fstat");
  if (bytes < page_align || bytes % page_align != 0 || status.st_size < 0 ||
      static_cast<std::uint64_t>(status.st_size) != bytes) {
    return corrupt("the region has another length than announced");
  }
  const int sealed = ::fcntl(fd, F_GET_SEALS);
  if (sealed < 0 || (sealed & F_SEAL_SHRINK) == 0)
    return corrupt("the region is not sealed against shrinking");

  void* first = ::mmap(nullptr, page_align, PROT_READ, MAP_SHARED, fd, 0);
  if (first == MAP_FAILED) return errno_error("arena: mmap");
  const ArenaHeader header = *static_cast<const ArenaHeader*>(first);
  ::munmap(first, page_align);
  if (header.magic != arena_magic) return corrupt("no arena");
  if (header.format != arena_format) return Error{Code::unsupported, 0, "arena: another format"};
  if (header.slots_max == 0 || header.slots_max > slots_max_limit || header.entries_max == 0 ||
      header.entries_max > entries_max_limit ||
      header.payload_offset != index_bytes(header.slots_max, header.entries_max) ||
      header.payload_offset > bytes || header.payload_bytes != bytes - header.payload_offset ||
      header.payload_bytes == 0) {
    return corrupt("the header does not fit the region");
  }

  std::shared_ptr<ArenaClient> client(new ArenaClient);
  client->payload_offset_ = header.payload_offset;
  client->payload_bytes_ = header.payload_bytes;
  client->slots_max_ = header.slots_max;
  client->entries_max_ = header.entries_max;
  client->generation_ = header.generation;
  void* index = ::mmap(nullptr, header.payload_offset, PROT_READ, MAP_SHARED, fd, 0);
  if (index == MAP_FAILED) return errno_error("arena: mmap");
  client->index_ = static_cast<std::byte*>(index);
  void* payload = ::mmap(nullptr, header.payload_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                         static_cast<off_t>(header.payload_offset));
  if (payload == MAP_FAILED) return errno_error("arena: mmap");
  client->payload_ = static_cast<std::byte*>(payload);
  return client;
}

ArenaClient::~ArenaClient() {
  if (index_ != nullptr) ::munmap(index_, payload_offset_);
  if (payload_ != nullptr) ::munmap(payload_, payload_bytes_);
}

Result<ArenaClient::Found> ArenaClient::find(const SlotRef& ref) const {
  if (ref.slot >= slots_max_ || ref.generation == 0) return stale();
  const auto& entry = reinterpret_cast<const SlotEntry*>(index_ + sizeof(ArenaHeader))[ref.slot];
  if (entry.generation.load(std::memory_order_acquire) != ref.generation) return stale();
  Found found{&entry, entry.offset.load(std::memory_order_acquire),
              entry.bytes.load(std::memory_order_acquire)};
  const std::uint32_t page_blocks = entry.page_blocks.load(std::memory_order_acquire);
  if (entry.generation.load(std::memory_order_acquire) != ref.generation) return stale();
  if (found.offset % page_align != 0 || found.offset > payload_bytes_ ||
      found.bytes > payload_bytes_ - found.offset) {
    return corrupt("a slot lies outside the payload");
  }
  if (page_blocks != ref.page_blocks || ref.page_blocks == 0 || ref.first > ref.page_blocks ||
      ref.count > ref.page_blocks - ref.first) {
    return corrupt("a slot holds a page of another length");
  }
  return found;
}

bool ArenaClient::current(const SlotRef& ref) const {
  return find(ref).ok();
}

Result<ByteView> ArenaClient::segment(const Layout& layout, const SlotRef& ref, std::uint32_t group) const {
  if (group >= layout.groups()) return Error{Code::invalid, 0, "arena: no such layer group"};
  const Result<Found> found = find(ref);
  if (!found) return found.error();
  if (layout.page_bytes(ref.page_blocks) > found->bytes) return corrupt("a page does not fit its slot");
  if ((found->entry->segments.load(std::memory_order_acquire) & (1u << group)) == 0) {
    return Error{Code::busy, 0, "arena: the segment is not there"};
  }
  return ByteView(payload_ + found->offset + layout.segment_offset(group, ref.page_blocks),
                  layout.segment_bytes(group, ref.page_blocks));
}

Result<ByteView> ArenaClient::page(const Layout& layout, const SlotRef& ref) const {
  const Result<Found> found = find(ref);
  if (!found) return found.error();
  const std::uint64_t bytes = layout.page_bytes(ref.page_blocks);
  if (bytes > found->bytes) return corrupt("a page does not fit its slot");
  return ByteView(payload_ + found->offset, bytes);
}

Result<MutableByteView> ArenaClient::page_to_write(const Layout& layout, const SlotRef& ref) {
  // Block counts of peers are small; a layout's page of more than page_blocks blocks does not exist.
  if (ref.page_blocks > layout.page_blocks()) return corrupt("a slot holds a page of another length");
  if (ref.page_blocks == 0) return stale();
  return slot_to_write(ref, layout.page_bytes(ref.page_blocks));
}

Result<MutableByteView> ArenaClient::slot_to_write(const SlotRef& ref, std::uint64_t bytes) {
  const Result<Found> found = find(ref);
  if (!found) return found.error();
  const std::uint32_t state = found->entry->state.load(std::memory_order_acquire);
  if (state != static_cast<std::uint32_t>(SlotState::granted) &&
      state != static_cast<std::uint32_t>(SlotState::filling)) {
    return Error{Code::denied, 0, "arena: the slot is sealed"};
  }
  if (bytes > found->bytes) return corrupt("a page does not fit its slot");
  return MutableByteView(payload_ + found->offset, bytes);
}

const ReadyEntry* ArenaClient::ready_entry(std::uint32_t handle) const {
  if (entry_index(handle) >= entries_max_ || entry_generation(handle) == 0) return nullptr;
  const std::byte* first = index_ + sizeof(ArenaHeader) + std::uint64_t{slots_max_} * sizeof(SlotEntry);
  return &reinterpret_cast<const ReadyEntry*>(first)[entry_index(handle)];
}

Readiness ArenaClient::readiness(std::uint32_t handle) const {
  constexpr Readiness gone{0, 0};
  if (failed()) return gone;
  const ReadyEntry* entry = ready_entry(handle);
  if (entry == nullptr || entry->generation.load(std::memory_order_acquire) != entry_generation(handle))
    return gone;
  Readiness seen{entry->groups.load(std::memory_order_acquire),
                 entry->failed_block.load(std::memory_order_acquire)};
  if (entry->generation.load(std::memory_order_acquire) != entry_generation(handle)) return gone;
  seen.groups = std::min(seen.groups, groups_max);
  return seen;
}

void ArenaClient::wait(std::uint32_t handle, std::uint32_t group, Duration at_most) const {
  const MonotonicClock clock;
  const Instant end = clock.now() + at_most;
  const ReadyEntry* entry = ready_entry(handle);
  if (entry == nullptr) return;
  while (true) {
    const std::uint32_t seen = entry->wake.load(std::memory_order_acquire);
    const Readiness now = readiness(handle);
    if (now.groups > group || now.failed_block != wire::block_none) return;
    const Duration left = end - clock.now();
    if (left.count() <= 0) return;
    futex_wait(entry->wake, seen, std::min(left, wait_slice));
  }
}

void ArenaClient::fail() {
  failed_.store(true, std::memory_order_release);
  for (std::uint32_t index = 0; index < entries_max_; ++index) {
    // Generation 1: any handle with this index finds the entry.
    futex_wake_all(ready_entry((1u << 16) | index)->wake);
  }
}

}  // namespace di::kv
