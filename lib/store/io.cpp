#include "store/io.h"

#include <pthread.h>

#include <algorithm>
#include <future>

#include "base/checksum.h"
#include "base/clock.h"

namespace di::store {

namespace {

Error broken_volume() {
  return Error{Code::io, 0, "the volume is broken: a write of its tables failed"};
}

}  // namespace

// ---- blocking

Result<SlotHeader> header_check(const Read& read, ByteView bytes) {
  Result<SlotHeader> header = slot_header_decode(bytes, read.slot_class);
  if (!header) return header;
  if (header->volume != read.volume || header->offset != read.offset || header->sequence != read.sequence ||
      header->segment_generation != read.segment_generation || header->shard.stripe != read.stripe ||
      header->shard.column != read.column) {
    return Error{Code::corrupt, 0, "a slot holds another column than it should"};
  }
  if (header->shard.payload_bytes() != read.payload_bytes) {
    return Error{Code::corrupt, 0, "a slot holds a column of another length than it should"};
  }
  return header;
}

Result<SlotHeader> read_header(Disk& disk, const Read& read, AlignedBuffer& scratch) {
  const MutableByteView bytes = scratch.first(read.slot_class.header_bytes);
  DI_TRY(disk.read(read.offset, bytes));
  return header_check(read, bytes);
}

Status read_segment(Disk& disk, const Read& read, const SlotHeader& header, std::uint32_t group,
                    MutableByteView to) {
  const Shard& shard = header.shard;
  DI_ASSERT(group < shard.segments.size() && to.size() == shard.segments[group]);
  std::uint64_t offset = read.offset + read.slot_class.header_bytes;
  for (std::uint32_t before = 0; before < group; ++before) offset += shard.segments[before];
  DI_TRY(disk.read(offset, to));
  if (crc32c(to) != shard.crcs()[group])
    return Error{Code::corrupt, 0, "a segment does not match its checksum"};
  return {};
}

// ---- the disk thread

namespace {

// Memory for headers and pages of tables, most of it in one piece that the queue knows.
class Buffers {
 public:
  static constexpr std::size_t unit_bytes = 32768;

  struct Buffer {
    MutableByteView bytes;
    std::uint32_t unit = UINT32_MAX;
    std::unique_ptr<AlignedBuffer> own;  // of a header that is longer than a unit
  };

  explicit Buffers(std::uint32_t units) : slab_(units * unit_bytes), units_(units) {
    for (std::uint32_t unit = units; unit-- > 0;) free_.push_back(unit);
  }
  [[nodiscard]] MutableByteView all() { return slab_.first(units_ * unit_bytes); }

  // There is one for each access in flight (asserted).
  Buffer take(std::size_t bytes) {
    Buffer buffer;
    if (bytes > unit_bytes) {
      buffer.own = std::make_unique<AlignedBuffer>(bytes);
      buffer.bytes = buffer.own->first(bytes);
      return buffer;
    }
    DI_ASSERT(!free_.empty());
    buffer.unit = free_.back();
    free_.pop_back();
    buffer.bytes = all().subspan(buffer.unit * unit_bytes, bytes);
    return buffer;
  }
  void give_back(Buffer& buffer) {
    if (buffer.unit != UINT32_MAX) free_.push_back(buffer.unit);
    buffer = {};
  }

 private:
  AlignedBuffer slab_;
  const std::uint32_t units_;
  std::vector<std::uint32_t> free_;
};

// Adds a piece, or makes the last one longer when it goes on behind it.
void add_piece(DiskOp& op, MutableByteView piece) {
  if (op.count > 0) {
    MutableByteView& last = op.pieces[op.count - 1];
    if (last.data() + last.size() == piece.data()) {
      last = {last.data(), last.size() + piece.size()};
      return;
    }
  }
  op.add(piece);
}

}  // namespace

// Everything here is touched by the disk thread alone.
class IoPool::Engine {
 public:
  Engine(IoPool& pool, DiskQueue& queue)
      : pool_(pool), queue_(queue), buffers_(accesses_max), accesses_(accesses_max) {
    for (std::uint32_t i = accesses_max; i-- > 0;) free_.push_back(i);
    queue_.memory_add(buffers_.all());
  }
  ~Engine() { queue_.memory_remove(buffers_.all()); }

  static constexpr std::uint32_t accesses_max = reads_max + writes_max + metadata_max;

  void take(Inbox&& inbox);
  void begin();
  void collect(bool wait);
  [[nodiscard]] bool idle() const {
    return columns_.empty() && headers_.empty() && puts_.empty() && metadata_.empty();
  }

 private:
  using Buffer = Buffers::Buffer;

  // A part of a payload that is read at once.
  struct Part {
    std::uint64_t offset = 0;  // in the payload
    std::uint64_t bytes = 0;
    bool half = false;  // the fault point comes after it
    bool done = false;
  };
  struct Column {
    std::shared_ptr<ColumnRead> job;
    std::list<Column>::iterator self;
    std::optional<SlotHeader> header;
    const std::vector<std::uint32_t>* segments = nullptr;  // once known: the header's, or the job's
    std::array<std::uint64_t, kv::groups_max + 1> segment_at{};  // in the payload
    MutableByteView whole;  // given: what is read before the header is known goes there
    std::vector<Part> parts;
    std::size_t next_part = 0;  // to submit
    std::size_t in_order = 0;   // parts [0, in_order) are done
    std::uint32_t next_group = 0;
    std::uint32_t outstanding = 0;
    bool begun = false;
    bool elsewhere = false;  // the header says that the payload goes elsewhere than into `whole`
    bool queued = false;
    std::optional<Error> failed;
    std::uint64_t bytes = 0;
  };
  struct Headers {
    std::shared_ptr<HeadersRead> job;
    std::vector<std::optional<Result<SlotHeader>>> found;
    std::size_t next = 0;
    std::size_t outstanding = 0;
  };
  struct Writing {
    std::shared_ptr<ColumnPut> job;
    std::list<Writing>::iterator self;
    std::uint64_t ticket = 0;  // of the last put with metadata, up to this one
    PutOutcome outcome;
  };
  // A flush, or writes that may be in flight together.
  struct Stage {
    bool flush = false;
    std::vector<const MetaWrite*> writes;
  };
  struct Metadata {
    std::vector<Stage> stages;
    std::size_t stage = 0;
    std::size_t next = 0;  // in the stage
    std::uint32_t outstanding = 0;
    std::optional<Error> failed;
    Writing* put = nullptr;  // whose `before` this is
    std::shared_ptr<SyncJob> sync;
  };
  struct Access {
    enum class What : std::uint8_t { column, headers, put, metadata };
    What what = What::column;
    DiskOp::Kind kind = DiskOp::Kind::read;
    Instant began;
    std::uint64_t bytes = 0;
    Column* column = nullptr;
    Headers* headers = nullptr;
    Writing* put = nullptr;
    std::size_t index = 0;  // part of the column (head: the header, perhaps with the first part), or header
    bool head = false;
    Buffer buffer;  // of a header, or of a page of tables
  };

  void submit(DiskOp& op, Access&& access);
  void done(const DiskQueue::Done& done);

  [[nodiscard]] bool room_to_read() const {
    return reads_ < reads_max && read_bytes_ < read_bytes_max;
  }
  [[nodiscard]] static bool cancelled(const Column& column) {
    return column.job->cancelled && column.job->cancelled->load(std::memory_order_relaxed);
  }
  [[nodiscard]] static bool wants(const Column& column);
  void queue_column(Column& column, bool first);
  void step(Column& column);
  void step_head(Column& column);
  void step_part(Column& column);
  void head_arrived(Column& column, ByteView bytes);
  void segments_known(Column& column, const std::vector<std::uint32_t>& segments);
  void make_parts(Column& column);
  void part_arrived(Column& column, std::size_t index);
  void groups_arrived(Column& column);
  Result<MutableByteView> segment_of(Column& column, std::uint32_t group);
  void fail(Column& column, Error error);
  void settle(Column& column);

  void begin_headers();
  void begin_puts();
  void begin_put(Writing& put);
  Result<std::vector<ByteView>> payload_of(const ColumnPut& job);
  void end_put(Writing& put);
  void begin_metadata();
  void end_metadata();
  void stages_of(const std::vector<MetaWrite>& writes, bool together, std::vector<Stage>& stages);

  IoPool& pool_;
  DiskQueue& queue_;
  Buffers buffers_;
  MonotonicClock clock_;
  std::vector<Access> accesses_;
  std::vector<std::uint32_t> free_;
  std::vector<DiskQueue::Done> done_;
  std::uint32_t reads_ = 0;
  std::uint64_t read_bytes_ = 0;
  std::uint32_t writes_ = 0;

  std::list<Column> columns_;
  std::array<std::deque<Column*>, priorities> ready_;  // have something to submit
  std::list<Headers> headers_;
  std::list<Writing> puts_;
  std::deque<Writing*> puts_waiting_;
  std::deque<Metadata> metadata_;
  std::uint64_t tickets_ = 0;       // given
  std::uint64_t tickets_done_ = 0;  // whose metadata is on the disk
  bool broken_ = false;
};

void IoPool::Engine::take(Inbox&& inbox) {
  for (MemoryChange& change : inbox.memory) {
    if (change.add) {
      queue_.memory_add(change.memory);
      pool_.ended(nullptr);
    } else {
      queue_.memory_remove(change.memory);
      pool_.ended(nullptr);
      pool_.report(std::move(change.removed));
    }
  }
  for (ColumnRead& read : inbox.reads) {
    Column& column = columns_.emplace_back();
    column.self = std::prev(columns_.end());
    column.job = std::make_shared<ColumnRead>(std::move(read));
    queue_column(column, false);
  }
  for (HeadersRead& read : inbox.headers) {
    Headers& headers = headers_.emplace_back();
    headers.job = std::make_shared<HeadersRead>(std::move(read));
    headers.found.resize(headers.job->reads.size());
  }
  for (auto& write : inbox.writes) {
    if (ColumnPut* job = std::get_if<ColumnPut>(&write)) {
      Writing& put = puts_.emplace_back();
      put.self = std::prev(puts_.end());
      put.job = std::make_shared<ColumnPut>(std::move(*job));
      if (const std::vector<MetaWrite>& before = put.job->put.before; !before.empty()) {
        ++tickets_;
        Metadata& metadata = metadata_.emplace_back();
        metadata.put = &put;
        stages_of(before, false, metadata.stages);
      }
      put.ticket = tickets_;
      puts_waiting_.push_back(&put);
    } else {
      Metadata& metadata = metadata_.emplace_back();
      metadata.sync = std::make_shared<SyncJob>(std::move(std::get<SyncJob>(write)));
      metadata.stages.push_back({.flush = true, .writes = {}});
      stages_of(metadata.sync->sync.table, true, metadata.stages);
      stages_of(metadata.sync->sync.superblock, false, metadata.stages);
    }
  }
}

void IoPool::Engine::stages_of(const std::vector<MetaWrite>& writes, bool together,
                               std::vector<Stage>& stages) {
  if (writes.empty()) return;
  if (together) stages.push_back({});
  for (const MetaWrite& write : writes) {
    if (write.flush_before) stages.push_back({.flush = true, .writes = {}});
    if (!together || write.flush_before) stages.push_back({});
    stages.back().writes.push_back(&write);
  }
}

void IoPool::Engine::begin() {
  begin_metadata();
  begin_puts();
  for (std::deque<Column*>& ready : ready_) {
    while (!ready.empty() && room_to_read()) {
      Column& column = *ready.front();
      if (!wants(column)) {
        column.queued = false;
        ready.pop_front();
        settle(column);
        continue;
      }
      step(column);
    }
  }
  begin_headers();
}

void IoPool::Engine::collect(bool wait) {
  // A wake is certain: something is in flight, or the inbox will be filled, or the pool closed.
  done_.clear();
  queue_.collect(wait, done_);
  for (const DiskQueue::Done& one : done_) done(one);
}

void IoPool::Engine::submit(DiskOp& op, Access&& access) {
  DI_ASSERT(!free_.empty());
  const std::uint32_t index = free_.back();
  free_.pop_back();
  accesses_[index] = std::move(access);
  Access& kept = accesses_[index];
  kept.kind = op.kind;
  kept.bytes = op.bytes();
  kept.began = clock_.now();
  pool_.figures_->begun.fetch_add(1, std::memory_order_relaxed);
  op.tag = index;
  switch (kept.what) {
    case Access::What::column:
    case Access::What::headers:
      ++reads_;
      read_bytes_ += kept.bytes;
      break;
    case Access::What::put:
      ++writes_;
      break;
    case Access::What::metadata:
      break;
  }
  queue_.submit(op);
}

void IoPool::Engine::done(const DiskQueue::Done& one) {
  Access access = std::move(accesses_[one.tag]);
  free_.push_back(static_cast<std::uint32_t>(one.tag));
  const auto us = static_cast<std::uint64_t>(to_us(clock_.now() - access.began));
  DiskFigures& figures = *pool_.figures_;
  switch (access.kind) {
    case DiskOp::Kind::read:
      figures.read_us.record(us);
      if (!one.status.ok()) figures.read_errors.fetch_add(1, std::memory_order_relaxed);
      break;
    case DiskOp::Kind::write:
    case DiskOp::Kind::flush:
      (access.kind == DiskOp::Kind::write ? figures.write_us : figures.flush_us).record(us);
      if (one.status.ok()) break;
      (one.status.error().code == Code::no_space ? figures.no_space : figures.write_errors)
          .fetch_add(1, std::memory_order_relaxed);
      break;
  }
  switch (access.what) {
    case Access::What::column: {
      --reads_;
      read_bytes_ -= access.bytes;
      Column& column = *access.column;
      --column.outstanding;
      if (!one.status.ok()) {
        fail(column, one.status.error());
      } else {
        if (access.head) head_arrived(column, access.buffer.bytes);
        // With the header may have come the first part.
        if (!access.head || !column.whole.empty()) part_arrived(column, access.index);
        groups_arrived(column);
      }
      buffers_.give_back(access.buffer);
      return settle(column);
    }
    case Access::What::headers: {
      --reads_;
      read_bytes_ -= access.bytes;
      Headers& headers = *access.headers;
      Result<SlotHeader> header = one.status.ok()
                                      ? header_check(headers.job->reads[access.index], access.buffer.bytes)
                                      : Result<SlotHeader>(one.status.error());
      if (!header && header.error().code == Code::corrupt) {
        figures.corrupt.fetch_add(1, std::memory_order_relaxed);
      }
      headers.found[access.index] = std::move(header);
      --headers.outstanding;
      buffers_.give_back(access.buffer);
      return;
    }
    case Access::What::put: {
      --writes_;
      Writing& put = *access.put;
      put.outcome.status = one.status;
      put.outcome.slot_sound = !one.status.ok() && one.status.error().code == Code::no_space;
      if (one.status.ok() && put.job->current && !put.job->current()) {
        put.outcome.status = Error{Code::stale, 0, "the slot was given up"};
        put.outcome.slot_sound = true;
      }
      buffers_.give_back(access.buffer);
      return end_put(put);
    }
    case Access::What::metadata: {
      Metadata& front = metadata_.front();
      --front.outstanding;
      if (!one.status.ok() && !front.failed) front.failed = one.status.error();
      buffers_.give_back(access.buffer);
      return;
    }
  }
}

// ---- columns

bool IoPool::Engine::wants(const Column& column) {
  if (column.failed) return false;
  if (!column.begun) return true;
  if (column.elsewhere || column.next_part >= column.parts.size()) return false;
  if (column.job->half && column.outstanding > 0) return false;
  return column.segments != nullptr || !column.whole.empty();
}

void IoPool::Engine::queue_column(Column& column, bool first) {
  if (column.queued) return;
  column.queued = true;
  std::deque<Column*>& ready = ready_[std::min<std::uint32_t>(column.job->priority, priorities - 1)];
  if (first) {
    ready.push_front(&column);
  } else {
    ready.push_back(&column);
  }
}

void IoPool::Engine::step(Column& column) {
  if (cancelled(column)) return fail(column, Error{Code::cancelled, 0, "cancelled"});
  if (column.begun) {
    step_part(column);
  } else {
    step_head(column);
  }
}

void IoPool::Engine::step_head(Column& column) {
  const ColumnRead& job = *column.job;
  const Read& read = job.read;
  column.begun = true;
  column.next_group = job.from_group;
  if (job.whole && job.from_group == 0 && !job.half) {
    const MutableByteView whole = job.whole();
    if (whole.size() == read.payload_bytes) column.whole = whole;
  }
  for (std::uint64_t at = 0; at < column.whole.size(); at += run_bytes_max) {
    column.parts.push_back({at, std::min<std::uint64_t>(run_bytes_max, column.whole.size() - at)});
  }
  if (!column.whole.empty() && !job.segments.empty() && !job.verify) {
    segments_known(column, job.segments);
    if (column.segment_at[job.segments.size()] == read.payload_bytes) return;
    return fail(column, Error{Code::corrupt, 0, "a column of another length than it should have"});
  }
  DiskOp op;
  op.kind = DiskOp::Kind::read;
  op.offset = read.offset;
  Access access;
  access.column = &column;
  access.head = true;
  access.buffer = buffers_.take(read.slot_class.header_bytes);
  op.add(access.buffer.bytes);
  if (!column.whole.empty()) {
    op.add(column.whole.first(column.parts[0].bytes));
    column.next_part = 1;
  }
  ++column.outstanding;
  submit(op, std::move(access));
}

void IoPool::Engine::step_part(Column& column) {
  const Part& part = column.parts[column.next_part];
  const Read& read = column.job->read;
  DiskOp op;
  op.kind = DiskOp::Kind::read;
  op.offset = read.offset + read.slot_class.header_bytes + part.offset;
  if (!column.whole.empty()) {
    op.add(column.whole.subspan(part.offset, part.bytes));
  } else {
    const auto groups = static_cast<std::uint32_t>(column.segments->size());
    for (std::uint32_t group = column.job->from_group; group < groups; ++group) {
      const std::uint64_t first = std::max(column.segment_at[group], part.offset);
      const std::uint64_t last = std::min(column.segment_at[group + 1], part.offset + part.bytes);
      if (first >= last) continue;
      const Result<MutableByteView> segment = segment_of(column, group);
      if (!segment) return fail(column, segment.error());
      add_piece(op, segment->subspan(first - column.segment_at[group], last - first));
    }
  }
  ++column.outstanding;
  Access access;
  access.column = &column;
  access.index = column.next_part++;
  submit(op, std::move(access));
}

Result<MutableByteView> IoPool::Engine::segment_of(Column& column, std::uint32_t group) {
  Result<MutableByteView> segment = column.job->place(*column.header, group);
  if (segment && segment->size() != column.header->shard.segments[group]) {
    return Error{Code::invalid, 0, "a segment has another length than its place"};
  }
  return segment;
}

void IoPool::Engine::head_arrived(Column& column, ByteView bytes) {
  const ColumnRead& job = *column.job;
  Result<SlotHeader> header = header_check(job.read, bytes);
  if (!header) return fail(column, header.error());
  column.header = *std::move(header);
  const std::vector<std::uint32_t>& segments = column.header->shard.segments;
  if (job.from_group >= segments.size()) {
    return fail(column, Error{Code::invalid, 0, "a read from behind the last segment"});
  }
  segments_known(column, segments);
  for (std::uint32_t group = job.from_group; group < segments.size(); ++group) {
    const Result<MutableByteView> segment = segment_of(column, group);
    if (!segment) return fail(column, segment.error());
    if (!column.whole.empty() && !segment->empty() &&
        segment->data() != column.whole.data() + column.segment_at[group]) {
      column.elsewhere = true;
    }
  }
  if (column.whole.empty()) make_parts(column);
}

void IoPool::Engine::segments_known(Column& column, const std::vector<std::uint32_t>& segments) {
  DI_ASSERT(segments.size() <= kv::groups_max);
  column.segments = &segments;
  for (std::size_t group = 0; group < segments.size(); ++group) {
    column.segment_at[group + 1] = column.segment_at[group] + segments[group];
  }
}

void IoPool::Engine::make_parts(Column& column) {
  const auto groups = static_cast<std::uint32_t>(column.segments->size());
  for (std::uint32_t group = column.job->from_group; group < groups; ++group) {
    const std::uint64_t at = column.segment_at[group];
    const std::uint64_t bytes = column.segment_at[group + 1] - at;
    if (bytes == 0) continue;
    if (column.job->half) {
      const std::uint64_t half = align_up(bytes / 2, disk_align_bytes);
      column.parts.push_back({at, half, true});
      if (half < bytes) column.parts.push_back({at + half, bytes - half});
    } else if (!column.parts.empty() && column.parts.back().bytes + bytes <= run_bytes_max) {
      column.parts.back().bytes += bytes;
    } else {
      column.parts.push_back({at, bytes});
    }
  }
}

void IoPool::Engine::part_arrived(Column& column, std::size_t index) {
  Part& part = column.parts[index];
  part.done = true;
  if (part.half) column.job->half();
  while (column.in_order < column.parts.size() && column.parts[column.in_order].done) ++column.in_order;
}

void IoPool::Engine::groups_arrived(Column& column) {
  if (column.failed || column.segments == nullptr || column.elsewhere) return;
  const ColumnRead& job = *column.job;
  const auto groups = static_cast<std::uint32_t>(column.segments->size());
  const std::uint64_t there = column.in_order == 0 ? column.segment_at[job.from_group]
                                                   : column.parts[column.in_order - 1].offset +
                                                         column.parts[column.in_order - 1].bytes;
  const std::uint32_t before = column.next_group;
  while (column.next_group < groups && column.segment_at[column.next_group + 1] <= there) {
    if (job.verify) {
      const Result<MutableByteView> segment = segment_of(column, column.next_group);
      if (!segment) return fail(column, segment.error());
      if (crc32c(*segment) != column.header->shard.crcs()[column.next_group]) {
        fail(column, Error{Code::corrupt, 0, "a segment does not match its checksum"});
        break;
      }
    }
    column.bytes += (*column.segments)[column.next_group];
    ++column.next_group;
  }
  if (column.next_group == before || column.next_group == groups || !job.arrived) return;
  pool_.report([job = column.job, group = column.next_group - 1] { job->arrived(group); });
}

void IoPool::Engine::fail(Column& column, Error error) {
  if (column.failed) return;
  if (error.code == Code::corrupt) pool_.figures_->corrupt.fetch_add(1, std::memory_order_relaxed);
  column.failed = std::move(error);
}

// Ends the column when nothing of it runs any more, or sees to it that it goes on.
void IoPool::Engine::settle(Column& column) {
  if (column.outstanding == 0 && column.elsewhere && !column.failed) {
    column.elsewhere = false;
    column.whole = {};
    column.parts.clear();
    column.next_part = 0;
    column.in_order = 0;
    make_parts(column);
  }
  if (wants(column)) return queue_column(column, true);
  // A column that is queued comes here again.
  if (column.outstanding > 0 || column.queued) return;
  const bool complete = column.segments != nullptr && column.next_group == column.segments->size();
  DI_ASSERT(column.failed || complete);
  ColumnEnd end;
  if (column.failed) end.status = *column.failed;
  end.bytes = column.bytes;
  end.verified = !column.failed && column.job->verify && column.job->from_group == 0;
  pool_.ended(&pool_.reads_);
  pool_.report([job = column.job, end, last = complete && !column.failed ? column.next_group : 0] {
    if (last > 0 && job->arrived) job->arrived(last - 1);
    job->done(end);
  });
  columns_.erase(column.self);
}

// ---- headers

void IoPool::Engine::begin_headers() {
  for (auto it = headers_.begin(); it != headers_.end();) {
    Headers& headers = *it;
    const std::vector<Read>& reads = headers.job->reads;
    while (headers.next < reads.size() && room_to_read()) {
      Access access;
      access.what = Access::What::headers;
      access.headers = &headers;
      access.index = headers.next;
      access.buffer = buffers_.take(reads[headers.next].slot_class.header_bytes);
      DiskOp op;
      op.kind = DiskOp::Kind::read;
      op.offset = reads[headers.next].offset;
      op.add(access.buffer.bytes);
      ++headers.next;
      ++headers.outstanding;
      submit(op, std::move(access));
    }
    if (headers.next < reads.size() || headers.outstanding > 0) {
      ++it;
      continue;
    }
    auto found = std::make_shared<std::vector<Result<SlotHeader>>>();
    found->reserve(headers.found.size());
    for (std::optional<Result<SlotHeader>>& header : headers.found) found->push_back(*std::move(header));
    pool_.ended(&pool_.reads_);
    pool_.report([job = headers.job, found] { job->done(std::move(*found)); });
    it = headers_.erase(it);
  }
}

// ---- puts

void IoPool::Engine::begin_puts() {
  while (!puts_waiting_.empty() && writes_ < writes_max) {
    Writing& put = *puts_waiting_.front();
    if (put.ticket > tickets_done_ && !broken_) return;
    // When it is broken the lane has ended, and every put in it knows how.
    puts_waiting_.pop_front();
    begin_put(put);
  }
}

Result<std::vector<ByteView>> IoPool::Engine::payload_of(const ColumnPut& job) {
  const Shard& shard = job.put.header.shard;
  Result<std::vector<ByteView>> pieces = job.payload();
  if (!pieces) return pieces;
  std::uint64_t bytes = 0;
  for (const ByteView& piece : *pieces) bytes += piece.size();
  if (bytes != shard.payload_bytes() || pieces->size() >= disk_pieces_max) {
    return Error{Code::stale, 0, "the payload has another length than it should"};
  }
  auto piece = pieces->begin();
  std::size_t used = 0;  // of the piece
  for (std::size_t group = 0; group < shard.segments.size(); ++group) {
    std::uint32_t crc = crc32c({});
    for (std::size_t left = shard.segments[group]; left > 0;) {
      while (used == piece->size()) {
        ++piece;
        used = 0;
      }
      const std::size_t part = std::min(left, piece->size() - used);
      crc = crc32c_extend(crc, piece->subspan(used, part));
      used += part;
      left -= part;
    }
    if (crc != shard.crcs()[group]) {
      return Error{Code::corrupt, 0, "the payload does not match its checksums"};
    }
  }
  return pieces;
}

void IoPool::Engine::begin_put(Writing& put) {
  if (broken_ && put.outcome.status.ok()) put.outcome.status = broken_volume();
  if (!put.outcome.status.ok()) return end_put(put);
  const Result<std::vector<ByteView>> pieces = payload_of(*put.job);
  if (!pieces) {
    put.outcome.status = pieces.error();
    return end_put(put);
  }
  const SlotHeader& header = put.job->put.header;
  Access access;
  access.what = Access::What::put;
  access.put = &put;
  access.buffer = buffers_.take(header.shard.slot_class.header_bytes);
  slot_header_encode(header, access.buffer.bytes);
  DiskOp op;
  op.kind = DiskOp::Kind::write;
  op.offset = put.job->put.offset;
  op.add(access.buffer.bytes);
  for (const ByteView& piece : *pieces) op.add(piece);
  put.outcome.slot_touched = true;
  submit(op, std::move(access));
}

void IoPool::Engine::end_put(Writing& put) {
  pool_.ended(&pool_.puts_);
  pool_.report([job = put.job, outcome = put.outcome] { job->done(outcome); });
  puts_.erase(put.self);
}

// ---- metadata

void IoPool::Engine::begin_metadata() {
  while (!metadata_.empty()) {
    Metadata& front = metadata_.front();
    if (broken_ && front.outstanding == 0 && !front.failed) front.failed = broken_volume();
    if (front.failed || front.stage == front.stages.size()) {
      if (front.outstanding > 0) return;
      end_metadata();
      continue;
    }
    const Stage& stage = front.stages[front.stage];
    const std::size_t count = stage.flush ? 1 : stage.writes.size();
    while (front.next < count && front.outstanding < metadata_max) {
      Access access;
      access.what = Access::What::metadata;
      DiskOp op;
      if (stage.flush) {
        op.kind = DiskOp::Kind::flush;
      } else {
        const MetaWrite& write = *stage.writes[front.next];
        access.buffer = buffers_.take(write.bytes.size());
        std::copy(write.bytes.begin(), write.bytes.end(), access.buffer.bytes.begin());
        op.kind = DiskOp::Kind::write;
        op.offset = write.offset;
        op.add(access.buffer.bytes);
      }
      ++front.next;
      ++front.outstanding;
      submit(op, std::move(access));
    }
    if (front.next < count || front.outstanding > 0) return;
    ++front.stage;
    front.next = 0;
  }
}

void IoPool::Engine::end_metadata() {
  Metadata& front = metadata_.front();
  const bool first_failure = front.failed && !broken_;
  if (front.failed) broken_ = true;
  if (front.put != nullptr) {
    ++tickets_done_;
    if (front.failed) {
      front.put->outcome.status = *front.failed;
      front.put->outcome.metadata_failed = first_failure;
    }
  } else {
    Status status;
    if (front.failed) status = *front.failed;
    pool_.ended(nullptr);
    pool_.report([job = front.sync, status] { job->done(status); });
  }
  metadata_.pop_front();
}

// ---- the pool

Result<std::unique_ptr<IoPool>> IoPool::create(loop::Loop& loop, Disk& disk, const Options& options) {
  std::unique_ptr<IoPool> pool(new IoPool(loop, disk, options));
  if (pool->queue_ == nullptr) return *pool->refused_;
  return pool;
}

IoPool::IoPool(loop::Loop& loop, Disk& disk, const Options& options)
    : disk_(disk),
      options_(options),
      figures_(options.figures ? options.figures : std::make_shared<DiskFigures>()),
      // Every job's reports fit; and a sync or a change of memory has one.
      reports_((2 * options.queue_max + 16) * (kv::groups_max + 1)),
      reader_(loop, reports_, "store-io", [](std::function<void()>&& callback) { callback(); }) {
  std::promise<void> made;
  thread_ = std::thread([this, &made] {
    ::pthread_setname_np(::pthread_self(), options_.name.substr(0, 15).c_str());
    if (options_.mode != IoMode::threads) {
      // The ring belongs to the thread that makes it.
      auto ring = disk_queue_uring(disk_, Engine::accesses_max);
      if (ring) {
        queue_ = *std::move(ring);
      } else {
        refused_ = ring.error();
      }
    }
    if (queue_ == nullptr && options_.mode != IoMode::uring) {
      queue_ = disk_queue_threads(disk_, Engine::accesses_max, options_.threads, options_.name);
    }
    if (queue_ != nullptr) mode_ = queue_->name();
    const bool works = queue_ != nullptr;
    made.set_value();
    if (!works) return;
    serve();
    const std::lock_guard lock(mutex_);
    queue_.reset();
  });
  made.get_future().wait();
}

IoPool::~IoPool() {
  stopping_.store(true, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (queue_ != nullptr) queue_->wake();
  }
  thread_.join();
}

void IoPool::serve() {
  Engine engine(*this, *queue_);
  while (true) {
    Inbox inbox;
    {
      const std::lock_guard lock(mutex_);
      sleeping_ = false;
      std::swap(inbox, inbox_);
    }
    engine.take(std::move(inbox));
    engine.begin();
    bool wait = false;
    {
      const std::lock_guard lock(mutex_);
      wait = inbox_.empty();
      if (wait && closed_ && engine.idle()) return;
      sleeping_ = wait;
    }
    engine.collect(wait);
  }
}

template <class Add>
Status IoPool::push(std::atomic<std::size_t>* count, const Add& add) {
  if (count != nullptr && count->fetch_add(1, std::memory_order_relaxed) >= options_.queue_max) {
    count->fetch_sub(1, std::memory_order_relaxed);
    return Error{Code::busy, 0, "the queue of the disk is full"};
  }
  pending_.fetch_add(1, std::memory_order_relaxed);
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    add(inbox_);
    wake = std::exchange(sleeping_, false);
  }
  if (wake) queue_->wake();
  return {};
}

void IoPool::ended(std::atomic<std::size_t>* count) {
  if (count != nullptr) count->fetch_sub(1, std::memory_order_relaxed);
  pending_.fetch_sub(1, std::memory_order_relaxed);
}

Status IoPool::read(ColumnRead read) {
  return push(&reads_, [&](Inbox& inbox) { inbox.reads.push_back(std::move(read)); });
}

Status IoPool::headers(HeadersRead headers) {
  return push(&reads_, [&](Inbox& inbox) { inbox.headers.push_back(std::move(headers)); });
}

Status IoPool::put(ColumnPut put) {
  return push(&puts_, [&](Inbox& inbox) { inbox.writes.emplace_back(std::move(put)); });
}

Status IoPool::sync(Sync sync, std::function<void(const Status&)> done) {
  return push(nullptr, [&](Inbox& inbox) { inbox.writes.emplace_back(SyncJob{std::move(sync), std::move(done)}); });
}

void IoPool::memory_add(MutableByteView memory) {
  const Status added = push(nullptr, [&](Inbox& inbox) { inbox.memory.push_back({memory, true, {}}); });
  DI_ASSERT(added.ok());
}

void IoPool::memory_remove(MutableByteView memory, std::function<void()> removed) {
  const Status added =
      push(nullptr, [&](Inbox& inbox) { inbox.memory.push_back({memory, false, std::move(removed)}); });
  DI_ASSERT(added.ok());
}

void IoPool::report(std::function<void()> callback) {
  // The box has room for everything that may be told; when the loop is behind by more, this waits for it.
  while (!reports_.try_push(std::move(callback)) && !stopping_.load(std::memory_order_relaxed)) {
    std::this_thread::yield();
  }
}

}  // namespace di::store
