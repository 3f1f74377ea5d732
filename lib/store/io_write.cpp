#include "store/io_write.h"

#include <algorithm>
#include <utility>

#include "store/slot_read.h"

namespace di::store {

namespace {

Error broken_volume() {
  return Error{Code::io, 0, "the volume is broken: a write of its tables failed"};
}

}  // namespace

void Writes::take(ColumnPut&& job) {
  Writing& put = puts_.emplace_back(*this, std::move(job));
  put.self = std::prev(puts_.end());
  if (const std::vector<MetaWrite>& before = put.job->put.before; !before.empty()) {
    ++tickets_;
    Metadata& metadata = metadata_.emplace_back();
    metadata.put = &put;
    stages_of(before, false, metadata.stages);
  }
  put.ticket = tickets_;
  puts_waiting_.push_back(&put);
}

void Writes::take(SyncJob&& job) {
  Metadata& metadata = metadata_.emplace_back();
  metadata.sync = std::make_shared<SyncJob>(std::move(job));
  metadata.stages.push_back({.flush = true, .writes = {}});
  stages_of(metadata.sync->sync.table, true, metadata.stages);
  stages_of(metadata.sync->sync.superblock, false, metadata.stages);
}

void Writes::stages_of(const std::vector<MetaWrite>& writes, bool together, std::vector<Stage>& stages) {
  if (writes.empty()) return;
  if (together) stages.push_back({});
  for (const MetaWrite& write : writes) {
    if (write.flush_before) stages.push_back({.flush = true, .writes = {}});
    if (!together || write.flush_before) stages.push_back({});
    stages.back().writes.push_back(&write);
  }
}

void Writes::begin() {
  begin_metadata();
  begin_puts();
}

// ---- puts

void Writes::begin_puts() {
  while (!puts_waiting_.empty() && puts_in_flight_ < Accesses::writes_max) {
    Writing& put = *puts_waiting_.front();
    if (put.ticket > tickets_done_ && !broken_) return;
    // When it is broken the lane has ended, and every put in it knows how.
    puts_waiting_.pop_front();
    begin_put(put);
  }
}

Result<std::vector<ByteView>> Writes::payload_of(const ColumnPut& job) {
  Result<std::vector<ByteView>> pieces = job.payload();
  if (!pieces) return pieces;
  if (pieces->size() >= disk_pieces_max) return Error{Code::stale, 0, "the payload comes in too many pieces"};
  DI_TRY(payload_check(job.put.header.shard, *pieces));
  return pieces;
}

void Writes::begin_put(Writing& put) {
  if (broken_ && put.outcome.status.ok()) put.outcome.status = broken_volume();
  if (!put.outcome.status.ok()) return end_put(put);
  const Result<std::vector<ByteView>> pieces = payload_of(*put.job);
  if (!pieces) {
    put.outcome.status = pieces.error();
    return end_put(put);
  }
  const SlotHeader& header = put.job->put.header;
  Access access;
  access.owner = &put;
  access.buffer = accesses_.buffer(header.shard.slot_class.header_bytes);
  slot_header_encode(header, access.buffer.bytes);
  DiskOp op;
  op.kind = DiskOp::Kind::write;
  op.offset = put.job->put.offset;
  op.add(access.buffer.bytes);
  for (const ByteView& piece : *pieces) op.add(piece);
  put.outcome.slot_touched = true;
  ++puts_in_flight_;
  accesses_.submit(op, std::move(access));
}

void Writes::slot_written(Writing& put, const Status& status) {
  --puts_in_flight_;
  put.outcome.status = status;
  put.outcome.slot_sound = !status.ok() && status.error().code == Code::no_space;
  if (status.ok() && put.job->current && !put.job->current()) {
    put.outcome.status = Error{Code::stale, 0, "the slot was given up"};
    put.outcome.slot_sound = true;
  }
  end_put(put);
}

void Writes::end_put(Writing& put) {
  ends_.ended(JobEnds::Kind::put);
  ends_.tell([job = put.job, outcome = put.outcome] { job->done(outcome); });
  puts_.erase(put.self);
}

// ---- metadata

void Writes::begin_metadata() {
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
    while (front.next < count && front.outstanding < Accesses::metadata_max) {
      Access access;
      access.owner = &front;
      DiskOp op;
      if (stage.flush) {
        op.kind = DiskOp::Kind::flush;
      } else {
        const MetaWrite& write = *stage.writes[front.next];
        access.buffer = accesses_.buffer(write.bytes.size());
        std::copy(write.bytes.begin(), write.bytes.end(), access.buffer.bytes.begin());
        op.kind = DiskOp::Kind::write;
        op.offset = write.offset;
        op.add(access.buffer.bytes);
      }
      ++front.next;
      ++front.outstanding;
      accesses_.submit(op, std::move(access));
    }
    if (front.next < count || front.outstanding > 0) return;
    ++front.stage;
    front.next = 0;
  }
}

void Writes::end_metadata() {
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
    ends_.ended(JobEnds::Kind::other);
    ends_.tell([job = front.sync, status] { job->done(status); });
  }
  metadata_.pop_front();
}

}  // namespace di::store
