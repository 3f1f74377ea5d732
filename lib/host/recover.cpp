#include "host/recover.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace di::host {

Status Recovery::begin(const kv::Layout& layout, kv::Former former) {
  // A record is of pages of this layout, or it is none.
  for (kv::FormerSlot& slot : former.slots) {
    if (!slot.record) continue;
    const bool fits = slot.page_blocks > 0 && slot.page_blocks <= layout.page_blocks() &&
                      slot.record->keys.size() == slot.page_blocks &&
                      slot.record->crcs.size() == layout.groups() &&
                      layout.page_bytes(slot.page_blocks) <= slot.place.bytes;
    if (fits) continue;
    slot.record.reset();
    ++bad_;
  }
  if (Status restored = pages_.restore(layout, former); !restored.ok()) return restored;
  for (kv::FormerSlot& slot : former.slots) {
    if (slot.record) records_.emplace(slot.place.slot, *std::move(slot.record));
  }
  former_ = true;
  return {};
}

std::vector<Recovery::Check> Recovery::take_checks() {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> order;
  for (const auto& [slot, record] : records_) order.emplace_back(record.number, slot);
  std::sort(order.rbegin(), order.rend());
  std::vector<Check> checks;
  const kv::Layout& layout = pages_.layout();
  for (const auto& [number, slot] : order) {
    const Page& page = pages_.at(slot);
    Check check{slot, {}};
    for (std::uint32_t group = 0; group < layout.groups(); ++group) {
      check.segments.push_back({page.place.offset + layout.segment_offset(group, page.blocks),
                                layout.segment_bytes(group, page.blocks), records_.at(slot).crcs[group]});
    }
    checks.push_back(std::move(check));
  }
  return checks;
}

void Recovery::checked(std::uint32_t slot, bool good) {
  const auto found = records_.find(slot);
  DI_ASSERT(found != records_.end());
  std::optional<kv::PageRecord> record;
  if (good) record = std::move(found->second);
  records_.erase(found);
  bad_ += good ? 0 : 1;
  pages_.checked(slot, std::move(record), pins_);
  settle();
}

void Recovery::former_gone() {
  if (!std::exchange(former_, false)) return;
  pages_.former_gone();
  settle();
}

// Gives back the pins of all offered pages at once, so that they are evicted in an order like that of
// their use: the chain that was longest not continued first, and in a chain a child before its parent.
void Recovery::settle() {
  if (active() || pins_.slots.empty()) return;
  std::vector<std::uint32_t> slots = std::move(pins_.slots);
  pins_.slots.clear();
  std::sort(slots.begin(), slots.end(),
            [&](std::uint32_t a, std::uint32_t b) { return pages_.at(a).number > pages_.at(b).number; });
  std::unordered_map<Key, std::uint32_t> by_last_key;
  for (const std::uint32_t slot : slots) by_last_key.emplace(pages_.at(slot).keys.back(), slot);
  // Children have higher numbers than their parents: one pass from the highest carries the latest use down.
  std::unordered_map<std::uint32_t, std::uint64_t> latest;
  for (const std::uint32_t slot : slots) {
    const Page& page = pages_.at(slot);
    std::uint64_t& own = latest.try_emplace(slot, page.number).first->second;
    const std::uint64_t carried = own;
    const auto parent = by_last_key.find(page.parent);
    if (parent == by_last_key.end()) continue;
    std::uint64_t& theirs =
        latest.try_emplace(parent->second, pages_.at(parent->second).number).first->second;
    theirs = std::max(theirs, carried);
  }
  // unpin() goes from the end, and what is unpinned first is evicted first.
  std::stable_sort(slots.begin(), slots.end(), [&](std::uint32_t a, std::uint32_t b) {
    const std::uint64_t use_a = latest.at(a);
    const std::uint64_t use_b = latest.at(b);
    return use_a != use_b ? use_a > use_b : pages_.at(a).number < pages_.at(b).number;
  });
  pins_.slots = std::move(slots);
  pages_.unpin(pins_);
}

Status Recovery::check(std::map<std::uint32_t, std::uint32_t>& pins) const {
  for (const std::uint32_t slot : pins_.slots) ++pins[slot];
  for (const auto& [slot, record] : records_) {
    if (!pages_.all().contains(slot) || !pages_.at(slot).checking) {
      return Error{Code::corrupt, 0, "a record of a page that is not checked"};
    }
  }
  return {};
}

}  // namespace di::host
