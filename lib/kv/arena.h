// kv/arena.h: the pages of a host in shared memory.
//
// A memfd: an index page (header, slot entries, readiness entries), then the payload, both aligned to
// 4 KiB.  The di-kvd host daemon alone writes the index; clients map it read-only and the payload
// read-write, and write only into slots granted to them.  Nothing in the index is trusted by a client:
// sizes are checked once against the file and kept, everything that moves is read atomically and
// checked at each use.
//
// Threads: ArenaOwner belongs to the loop thread of di-kvd.  ArenaClient may be used from any thread
// once mapped (a rank's loop and engine threads; a store's workers); it must outlive every view.
// Bounds: slots_max, entries_max and the payload, fixed at creation.
//
// Order of publication.  A slot: fields, then its generation (release); the generation is 0 while the
// slot is free, so a stale reference never matches.  A readiness entry likewise.  A segment's bit is
// set after its bytes; `groups` of an entry moves after the bits; then the wake word and FUTEX_WAKE.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/fd.h"
#include "base/result.h"
#include "base/time.h"
#include "kv/layout.h"
#include "wire/messages.h"

namespace di::kv {

using wire::SlotRef;

enum class SlotState : std::uint32_t {
  free = 0,
  granted = 1,  // a rank writes it
  filling = 2,  // a store daemon writes it
  sealed = 3,   // nobody writes it any more
};

struct Readiness {
  std::uint32_t groups = 0;                       // layer groups of all blocks that are there
  std::uint32_t failed_block = wire::block_none;  // first block that will not come
};

// What lies in shared memory.  Changing any of these changes `arena_format`.
inline constexpr std::uint32_t arena_format = 1;
inline constexpr std::uint32_t slots_max_limit = 1u << 20;
inline constexpr std::uint32_t entries_max_limit = 1u << 16;

struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t format;
  std::uint32_t generation;
  std::uint32_t slots_max;
  std::uint32_t entries_max;
  std::uint64_t payload_offset;
  std::uint64_t payload_bytes;
  std::uint64_t reserved[3];
};
struct SlotEntry {
  std::atomic<std::uint32_t> generation;
  std::atomic<std::uint32_t> segments;  // bit g: segment g is there and verified
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint32_t> page_blocks;
  std::atomic<std::uint64_t> offset;
  std::atomic<std::uint64_t> bytes;
  std::atomic<std::uint32_t> crcs[groups_max];
};
struct ReadyEntry {
  std::atomic<std::uint32_t> generation;
  std::atomic<std::uint32_t> groups;
  std::atomic<std::uint32_t> failed_block;
  std::atomic<std::uint32_t> wake;  // futex word; counts movements
  std::uint64_t reserved[6];
};
static_assert(sizeof(ArenaHeader) == 64 && sizeof(SlotEntry) == 64 && sizeof(ReadyEntry) == 64);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);

// The host daemon's side.  Numbers come from kv/slots.h; arguments are asserted, not validated.
class ArenaOwner {
 public:
  struct Options {
    std::string name;              // shown in /proc/PID/maps
    std::uint32_t generation = 0;  // of the host daemon
    std::uint64_t payload_bytes = 0;
    std::uint32_t slots_max = 0;
    std::uint32_t entries_max = 0;
    bool prefault = false;  // touch every page now; blocks for about a second per GiB
  };
  // Errors: invalid, no_space, io.
  static Result<std::unique_ptr<ArenaOwner>> create(const Options& options);
  ~ArenaOwner();
  ArenaOwner(const ArenaOwner&) = delete;
  ArenaOwner& operator=(const ArenaOwner&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::uint32_t generation() const;
  // The generation is known only after registration: set before the first client is accepted.
  void set_generation(std::uint32_t generation);

  struct Slot {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t page_blocks = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    SlotState state = SlotState::granted;
  };
  void slot_assign(const Slot& slot);
  void slot_state(std::uint32_t slot, SlotState state);
  void slot_crcs(std::uint32_t slot, std::span<const std::uint32_t> crcs);
  // Segments that are there and verified, as a bitmap.
  void slot_segments(std::uint32_t slot, std::uint32_t segments);
  void slot_free(std::uint32_t slot);

  void entry_open(std::uint32_t handle);
  // Wakes whoever waits, once, when something moved.
  void entry_set(std::uint32_t handle, const Readiness& readiness);
  // Whoever still waits sees block 0 failed.
  void entry_close(std::uint32_t handle);

  [[nodiscard]] MutableByteView payload(std::uint64_t offset, std::uint64_t bytes);
  // The bytes of a slot while it has this generation.  On any thread.  Errors: stale.
  [[nodiscard]] Result<MutableByteView> slot_bytes(std::uint32_t slot, std::uint32_t generation);

 private:
  ArenaOwner(Fd fd, std::byte* base, std::uint64_t bytes, const Options& options);
  SlotEntry& slot_entry(std::uint32_t slot);
  ReadyEntry& ready_entry(std::uint32_t handle);

  Fd fd_;
  std::byte* base_;
  std::uint64_t bytes_;
  std::uint32_t slots_max_;
  std::uint32_t entries_max_;
  std::uint64_t payload_offset_;
  std::uint64_t payload_bytes_;
};

// The side of ranks and store daemons.
class ArenaClient {
 public:
  // Maps the region of `bytes` bytes and checks its header.  The descriptor may be closed afterwards.
  // Errors: corrupt, unsupported (another format), io.
  static Result<std::shared_ptr<ArenaClient>> map(int fd, std::uint64_t bytes);
  ~ArenaClient();
  ArenaClient(const ArenaClient&) = delete;
  ArenaClient& operator=(const ArenaClient&) = delete;

  [[nodiscard]] std::uint32_t generation() const { return generation_; }

  // True while `ref` names the page it named when it was handed out.  A reader that copied bytes asks
  // again afterwards: a pin makes the answer always true, so false is a bug of somebody.
  [[nodiscard]] bool current(const SlotRef& ref) const;
  // One segment of a page, which must be there.  Errors: stale, busy (not there yet), corrupt (the
  // page does not fit its slot).
  Result<ByteView> segment(const Layout& layout, const SlotRef& ref, std::uint32_t group) const;
  // All bytes of a page's slot, whatever is in it so far.  Errors: stale, corrupt.
  Result<ByteView> page(const Layout& layout, const SlotRef& ref) const;
  // The same to write into; the slot must be granted or filling.  Errors: also denied.
  Result<MutableByteView> page_to_write(const Layout& layout, const SlotRef& ref);
  // The slot's bytes for a writer that knows no layout, at least `bytes` long.
  Result<MutableByteView> slot_to_write(const SlotRef& ref, std::uint64_t bytes);

  // An entry that is not there (any more) reads as block 0 failed.
  [[nodiscard]] Readiness readiness(std::uint32_t handle) const;
  // Blocks until more than `group` groups are there, a block failed, or `at_most` has passed.
  void wait(std::uint32_t handle, std::uint32_t group, Duration at_most) const;

  // The owner is gone (end of the arena socket): every entry reads as failed from now on, waiters wake.
  void fail();
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }

 private:
  ArenaClient() = default;
  struct Found {
    const SlotEntry* entry = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  [[nodiscard]] Result<Found> find(const SlotRef& ref) const;
  [[nodiscard]] const ReadyEntry* ready_entry(std::uint32_t handle) const;

  std::byte* index_ = nullptr;  // mapped read-only
  std::byte* payload_ = nullptr;
  std::uint64_t payload_offset_ = 0;
  std::uint64_t payload_bytes_ = 0;
  std::uint32_t slots_max_ = 0;
  std::uint32_t entries_max_ = 0;
  std::uint32_t generation_ = 0;
  std::atomic<bool> failed_{false};
};

}  // namespace di::kv
