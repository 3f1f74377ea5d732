#include "kv/arena_index.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/checksum.h"

namespace di::kv {

namespace {

template <class T>
std::uint32_t extend(std::uint32_t crc, const T& value) {
  std::array<std::byte, sizeof(T)> raw;
  put_le<T>(raw.data(), value);
  return crc32c_extend(crc, raw);
}

}  // namespace

ArenaPlan ArenaPlan::of(std::uint32_t slots_max, std::uint32_t entries_max, std::uint64_t align) {
  ArenaPlan plan;
  plan.slots = sizeof(ArenaHeader);
  plan.entries = plan.slots + std::uint64_t{slots_max} * sizeof(SlotEntry);
  plan.records = plan.entries + std::uint64_t{entries_max} * sizeof(ReadyEntry);
  plan.keys = plan.records + std::uint64_t{slots_max} * sizeof(SlotRecord);
  plan.layout = plan.keys + std::uint64_t{arena_keys(slots_max)} * sizeof(Key);
  plan.payload = align_up(plan.layout + arena_layout_bytes_max, align);
  return plan;
}

std::uint32_t arena_header_checksum(const ArenaHeader& header) {
  std::uint32_t crc = extend(0, header.magic);
  for (const std::uint32_t part : {header.format, header.slots_max, header.entries_max, header.align}) {
    crc = extend(crc, part);
  }
  for (const std::uint64_t part : {header.payload_offset, header.payload_bytes, header.id[0], header.id[1]}) {
    crc = extend(crc, part);
  }
  return crc;
}

std::uint32_t slot_record_checksum(std::uint32_t slot, const SlotEntry& entry, const SlotRecord& record,
                                   const Key* keys) {
  std::uint32_t crc = extend(0, slot);
  crc = extend(crc, entry.generation.load(std::memory_order_relaxed));
  crc = extend(crc, entry.page_blocks.load(std::memory_order_relaxed));
  crc = extend(crc, entry.offset.load(std::memory_order_relaxed));
  crc = extend(crc, entry.bytes.load(std::memory_order_relaxed));
  for (std::uint32_t group = 0; group < std::min<std::uint32_t>(record.groups, groups_max); ++group) {
    crc = extend(crc, entry.crcs[group].load(std::memory_order_relaxed));
  }
  crc = extend(crc, record.key_first);
  crc = extend(crc, std::uint32_t{record.key_count});
  crc = extend(crc, std::uint32_t{record.groups});
  crc = extend(crc, record.number);
  crc = extend(crc, record.tenant);
  crc = crc32c_extend(crc, record.parent.raw);
  for (std::uint32_t i = 0; i < record.key_count; ++i) crc = crc32c_extend(crc, keys[i].raw);
  return crc;
}

}  // namespace di::kv
