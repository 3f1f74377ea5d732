#include "host/pages.h"

#include <algorithm>
#include <utility>

namespace di::host {

namespace {

Status broken(std::string what, std::uint32_t slot) {
  return Error{Code::corrupt, 0, what + " (slot " + std::to_string(slot) + ")"};
}

}  // namespace

std::string_view page_state_name(PageState state) {
  switch (state) {
    case PageState::granted:
      return "granted";
    case PageState::filling:
      return "filling";
    case PageState::sealed:
      return "sealed";
    case PageState::quarantined:
      return "quarantined";
    case PageState::scratch:
      return "scratch";
  }
  return "unknown";
}

Pages::Pages(const Options& options, ArenaPort& port) : options_(options), port_(port) {}

Status Pages::set_layout(const kv::Layout& layout) {
  if (layout_) {
    if (*layout_ == layout) return {};
    return Error{Code::unsupported, 0, "the arena holds pages of another layout"};
  }
  Result<kv::SlotPool> pool = kv::SlotPool::create({.payload_bytes = options_.payload_bytes,
                                                    .unit_bytes = layout.page_bytes(1),
                                                    .slots_max = options_.slots_max});
  if (!pool) return pool.error();
  pool_.emplace(std::move(*pool));
  for (std::uint32_t slot = 0; slot < generations_.size(); ++slot)
    pool_->restore_generation(slot, generations_[slot]);
  layout_ = layout;
  return {};
}

Result<std::vector<std::uint32_t>> Pages::take(std::span<const std::uint32_t> blocks, PageState state) {
  DI_ASSERT(state == PageState::granted || state == PageState::filling || state == PageState::scratch);
  if (!layout_) return Error{Code::busy, 0, "no layout is known yet"};
  const auto never_fits = [&] {
    ++counters_.room_refused;
    return Error{Code::invalid, 0, "more than the arena holds"};
  };
  if (blocks.size() > options_.slots_max) return never_fits();
  std::vector<std::uint64_t> bytes;
  std::uint64_t room = 0;
  for (const std::uint32_t count : blocks) {
    if (count == 0 || count > layout_->page_blocks()) return Error{Code::invalid, 0, "page of a wrong size"};
    bytes.push_back(layout_->page_bytes(count));
    room += room_bytes(count);
  }
  if (room > pool_->bytes_total()) return never_fits();
  const std::uint64_t slots_left = options_.slots_max - pool_->slots_used() + evictable_.size();
  if (room > pool_->bytes_free() + evictable_bytes_ || blocks.size() > slots_left) {
    ++counters_.room_refused;
    return Error{Code::busy, 0, "no room in the arena"};
  }
  Result<std::vector<kv::SlotPlace>> places = take_places(bytes);
  if (!places) {
    ++counters_.room_refused;
    return places.error();
  }
  std::vector<std::uint32_t> slots;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const kv::SlotPlace& place = (*places)[i];
    Page fresh;
    fresh.place = place;
    fresh.state = state;
    fresh.number = next_number_++;
    fresh.blocks = blocks[i];
    Page& added = pages_.emplace(place.slot, std::move(fresh)).first->second;
    ++counts_[static_cast<std::size_t>(state)];
    show(added, state == PageState::granted ? kv::SlotState::granted : kv::SlotState::filling);
    slots.push_back(place.slot);
  }
  return slots;
}

// One after the other, each as soon as there is room for it: to begin anew after each page that is thrown out
// would be n * n of work.
bool Pages::fits(std::span<const std::uint32_t> blocks, const std::set<std::uint32_t>& beside) const {
  if (!layout_) return true;
  std::uint64_t room = 0;
  for (const std::uint32_t count : blocks) room += room_bytes(count);
  for (const std::uint32_t slot : beside) room += at(slot).place.bytes;
  return room <= pool_->bytes_total() && blocks.size() + beside.size() <= options_.slots_max;
}

Result<std::vector<kv::SlotPlace>> Pages::take_places(std::span<const std::uint64_t> bytes) {
  std::vector<kv::SlotPlace> places;
  places.reserve(bytes.size());
  for (const std::uint64_t wanted : bytes) {
    Result<kv::SlotPlace> place = pool_->take(wanted);
    // Bytes may be free and still not lie together: evict until they do.
    while (!place && place.error().code == Code::busy && !evictable_.empty()) {
      ++counters_.evicted;
      free(victim());
      place = pool_->take(wanted);
    }
    if (place) {
      places.push_back(*place);
      continue;
    }
    for (const kv::SlotPlace& taken : places) pool_->give_back(taken.slot);
    // Those may have lain in the way.
    return places.empty() ? place.error() : pool_->take_all(bytes);
  }
  return places;
}

void Pages::give_back(std::uint32_t slot) {
  DI_ASSERT(page(slot).state == PageState::granted);
  free(slot);
}

void Pages::give_up(std::uint32_t slot, const Peer& rank) {
  Page& lost = page(slot);
  DI_ASSERT(lost.state == PageState::granted);
  become(lost, PageState::quarantined);
  lost.rank_writes = rank;
  ++counters_.quarantined;
  settle(slot);
}

void Pages::seal(const wire::kv_sealed& message) {
  const std::uint32_t slot = message.slot.slot;
  Page& sealed = page(slot);
  DI_ASSERT(sealed.state == PageState::granted);
  DI_ASSERT(sealed.pins > 0 && message.crcs.size() == layout_->groups());
  DI_ASSERT(message.keys.empty() || message.keys.size() == sealed.blocks);
  become(sealed, PageState::sealed);
  sealed.tenant = message.tenant;
  sealed.parent = message.parent;
  sealed.keys = message.keys;
  sealed.crcs = message.crcs;
  sealed.groups = layout_->groups();
  port_.slot_crcs(slot, sealed.crcs);
  port_.slot_segments(slot, (1u << sealed.groups) - 1);
  record(sealed);
  port_.slot_state(slot, kv::SlotState::sealed);
  ++counters_.sealed;
  index_add(sealed);
}

void Pages::announce(std::uint32_t slot, const Key& parent, std::vector<Key> keys,
                     std::vector<std::uint32_t> crcs, bool findable) {
  Page& filling = page(slot);
  DI_ASSERT(filling.state == PageState::filling && !filling.indexed);
  DI_ASSERT((keys.empty() || keys.size() == filling.blocks) && crcs.size() == layout_->groups());
  filling.parent = parent;
  filling.keys = std::move(keys);
  filling.crcs = std::move(crcs);
  filling.stored = true;
  port_.slot_crcs(slot, filling.crcs);
  if (!findable) return;
  filling.indexed = true;
  for (std::uint32_t i = 0; i < filling.blocks; ++i) filling_.try_emplace(filling.keys[i], Place{slot, i});
}

bool Pages::verify_next(std::uint32_t slot) {
  Page& filling = page(slot);
  DI_ASSERT(filling.state == PageState::filling && filling.groups < layout_->groups());
  const std::uint32_t group = filling.groups;
  const std::uint64_t offset = filling.place.offset + layout_->segment_offset(group, filling.blocks);
  if (port_.segment_crc(offset, layout_->segment_bytes(group, filling.blocks)) != filling.crcs[group])
    return false;
  ++filling.groups;
  port_.slot_segments(slot, (1u << filling.groups) - 1);
  if (filling.groups < layout_->groups()) return true;
  record(filling);
  DI_ASSERT(filling.pins > 0);
  if (filling.indexed) index_remove(filling, 0);
  become(filling, PageState::sealed);
  filling.peer_writes = 0;
  port_.slot_state(slot, kv::SlotState::sealed);
  ++counters_.filled;
  index_add(filling);
  return true;
}

void Pages::spoil(std::uint32_t slot) {
  Page& spoilt = page(slot);
  DI_ASSERT(spoilt.state == PageState::filling);
  if (spoilt.indexed) index_remove(spoilt, 0);
  become(spoilt, PageState::quarantined);
  ++counters_.quarantined;
  settle(slot);
}

void Pages::scrap(std::uint32_t slot) {
  Page& used = page(slot);
  DI_ASSERT(used.state == PageState::scratch);
  become(used, PageState::quarantined);
  if (used.peer_writes > 0) ++counters_.quarantined;
  settle(slot);
}

void Pages::peer_writes(std::uint32_t slot, bool writes) {
  Page& written = page(slot);
  DI_ASSERT(written.state != PageState::granted && written.state != PageState::sealed);
  DI_ASSERT(writes || written.peer_writes > 0);
  if (writes) {
    ++written.peer_writes;
  } else {
    --written.peer_writes;
  }
  settle(slot);
}

void Pages::writer_gone(const Peer& rank) {
  std::vector<std::uint32_t> over;
  for (auto& [slot, held] : pages_) {
    if (held.rank_writes && *held.rank_writes == rank) {
      held.rank_writes.reset();
      over.push_back(slot);
    }
  }
  for (const std::uint32_t slot : over) settle(slot);
}

Status Pages::restore(const kv::Layout& layout, const kv::Former& former) {
  DI_ASSERT(pages_.empty());
  generations_ = former.slot_generations;
  if (Status set = set_layout(layout); !set.ok()) return set;
  for (const kv::FormerSlot& slot : former.slots) {
    if (Status taken = pool_->restore(slot.place); !taken.ok()) return taken;
    Page held;
    held.place = slot.place;
    held.state = PageState::quarantined;
    held.blocks = slot.page_blocks;
    held.former = true;
    held.checking = slot.record.has_value();
    if (slot.record) next_number_ = std::max(next_number_, slot.record->number + 1);
    held.number = slot.record ? slot.record->number : 0;
    ++counts_[static_cast<std::size_t>(held.state)];
    pages_.emplace(slot.place.slot, std::move(held));
  }
  return {};
}

void Pages::checked(std::uint32_t slot, std::optional<kv::PageRecord> record, PinSet& pins) {
  Page& found = page(slot);
  DI_ASSERT(found.state == PageState::quarantined && found.checking);
  found.checking = false;
  if (!record) return settle(slot);
  DI_ASSERT(record->keys.size() == found.blocks && record->crcs.size() == layout_->groups());
  become(found, PageState::sealed);
  found.former = false;
  found.tenant = record->tenant;
  found.parent = record->parent;
  found.keys = std::move(record->keys);
  found.crcs = std::move(record->crcs);
  found.groups = layout_->groups();
  found.stored = record->stored;
  pin(pins, slot);
  index_add(found);
  ++counters_.recovered;
}

void Pages::former_gone() {
  std::vector<std::uint32_t> over;
  for (auto& [slot, held] : pages_) {
    if (std::exchange(held.former, false)) over.push_back(slot);
  }
  for (const std::uint32_t slot : over) settle(slot);
}

Status Pages::replace_layout(const kv::Layout& layout) {
  if (!pages_.empty()) return Error{Code::busy, 0, "the arena still holds pages of another layout"};
  if (pool_) {
    generations_.resize(options_.slots_max);
    for (std::uint32_t slot = 0; slot < options_.slots_max; ++slot)
      generations_[slot] = pool_->last_generation(slot);
  }
  layout_.reset();
  return set_layout(layout);
}

Pages::Dropped Pages::drop_evictable() {
  Dropped dropped;
  while (!evictable_.empty()) {
    const std::uint32_t slot = evictable_.begin()->second;
    ++dropped.pages;
    dropped.blocks += at(slot).owned;
    dropped.bytes += at(slot).place.bytes;
    ++counters_.dropped;
    free(slot);
  }
  return dropped;
}

void Pages::pin(PinSet& pins, std::uint32_t slot) {
  Page& pinned = page(slot);
  DI_ASSERT(pinned.state != PageState::quarantined);
  not_evictable(pinned);
  ++pinned.pins;
  pins.slots.push_back(slot);
}

void Pages::pin_again(PinSet& pins, const PinSet& held) {
  for (const std::uint32_t slot : held.slots) {
    Page& pinned = page(slot);
    DI_ASSERT(pinned.pins > 0);
    ++pinned.pins;
    pins.slots.push_back(slot);
  }
}

void Pages::unpin(PinSet& pins) {
  // From the end of the chain: what is unpinned first is evicted first.
  std::vector<std::uint32_t> slots = std::move(pins.slots);
  pins.slots.clear();
  for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) {
    Page& pinned = page(*slot);
    DI_ASSERT(pinned.pins > 0);
    --pinned.pins;
    settle(*slot);
  }
}

std::vector<Piece> Pages::cover(std::span<const Key> keys, std::uint32_t from, bool filling,
                                std::size_t pieces_max) const {
  std::vector<Piece> pieces;
  std::uint32_t at = from;
  while (at < keys.size() && pieces.size() < pieces_max) {
    Place place;
    if (const auto found = sealed_.find(keys[at]); found != sealed_.end()) {
      place = found->second.front();
    } else if (const auto coming = filling_.find(keys[at]); filling && coming != filling_.end()) {
      place = coming->second;
    } else {
      break;
    }
    // As much of this page as the chain goes on in it, whoever owns the later keys.
    const Page& held = this->at(place.slot);
    std::uint32_t count = 1;
    while (at + count < keys.size() && place.block + count < held.blocks &&
           held.keys[place.block + count] == keys[at + count]) {
      ++count;
    }
    pieces.push_back({place.slot, place.block, count, at});
    at += count;
  }
  return pieces;
}

std::optional<std::uint32_t> Pages::ending(const Key& last, std::uint32_t blocks) const {
  const auto found = sealed_.find(last);
  if (found == sealed_.end()) return std::nullopt;
  for (const Place& place : found->second) {
    if (place.block + 1 == blocks && at(place.slot).blocks == blocks) return place.slot;
  }
  return std::nullopt;
}

const Page* Pages::find(std::uint32_t slot, std::uint32_t generation) const {
  const auto found = pages_.find(slot);
  return found != pages_.end() && found->second.place.generation == generation ? &found->second : nullptr;
}

const Page& Pages::at(std::uint32_t slot) const {
  const auto found = pages_.find(slot);
  DI_ASSERT(found != pages_.end());
  return found->second;
}

Page& Pages::page(std::uint32_t slot) {
  const auto found = pages_.find(slot);
  DI_ASSERT(found != pages_.end());
  return found->second;
}

wire::SlotRef Pages::ref(const Piece& piece) const {
  const Page& held = at(piece.slot);
  return {piece.slot, held.place.generation, held.blocks, piece.first, piece.count};
}

bool Pages::matches(std::uint32_t slot, std::span<const std::uint32_t> crcs) const {
  const Page& held = at(slot);
  if (crcs.size() != layout_->groups()) return false;
  for (std::uint32_t group = 0; group < layout_->groups(); ++group) {
    const std::uint64_t offset = held.place.offset + layout_->segment_offset(group, held.blocks);
    if (port_.segment_crc(offset, layout_->segment_bytes(group, held.blocks)) != crcs[group]) return false;
  }
  return true;
}

std::uint64_t Pages::room_bytes(std::uint32_t blocks) const {
  // The pool hands out runs of 2^k units (kv/slots.h).
  const std::uint64_t unit = layout_->page_bytes(1);
  std::uint64_t room = unit;
  while (room < layout_->page_bytes(blocks)) room *= 2;
  return room;
}

Pages::Changes Pages::take_changes() {
  Changes changes;
  changes.added.assign(added_.begin(), added_.end());
  changes.removed = std::move(removed_);
  added_.clear();
  removed_.clear();
  return changes;
}

std::vector<std::uint32_t> Pages::published() const {
  std::map<std::uint64_t, std::uint32_t> by_number;
  for (const auto& [slot, held] : pages_) {
    if (held.published) by_number.emplace(held.number, slot);
  }
  std::vector<std::uint32_t> slots;
  for (const auto& [number, slot] : by_number) slots.push_back(slot);
  return slots;
}

wire::ArenaPage Pages::describe(std::uint32_t slot) const {
  const Page& held = at(slot);
  return {held.number, held.parent, held.keys, held.crcs};
}

// Puts a sealed page behind those that brought its keys before; it owns the keys nobody had.
void Pages::index_add(Page& sealed) {
  for (std::uint32_t i = 0; i < sealed.keys.size(); ++i) {
    std::vector<Place>& places = sealed_[sealed.keys[i]];
    if (places.empty()) ++sealed.owned;
    places.push_back({sealed.place.slot, i});
    const auto count = continuations_.find(sealed.keys[i]);
    if (count != continuations_.end()) sealed.continued += count->second;
  }
  sealed.indexed = true;
  if (!sealed.keys.empty()) continue_chain(sealed);
  if (sealed.owned > 0) {
    publish(sealed);
  } else if (!sealed.keys.empty()) {
    ++counters_.duplicates;
  }
}

void Pages::index_remove(Page& gone, std::uint64_t use) {
  gone.indexed = false;
  if (gone.state == PageState::sealed && !gone.keys.empty()) end_chain(gone, use);
  for (std::uint32_t i = 0; i < gone.keys.size(); ++i) {
    if (gone.state == PageState::filling) {
      const auto found = filling_.find(gone.keys[i]);
      if (found != filling_.end() && found->second.slot == gone.place.slot) filling_.erase(found);
      continue;
    }
    const auto found = sealed_.find(gone.keys[i]);
    DI_ASSERT(found != sealed_.end());
    std::vector<Place>& places = found->second;
    const auto mine = std::find_if(places.begin(), places.end(), [&](const Place& place) {
      return place.slot == gone.place.slot && place.block == i;
    });
    DI_ASSERT(mine != places.end());
    const bool owner = mine == places.begin();
    places.erase(mine);
    if (!owner) continue;
    --gone.owned;
    if (places.empty()) {
      sealed_.erase(found);
      continue;
    }
    Page& heir = page(places.front().slot);
    ++heir.owned;
    publish(heir);
  }
}

void Pages::publish(Page& owner) {
  if (owner.published) return;
  owner.published = true;
  added_.insert(owner.place.slot);
}

void Pages::show(Page& fresh, kv::SlotState state) {
  port_.slot_assign({.slot = fresh.place.slot,
                     .generation = fresh.place.generation,
                     .page_blocks = fresh.blocks,
                     .offset = fresh.place.offset,
                     .bytes = fresh.place.bytes,
                     .state = state});
}

void Pages::record(const Page& sealed) {
  // A page without keys is of use only to the request that it was made for.
  if (sealed.keys.empty()) return;
  port_.slot_record(sealed.place.slot, {.number = sealed.number,
                                        .tenant = sealed.tenant,
                                        .parent = sealed.parent,
                                        .keys = sealed.keys,
                                        .crcs = sealed.crcs,
                                        .stored = sealed.stored});
}

// What follows from who still uses the page.
void Pages::settle(std::uint32_t slot) {
  Page& held = page(slot);
  // What a process of before may be reading stays readable.
  if (held.pins > 0 || held.former || held.checking) return;
  if (held.state == PageState::quarantined) {
    // Nobody reads it: references to it go stale at once, and its room is kept while somebody may write.
    if (held.peer_writes == 0 && !held.rank_writes) return free(slot);
    port_.slot_state(slot, kv::SlotState::quarantined);
  } else if (held.state == PageState::sealed) {
    if (held.owned == 0) {
      free(slot);
    } else if (held.use == 0) {
      evictable(held);
    }
  }
}

void Pages::evictable(Page& held) {
  held.use = ++last_use_;
  evictable_.emplace(held.use, held.place.slot);
  evictable_bytes_ += held.place.bytes;
  if (held.continued == 0) leaves_.emplace(held.use, held.place.slot);
}

void Pages::become(Page& page, PageState state) {
  --counts_[static_cast<std::size_t>(page.state)];
  ++counts_[static_cast<std::size_t>(state)];
  page.state = state;
}

void Pages::free(std::uint32_t slot) {
  Page& gone = page(slot);
  DI_ASSERT(gone.pins == 0 && gone.peer_writes == 0 && !gone.rank_writes);
  const std::uint64_t use = gone.use;
  not_evictable(gone);
  DI_ASSERT(!gone.former && !gone.checking);
  if (gone.indexed) index_remove(gone, use);
  if (gone.published && added_.erase(slot) == 0) removed_.push_back(gone.number);
  port_.slot_free(slot);
  --counts_[static_cast<std::size_t>(gone.state)];
  pages_.erase(slot);
  pool_->give_back(slot);
}

void Pages::not_evictable(Page& held) {
  if (held.use == 0) return;
  const std::uint64_t use = std::exchange(held.use, 0);
  evictable_.erase(use);
  leaves_.erase(use);
  evictable_bytes_ -= held.place.bytes;
}

void Pages::continue_chain(const Page& fresh) {
  if (fresh.parent == Key{}) return;
  ++continuations_[fresh.parent];
  const auto found = sealed_.find(fresh.parent);
  if (found == sealed_.end()) return;
  for (const Place& place : found->second) {
    Page& before = page(place.slot);
    if (before.continued++ == 0 && before.use != 0) leaves_.erase(before.use);
  }
}

void Pages::end_chain(const Page& gone, std::uint64_t use) {
  if (gone.parent == Key{}) return;
  const auto count = continuations_.find(gone.parent);
  if (--count->second == 0) continuations_.erase(count);
  const auto found = sealed_.find(gone.parent);
  if (found == sealed_.end()) return;
  for (const Place& place : found->second) {
    Page& before = page(place.slot);
    if (--before.continued > 0 || before.use == 0) continue;
    // Whoever used what continued it used it too.
    if (before.use < use && !evictable_.contains(use)) {
      evictable_.erase(before.use);
      before.use = use;
      evictable_.emplace(use, place.slot);
    }
    leaves_.emplace(before.use, place.slot);
  }
}

std::uint32_t Pages::victim() const {
  // Keys that come from a peer may go in a circle, which has no end to begin with.
  return (leaves_.empty() ? evictable_ : leaves_).begin()->second;
}

Status Pages::check(const std::map<std::uint32_t, std::uint32_t>& pins,
                    const std::set<std::uint32_t>& scratch) const {
  std::uint64_t bytes = 0;
  std::uint64_t evictable = 0;
  std::size_t places = 0;
  for (const auto& [slot, held] : pages_) {
    bytes += held.place.bytes;
    if (!pool_->current(slot, held.place.generation)) return broken("a page's slot is free", slot);
    const auto counted = pins.find(slot);
    if ((counted == pins.end() ? 0 : counted->second) != held.pins) return broken("pins disagree", slot);
    if ((held.use != 0) != (held.state == PageState::sealed && held.pins == 0)) {
      return broken("evictable and used, or neither", slot);
    }
    if (held.use != 0) evictable += held.place.bytes;
    if ((held.use != 0 && held.continued == 0) != (held.use != 0 && leaves_.contains(held.use)))
      return broken("not evicted in its turn", slot);
    if ((held.former || held.checking) && held.state != PageState::quarantined)
      return broken("a page of before is in use", slot);
    switch (held.state) {
      case PageState::granted:
        if (held.pins != 0 || held.indexed || held.published || held.peer_writes != 0)
          return broken("granted page in use", slot);
        break;
      case PageState::filling:
        if (held.published || held.owned != 0) return broken("page published before it is verified", slot);
        if (held.groups >= layout_->groups()) return broken("full page is filling", slot);
        break;
      case PageState::sealed: {
        if (held.peer_writes != 0 || held.rank_writes)
          return broken("somebody may write into a sealed page", slot);
        if (held.published != (held.owned > 0))
          return broken("published without a key, or a key not published", slot);
        std::uint32_t owned = 0;
        for (std::uint32_t i = 0; i < held.keys.size(); ++i) {
          const auto found = sealed_.find(held.keys[i]);
          if (found == sealed_.end()) return broken("key of a sealed page is not indexed", slot);
          if (found->second.front().slot == slot && found->second.front().block == i) ++owned;
        }
        if (owned != held.owned) return broken("count of owned keys is wrong", slot);
        std::uint32_t continued = 0;
        for (const Key& key : held.keys) {
          const auto count = continuations_.find(key);
          if (count != continuations_.end()) continued += count->second;
        }
        if (continued != held.continued) return broken("count of pages that continue it is wrong", slot);
        places += held.keys.size();
        break;
      }
      case PageState::quarantined:
        if (held.indexed || held.published) return broken("quarantined page can be found", slot);
        if (held.former || held.checking) break;
        if (held.pins == 0 && held.peer_writes == 0 && !held.rank_writes)
          return broken("quarantined for nobody", slot);
        break;
      case PageState::scratch:
        if (held.pins != 0 || held.indexed || held.published || !held.keys.empty())
          return broken("scratch is used like a page", slot);
        if (!scratch.contains(slot)) return broken("scratch that nobody uses", slot);
        break;
    }
  }
  for (const std::uint32_t slot : scratch) {
    const auto found = pages_.find(slot);
    if (found == pages_.end() || found->second.state != PageState::scratch)
      return broken("scratch is used that is none", slot);
  }
  for (const auto& [slot, count] : pins) {
    if (count != 0 && !pages_.contains(slot)) return broken("pinned and free", slot);
  }
  if (pool_ &&
      (bytes + pool_->bytes_free() != pool_->bytes_total() || pool_->slots_used() != pages_.size())) {
    return Error{Code::corrupt, 0, "bytes of pages and free bytes are not the payload"};
  }
  if (evictable != evictable_bytes_) return Error{Code::corrupt, 0, "evictable bytes are miscounted"};
  std::size_t indexed = 0;
  for (const auto& [key, list] : sealed_) indexed += list.size();
  if (indexed != places) return Error{Code::corrupt, 0, "the index names pages that are gone"};
  for (const auto& [key, place] : filling_) {
    const auto found = pages_.find(place.slot);
    if (found == pages_.end() || found->second.state != PageState::filling) {
      return broken("a page that is not filling is awaited", place.slot);
    }
  }
  for (const std::uint32_t slot : added_) {
    if (!pages_.contains(slot)) return broken("a free page is about to be told to di-meta", slot);
  }
  return {};
}

}  // namespace di::host
