// support/fake_arena.h: an arena without bytes, for tests of the host's core.
//
// What the core writes into the index page is kept as plain values; a segment's bytes are its checksum,
// put there by write() as a rank or a store would put bytes, and the code of a stripe is made over those four
// bytes.  Misuse that kv::ArenaOwner asserts is asserted here too.  ByteArena has real bytes.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "host/port.h"
#include "tests/support/naive_code.h"

namespace di::test {

class FakeArena : public host::ArenaPort {
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

  bool has_code(std::uint32_t data_columns, std::uint32_t parity_columns) override {
    return data_columns + parity_columns <= 16 && parity_columns <= 4;
  }
  std::vector<std::uint32_t> encode(std::span<const host::Strip> data,
                                    std::span<const host::Strip> parity) override {
    ++encodes;
    std::vector<Bytes> columns;
    std::vector<std::uint32_t> crcs;
    for (const host::Strip& strip : data) {
      columns.push_back(strip.bytes == 0 ? Bytes() : load(strip));
      crcs.push_back(strip.bytes == 0 ? 0 : checksum(columns.back()));
    }
    for (std::uint32_t p = 0; p < parity.size(); ++p) {
      const Bytes made = code_row(static_cast<std::uint32_t>(data.size()) + p, columns, length(parity[p]));
      store(parity[p], made);
      crcs.push_back(checksum(made));
    }
    return crcs;
  }
  std::uint32_t decode(std::uint32_t data_columns, std::span<const CodeColumn> columns,
                       std::span<const std::uint32_t> wanted) override {
    ++decodes;
    DI_ASSERT(!wanted.empty() && wanted.size() <= columns.size() - data_columns);
    std::uint32_t wrong = 0;
    std::uint64_t bytes = 0;
    for (const CodeColumn& column : columns)
      bytes = std::max(bytes, column.strip.bytes == 0 ? 0 : length(column.strip));
    std::vector<std::pair<std::uint32_t, Bytes>> rows;
    for (std::uint32_t i = 0; i < columns.size() && rows.size() < data_columns; ++i) {
      if (!columns[i].present) continue;
      rows.emplace_back(i, columns[i].strip.bytes == 0 ? Bytes() : load(columns[i].strip));
      if (columns[i].strip.bytes != 0 && checksum(rows.back().second) != columns[i].crc) wrong |= 1u << i;
    }
    DI_ASSERT(rows.size() == data_columns);
    const std::vector<Bytes> data = code_solve(data_columns, std::move(rows), bytes);
    for (const std::uint32_t i : wanted) {
      DI_ASSERT(!columns[i].present);
      Bytes made = code_row(i, data, bytes);
      if (columns[i].strip.bytes == 0) continue;
      made.resize(length(columns[i].strip));
      store(columns[i].strip, made);
      if (checksum(made) != columns[i].crc) wrong |= 1u << i;
    }
    return wrong;
  }

  bool xor_is_zero(std::span<const host::Strip> columns) override {
    ++cross_checks;
    Bytes sum;
    for (const host::Strip& strip : columns) {
      if (strip.bytes == 0) continue;
      const Bytes bytes = load(strip);
      sum.resize(std::max(sum.size(), bytes.size()));
      for (std::size_t i = 0; i < bytes.size(); ++i) sum[i] ^= bytes[i];
    }
    return std::all_of(sum.begin(), sum.end(), [](std::byte b) { return b == std::byte{0}; });
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
    return found != slots.end() && found->second.assigned.generation == ref.generation &&
           found->second.state != kv::SlotState::quarantined;
  }

  std::map<std::uint32_t, Slot> slots;
  std::map<std::uint32_t, kv::Readiness> entries;
  std::map<std::uint64_t, std::uint32_t> written;  // payload offset of a segment -> checksum of its bytes
  std::uint64_t encodes = 0;
  std::uint64_t decodes = 0;
  std::uint64_t cross_checks = 0;

 private:
  virtual Bytes load(const host::Strip& strip) {
    Bytes bytes(4);
    put_le<std::uint32_t>(bytes.data(), segment_crc(strip.offset, strip.bytes));
    return bytes;
  }
  virtual void store(const host::Strip& strip, ByteView bytes) {
    written[strip.offset] = get_le<std::uint32_t>(bytes.data());
  }
  virtual std::uint64_t length(const host::Strip&) { return 4; }
  virtual std::uint32_t checksum(ByteView bytes) { return get_le<std::uint32_t>(bytes.data()); }
};

}  // namespace di::test
