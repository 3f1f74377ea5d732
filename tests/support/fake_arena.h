// support/fake_arena.h: an arena without bytes, for tests of the host's core.
//
// What the core writes into the index page is kept as plain values; a segment's bytes are its checksum,
// put there by write() as a rank or a store would put bytes.  Misuse that kv::ArenaOwner asserts is
// asserted here too.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "host/port.h"

namespace di::test {

class FakeArena final : public host::ArenaPort {
 public:
  struct Slot {
    kv::ArenaOwner::Slot assigned;
    kv::SlotState state = kv::SlotState::free;
    std::uint32_t segments = 0;
    std::vector<std::uint32_t> crcs;
    std::optional<kv::PageRecord> record;
  };

  void slot_assign(const kv::ArenaOwner::Slot& slot) override {
    DI_ASSERT(slot.generation != 0 && !slots.contains(slot.slot));
    slots[slot.slot] = Slot{slot, slot.state, 0, {}, {}};
  }
  void slot_state(std::uint32_t slot, kv::SlotState state) override { slots.at(slot).state = state; }
  void slot_crcs(std::uint32_t slot, std::span<const std::uint32_t> crcs) override {
    slots.at(slot).crcs.assign(crcs.begin(), crcs.end());
  }
  void slot_segments(std::uint32_t slot, std::uint32_t segments) override {
    slots.at(slot).segments = segments;
  }
  void slot_record(std::uint32_t slot, const kv::PageRecord& record) override {
    DI_ASSERT(slots.at(slot).state != kv::SlotState::sealed && !slots.at(slot).record);
    slots.at(slot).record = record;
  }
  void slot_stored(std::uint32_t slot) override {
    if (slots.at(slot).record) slots.at(slot).record->stored = true;
  }
  void slot_free(std::uint32_t slot) override { DI_ASSERT(slots.erase(slot) == 1); }
  void entry_open(std::uint32_t handle) override {
    DI_ASSERT(entries.emplace(handle, kv::Readiness{}).second);
  }
  void entry_set(std::uint32_t handle, const kv::Readiness& readiness) override {
    entries.at(handle) = readiness;
  }
  void entry_close(std::uint32_t handle) override { DI_ASSERT(entries.erase(handle) == 1); }
  std::uint32_t segment_crc(std::uint64_t offset, std::uint64_t bytes) override {
    static_cast<void>(bytes);
    const auto found = written.find(offset);
    return found == written.end() ? 0 : found->second;
  }

  // Segment `group` of a page in `ref` now has bytes with this checksum.
  void write(const kv::Layout& layout, const wire::SlotRef& ref, std::uint32_t group, std::uint32_t crc) {
    write_at(slots.at(ref.slot).assigned.offset, layout, ref.page_blocks, group, crc);
  }
  void write_at(std::uint64_t page_offset, const kv::Layout& layout, std::uint32_t page_blocks,
                std::uint32_t group, std::uint32_t crc) {
    written[page_offset + layout.segment_offset(group, page_blocks)] = crc;
  }
  // What a reader of the index page sees.
  [[nodiscard]] bool current(const wire::SlotRef& ref) const {
    const auto found = slots.find(ref.slot);
    return found != slots.end() && found->second.assigned.generation == ref.generation;
  }

  std::map<std::uint32_t, Slot> slots;
  std::map<std::uint32_t, kv::Readiness> entries;
  std::map<std::uint64_t, std::uint32_t> written;  // payload offset of a segment -> checksum of its bytes
};

}  // namespace di::test
