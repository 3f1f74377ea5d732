// kv/arena.h: the pages of a host in shared memory.
//
// A memfd: an index (kv/arena_index.h), then the payload.  The di-kvd host daemon alone writes the index;
// clients map it read-only and the payload read-write, and write only into slots granted to them.
// Nothing in the index is trusted by a client: sizes are checked once against the file and kept,
// everything that moves is read atomically and checked at each use.
//
// Threads: ArenaOwner belongs to the loop thread of di-kvd.  ArenaClient may be used from any thread
// once mapped (a rank's loop and engine threads; a store's workers); it must outlive every view.
// Bounds: slots_max, entries_max and the payload, fixed at creation.
//
// Order of publication.  A slot: fields, then its generation (release); the generation is 0 while the
// slot is free, so a stale reference never matches.  A readiness entry likewise.  A segment's bit is
// set after its bytes; `groups` of an entry moves after the bits; then the wake word and FUTEX_WAKE.
// A page's record is whole before its slot is sealed.
//
// Owners come and go, the memory stays.  take_over() raises the epoch, fails every readiness entry and says
// what the slots hold.  Processes may still read and write on behalf of an earlier owner: each ArenaClient
// holds a shared lock on the byte of the memory at the offset of the epoch that it mapped, through a file
// description of its own, and the kernel gives it up with the client's last use or its process.  Until
// former_users() says that no such lock is left, nothing that an earlier owner had given out may be given
// to others.  No list of clients has to survive, and a frozen process counts as what it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "base/time.h"
#include "kv/arena_index.h"
#include "kv/layout.h"
#include "kv/slots.h"
#include "wire/messages.h"

namespace di::kv {

using wire::SlotRef;

enum class SlotState : std::uint32_t {
  free = 0,
  granted = 1,  // a rank writes it
  filling = 2,  // a store daemon writes it
  sealed = 3,   // nobody writes it any more
  // Given up, and somebody may still write it: references to it are stale, its room is nobody's, also for the
  // next owner of the arena.
  quarantined = 4,
};

struct Readiness {
  std::uint32_t groups = 0;                       // layer groups of all blocks that are there
  std::uint32_t failed_block = wire::block_none;  // first block that will not come
};

// What the index keeps of a sealed page besides its slot.
struct PageRecord {
  std::uint64_t number = 0;
  std::uint64_t tenant = 0;
  Key parent;
  std::vector<Key> keys;
  std::vector<std::uint32_t> crcs;
  bool stored = false;

  bool operator==(const PageRecord&) const = default;
};

// A slot that was taken when the last owner ended.
struct FormerSlot {
  SlotPlace place;
  std::uint32_t page_blocks = 0;
  std::optional<PageRecord> record;  // sealed, and the record's checksum is right
};
struct Former {
  std::optional<Layout> layout;  // none: no slot was ever taken, or it is damaged
  std::vector<FormerSlot> slots;
  std::vector<std::uint32_t> slot_generations;   // last ones, by slot
  std::vector<std::uint16_t> entry_generations;  // by index
  std::uint32_t records_none = 0;                // sealed slots without a good record; a tail has none
};

enum class HugePages : std::uint8_t { automatic, off, on };

// The host daemon's side.  Numbers come from kv/slots.h; arguments are asserted, not validated.
class ArenaOwner {
 public:
  struct Options {
    std::string name;              // shown in /proc/PID/maps
    std::uint32_t generation = 0;  // of the host daemon
    std::uint64_t payload_bytes = 0;
    std::uint32_t slots_max = 0;
    std::uint32_t entries_max = 0;
    HugePages huge_pages = HugePages::off;
    // Touch every page now, on several threads, and lock what the limits allow.  Blocks: about a second
    // per GiB and thread with small pages.
    bool prefault = false;
    // About every second, from the caller's thread.
    std::function<void(std::uint64_t done_bytes, std::uint64_t bytes)> progress = nullptr;
    // As often, and before it begins.  True: it is not wanted any more.
    std::function<bool()> stopped = nullptr;
  };
  // Errors: invalid, no_space (also: no huge pages, with HugePages::on), cancelled (`stopped`), io.
  static Result<std::unique_ptr<ArenaOwner>> create(const Options& options);
  // The memory of an earlier owner, who is dead.  Nobody's page or entry is touched on an error.
  // Errors: corrupt, unsupported (another format), invalid (not what `options` ask for), cancelled, io.
  static Result<std::unique_ptr<ArenaOwner>> take_over(Fd fd, const Options& options, Former& former);
  // Says in the memory, if it is an arena of whatever format, that nobody will own it again: who kept a mapping
  // of it lets go (ArenaMapping::given_up()).
  static void give_up(int fd);
  // Whether some client has a mapping of the memory, on behalf of whomever.
  [[nodiscard]] static bool mapped(int fd);
  ~ArenaOwner();
  ArenaOwner(const ArenaOwner&) = delete;
  ArenaOwner& operator=(const ArenaOwner&) = delete;

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::uint32_t generation() const;
  // The generation is known only after registration: set before the first client is accepted.
  void set_generation(std::uint32_t generation);
  [[nodiscard]] std::uint32_t epoch() const { return epoch_; }
  [[nodiscard]] bool huge_pages() const { return align_ == arena_huge_page_bytes; }
  // False when the limits did not allow to lock the memory.
  [[nodiscard]] bool locked() const { return locked_; }
  // The layout of the pages, for the next owner; writes nothing when it is there already.  False when its
  // descriptor is too long to be kept.
  bool set_layout(const Layout& layout);
  // Whether some process may still use the memory on behalf of an earlier owner.
  [[nodiscard]] bool former_users() const;

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
  // Before the state says sealed.  False when no room is left for so many keys: the page will be unknown
  // to the next owner.
  bool slot_record(std::uint32_t slot, const PageRecord& record);
  // The store has its page.
  void slot_stored(std::uint32_t slot);
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
  struct Memory {
    Fd fd;
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t align = arena_page_bytes;
  };
  ArenaOwner(Memory memory, const Options& options);
  static Result<Memory> allocate(const Options& options, std::uint64_t align);
  Status prefault(const Options& options);
  void read_former(Former& former);
  [[nodiscard]] ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  SlotEntry& slot_entry(std::uint32_t slot);
  SlotRecord& record_of(std::uint32_t slot);
  [[nodiscard]] Key* keys() const { return reinterpret_cast<Key*>(base_ + plan_.keys); }
  ReadyEntry& ready_entry(std::uint32_t handle);

  Fd fd_;
  std::byte* base_;
  std::uint64_t bytes_;
  std::uint64_t align_;
  std::uint32_t slots_max_;
  std::uint32_t entries_max_;
  ArenaPlan plan_;
  std::uint64_t payload_bytes_;
  std::uint32_t epoch_ = 1;
  bool locked_ = false;
  BuddyPool key_cells_;
};

// The mapping of a client: index read-only, payload read-write.
class ArenaMapping {
 public:
  ~ArenaMapping();
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;

  // Nobody will own this memory again: keeping the mapping only keeps the memory from others.
  [[nodiscard]] bool given_up() const;

 private:
  friend class ArenaClient;
  ArenaMapping() = default;

  Fd lock_;  // first, so that it goes last
  std::byte* index_ = nullptr;
  std::byte* payload_ = nullptr;
  ArenaPlan plan_;
  std::uint64_t payload_bytes_ = 0;
  std::uint32_t slots_max_ = 0;
  std::uint32_t entries_max_ = 0;
  std::array<std::uint64_t, 2> id_{};
};

// The side of ranks and store daemons.
class ArenaClient {
 public:
  // Maps the region of `bytes` bytes and checks its header.  The descriptor may be closed afterwards.
  // With the mapping of before, when it is of the same memory, nothing is mapped anew.
  // Errors: corrupt, unsupported (another format), busy (its owner has just changed), io.
  static Result<std::shared_ptr<ArenaClient>> map(int fd, std::uint64_t bytes,
                                                  std::shared_ptr<ArenaMapping> before = nullptr);
  ~ArenaClient() = default;
  ArenaClient(const ArenaClient&) = delete;
  ArenaClient& operator=(const ArenaClient&) = delete;

  [[nodiscard]] std::uint32_t generation() const { return generation_; }
  // To be kept for map(): it does not count as a use of the memory, and must not be used as one.
  [[nodiscard]] const std::shared_ptr<ArenaMapping>& mapping() const { return mapping_; }
  // The payload of all slots, for who tells a device about it; what is in it is asked for by slot.
  [[nodiscard]] MutableByteView memory() const { return {mapping_->payload_, mapping_->payload_bytes_}; }

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

  Fd lock_;  // first, so that it goes last
  std::shared_ptr<ArenaMapping> mapping_;
  std::uint32_t generation_ = 0;
  std::atomic<bool> failed_{false};
};

}  // namespace di::kv
