#include "kv/arena.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>
#include <thread>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/crypto.h"

namespace di::kv {

namespace {

constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// MFD_HUGE_2MB of linux/memfd.h, which defines again what sys/mman.h has.
constexpr unsigned huge_2mib = 21u << 26;
// What a thread takes of the memory at a time.
constexpr std::uint64_t prefault_chunk_bytes = std::uint64_t{64} << 20;
constexpr std::uint32_t prefault_threads_max = 16;
constexpr Duration progress_every = seconds(1);

// A waiter cannot write the (read-only) wake word when the owner has died, so fail() may slip in
// between its look and its sleep: it looks again at least this often.
constexpr Duration wait_slice = milliseconds(20);

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

std::uint32_t order_of(std::uint32_t keys) {
  return static_cast<std::uint32_t>(std::bit_width(keys - 1));
}

Error corrupt(std::string what) {
  return Error{Code::corrupt, 0, "arena: " + std::move(what)};
}
Error stale() {
  return Error{Code::stale, 0, "arena: the slot has another generation"};
}
// A shared lock on one byte of the memory, through a file description of its own: the one that was passed is
// shared with the owner, and so would its locks be.
Result<Fd> lock_byte(int fd, std::uint64_t at) {
  Fd own(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
  if (!own.valid()) return errno_error("arena: open");
  struct flock lock {};
  lock.l_type = F_RDLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(at);
  lock.l_len = 1;
  if (::fcntl(own.get(), F_OFD_SETLK, &lock) != 0) return errno_error("arena: lock");
  return own;
}
// Whether others hold locks below `end`; 0: anywhere.
bool bytes_locked(int fd, std::uint64_t end) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = 0;
  lock.l_len = static_cast<off_t>(end);
  // A lock that cannot be asked for is taken for one that is held.
  return ::fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}
bool in_quarantine(const SlotEntry& entry) {
  return entry.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(SlotState::quarantined);
}

}  // namespace

// ---- owner

Result<ArenaOwner::Memory> ArenaOwner::allocate(const Options& options, std::uint64_t align) {
  Memory memory;
  memory.align = align;
  memory.bytes = ArenaPlan::of(options.slots_max, options.entries_max, align).payload +
                 align_up(options.payload_bytes, align);
  const bool huge = align == arena_huge_page_bytes;
  memory.fd = Fd(::memfd_create(options.name.c_str(),
                                MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | huge_2mib : 0u)));
  if (!memory.fd.valid()) return errno_error("arena: memfd_create");
  if (::ftruncate(memory.fd.get(), static_cast<off_t>(memory.bytes)) != 0)
    return errno_error("arena: ftruncate");
  // A client that could shrink the file would kill everybody else with SIGBUS.
  if (::fcntl(memory.fd.get(), F_ADD_SEALS, seals) != 0) return errno_error("arena: seal");
  // With huge pages this takes all of them out of the pool, or fails: no SIGBUS later.
  void* base = ::mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd.get(), 0);
  if (base == MAP_FAILED) {
    const int why = errno;
    Error error = errno_error("arena: mmap", why);
    if (why == ENOMEM) error.code = Code::no_space;
    return error;
  }
  memory.base = static_cast<std::byte*>(base);
  return memory;
}

Result<std::unique_ptr<ArenaOwner>> ArenaOwner::create(const Options& options) {
  if (options.slots_max == 0 || options.slots_max > slots_max_limit || options.entries_max == 0 ||
      options.entries_max > entries_max_limit || options.payload_bytes < arena_page_bytes) {
    return Error{Code::invalid, 0, "arena: counts of slots and entries or the payload are out of range"};
  }
  Result<Memory> memory = Error{Code::no_space, 0, "arena: no huge pages wanted"};
  if (options.huge_pages != HugePages::off) memory = allocate(options, arena_huge_page_bytes);
  if (!memory && options.huge_pages == HugePages::on) return memory.error().in("huge pages");
  if (!memory) memory = allocate(options, arena_page_bytes);
  if (!memory) return memory.error();
  std::unique_ptr<ArenaOwner> owner(new ArenaOwner(*std::move(memory), options));
  auto* header = new (owner->base_) ArenaHeader{};
  header->magic = arena_magic;
  header->format = arena_format;
  header->generation = options.generation;
  header->slots_max = owner->slots_max_;
  header->entries_max = owner->entries_max_;
  header->payload_offset = owner->plan_.payload;
  header->payload_bytes = owner->payload_bytes_;
  header->align = static_cast<std::uint32_t>(owner->align_);
  header->epoch = owner->epoch_;
  random_bytes(std::as_writable_bytes(std::span(header->id)));
  header->checksum = arena_header_checksum(*header);
  // The entries are all zero bytes: generation 0 is a free slot and an entry that is not open.
  DI_TRY(owner->prefault(options));
  return owner;
}

Result<std::unique_ptr<ArenaOwner>> ArenaOwner::take_over(Fd fd, const Options& options, Former& former) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return errno_error("arena: fstat");
  const int sealed = ::fcntl(fd.get(), F_GET_SEALS);
  if (sealed < 0 || (sealed & seals) != seals) return corrupt("the parked memory is not sealed");
  ArenaHeader header{};
  if (::pread(fd.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header) ||
      header.magic != arena_magic) {
    return corrupt("the parked memory is no arena");
  }
  if (header.format != arena_format) return Error{Code::unsupported, 0, "arena: another format"};
  if (header.checksum != arena_header_checksum(header)) return corrupt("the header is damaged");
  const bool huge = header.align == arena_huge_page_bytes;
  if ((!huge && header.align != arena_page_bytes) || header.slots_max != options.slots_max ||
      header.entries_max != options.entries_max ||
      header.payload_bytes != align_up(options.payload_bytes, header.align) ||
      (huge && options.huge_pages == HugePages::off) || (!huge && options.huge_pages == HugePages::on)) {
    return Error{Code::invalid, 0, "arena: made with another configuration"};
  }
  Memory memory;
  memory.align = header.align;
  memory.bytes = header.payload_offset + header.payload_bytes;
  if (header.payload_offset != ArenaPlan::of(header.slots_max, header.entries_max, header.align).payload ||
      static_cast<std::uint64_t>(status.st_size) != memory.bytes) {
    return corrupt("the header does not fit the region");
  }
  void* base = ::mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return errno_error("arena: mmap");
  memory.base = static_cast<std::byte*>(base);
  memory.fd = std::move(fd);
  std::unique_ptr<ArenaOwner> owner(new ArenaOwner(std::move(memory), options));
  DI_TRY(owner->prefault(options));
  // Before anything is looked at: a client that maps from now on either sees the new epoch and goes away, or
  // has its lock where former_users() finds it.
  owner->epoch_ = header.epoch + 1;
  std::atomic_ref<std::uint32_t>(owner->header().epoch).store(owner->epoch_, std::memory_order_seq_cst);
  owner->set_generation(options.generation);
  owner->read_former(former);
  return owner;
}

ArenaOwner::ArenaOwner(Memory memory, const Options& options)
    : fd_(std::move(memory.fd)),
      base_(memory.base),
      bytes_(memory.bytes),
      align_(memory.align),
      slots_max_(options.slots_max),
      entries_max_(options.entries_max),
      plan_(ArenaPlan::of(slots_max_, entries_max_, align_)),
      payload_bytes_(align_up(options.payload_bytes, align_)),
      key_cells_(arena_keys(slots_max_)) {}

ArenaOwner::~ArenaOwner() {
  ::munmap(base_, bytes_);
}

Status ArenaOwner::prefault(const Options& options) {
  if (align_ == arena_page_bytes && options.huge_pages != HugePages::off) {
    // Where the system allows it for shared memory; otherwise this has no effect.
    ::madvise(base_, bytes_, MADV_HUGEPAGE);
  }
  if (!options.prefault) return {};
  const auto stopped = [&] { return options.stopped && options.stopped(); };
  const Error cancelled{Code::cancelled, 0, "arena: prefault"};
  if (stopped()) return cancelled;
  const std::uint64_t chunks = (bytes_ + prefault_chunk_bytes - 1) / prefault_chunk_bytes;
  std::atomic<std::uint64_t> next{0};
  std::atomic<std::uint64_t> done_bytes{0};
  std::atomic<int> failed{0};
  std::mutex mutex;
  std::condition_variable finished;
  std::uint64_t running =
      std::clamp<std::uint64_t>(std::thread::hardware_concurrency(), 1, prefault_threads_max);
  running = std::min(running, chunks);
  const auto work = [&] {
    for (std::uint64_t chunk = next++; chunk < chunks && failed == 0; chunk = next++) {
      const std::uint64_t from = chunk * prefault_chunk_bytes;
      const std::uint64_t length = std::min(prefault_chunk_bytes, bytes_ - from);
      // Writes nothing: memory that was taken over keeps its bytes.
      if (::madvise(base_ + from, length, MADV_POPULATE_WRITE) != 0) failed = errno;
      done_bytes += length;
    }
    const std::lock_guard lock(mutex);
    if (--running == 0) finished.notify_all();
  };
  std::vector<std::jthread> threads;
  for (std::uint64_t count = running; count > 0; --count) threads.emplace_back(work);
  {
    std::unique_lock lock(mutex);
    while (!finished.wait_for(lock, std::chrono::nanoseconds(progress_every.count()),
                              [&] { return running == 0; })) {
      if (options.progress) options.progress(done_bytes, bytes_);
      if (stopped()) failed = ECANCELED;
    }
  }
  threads.clear();
  if (failed == ECANCELED) return cancelled;
  if (failed != 0) {
    Error error = errno_error("arena: prefault", failed);
    if (failed == ENOMEM || failed == EFAULT) error.code = Code::no_space;
    return error;
  }
  locked_ = ::mlock(base_, bytes_) == 0;
  return {};
}

// Everything that the last owner had given out, and the end of its readiness entries.
void ArenaOwner::read_former(Former& former) {
  for (std::uint32_t index = 0; index < entries_max_; ++index) {
    ReadyEntry& entry = ready_entry(index);
    former.entry_generations.push_back(
        static_cast<std::uint16_t>(entry.last_generation.load(std::memory_order_relaxed)));
    if (entry.generation.load(std::memory_order_relaxed) == 0) continue;
    entry.generation.store(0, std::memory_order_release);
    entry.wake.fetch_add(1, std::memory_order_release);
    futex_wake_all(entry.wake);
  }
  const ByteView descriptor(base_ + plan_.layout, std::min(header().layout_bytes, arena_layout_bytes_max));
  if (!descriptor.empty() && crc32c(descriptor) == header().layout_crc) {
    if (Result<Layout> layout = Layout::decode(descriptor)) former.layout = *std::move(layout);
  }
  for (std::uint32_t slot = 0; slot < slots_max_; ++slot) {
    SlotEntry& entry = slot_entry(slot);
    SlotRecord& record = record_of(slot);
    former.slot_generations.push_back(record.last_generation);
    const std::uint32_t generation = entry.generation.load(std::memory_order_relaxed);
    if (generation == 0) {
      record.key_count = 0;
      continue;
    }
    FormerSlot found;
    found.place = {slot, generation, entry.offset.load(std::memory_order_relaxed),
                   entry.bytes.load(std::memory_order_relaxed)};
    found.page_blocks = entry.page_blocks.load(std::memory_order_relaxed);
    // The caller checks the place against the others'; here only that it lies in the payload.
    if (found.place.offset > payload_bytes_ || found.place.bytes > payload_bytes_ - found.place.offset)
      found.place.bytes = 0;
    const bool sealed =
        entry.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(SlotState::sealed);
    const std::uint32_t cells = arena_keys(slots_max_);
    if (sealed && record.key_count > 0 && record.key_count <= cells && record.key_first < cells &&
        record.key_count <= cells - record.key_first && record.groups <= groups_max &&
        record.checksum == slot_record_checksum(slot, entry, record, keys() + record.key_first) &&
        key_cells_.take_at(record.key_first, order_of(record.key_count))) {
      PageRecord page;
      page.number = record.number;
      page.tenant = record.tenant;
      page.parent = record.parent;
      page.keys.assign(keys() + record.key_first, keys() + record.key_first + record.key_count);
      for (std::uint32_t group = 0; group < record.groups; ++group)
        page.crcs.push_back(entry.crcs[group].load(std::memory_order_relaxed));
      page.stored = record.stored != 0;
      found.record = std::move(page);
    } else {
      // Its cells, if it had any, are whatever the records say that are right.
      record.key_count = 0;
      former.records_none += sealed ? 1 : 0;
    }
    former.slots.push_back(std::move(found));
  }
}

std::uint32_t ArenaOwner::generation() const {
  return header().generation;
}
void ArenaOwner::set_generation(std::uint32_t generation) {
  std::atomic_ref<std::uint32_t>(header().generation).store(generation, std::memory_order_release);
}

bool ArenaOwner::set_layout(const Layout& layout) {
  const Bytes& descriptor = layout.descriptor();
  // Each rank that comes again says what is known.  Writing it anew would leave a moment in which a kill costs
  // the next owner all pages.
  if (header().layout_bytes == descriptor.size() && header().layout_crc == crc32c(descriptor) &&
      std::memcmp(base_ + plan_.layout, descriptor.data(), descriptor.size()) == 0) {
    return true;
  }
  // A next owner that comes in the middle finds no layout, and no sealed page has been written by it yet.
  header().layout_bytes = 0;
  if (descriptor.size() > arena_layout_bytes_max) return false;
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(base_ + plan_.layout, descriptor.data(), descriptor.size());
  header().layout_crc = crc32c(descriptor);
  std::atomic_thread_fence(std::memory_order_release);
  header().layout_bytes = static_cast<std::uint32_t>(descriptor.size());
  return true;
}

bool ArenaOwner::former_users() const {
  return bytes_locked(fd_.get(), epoch_);
}
bool ArenaOwner::mapped(int fd) {
  return bytes_locked(fd, 0);
}

void ArenaOwner::give_up(int fd) {
  std::uint64_t magic = 0;
  struct stat status {};
  if (::pread(fd, &magic, sizeof magic, 0) != static_cast<ssize_t>(sizeof magic) || magic != arena_magic ||
      ::fstat(fd, &status) != 0) {
    return;
  }
  // Huge pages can be written only through a mapping, and are mapped only whole.
  const auto bytes = std::max<std::uint64_t>(static_cast<std::uint64_t>(status.st_blksize), arena_page_bytes);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return;
  std::atomic_ref<std::uint64_t>(static_cast<ArenaHeader*>(base)->magic).store(0, std::memory_order_release);
  ::munmap(base, bytes);
}

SlotEntry& ArenaOwner::slot_entry(std::uint32_t slot) {
  DI_ASSERT(slot < slots_max_);
  return reinterpret_cast<SlotEntry*>(base_ + plan_.slots)[slot];
}

SlotRecord& ArenaOwner::record_of(std::uint32_t slot) {
  DI_ASSERT(slot < slots_max_);
  return reinterpret_cast<SlotRecord*>(base_ + plan_.records)[slot];
}

ReadyEntry& ArenaOwner::ready_entry(std::uint32_t handle) {
  DI_ASSERT(entry_index(handle) < entries_max_);
  return reinterpret_cast<ReadyEntry*>(base_ + plan_.entries)[entry_index(handle)];
}

void ArenaOwner::slot_assign(const Slot& slot) {
  DI_ASSERT(slot.generation != 0 && slot.page_blocks > 0 && slot.state != SlotState::free);
  DI_ASSERT(slot.offset % arena_page_bytes == 0 && slot.offset <= payload_bytes_ &&
            slot.bytes <= payload_bytes_ - slot.offset);
  SlotEntry& entry = slot_entry(slot.slot);
  DI_ASSERT(entry.generation.load(std::memory_order_relaxed) == 0);
  entry.segments.store(0, std::memory_order_relaxed);
  entry.state.store(static_cast<std::uint32_t>(slot.state), std::memory_order_relaxed);
  entry.page_blocks.store(slot.page_blocks, std::memory_order_relaxed);
  entry.offset.store(slot.offset, std::memory_order_relaxed);
  entry.bytes.store(slot.bytes, std::memory_order_relaxed);
  for (auto& crc : entry.crcs) crc.store(0, std::memory_order_relaxed);
  record_of(slot.slot).last_generation = slot.generation;
  entry.generation.store(slot.generation, std::memory_order_release);
}

Result<MutableByteView> ArenaOwner::slot_bytes(std::uint32_t slot, std::uint32_t generation) {
  if (slot >= slots_max_ || generation == 0) return stale();
  const SlotEntry& entry = slot_entry(slot);
  if (entry.generation.load(std::memory_order_acquire) != generation || in_quarantine(entry)) return stale();
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

bool ArenaOwner::slot_record(std::uint32_t slot, const PageRecord& page) {
  const SlotEntry& entry = slot_entry(slot);
  SlotRecord& record = record_of(slot);
  DI_ASSERT(record.key_count == 0 && !page.keys.empty() && page.crcs.size() <= groups_max);
  if (page.keys.size() > UINT16_MAX) return false;
  const auto count = static_cast<std::uint16_t>(page.keys.size());
  const std::optional<std::uint32_t> first = key_cells_.take(order_of(count));
  if (!first) return false;
  std::copy(page.keys.begin(), page.keys.end(), keys() + *first);
  record.key_first = *first;
  record.key_count = count;
  record.groups = static_cast<std::uint8_t>(page.crcs.size());
  record.number = page.number;
  record.tenant = page.tenant;
  record.parent = page.parent;
  record.stored = page.stored ? 1 : 0;
  // With the checksums that are going to be shown: slot_crcs() comes before this.
  record.checksum = slot_record_checksum(slot, entry, record, keys() + *first);
  return true;
}

void ArenaOwner::slot_stored(std::uint32_t slot) {
  record_of(slot).stored = 1;
}

void ArenaOwner::slot_free(std::uint32_t slot) {
  SlotEntry& entry = slot_entry(slot);
  entry.generation.store(0, std::memory_order_release);
  SlotRecord& record = record_of(slot);
  if (record.key_count > 0) key_cells_.give_back(record.key_first, order_of(record.key_count));
  record.key_count = 0;
  entry.state.store(static_cast<std::uint32_t>(SlotState::free), std::memory_order_relaxed);
  entry.segments.store(0, std::memory_order_relaxed);
}

void ArenaOwner::entry_open(std::uint32_t handle) {
  ReadyEntry& entry = ready_entry(handle);
  DI_ASSERT(entry_generation(handle) != 0 && entry.generation.load(std::memory_order_relaxed) == 0);
  entry.groups.store(0, std::memory_order_relaxed);
  entry.failed_block.store(wire::block_none, std::memory_order_relaxed);
  entry.last_generation.store(entry_generation(handle), std::memory_order_relaxed);
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
  return {base_ + plan_.payload + offset, bytes};
}

// ---- client

ArenaMapping::~ArenaMapping() {
  if (index_ != nullptr) ::munmap(index_, plan_.payload);
  if (payload_ != nullptr) ::munmap(payload_, payload_bytes_);
}

bool ArenaMapping::given_up() const {
  const auto& magic = reinterpret_cast<const std::atomic<std::uint64_t>&>(
      reinterpret_cast<const ArenaHeader*>(index_)->magic);
  return magic.load(std::memory_order_acquire) != arena_magic;
}

Result<std::shared_ptr<ArenaClient>> ArenaClient::map(int fd, std::uint64_t bytes,
                                                      std::shared_ptr<ArenaMapping> before) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return errno_error("arena: fstat");
  if (bytes < arena_page_bytes || bytes % arena_page_bytes != 0 || status.st_size < 0 ||
      static_cast<std::uint64_t>(status.st_size) != bytes) {
    return corrupt("the region has another length than announced");
  }
  const int sealed = ::fcntl(fd, F_GET_SEALS);
  if (sealed < 0 || (sealed & F_SEAL_SHRINK) == 0)
    return corrupt("the region is not sealed against shrinking");

  ArenaHeader header{};
  const auto read_header = [&] {
    return ::pread(fd, &header, sizeof header, 0) == static_cast<ssize_t>(sizeof header);
  };
  if (!read_header()) return errno_error("arena: read");
  if (header.magic != arena_magic) return corrupt("no arena");
  if (header.format != arena_format) return Error{Code::unsupported, 0, "arena: another format"};
  if (header.slots_max == 0 || header.slots_max > slots_max_limit || header.entries_max == 0 ||
      header.entries_max > entries_max_limit ||
      (header.align != arena_page_bytes && header.align != arena_huge_page_bytes) ||
      header.payload_offset != ArenaPlan::of(header.slots_max, header.entries_max, header.align).payload ||
      header.payload_offset > bytes || header.payload_bytes != bytes - header.payload_offset ||
      header.payload_bytes == 0) {
    return corrupt("the header does not fit the region");
  }

  std::shared_ptr<ArenaClient> client(new ArenaClient);
  const std::uint32_t epoch = header.epoch;
  Result<Fd> used = lock_byte(fd, epoch);
  if (!used) return used.error();
  client->lock_ = *std::move(used);
  if (!read_header()) return errno_error("arena: read");
  if (header.epoch != epoch) return Error{Code::busy, 0, "arena: its owner has just changed"};

  client->generation_ = header.generation;
  if (before != nullptr && before->id_ == header.id && before->payload_bytes_ == header.payload_bytes &&
      before->slots_max_ == header.slots_max && before->entries_max_ == header.entries_max) {
    client->mapping_ = std::move(before);
    return client;
  }
  std::shared_ptr<ArenaMapping> mapping(new ArenaMapping);
  mapping->plan_ = ArenaPlan::of(header.slots_max, header.entries_max, header.align);
  mapping->payload_bytes_ = header.payload_bytes;
  mapping->slots_max_ = header.slots_max;
  mapping->entries_max_ = header.entries_max;
  mapping->id_ = header.id;
  Result<Fd> kept = lock_byte(fd, arena_mapping_lock_at);
  if (!kept) return kept.error();
  mapping->lock_ = *std::move(kept);
  void* index = ::mmap(nullptr, header.payload_offset, PROT_READ, MAP_SHARED, fd, 0);
  if (index == MAP_FAILED) return errno_error("arena: mmap");
  mapping->index_ = static_cast<std::byte*>(index);
  void* payload = ::mmap(nullptr, header.payload_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                         static_cast<off_t>(header.payload_offset));
  if (payload == MAP_FAILED) return errno_error("arena: mmap");
  mapping->payload_ = static_cast<std::byte*>(payload);
  client->mapping_ = std::move(mapping);
  return client;
}

Result<ArenaClient::Found> ArenaClient::find(const SlotRef& ref) const {
  if (ref.slot >= mapping_->slots_max_ || ref.generation == 0) return stale();
  const auto& entry = reinterpret_cast<const SlotEntry*>(mapping_->index_ + mapping_->plan_.slots)[ref.slot];
  if (entry.generation.load(std::memory_order_acquire) != ref.generation || in_quarantine(entry))
    return stale();
  Found found{&entry, entry.offset.load(std::memory_order_acquire),
              entry.bytes.load(std::memory_order_acquire)};
  const std::uint32_t page_blocks = entry.page_blocks.load(std::memory_order_acquire);
  if (entry.generation.load(std::memory_order_acquire) != ref.generation) return stale();
  if (found.offset % arena_page_bytes != 0 || found.offset > mapping_->payload_bytes_ ||
      found.bytes > mapping_->payload_bytes_ - found.offset) {
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
  return ByteView(mapping_->payload_ + found->offset + layout.segment_offset(group, ref.page_blocks),
                  layout.segment_bytes(group, ref.page_blocks));
}

Result<ByteView> ArenaClient::page(const Layout& layout, const SlotRef& ref) const {
  const Result<Found> found = find(ref);
  if (!found) return found.error();
  const std::uint64_t bytes = layout.page_bytes(ref.page_blocks);
  if (bytes > found->bytes) return corrupt("a page does not fit its slot");
  return ByteView(mapping_->payload_ + found->offset, bytes);
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
  return MutableByteView(mapping_->payload_ + found->offset, bytes);
}

const ReadyEntry* ArenaClient::ready_entry(std::uint32_t handle) const {
  if (entry_index(handle) >= mapping_->entries_max_ || entry_generation(handle) == 0) return nullptr;
  return &reinterpret_cast<const ReadyEntry*>(mapping_->index_ +
                                              mapping_->plan_.entries)[entry_index(handle)];
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
  for (std::uint32_t index = 0; index < mapping_->entries_max_; ++index) {
    // Generation 1: any handle with this index finds the entry.
    futex_wake_all(ready_entry((1u << 16) | index)->wake);
  }
}

}  // namespace di::kv
