#include "kv/slots.h"

#include <bit>

#include "kv/layout.h"

namespace di::kv {

namespace {

std::uint32_t order_of_units(std::uint64_t units) {
  return static_cast<std::uint32_t>(std::bit_width(units - 1));
}

}  // namespace

BuddyPool::BuddyPool(std::uint32_t units) : units_(units), free_(orders_max) {
  // Any number of units: cut into the longest aligned runs, from the front.
  for (std::uint32_t first = 0; first < units;) {
    std::uint32_t order = orders_max - 1;
    while ((first & ((1u << order) - 1)) != 0 || units - first < (1u << order)) --order;
    free_[order].insert(first);
    first += 1u << order;
  }
  free_units_ = units;
}

std::optional<std::uint32_t> BuddyPool::take(std::uint32_t order) {
  std::uint32_t from = order;
  while (from < orders_max && free_[from].empty()) ++from;
  if (from >= orders_max) return std::nullopt;
  const std::uint32_t first = *free_[from].begin();
  free_[from].erase(free_[from].begin());
  while (from > order) {
    --from;
    free_[from].insert(first + (1u << from));
  }
  free_units_ -= 1u << order;
  return first;
}

bool BuddyPool::take_at(std::uint32_t first, std::uint32_t order) {
  if (order >= orders_max || first >= units_ || units_ - first < (1u << order) ||
      (first & ((1u << order) - 1)) != 0) {
    return false;
  }
  for (std::uint32_t from = order; from < orders_max; ++from) {
    std::uint32_t run = first & ~((1u << from) - 1);
    if (free_[from].erase(run) == 0) continue;
    while (from > order) {
      --from;
      const std::uint32_t upper = run + (1u << from);
      free_[from].insert(first < upper ? upper : run);
      if (first >= upper) run = upper;
    }
    free_units_ -= 1u << order;
    return true;
  }
  return false;
}

void BuddyPool::give_back(std::uint32_t first, std::uint32_t order) {
  DI_ASSERT(order < orders_max && first < units_ && units_ - first >= (1u << order));
  free_units_ += 1u << order;
  while (order + 1 < orders_max) {
    const std::uint32_t buddy = first ^ (1u << order);
    const auto found = free_[order].find(buddy);
    if (found == free_[order].end()) break;
    free_[order].erase(found);
    first &= ~(1u << order);
    ++order;
  }
  const bool inserted = free_[order].insert(first).second;
  DI_ASSERT(inserted);
}

std::optional<std::uint32_t> BuddyPool::order_free_max() const {
  for (std::uint32_t order = orders_max; order-- > 0;) {
    if (!free_[order].empty()) return order;
  }
  return std::nullopt;
}

SlotPool::SlotPool(const Options& options, std::uint32_t units)
    : unit_bytes_(options.unit_bytes), buddy_(units), slots_(options.slots_max) {
  for (std::uint32_t slot = 0; slot < options.slots_max; ++slot) free_numbers_.insert(slot);
}

Result<SlotPool> SlotPool::create(const Options& options) {
  if (options.unit_bytes == 0 || options.unit_bytes % segment_align_bytes != 0) {
    return Error{Code::invalid, 0, "slots: a unit must be a multiple of 4 KiB"};
  }
  const std::uint64_t units = options.payload_bytes / options.unit_bytes;
  if (units == 0 || options.slots_max == 0)
    return Error{Code::invalid, 0, "slots: no room for a single page"};
  if (units > (std::uint64_t{1} << 31)) return Error{Code::invalid, 0, "slots: more than 2^31 units"};
  return SlotPool(options, static_cast<std::uint32_t>(units));
}

Result<SlotPlace> SlotPool::take(std::uint64_t bytes) {
  const std::uint64_t units = (bytes + unit_bytes_ - 1) / unit_bytes_;
  if (units == 0 || units > buddy_.units() || order_of_units(units) >= BuddyPool::orders_max) {
    return Error{Code::invalid, 0, "slots: a page of this size never fits"};
  }
  const std::uint32_t order = order_of_units(units);
  if (free_numbers_.empty()) return Error{Code::busy, 0, "slots: no slot number is free"};
  const std::optional<std::uint32_t> first = buddy_.take(order);
  if (!first) return Error{Code::busy, 0, "slots: no room"};
  const std::uint32_t number = *free_numbers_.begin();
  free_numbers_.erase(free_numbers_.begin());
  Slot& slot = slots_[number];
  DI_ASSERT(!slot.taken);
  slot.taken = true;
  slot.order = order;
  slot.place.slot = number;
  if (++slot.place.generation == 0) slot.place.generation = 1;
  slot.place.offset = std::uint64_t{*first} * unit_bytes_;
  slot.place.bytes = (std::uint64_t{1} << order) * unit_bytes_;
  ++slots_used_;
  return slot.place;
}

Result<std::vector<SlotPlace>> SlotPool::take_all(std::span<const std::uint64_t> bytes) {
  std::vector<SlotPlace> places;
  places.reserve(bytes.size());
  for (const std::uint64_t wanted : bytes) {
    Result<SlotPlace> place = take(wanted);
    if (!place) {
      for (const SlotPlace& taken : places) give_back(taken.slot);
      return place.error();
    }
    places.push_back(*place);
  }
  return places;
}

void SlotPool::give_back(std::uint32_t slot) {
  DI_ASSERT(slot < slots_.size() && slots_[slot].taken);
  slots_[slot].taken = false;
  buddy_.give_back(static_cast<std::uint32_t>(slots_[slot].place.offset / unit_bytes_), slots_[slot].order);
  free_numbers_.insert(slot);
  --slots_used_;
}

Status SlotPool::restore(const SlotPlace& place) {
  const auto wrong = [&] {
    return Error{Code::corrupt, 0, "slots: slot " + std::to_string(place.slot) + " has no place of its own"};
  };
  if (place.slot >= slots_.size() || slots_[place.slot].taken || place.generation == 0) return wrong();
  const std::uint64_t units = place.bytes / unit_bytes_;
  const std::uint64_t first = place.offset / unit_bytes_;
  if (units == 0 || !std::has_single_bit(units) || place.bytes % unit_bytes_ != 0 ||
      place.offset % unit_bytes_ != 0 || first >= buddy_.units() || units > buddy_.units()) {
    return wrong();
  }
  const std::uint32_t order = order_of_units(units);
  if (!buddy_.take_at(static_cast<std::uint32_t>(first), order)) return wrong();
  free_numbers_.erase(place.slot);
  slots_[place.slot] = Slot{place, order, true};
  ++slots_used_;
  return {};
}

void SlotPool::restore_generation(std::uint32_t slot, std::uint32_t generation) {
  DI_ASSERT(slot < slots_.size() && !slots_[slot].taken);
  slots_[slot].place.generation = generation;
}

bool SlotPool::current(std::uint32_t slot, std::uint32_t generation) const {
  return slot < slots_.size() && slots_[slot].taken && slots_[slot].place.generation == generation;
}

const SlotPlace& SlotPool::place(std::uint32_t slot) const {
  DI_ASSERT(slot < slots_.size() && slots_[slot].taken);
  return slots_[slot].place;
}

EntryPool::EntryPool(std::uint32_t entries) : generations_(entries, 0), taken_(entries, false) {
  DI_ASSERT(entries > 0 && entries <= entries_max);
  for (std::uint32_t index = 0; index < entries; ++index) free_.insert(index);
}

Result<std::uint32_t> EntryPool::take() {
  if (free_.empty()) return Error{Code::busy, 0, "entries: none is free"};
  const std::uint32_t index = *free_.begin();
  free_.erase(free_.begin());
  taken_[index] = true;
  if (++generations_[index] == 0) generations_[index] = 1;
  ++used_;
  return (std::uint32_t{generations_[index]} << 16) | index;
}

void EntryPool::give_back(std::uint32_t handle) {
  DI_ASSERT(current(handle));
  taken_[entry_index(handle)] = false;
  free_.insert(entry_index(handle));
  --used_;
}

void EntryPool::restore_generation(std::uint32_t index, std::uint16_t generation) {
  DI_ASSERT(index < generations_.size() && !taken_[index]);
  generations_[index] = generation;
}

bool EntryPool::current(std::uint32_t handle) const {
  const std::uint32_t index = entry_index(handle);
  return index < generations_.size() && taken_[index] && generations_[index] == entry_generation(handle);
}

}  // namespace di::kv
