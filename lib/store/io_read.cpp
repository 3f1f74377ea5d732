#include "store/io_read.h"

#include <algorithm>
#include <utility>

#include "base/checksum.h"
#include "store/slot_read.h"

namespace di::store {

namespace {

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

// ---- columns

void ColumnReads::take(ColumnRead&& read) {
  Column& column = columns_.emplace_back(*this, std::move(read));
  column.self = std::prev(columns_.end());
  queue(column, false);
}

void ColumnReads::begin() {
  for (std::deque<Column*>& ready : ready_) {
    while (!ready.empty() && accesses_.room_to_read()) {
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
}

void ColumnReads::end_cancelled() {
  for (std::deque<Column*>& ready : ready_) {
    std::vector<Column*> over;
    std::erase_if(ready, [&](Column* column) {
      if (!cancelled(*column) || column->outstanding > 0) return false;
      column->queued = false;
      over.push_back(column);
      return true;
    });
    for (Column* column : over) {
      fail(*column, Error{Code::cancelled, 0, "cancelled"});
      settle(*column);
    }
  }
}

bool ColumnReads::cancelled(const Column& column) {
  return column.job->cancelled && column.job->cancelled->load(std::memory_order_relaxed);
}

void ColumnReads::accessed(Column& column, Access& access, const Status& status) {
  --column.outstanding;
  if (!status.ok()) {
    fail(column, status.error());
  } else {
    if (access.head) head_arrived(column, access.buffer.bytes);
    // With the header may have come the first part.
    if (!access.head || !column.whole.empty()) part_arrived(column, access.index);
    groups_arrived(column);
  }
  settle(column);
}

bool ColumnReads::wants(const Column& column) {
  if (column.failed) return false;
  if (!column.begun) return true;
  if (column.elsewhere || column.next_part >= column.parts.size()) return false;
  if (column.job->half && column.outstanding > 0) return false;
  return column.segments != nullptr || !column.whole.empty();
}

void ColumnReads::queue(Column& column, bool first) {
  if (column.queued) return;
  column.queued = true;
  std::deque<Column*>& ready = ready_[std::min<std::uint32_t>(column.job->priority, priorities - 1)];
  if (first) {
    ready.push_front(&column);
  } else {
    ready.push_back(&column);
  }
}

void ColumnReads::step(Column& column) {
  if (cancelled(column)) return fail(column, Error{Code::cancelled, 0, "cancelled"});
  if (column.begun) {
    step_part(column);
  } else {
    step_head(column);
  }
}

void ColumnReads::step_head(Column& column) {
  const ColumnRead& job = *column.job;
  const Read& read = job.read;
  column.begun = true;
  column.next_group = job.from_group;
  if (job.whole && job.from_group == 0 && !job.half) {
    const MutableByteView whole = job.whole();
    if (whole.size() == read.payload_bytes) column.whole = whole;
  }
  for (std::uint64_t at = 0; at < column.whole.size(); at += column.parts.back().bytes) {
    column.parts.push_back({at, std::min<std::uint64_t>(run_bytes(at), column.whole.size() - at)});
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
  access.owner = &column;
  access.again = column.job->again;
  access.head = true;
  access.buffer = accesses_.buffer(read.slot_class.header_bytes);
  op.add(access.buffer.bytes);
  if (!column.whole.empty()) {
    op.add(column.whole.first(column.parts[0].bytes));
    column.next_part = 1;
  }
  ++column.outstanding;
  accesses_.submit(op, std::move(access));
}

void ColumnReads::step_part(Column& column) {
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
  access.owner = &column;
  access.again = column.job->again;
  access.index = column.next_part++;
  accesses_.submit(op, std::move(access));
}

Result<MutableByteView> ColumnReads::segment_of(Column& column, std::uint32_t group) {
  Result<MutableByteView> segment = column.job->place(*column.header, group);
  if (segment && segment->size() != column.header->shard.segments[group]) {
    return Error{Code::invalid, 0, "a segment has another length than its place"};
  }
  return segment;
}

void ColumnReads::head_arrived(Column& column, ByteView bytes) {
  const ColumnRead& job = *column.job;
  Result<SlotHeader> header = header_check(job.read, bytes);
  if (!header) return fail(column, header.error(), !slot_is_newer(job.read, bytes));
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

void ColumnReads::segments_known(Column& column, const std::vector<std::uint32_t>& segments) {
  DI_ASSERT(segments.size() <= kv::groups_max);
  column.segments = &segments;
  for (std::size_t group = 0; group < segments.size(); ++group) {
    column.segment_at[group + 1] = column.segment_at[group] + segments[group];
  }
}

void ColumnReads::make_parts(Column& column) {
  const auto groups = static_cast<std::uint32_t>(column.segments->size());
  const std::uint64_t first = column.segment_at[column.job->from_group];
  for (std::uint32_t group = column.job->from_group; group < groups; ++group) {
    const std::uint64_t at = column.segment_at[group];
    const std::uint64_t bytes = column.segment_at[group + 1] - at;
    if (bytes == 0) continue;
    if (column.job->half) {
      const std::uint64_t half = align_up(bytes / 2, disk_align_bytes);
      column.parts.push_back({at, half, true});
      if (half < bytes) column.parts.push_back({at + half, bytes - half});
    } else if (!column.parts.empty() &&
               column.parts.back().bytes + bytes <= run_bytes(column.parts.back().offset - first)) {
      column.parts.back().bytes += bytes;
    } else {
      column.parts.push_back({at, bytes});
    }
  }
}

void ColumnReads::part_arrived(Column& column, std::size_t index) {
  Part& part = column.parts[index];
  part.done = true;
  if (part.half) column.job->half();
  while (column.in_order < column.parts.size() && column.parts[column.in_order].done) ++column.in_order;
}

void ColumnReads::groups_arrived(Column& column) {
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
  ends_.tell([job = column.job, group = column.next_group - 1] { job->arrived(group); });
}

void ColumnReads::fail(Column& column, Error error, bool by_disk) {
  if (column.failed) return;
  if (error.code == Code::corrupt && by_disk && !column.job->again) accesses_.count_corrupt();
  column.failed = std::move(error);
}

void ColumnReads::settle(Column& column) {
  if (column.outstanding == 0 && column.elsewhere && !column.failed) {
    column.elsewhere = false;
    column.whole = {};
    column.parts.clear();
    column.next_part = 0;
    column.in_order = 0;
    make_parts(column);
  }
  if (wants(column)) return queue(column, true);
  // A column that is queued comes here again.
  if (column.outstanding > 0 || column.queued) return;
  const bool complete = column.segments != nullptr && column.next_group == column.segments->size();
  DI_ASSERT(column.failed || complete);
  ColumnEnd end;
  if (column.failed) end.status = *column.failed;
  end.bytes = column.bytes;
  end.verified = !column.failed && column.job->verify && column.job->from_group == 0;
  ends_.ended(JobEnds::Kind::read);
  ends_.tell([job = column.job, end, last = complete && !column.failed ? column.next_group : 0] {
    if (last > 0 && job->arrived) job->arrived(last - 1);
    job->done(end);
  });
  columns_.erase(column.self);
}

// ---- headers

void HeaderReads::take(HeadersRead&& read) {
  headers_.emplace_back(*this, std::move(read));
}

void HeaderReads::begin() {
  for (auto it = headers_.begin(); it != headers_.end();) {
    Headers& headers = *it;
    const std::vector<Read>& reads = headers.job->reads;
    while (headers.next < reads.size() && accesses_.room_to_read()) {
      Access access;
      access.owner = &headers;
      access.index = headers.next;
      access.buffer = accesses_.buffer(reads[headers.next].slot_class.header_bytes);
      DiskOp op;
      op.kind = DiskOp::Kind::read;
      op.offset = reads[headers.next].offset;
      op.add(access.buffer.bytes);
      ++headers.next;
      ++headers.outstanding;
      accesses_.submit(op, std::move(access));
    }
    if (headers.next < reads.size() || headers.outstanding > 0) {
      ++it;
      continue;
    }
    auto found = std::make_shared<std::vector<Result<SlotHeader>>>();
    found->reserve(headers.found.size());
    for (std::optional<Result<SlotHeader>>& header : headers.found) found->push_back(*std::move(header));
    ends_.ended(JobEnds::Kind::read);
    ends_.tell([job = headers.job, found] { job->done(std::move(*found)); });
    it = headers_.erase(it);
  }
}

void HeaderReads::accessed(Headers& headers, Access& access, const Status& status) {
  Result<SlotHeader> header = status.ok()
                                  ? header_check(headers.job->reads[access.index], access.buffer.bytes)
                                  : Result<SlotHeader>(status.error());
  if (!header && header.error().code == Code::corrupt &&
      !slot_is_newer(headers.job->reads[access.index], access.buffer.bytes)) {
    accesses_.count_corrupt();
  }
  headers.found[access.index] = std::move(header);
  --headers.outstanding;
}

}  // namespace di::store
