// kv/arena_index.h: what lies in the shared memory of an arena in front of its payload.
//
// In this order: header, slot entries, readiness entries, slot records, key cells, layout descriptor; then
// the payload, aligned to the header's `align`.  The memory outlives its owner (di-kvd host may be killed
// and started anew), so everything that a new owner believes carries a checksum.
//
//   what              per                        bytes  written by the owner
//   SlotEntry         slot                          64  at each change; clients read it
//   SlotRecord        slot                          64  when its page is sealed, before the state says so
//   key cell          block of a recorded page      32  with the record; a run of 2^k cells for each page
//   ReadyEntry        readiness entry               64  at each change; clients read it
//   layout descriptor arena                              once the first rank has registered
//
// A record is believed when the slot's state is sealed and the checksum over the entry's geometry and
// checksums, the record and its keys matches: a kill at any point of sealing leaves either a whole page or
// one that is dropped.  Bounds: arena_keys_per_slot cells for each slot; a page that finds no free run of
// cells is not recorded, and is dropped by the next owner.
//
// Numbers that never repeat in the life of the memory, whoever owns it: the generations of slots and of
// readiness entries (kept here when nobody has the slot), and `epoch`, which each owner raises by one.  A
// client holds a lock on the byte of the memory whose offset is its owner's epoch, and a mapping, which may
// outlive its owner, one on the byte at arena_mapping_lock_at (kv/arena.h).
//
// An arena that nobody will own again has no magic any more: the one thing that is the same in all formats.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kv/layout.h"
#include "wire/ids.h"

namespace di::kv {

// Changing anything below changes this number: an arena of another format is not taken over.
inline constexpr std::uint32_t arena_format = 3;
inline constexpr std::uint64_t arena_magic = 0x30414e4552414944;  // "DIARENA0" read as a little-endian number
inline constexpr std::uint64_t arena_page_bytes = 4096;
inline constexpr std::uint64_t arena_mapping_lock_at = std::uint64_t{1} << 32;  // behind every epoch
inline constexpr std::uint64_t arena_huge_page_bytes = std::uint64_t{2} << 20;
inline constexpr std::uint32_t slots_max_limit = 1u << 20;
inline constexpr std::uint32_t entries_max_limit = 1u << 16;
// The demo model has one key for each 32 KiB of payload, which is what a slot is counted with.
inline constexpr std::uint32_t arena_keys_per_slot = 4;
// DeepSeek-V3 needs 2 KiB; an arena whose layout is longer is not taken over.
inline constexpr std::uint32_t arena_layout_bytes_max = 64 << 10;

struct ArenaHeader {
  std::uint64_t magic;
  std::uint32_t format;
  std::uint32_t generation;  // of the host daemon; 0 until it is registered
  std::uint32_t slots_max;
  std::uint32_t entries_max;
  std::uint64_t payload_offset;
  std::uint64_t payload_bytes;
  std::uint32_t align;         // arena_page_bytes or arena_huge_page_bytes
  std::uint32_t epoch;         // owners so far
  std::uint32_t layout_bytes;  // 0: not known
  std::uint32_t layout_crc;
  std::uint32_t checksum;  // over what never changes
  std::uint32_t padding;
  std::array<std::uint64_t, 2> id;  // random
  std::array<std::uint64_t, 6> reserved;
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
struct SlotRecord {
  std::uint32_t last_generation;  // of this slot number; outside the checksum
  std::uint32_t key_first;        // cell
  std::uint64_t number;
  std::uint64_t tenant;
  Key parent;
  std::uint16_t key_count;
  std::uint8_t groups;
  std::uint8_t stored;  // 1: the store has the page, as far as is known; outside the checksum
  std::uint32_t checksum;
};
struct ReadyEntry {
  std::atomic<std::uint32_t> generation;
  std::atomic<std::uint32_t> groups;
  std::atomic<std::uint32_t> failed_block;
  std::atomic<std::uint32_t> wake;             // futex word; counts movements
  std::atomic<std::uint32_t> last_generation;  // of this entry
  std::uint32_t padding;
  std::array<std::uint64_t, 5> reserved;
};
static_assert(sizeof(ArenaHeader) == 128 && sizeof(SlotEntry) == 64 && sizeof(SlotRecord) == 64 &&
              sizeof(ReadyEntry) == 64 && sizeof(Key) == 32);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);

// Where the parts begin.
struct ArenaPlan {
  std::uint64_t slots = 0;
  std::uint64_t entries = 0;
  std::uint64_t records = 0;
  std::uint64_t keys = 0;
  std::uint64_t layout = 0;
  std::uint64_t payload = 0;

  static ArenaPlan of(std::uint32_t slots_max, std::uint32_t entries_max, std::uint64_t align);
};
[[nodiscard]] constexpr std::uint32_t arena_keys(std::uint32_t slots_max) {
  return slots_max * arena_keys_per_slot;
}

[[nodiscard]] std::uint32_t arena_header_checksum(const ArenaHeader& header);
// `keys`: the record's key_count cells.
[[nodiscard]] std::uint32_t slot_record_checksum(std::uint32_t slot, const SlotEntry& entry,
                                                 const SlotRecord& record, const Key* keys);

}  // namespace di::kv
