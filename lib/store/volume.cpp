#include "store/volume.h"

#include <algorithm>

#include "store/slot_read.h"

namespace di::store {

namespace {

constexpr std::size_t meta_page_bytes = 4096;
// Tables are read in parts of this length.
constexpr std::size_t table_part_bytes = std::size_t{1} << 20;

// A disk has a bad place now and then, most of all where a write was cut off.  More than this, and it is the disk.
constexpr std::uint32_t unreadable_max = 16;

// The index has 32 bits for a slot: 64 TiB of the smallest.
Status check_slots(const Geometry& geometry) {
  if (std::uint64_t{geometry.segments} * geometry.records_per_segment < SlotIndex::none) return {};
  return Error{Code::unsupported, 0, "a volume has at most 2^32 slots: take a shorter one"};
}

}  // namespace

// ---- format and open

Status Volume::format(Disk& disk, const FormatOptions& options) {
  Result<Geometry> geometry = Geometry::of(disk.bytes(), options.segment_bytes);
  if (!geometry) return geometry.error();
  DI_TRY(check_slots(*geometry));
  AlignedBuffer zeros(table_part_bytes);
  for (std::uint64_t offset = 0; offset < geometry->segments_offset;) {
    const auto part = static_cast<std::size_t>(
        std::min<std::uint64_t>(geometry->segments_offset - offset, table_part_bytes));
    DI_TRY(disk.write(offset, zeros.first(part)));
    offset += part;
  }
  Superblock superblock;
  superblock.uuid = options.uuid;
  superblock.geometry = *geometry;
  AlignedBuffer page(meta_page_bytes);
  for (superblock.sequence = 1; superblock.sequence <= 2; ++superblock.sequence) {
    superblock_encode(superblock, page.first(superblock_bytes));
    DI_TRY(disk.write(superblock.sequence % 2 * superblock_bytes, page.first(superblock_bytes)));
  }
  return disk.flush();
}

Result<std::unique_ptr<Volume>> Volume::open(Disk& disk) {
  if (disk.bytes() < 2 * superblock_bytes) return Error{Code::corrupt, 0, "not a volume: too short"};
  AlignedBuffer buffer(table_part_bytes);
  std::optional<Superblock> best;
  std::optional<Error> why;
  for (std::uint64_t which = 0; which < 2; ++which) {
    const MutableByteView page = buffer.first(superblock_bytes);
    // A write that was cut off may leave a sector that cannot be read: the other one is there for that.
    const Status there = disk.read(which * superblock_bytes, page);
    const Result<Superblock> read = there.ok() ? superblock_decode(page) : Result<Superblock>(there.error());
    if (!read) {
      if (!why || read.error().code == Code::unsupported) why = read.error();
      continue;
    }
    if (!best || read->sequence > best->sequence) best = *read;
  }
  if (!best) return *why;
  if (best->geometry.volume_bytes > disk.bytes()) {
    return Error{Code::corrupt, 0, "the volume's file is shorter than the volume"};
  }
  DI_TRY(check_slots(best->geometry));

  std::unique_ptr<Volume> volume(new Volume(*std::move(best)));
  const Geometry& geometry = volume->geometry();
  for (std::uint32_t first = 0; first < geometry.segments;) {
    const auto per_part = static_cast<std::uint32_t>(table_part_bytes / record_bytes);
    const std::uint32_t count = std::min(geometry.segments - first, per_part);
    const MutableByteView part = buffer.first(align_up(std::size_t{count} * record_bytes, meta_page_bytes));
    // A page that cannot be read is like one that was torn.
    DI_TRY(
        volume->read_table(disk, geometry.segment_table_offset + std::uint64_t{first} * record_bytes, part));
    for (std::uint32_t i = 0; i < count; ++i) {
      // A torn record loses its segment's slots: a cache that is colder.
      Result<SegmentRecord> record = segment_record_decode(&part[std::size_t{i} * record_bytes]);
      if (record) volume->segments_[first + i].record = *record;
    }
    first += count;
  }
  for (const std::uint32_t number : volume->superblock_.open) {
    volume->segments_[number].open = true;
    volume->open_.insert(number);
  }
  for (std::uint32_t number = 0; number < geometry.segments; ++number) {
    const SegmentRecord& record = volume->segments_[number].record;
    volume->next_sequence_ =
        std::max<std::uint64_t>(volume->next_sequence_, std::uint64_t{record.generation} + 1);
    if (!record.bound || volume->slots_of(record.slot_class) == 0) {
      volume->unbound_.insert(number);
      continue;
    }
    DI_TRY(volume->load_segment(disk, number, buffer));
  }
  volume->index_all();

  ++volume->superblock_.epoch;
  const MetaWrite superblock = volume->next_superblock();
  const MutableByteView page = buffer.first(superblock_bytes);
  std::copy(superblock.bytes.begin(), superblock.bytes.end(), page.begin());
  DI_TRY(disk.write(superblock.offset, page));
  DI_TRY(disk.flush());
  volume->superblock_unflushed_ = false;
  return volume;
}

Volume::Volume(Superblock superblock)
    : superblock_(std::move(superblock)), segments_(superblock_.geometry.segments) {}

Result<std::vector<bool>> Volume::read_table(Disk& disk, std::uint64_t offset, MutableByteView to) {
  std::vector<bool> missing(to.size() / meta_page_bytes);
  if (disk.read(offset, to).ok()) return missing;
  for (std::size_t page = 0; page < missing.size(); ++page) {
    const MutableByteView there = to.subspan(page * meta_page_bytes, meta_page_bytes);
    const Status read = disk.read(offset + page * meta_page_bytes, there);
    if (read.ok()) continue;
    DI_TRY(unreadable(read.error()));
    missing[page] = true;
    std::fill(there.begin(), there.end(), std::byte{0});
  }
  return missing;
}

Status Volume::unreadable(const Error& error) {
  if (++stats_.unreadable > unreadable_max) return error;
  return {};
}

Status Volume::load_segment(Disk& disk, std::uint32_t number, AlignedBuffer& buffer) {
  Segment& segment = segments_[number];
  const std::uint32_t count = slots_of(segment.record.slot_class);
  segment.slots.assign(count, Slot());
  // The records first, out of the buffer that the headers will need.
  std::vector<std::optional<SlotRecord>> records(count);
  std::vector<bool> doubtful(count, segment.open);
  const std::uint32_t pages = (count + records_per_page - 1) / records_per_page;
  for (std::uint32_t page = 0; page < pages;) {
    const std::uint32_t some = std::min<std::uint32_t>(pages - page, table_part_bytes / meta_page_bytes);
    const MutableByteView part = buffer.first(std::size_t{some} * meta_page_bytes);
    const Result<std::vector<bool>> missing =
        read_table(disk, superblock_.geometry.record_page_offset(number, page), part);
    if (!missing) return missing.error();
    for (std::uint32_t i = 0; i < some * records_per_page; ++i) {
      const std::uint32_t slot = page * records_per_page + i;
      if (slot >= count) break;
      Result<SlotRecord> record = slot_record_decode(&part[std::size_t{i} * record_bytes]);
      if (!record || (*missing)[i / records_per_page]) {
        doubtful[slot] = true;
      } else if (record->segment_generation == segment.record.generation) {
        records[slot] = *record;
      }
    }
    page += some;
  }
  for (std::uint32_t slot = 0; slot < count; ++slot) {
    if (records[slot]) next_sequence_ = std::max(next_sequence_, records[slot]->sequence + 1);
    if (doubtful[slot]) {
      DI_TRY(load_slot(disk, number, slot, records[slot], buffer));
    } else if (records[slot]) {
      segment.slots[slot].sequence = records[slot]->sequence;
      if (records[slot]->live) adopt({number, slot}, *records[slot]);
    }
  }
  if (segment.used == 0) empty_.insert(number);
  if (segment.used < count) {
    with_room_[segment.record.slot_class].insert(number);
  }
  return {};
}

// The header decides, as far as it is newer than the record.
Status Volume::load_slot(Disk& disk, std::uint32_t number, std::uint32_t slot,
                         const std::optional<SlotRecord>& record, AlignedBuffer& buffer) {
  const SegmentRecord& segment = segments_[number].record;
  const SlotAddress at{number, slot};
  const std::uint64_t known = record ? record->sequence : 0;
  slot_at(at).sequence = known;
  const MutableByteView bytes = buffer.first(segment.slot_class.header_bytes);
  const Status read_header = disk.read(slot_offset(at), bytes);
  if (!read_header.ok()) DI_TRY(unreadable(read_header.error()));
  const Result<SlotHeader> header = read_header.ok() ? slot_header_decode(bytes, segment.slot_class)
                                                     : Result<SlotHeader>(read_header.error());
  const bool ours = header.ok() && header->volume == superblock_.uuid && header->offset == slot_offset(at) &&
                    header->segment_generation == segment.generation;
  if (!ours || header->sequence < known) {
    // What the record knows is not there (a write that was lost or torn), or nothing ever was.
    if (record && record->live) mark_dirty(at);
    return {};
  }
  next_sequence_ = std::max(next_sequence_, header->sequence + 1);
  if (header->sequence == known) {
    if (record->live) adopt(at, *record);
    return {};
  }
  mark_dirty(at);
  slot_at(at).sequence = header->sequence;
  const Read read{at,
                  slot_offset(at),
                  segment.slot_class,
                  superblock_.uuid,
                  header->shard.stripe,
                  header->shard.column,
                  header->sequence,
                  segment.generation,
                  header->shard.payload_bytes(),
                  true};
  for (std::uint32_t group = 0; group < header->shard.segments.size(); ++group) {
    const Status segment_read =
        read_segment(disk, read, *header, group, buffer.first(header->shard.segments[group]));
    if (!segment_read.ok()) {
      ++stats_.dropped_torn;
      return {};
    }
  }
  SlotRecord found;
  found.stripe = header->shard.stripe;
  found.column = header->shard.column;
  found.sequence = header->sequence;
  found.payload_bytes = header->shard.payload_bytes();
  adopt(at, found);
  slot_at(at).verified = true;
  ++stats_.recovered_by_header;
  return {};
}

void Volume::adopt(SlotAddress at, const SlotRecord& record) {
  Slot& slot = slot_at(at);
  slot.stripe = record.stripe;
  slot.sequence = record.sequence;
  slot.payload_bytes = record.payload_bytes;
  slot.column = record.column;
  slot.state = SlotState::live;
  slot.verified = false;
  ++segments_[at.segment].used;
}

void Volume::index_all() {
  const auto each = [this](const auto& add) {
    for (std::uint32_t segment = 0; segment < segments_.size(); ++segment) {
      const std::vector<Slot>& slots = segments_[segment].slots;
      for (std::uint32_t slot = 0; slot < slots.size(); ++slot) {
        if (slots[slot].state == SlotState::live) add(number_of({segment, slot}), slots[slot].stripe);
      }
    }
  };
  const auto drop = [this](SlotAddress at) {
    slot_at(at).verified = false;
    mark_dirty(at);
    release(at);
  };
  index_.build(each, [&](std::uint32_t number, std::uint32_t earlier) {
    const SlotAddress at = address_of(number);
    const SlotAddress other = address_of(earlier);
    if (slot_at(at).stripe != slot_at(other).stripe || slot_at(at).column != slot_at(other).column)
      return SlotIndex::Clash::other_stripe;
    // One column in two slots: the later write counts.
    const bool keep = slot_at(other).sequence >= slot_at(at).sequence;
    drop(keep ? at : other);
    return keep ? SlotIndex::Clash::keep_earlier : SlotIndex::Clash::replace;
  });
  for (const Segment& segment : segments_) {
    stats_.slots_live += segment.used;
    stats_.slot_bytes_live += std::uint64_t{segment.used} * segment.record.slot_class.slot_bytes;
    for (const Slot& slot : segment.slots) {
      if (slot.state == SlotState::live) stats_.payload_bytes_live += slot.payload_bytes;
    }
  }
}

// ---- put

Result<Put> Volume::put_begin(const Shard& shard) {
  DI_ASSERT(shard.payload_bytes() <= shard.slot_class.slot_bytes - shard.slot_class.header_bytes);
  if (broken_) return Error{Code::io, 0, "the volume is broken: a write of its tables failed"};
  if (slots_of(shard.slot_class) == 0) {
    return Error{Code::unsupported, 0, "a page of this layout does not fit a segment"};
  }
  if (find(shard.stripe, shard.column) || writing_.contains({shard.stripe, shard.column})) {
    return Error{Code::exists, 0, "the column is there"};
  }
  std::optional<std::uint32_t> number = segment_with_room(shard.slot_class);
  const bool to_bind = !number;
  if (to_bind) number = segment_to_bind();
  if (!number) return Error{Code::no_space, 0, "the volume is full"};
  if (!segments_[*number].open && open_.size() >= open_segments_max) {
    return Error{Code::busy, 0, "too many segments are open"};
  }

  Put put;
  if (to_bind) {
    bind(*number, shard.slot_class);
    put.before.push_back(segment_page(*number));
  }
  Segment& segment = segments_[*number];
  if (!segment.open) {
    segment.open = true;
    open_.insert(*number);
    put.before.push_back(next_superblock());
  }
  current_[shard.slot_class] = *number;
  while (segment.slots[segment.first_free].state != SlotState::free) ++segment.first_free;
  put.at = {*number, segment.first_free};
  put.offset = slot_offset(put.at);
  put.header = {shard, superblock_.uuid, put.offset, next_sequence_++, segment.record.generation};

  slot_at(put.at).state = SlotState::writing;
  ++segment.writing;
  if (segment.used++ == 0) empty_.erase(*number);
  if (segment.used == segment.slots.size()) with_room_[shard.slot_class].erase(*number);
  segment.touched = sync_number_;
  writing_.emplace(std::pair(shard.stripe, shard.column), false);
  ++stats_.writing;
  return put;
}

bool Volume::put_end(const Put& put, const PutOutcome& outcome) {
  const Shard& shard = put.header.shard;
  Segment& segment = segments_[put.at.segment];
  Slot& slot = slot_at(put.at);
  DI_ASSERT(slot.state == SlotState::writing);
  --segment.writing;
  segment.touched = sync_number_;
  const auto written = writing_.extract({shard.stripe, shard.column});
  DI_ASSERT(!written.empty());
  --stats_.writing;
  if (outcome.metadata_failed) broken_ = true;
  if (outcome.status.ok()) {
    slot.state = SlotState::live;
    slot.stripe = shard.stripe;
    slot.column = shard.column;
    slot.sequence = put.header.sequence;
    slot.payload_bytes = shard.payload_bytes();
    // Before the write, that is; what a write does wrong, readers find, who have the checksums too.
    slot.verified = true;
    index_insert(put.at);
    ++stats_.slots_live;
    stats_.payload_bytes_live += slot.payload_bytes;
    stats_.slot_bytes_live += segment.record.slot_class.slot_bytes;
    mark_dirty(put.at);
    if (!written.mapped()) return true;
    free(shard.stripe, shard.column);
    return false;
  }
  if (outcome.slot_touched) {
    // The header may be there: a record of this sequence says that it does not count.
    slot.sequence = put.header.sequence;
    mark_dirty(put.at);
  }
  if (outcome.slot_touched && !outcome.slot_sound) {
    slot.state = SlotState::bad;
    ++stats_.slots_bad;
  } else {
    release(put.at);
  }
  return false;
}

std::optional<std::uint32_t> Volume::segment_with_room(const SlotClass& slot_class) {
  const auto found = with_room_.find(slot_class);
  if (found == with_room_.end() || found->second.empty()) return std::nullopt;
  const std::set<std::uint32_t>& segments = found->second;
  if (const auto current = current_.find(slot_class);
      current != current_.end() && segments.contains(current->second)) {
    return current->second;
  }
  for (const std::uint32_t number : open_) {
    if (segments.contains(number)) return number;
  }
  return *segments.begin();
}

std::optional<std::uint32_t> Volume::segment_to_bind() const {
  if (!unbound_.empty()) return *unbound_.begin();
  if (!empty_.empty()) return *empty_.begin();
  return std::nullopt;
}

void Volume::bind(std::uint32_t number, const SlotClass& slot_class) {
  Segment& segment = segments_[number];
  DI_ASSERT(segment.used == 0 && segment.writing == 0);
  if (segment.record.bound) {
    with_room_[segment.record.slot_class].erase(number);
    if (const auto current = current_.find(segment.record.slot_class);
        current != current_.end() && current->second == number) {
      current_.erase(current);
    }
  }
  unbound_.erase(number);
  dirty_.erase(number);
  segment.dirty_pages.clear();
  segment.record.bound = true;
  // Unique in the volume, also after a lost segment record: taken from the same count as writes.
  segment.record.generation = static_cast<std::uint32_t>(next_sequence_++);
  segment.record.slot_class = slot_class;
  segment.slots.assign(slots_of(slot_class), Slot());
  segment.first_free = 0;
  empty_.insert(number);
  with_room_[slot_class].insert(number);
}

// ---- read, free, list

Result<Read> Volume::read_begin(std::uint64_t stripe, std::uint16_t column) {
  return read_begin(stripe, column, UINT8_MAX - 1);
}

Result<Read> Volume::read_begin(std::uint64_t stripe, std::uint16_t column, std::uint8_t readers_max) {
  const auto found = find(stripe, column);
  if (!found) return Error{Code::not_found, 0, "no such column"};
  const SlotAddress at = *found;
  Slot& slot = slot_at(at);
  if (slot.readers >= readers_max) return Error{Code::busy, 0, "too many reads of one slot"};
  ++slot.readers;
  ++stats_.reading;
  const SegmentRecord& record = segments_[at.segment].record;
  return Read{at,     slot_offset(at), record.slot_class, superblock_.uuid,   stripe,
              column, slot.sequence,   record.generation, slot.payload_bytes, !slot.verified};
}

void Volume::read_end(const Read& read, bool verified) {
  Slot& slot = slot_at(read.at);
  DI_ASSERT(slot.readers > 0);
  if (verified) slot.verified = true;
  --slot.readers;
  --stats_.reading;
  if (slot.state == SlotState::doomed && slot.readers == 0) release(read.at);
}

bool Volume::holds(const Read& read) const {
  return find(read.stripe, read.column) == read.at && slot_at(read.at).sequence == read.sequence;
}

std::uint32_t Volume::free(std::uint64_t stripe, std::optional<std::uint16_t> column) {
  for (auto at = writing_.lower_bound({stripe, 0}); at != writing_.end() && at->first.first == stripe; ++at) {
    if (!column || at->first.second == *column) at->second = true;
  }
  std::uint32_t count = 0;
  const auto stripe_of = [this](std::uint32_t number) { return slot_at(address_of(number)).stripe; };
  while (true) {
    const std::uint32_t number = index_.find(stripe, stripe_of, [&](std::uint32_t other) {
      return !column || slot_at(address_of(other)).column == *column;
    });
    if (number == SlotIndex::none) return count;
    const SlotAddress at = address_of(number);
    index_erase(at);
    Slot& slot = slot_at(at);
    --stats_.slots_live;
    stats_.payload_bytes_live -= slot.payload_bytes;
    stats_.slot_bytes_live -= segments_[at.segment].record.slot_class.slot_bytes;
    mark_dirty(at);
    if (slot.readers > 0) {
      slot.state = SlotState::doomed;
    } else {
      release(at);
    }
    ++count;
  }
}

std::vector<std::pair<std::uint64_t, std::uint16_t>> Volume::free_behind(std::uint64_t end) {
  std::vector<std::pair<std::uint64_t, std::uint16_t>> gone;
  for (std::uint32_t number = 0; number < segments_.size(); ++number) {
    const Segment& segment = segments_[number];
    for (std::uint32_t i = 0; i < segment.slots.size(); ++i) {
      const Slot& slot = segment.slots[i];
      if (slot.state != SlotState::live) continue;
      const std::uint64_t behind = slot_offset({number, i}) + segment.record.slot_class.slot_bytes;
      if (behind > end) gone.emplace_back(slot.stripe, slot.column);
    }
  }
  for (const auto& [stripe, column] : gone) free(stripe, column);
  return gone;
}

bool Volume::list(SlotAddress& from, std::size_t count, std::vector<Read>& out) {
  for (; from.segment < segments_.size(); ++from.segment, from.slot = 0) {
    const Segment& segment = segments_[from.segment];
    for (; from.slot < segment.slots.size(); ++from.slot) {
      const Slot& slot = segment.slots[from.slot];
      if (slot.state != SlotState::live) continue;
      if (out.size() >= count) return true;
      // What a list leaves out is lost for di-meta, however many read it.
      if (Result<Read> read = read_begin(slot.stripe, slot.column, UINT8_MAX)) out.push_back(*read);
    }
  }
  return false;
}

void Volume::release(SlotAddress at) {
  Segment& segment = segments_[at.segment];
  slot_at(at).state = SlotState::free;
  DI_ASSERT(segment.used > 0);
  --segment.used;
  segment.first_free = std::min(segment.first_free, at.slot);
  with_room_[segment.record.slot_class].insert(at.segment);
  if (segment.used == 0) empty_.insert(at.segment);
}

std::optional<SlotAddress> Volume::find(std::uint64_t stripe, std::uint16_t column) const {
  const std::uint32_t number = index_.find(
      stripe, [this](std::uint32_t other) { return slot_at(address_of(other)).stripe; },
      [&](std::uint32_t other) { return slot_at(address_of(other)).column == column; });
  if (number == SlotIndex::none) return std::nullopt;
  return address_of(number);
}

void Volume::index_insert(SlotAddress at) {
  index_.insert(slot_at(at).stripe, number_of(at),
                [this](std::uint32_t number) { return slot_at(address_of(number)).stripe; });
}

void Volume::index_erase(SlotAddress at) {
  index_.erase(slot_at(at).stripe, number_of(at),
               [this](std::uint32_t number) { return slot_at(address_of(number)).stripe; });
}

// ---- sync

void Volume::mark_dirty(SlotAddress at) {
  segments_[at.segment].dirty_pages.insert(at.slot / records_per_page);
  dirty_.insert(at.segment);
}

std::optional<Sync> Volume::sync_begin() {
  if (syncing_ || broken_) return std::nullopt;
  Sync sync;
  // Pages that an earlier sync wrote are made durable by this one's flush; then the open list, which
  // covered their segments, may shrink.
  bool shrunk = false;
  const bool superblock_unflushed = superblock_unflushed_;
  superblock_unflushed_ = false;  // by the flush that this sync begins with
  for (auto it = open_.begin(); it != open_.end();) {
    Segment& segment = segments_[*it];
    if (segment.writing == 0 && segment.dirty_pages.empty() && segment.touched < sync_number_) {
      segment.open = false;
      it = open_.erase(it);
      shrunk = true;
    } else {
      ++it;
    }
  }
  const bool worn = superblock_.wear.written_bytes - wear_told_ >= wear_lag_bytes;
  if (shrunk || worn) sync.superblock.push_back(next_superblock());
  for (const std::uint32_t number : dirty_) {
    for (const std::uint32_t page : segments_[number].dirty_pages)
      sync.table.push_back(record_page(number, page));
    segments_[number].dirty_pages.clear();
  }
  dirty_.clear();
  // The number moves also when there is nothing to write: it is what lets idle segments close.
  ++sync_number_;
  if (sync.table.empty() && sync.superblock.empty()) {
    superblock_unflushed_ = superblock_unflushed;
    return std::nullopt;
  }
  syncing_ = true;
  return sync;
}

void Volume::sync_end(const Status& written) {
  DI_ASSERT(syncing_);
  syncing_ = false;
  if (!written.ok()) broken_ = true;
}

bool Volume::clean() const {
  return !syncing_ && dirty_.empty() && open_.empty();
}

MetaWrite Volume::record_page(std::uint32_t number, std::uint32_t page) const {
  const Segment& segment = segments_[number];
  MetaWrite write{superblock_.geometry.record_page_offset(number, page), Bytes(meta_page_bytes), false};
  for (std::uint32_t i = 0; i < records_per_page; ++i) {
    const std::size_t at = std::size_t{page} * records_per_page + i;
    if (at >= segment.slots.size()) break;
    const Slot& slot = segment.slots[at];
    SlotRecord record;
    record.segment_generation = segment.record.generation;
    record.sequence = slot.sequence;
    record.live = slot.state == SlotState::live;
    if (record.live) {
      record.stripe = slot.stripe;
      record.column = slot.column;
      record.payload_bytes = slot.payload_bytes;
    }
    slot_record_encode(record, &write.bytes[std::size_t{i} * record_bytes]);
  }
  return write;
}

MetaWrite Volume::segment_page(std::uint32_t number) const {
  const std::uint32_t first = number / records_per_page * records_per_page;
  MetaWrite write{superblock_.geometry.segment_table_offset + std::uint64_t{first} * record_bytes,
                  Bytes(meta_page_bytes), false};
  for (std::uint32_t i = 0; i < records_per_page && first + i < segments_.size(); ++i) {
    segment_record_encode(segments_[first + i].record, &write.bytes[std::size_t{i} * record_bytes]);
  }
  return write;
}

MetaWrite Volume::next_superblock() {
  ++superblock_.sequence;
  wear_told_ = superblock_.wear.written_bytes;
  superblock_.open.assign(open_.begin(), open_.end());
  MetaWrite write{superblock_.sequence % 2 * superblock_bytes, Bytes(superblock_bytes),
                  superblock_unflushed_};
  superblock_unflushed_ = true;
  superblock_encode(superblock_, write.bytes);
  return write;
}

// ---- places and figures

std::uint32_t Volume::slots_of(const SlotClass& slot_class) const {
  if (slot_class.slot_bytes == 0) return 0;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(
      superblock_.geometry.segment_bytes / slot_class.slot_bytes, superblock_.geometry.records_per_segment));
}

std::uint64_t Volume::slot_offset(SlotAddress at) const {
  return superblock_.geometry.segment_offset(at.segment) +
         std::uint64_t{at.slot} * segments_[at.segment].record.slot_class.slot_bytes;
}

std::size_t Volume::memory_bytes() const {
  std::size_t sum = index_.bytes() + segments_.capacity() * sizeof(Segment);
  for (const Segment& segment : segments_) sum += segment.slots.capacity() * sizeof(Slot);
  return sum;
}

Volume::Stats Volume::stats() const {
  Stats out = stats_;
  out.segments = superblock_.geometry.segments;
  out.segments_bound = out.segments - static_cast<std::uint32_t>(unbound_.size());
  out.segments_open = static_cast<std::uint32_t>(open_.size());
  out.bytes_total = std::uint64_t{out.segments} * superblock_.geometry.segment_bytes;
  out.epoch = superblock_.epoch;
  return out;
}

}  // namespace di::store
