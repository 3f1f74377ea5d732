// store/volume.h: one volume: a preallocated file of segments of slots, found again after any crash.
//
// Owner: loop thread.  Nothing here blocks except format() and open(), which run before the loop: a put,
// a read or a sync is begun here, its I/O is done elsewhere (store/io.h), and it is ended here.  Bounds: slots of
// the volume; RAM is 24 bytes a slot of a bound segment and at most 12 in the index for a live one.
//
// Commit rule: a live slot is never overwritten; header and payload go in one write to a free slot, and
// every slot describes itself.  There is no journal.  The slot table is an accelerator, written behind.
//
// Order of writes (one writer, first in first out, per volume):
//   put   before the first write into a segment since its records were last durable: its segment record
//         (when it was just bound), then the superblock with the segment in the open list; then the slot
//   sync  flush; the dirty pages of the slot table (they describe only slots that the flush made durable);
//         the superblock, when segments whose pages an earlier sync wrote leave its open list, or when much
//         was written since the last one
// A metadata write that fails breaks the volume: puts are refused from then on, reads go on.
//
// Restart: the table is read; in segments of the open list the headers decide, and a slot that only its
// header knows counts when its payload matches its checksums.  A clean stop leaves the open list empty;
// otherwise it is the same path.  A slot freed just before a crash may come back: it is immutable and
// its stripe unknown to di-meta, which frees it again.
//
// States of a slot:
//   state    put_begin  put_end ok  put_end failed  read_begin  free            last read_end
//   free     writing
//   writing             live        bad (free: see PutOutcome)  not_found       writing, and free at put_end
//   live                                            live        free or doomed
//   doomed                                          not_found   not_found       free
//   bad      (its write failed: not used again until the volume is opened anew)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "store/disk.h"
#include "store/format.h"
#include "store/index.h"

namespace di::store {

// A 4 KiB page for one place of the volume.
struct MetaWrite {
  std::uint64_t offset = 0;
  Bytes bytes;
  // Two superblocks must not be torn by one power failure: the one before is flushed first.
  bool flush_before = false;
};

struct SlotAddress {
  std::uint32_t segment = 0;
  std::uint32_t slot = 0;

  friend auto operator<=>(const SlotAddress&, const SlotAddress&) = default;
};

// A put in progress.
struct Put {
  SlotAddress at;
  std::uint64_t offset = 0;  // of the slot
  SlotHeader header;
  std::vector<MetaWrite> before;  // in this order, each of them before the slot
};

// How a put ended.
struct PutOutcome {
  Status status;
  bool slot_touched = false;  // the slot's bytes may have changed
  // the slot can be written again: the source failed too late, or there was no room
  bool slot_sound = false;
  bool metadata_failed = false;  // one of `before` could not be written
};

// A read in progress, and what must be found in the slot.
struct Read {
  SlotAddress at;
  std::uint64_t offset = 0;
  SlotClass slot_class;
  Uuid volume{};
  std::uint64_t stripe = 0;
  std::uint16_t column = 0;
  std::uint64_t sequence = 0;
  std::uint32_t segment_generation = 0;
  std::uint32_t payload_bytes = 0;
  // Nothing has compared its payload with its checksums since the volume was opened.
  bool unverified = false;
};

// A sync in progress: flush, `table`, then `superblock`.
struct Sync {
  std::vector<MetaWrite> table;
  std::vector<MetaWrite> superblock;  // none or one
};

class Volume {
 public:
  struct FormatOptions {
    std::uint64_t segment_bytes = 0;
    Uuid uuid{};
  };
  // Writes empty tables and superblocks.  Blocks.
  static Status format(Disk& disk, const FormatOptions& options);
  // Reads the tables.  `disk` outlives the volume.  Blocks.
  // Errors: corrupt (no valid superblock), unsupported, io.
  static Result<std::unique_ptr<Volume>> open(Disk& disk);

  // Errors: exists (the column is there or being written), no_space, busy (too many open segments: after
  // the next sync), unsupported (the class does not fit a segment), io (the volume is broken).
  Result<Put> put_begin(const Shard& shard);
  // The slot is written and readable from now on; false when it is not, or was freed while it was written.
  bool put_end(const Put& put, const PutOutcome& outcome);

  // Errors: not_found.
  Result<Read> read_begin(std::uint64_t stripe, std::uint16_t column);
  // `verified`: the whole payload was compared with its checksums and is good.
  void read_end(const Read& read, bool verified = false);
  // What was read is what the volume has of that column: it was not freed, and not written anew, meanwhile.
  [[nodiscard]] bool holds(const Read& read) const;

  // Frees a column of a stripe, or all; returns how many there were.  One that is being written is not counted: it is
  // freed at its put_end.
  std::uint32_t free(std::uint64_t stripe, std::optional<std::uint16_t> column = {});

  // Frees every column of which something lies at or behind `end`; (stripe, column) of each.
  std::vector<std::pair<std::uint64_t, std::uint16_t>> free_behind(std::uint64_t end);

  // Nothing when nothing is to be written behind or a sync is in progress.
  std::optional<Sync> sync_begin();
  void sync_end(const Status& written);
  // Goes with the next superblock; a kill forgets at most wear_lag_bytes of it.
  void set_wear(const Wear& wear) { superblock_.wear = wear; }
  [[nodiscard]] const Wear& wear() const { return superblock_.wear; }
  static constexpr std::uint64_t wear_lag_bytes = std::uint64_t{64} << 20;
  // True when a sync would leave nothing behind: no dirty page, no open segment.
  [[nodiscard]] bool clean() const;
  [[nodiscard]] bool broken() const { return broken_; }

  // Reads for the live slots at or after `from`, at most `count`; the reads are begun.  `from` is moved
  // behind them; false at the end.
  bool list(SlotAddress& from, std::size_t count, std::vector<Read>& out);

  struct Stats {
    std::uint64_t slots_live = 0;
    std::uint64_t payload_bytes_live = 0;
    std::uint64_t slot_bytes_live = 0;  // what the live slots occupy
    std::uint64_t writing = 0;
    std::uint64_t reading = 0;
    std::uint64_t slots_bad = 0;
    std::uint32_t segments = 0;
    std::uint32_t segments_bound = 0;
    std::uint32_t segments_open = 0;
    std::uint64_t bytes_total = 0;  // all segments
    std::uint64_t epoch = 0;
    // Of the last open().
    std::uint64_t recovered_by_header = 0;  // slots that the table did not know
    std::uint64_t dropped_torn = 0;         // headers whose payload did not match
    std::uint64_t unreadable = 0;           // pages of tables, and headers, that the disk did not give
  };
  [[nodiscard]] Stats stats() const;
  // Memory of what grows with the slots.
  [[nodiscard]] std::size_t memory_bytes() const;
  [[nodiscard]] const Geometry& geometry() const { return superblock_.geometry; }
  [[nodiscard]] const Uuid& uuid() const { return superblock_.uuid; }

 private:
  Result<Read> read_begin(std::uint64_t stripe, std::uint16_t column, std::uint8_t readers_max);
  enum class SlotState : std::uint8_t { free, writing, live, doomed, bad };
  struct Slot {
    std::uint64_t stripe = 0;
    std::uint64_t sequence = 0;
    std::uint32_t payload_bytes = 0;
    std::uint16_t column = 0;
    SlotState state : 7 = SlotState::free;
    bool verified : 1 = false;
    std::uint8_t readers = 0;
  };
  static_assert(sizeof(Slot) == 24);
  struct Segment {
    SegmentRecord record;
    std::vector<Slot> slots;
    std::uint32_t used = 0;  // slots that are not free
    std::uint32_t writing = 0;
    std::uint32_t first_free = 0;         // no free slot below
    bool open = false;                    // in the open list
    std::uint64_t touched = 0;            // number of the sync in whose time it was last written to
    std::set<std::uint32_t> dirty_pages;  // of its slot table
  };
  explicit Volume(Superblock superblock);
  // All of `to`, of the tables; which 4 KiB of it cannot be read, and are zero.  Errors: io, when there are too many
  // such places in the volume.
  Result<std::vector<bool>> read_table(Disk& disk, std::uint64_t offset, MutableByteView to);
  Status unreadable(const Error& error);
  Status load_segment(Disk& disk, std::uint32_t number, AlignedBuffer& buffer);
  Status load_slot(Disk& disk, std::uint32_t number, std::uint32_t slot,
                   const std::optional<SlotRecord>& record, AlignedBuffer& buffer);
  // It is live, and not yet in the index.
  void adopt(SlotAddress at, const SlotRecord& record);
  // All live slots, after the tables are read.
  void index_all();
  [[nodiscard]] std::optional<SlotAddress> find(std::uint64_t stripe, std::uint16_t column) const;
  void index_insert(SlotAddress at);
  void index_erase(SlotAddress at);
  // An open segment when there is one, so that the open list stays short.
  [[nodiscard]] std::optional<std::uint32_t> segment_with_room(const SlotClass& slot_class);
  [[nodiscard]] std::optional<std::uint32_t> segment_to_bind() const;
  void bind(std::uint32_t number, const SlotClass& slot_class);
  void release(SlotAddress at);
  void mark_dirty(SlotAddress at);
  [[nodiscard]] std::uint64_t slot_offset(SlotAddress at) const;
  [[nodiscard]] Slot& slot_at(SlotAddress at) { return segments_[at.segment].slots[at.slot]; }
  [[nodiscard]] const Slot& slot_at(SlotAddress at) const { return segments_[at.segment].slots[at.slot]; }
  // The index knows a slot by its record's place in the slot table.
  [[nodiscard]] std::uint32_t number_of(SlotAddress at) const {
    return at.segment * superblock_.geometry.records_per_segment + at.slot;
  }
  [[nodiscard]] SlotAddress address_of(std::uint32_t number) const {
    const std::uint32_t per_segment = superblock_.geometry.records_per_segment;
    return {number / per_segment, number % per_segment};
  }
  [[nodiscard]] std::uint32_t slots_of(const SlotClass& slot_class) const;
  [[nodiscard]] MetaWrite record_page(std::uint32_t number, std::uint32_t page) const;
  [[nodiscard]] MetaWrite segment_page(std::uint32_t number) const;
  [[nodiscard]] MetaWrite next_superblock();

  Superblock superblock_;
  std::vector<Segment> segments_;
  SlotIndex index_;                                         // the live slots
  std::map<SlotClass, std::set<std::uint32_t>> with_room_;  // bound segments that have a free slot
  std::map<SlotClass, std::uint32_t> current_;              // segment that the class writes into
  std::set<std::uint32_t> unbound_;
  std::set<std::uint32_t> empty_;  // bound segments without a used slot
  std::set<std::uint32_t> dirty_;  // segments with dirty pages
  std::set<std::uint32_t> open_;
  std::map<std::pair<std::uint64_t, std::uint16_t>, bool> writing_;  // whether it was freed meanwhile
  std::uint64_t next_sequence_ = 1;
  std::uint64_t sync_number_ = 1;
  std::uint64_t wear_told_ = 0;  // bytes written, as the last superblock says
  bool superblock_unflushed_ = false;
  bool syncing_ = false;
  bool broken_ = false;
  Stats stats_;
};

}  // namespace di::store
