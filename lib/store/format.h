// store/format.h: the bytes of a volume, format 0 (di-volume(5) has offsets and units).
//
// Pure: encodes and decodes, little-endian, byte by byte; every structure carries a CRC32C of itself.
// A decoder trusts nothing and checks every count against what is there.
//
//   0       superblock A, 4 KiB      written alternately; the valid one with the higher sequence counts
//   4096    superblock B, 4 KiB
//   8192    segment table            64 bytes a segment
//   ...     slot table               records_per_segment x 64 bytes a segment; an accelerator only
//   ...     segments                 [slot][slot]..., slot = header, payload
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "kv/layout.h"
#include "kv/stripe.h"
#include "store/erasure.h"
#include "wire/messages.h"

namespace di::store {

inline constexpr std::uint32_t volume_format = 0;
inline constexpr std::uint32_t superblock_bytes = 4096;
inline constexpr std::uint32_t record_bytes = 64;
inline constexpr std::uint32_t records_per_page = 4096 / record_bytes;
// Smallest slot; shorter columns take one of this length.  It bounds the slot table at 0.4 % of the volume.
inline constexpr std::uint32_t slot_bytes_min = 16384;
inline constexpr std::uint32_t classes_per_layout_max = 8;
inline constexpr std::uint32_t slot_header_fixed_bytes = 160;
inline constexpr std::uint32_t slot_page_bytes = 80;
// Segments that may be in the superblock's open list.
inline constexpr std::uint32_t open_segments_max = 512;

using Uuid = std::array<std::byte, 16>;

// Where everything lies; follows from three numbers.
struct Geometry {
  std::uint64_t volume_bytes = 0;
  std::uint64_t segment_bytes = 0;
  std::uint32_t segments = 0;
  std::uint32_t records_per_segment = 0;  // a multiple of records_per_page
  std::uint64_t segment_table_offset = 0;
  std::uint64_t slot_table_offset = 0;
  std::uint64_t segments_offset = 0;

  // As many segments as fit.  Errors: invalid, when not one fits or a number is no multiple of 4 KiB.
  static Result<Geometry> of(std::uint64_t volume_bytes, std::uint64_t segment_bytes);

  [[nodiscard]] std::uint64_t segment_offset(std::uint32_t segment) const {
    return segments_offset + segment * segment_bytes;
  }
  // Of the 4 KiB page of records [page * records_per_page, ...) of a segment.
  [[nodiscard]] std::uint64_t record_page_offset(std::uint32_t segment, std::uint32_t page) const {
    return slot_table_offset +
           (std::uint64_t{segment} * records_per_segment + page * records_per_page) * record_bytes;
  }
  bool operator==(const Geometry&) const = default;
};

// What a disk has had to take, as the volume remembers it (kv/write_budget.h).
struct Wear {
  std::uint64_t written_bytes = 0;  // since the volume was made
  std::uint64_t spent_bytes = 0;    // of the budget of a day

  bool operator==(const Wear&) const = default;
};

struct Superblock {
  Uuid uuid{};
  std::uint64_t sequence = 0;  // of the superblock
  std::uint64_t epoch = 0;     // counts how often the volume was opened
  Geometry geometry;
  Wear wear;
  std::vector<std::uint32_t> open;  // segments written to since their table records were last durable

  bool operator==(const Superblock&) const = default;
};
void superblock_encode(const Superblock& superblock, MutableByteView to);
// Errors: corrupt, unsupported (a valid one of another format).
Result<Superblock> superblock_decode(ByteView from);

// A segment is bound to one class of slots on first use.
struct SlotClass {
  std::uint32_t slot_bytes = 0;
  std::uint32_t header_bytes = 0;

  friend auto operator<=>(const SlotClass&, const SlotClass&) = default;
};
struct SegmentRecord {
  bool bound = false;
  std::uint32_t generation = 0;  // counts bindings; slot headers and records of an earlier one do not count
  SlotClass slot_class;

  bool operator==(const SegmentRecord&) const = default;
};
void segment_record_encode(const SegmentRecord& record, std::byte* to);
// Errors: corrupt.  All zeros is a segment that was never bound.
Result<SegmentRecord> segment_record_decode(const std::byte* from);

struct SlotRecord {
  std::uint32_t segment_generation = 0;
  bool live = false;
  std::uint64_t stripe = 0;
  std::uint64_t sequence = 0;  // of the last write into the slot that the volume knows the end of
  std::uint32_t payload_bytes = 0;
  std::uint16_t column = 0;

  bool operator==(const SlotRecord&) const = default;
};
void slot_record_encode(const SlotRecord& record, std::byte* to);
// Errors: corrupt.  All zeros is a slot that was never written.
Result<SlotRecord> slot_record_decode(const std::byte* from);

// A column of a stripe: what a slot header says about itself, and about the whole stripe.
struct Shard {
  std::uint64_t stripe = 0;
  std::uint16_t column = 0;
  std::uint64_t tenant = 0;             // whose the stripe is
  Key fingerprint;                      // layout
  std::vector<wire::PutPage> pages;     // every page of the stripe
  wire::StripeCode code;                // how they became columns
  std::uint8_t parts = 1;               // of each page
  std::vector<std::uint32_t> segments;  // bytes of each segment of this column; those of a part may be empty
  SlotClass slot_class;

  [[nodiscard]] std::uint32_t payload_bytes() const;
  [[nodiscard]] std::uint32_t segment_offset(std::uint32_t group) const;  // in the payload
  [[nodiscard]] bool is_parity() const { return column >= code.data_columns; }
  [[nodiscard]] std::uint8_t code_id() const {
    return code.parity_columns == 0 ? code_id_none : code_id_reed_solomon;
  }
  // One for each segment of this column.
  [[nodiscard]] std::span<const std::uint32_t> crcs() const;
  bool operator==(const Shard&) const = default;
};
// Header and slot lengths for a column of `payload_bytes` bytes.  The header's is the layout's.  The payload
// is a full page, or a half, 1/3, 1/4, 1/5, 1/8, 1/10 or 1/16 of each of its segments in whole 4 KiB: what
// parts of pages, and pages of a power of two of blocks, fill without a rest.
[[nodiscard]] SlotClass slot_class_of(const kv::Layout& layout, std::uint64_t payload_bytes);
// Checks what a peer sent against the layout.  Errors: invalid.
Result<Shard> shard_make(const kv::Layout& layout, std::uint64_t stripe, std::uint16_t column,
                         std::vector<wire::PutPage> pages, wire::StripeCode code);

struct SlotHeader {
  Shard shard;
  Uuid volume{};
  std::uint64_t offset = 0;  // of the slot in the volume: a write that went elsewhere shows
  std::uint64_t sequence = 0;
  std::uint32_t segment_generation = 0;

  bool operator==(const SlotHeader&) const = default;
};
// `to` has shard.slot_class.header_bytes bytes.
void slot_header_encode(const SlotHeader& header, MutableByteView to);
// `slot_class` is that of the segment the header was read from.  Errors: corrupt.
Result<SlotHeader> slot_header_decode(ByteView from, const SlotClass& slot_class);

}  // namespace di::store
