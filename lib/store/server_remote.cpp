// Reads and puts of hosts on other machines: through a buffer and the fabric.
#include <algorithm>

#include "store/server_work.h"

namespace di::store {

void Server::read_remote(Host& host, const wire::kv_read& want) {
  const TransferId id{host.peer, want.transfer};
  if (fabric_ == nullptr) return refuse_read(host.peer, want.transfer, Code::unsupported);
  Mount* mount = mount_of(want.volume);
  if (mount == nullptr) return refuse_read(host.peer, want.transfer, Code::not_found);
  Held& held = held_by_[want.volume];
  if (transfers_.size() >= options_.transfers_max ||
      !has_place(held.reads, held_.reads, options_.transfers_max) ||
      !has_place(held.remote, held_.remote, options_.remote_max)) {
    return refuse_read(host.peer, want.transfer, Code::busy);
  }
  const Result<Read> begun = mount->read_begin(want.stripe, want.column);
  if (!begun) return refuse_read(host.peer, want.transfer, begun.error().code);
  auto read = std::make_shared<RemoteRead>();
  read->id = id;
  read->want = want;
  read->mount = mount;
  read->read = *begun;
  read->told = want.from_group;
  for (Held* each : {&held_, &held}) {
    ++each->reads;
    ++each->remote;
  }
  Transfer& transfer = transfers_[id];
  transfer.began = loop_.monotonic_now();
  transfer.running = true;
  transfer.mount = mount;
  transfer.remote = read;
  read->payload = buffers_->take(begun->payload_bytes);
  const MutableByteView payload = read->payload.first(begun->payload_bytes);
  ColumnRead job = job_of(want, *begun, transfer);
  job.whole = [payload] { return payload; };
  job.place = [read, payload, places = std::make_shared<Places>(want, layouts_)](
                  const SlotHeader& header, std::uint32_t group) -> Result<MutableByteView> {
    const Shard& shard = header.shard;
    for (std::uint32_t i = 0; read->strips.size() < shard.segments.size(); ++i) {
      const Result<Strip> strip = places->of(shard, i);
      if (!strip) return strip.error();
      read->strips.push_back(*strip);
    }
    if (payload.size() != shard.payload_bytes()) {
      return Error{Code::corrupt, 0, "a column has another length than its slot's record"};
    }
    return payload.subspan(shard.segment_offset(group), shard.segments[group]);
  };
  job.arrived = [this, read](std::uint32_t group) { remote_read(read, group); };
  job.done = [this, read](const ColumnEnd& end) {
    read->disk_over = true;
    read->verified = end.verified;
    if (read->code == Code::ok) read->disk = end.status;
    if (!end.status.ok()) remote_fail(*read, end.status.error().code);
    remote_settle(read);
  };
  const Status queued = mount->pool().read(std::move(job));
  DI_ASSERT(queued.ok());
}

void Server::remote_read(const std::shared_ptr<RemoteRead>& read, std::uint32_t group) {
  // What came together and goes to one place goes at once.
  Strip run;
  std::uint32_t segments = 0;  // of the run; bitmap
  for (; read->begun <= group; ++read->begun) {
    const Strip strip = read->strips[read->begun];
    const std::uint32_t bit = 1u << read->begun;
    if (read->begun < read->want.from_group) {
      // The host has it, and may show it to a reader.
    } else if (strip.bytes == 0) {
      // An empty segment is there as soon as those before it are.
      read->arrived |= bit;
    } else {
      if (segments != 0 && strip.offset != run.offset + run.bytes) {
        remote_move(read, run, std::exchange(segments, 0));
        run = {};
      }
      if (segments == 0) run.offset = strip.offset;
      run.bytes += strip.bytes;
      segments |= bit;
    }
    read->begun_bytes += strip.bytes;
  }
  if (segments != 0) remote_move(read, run, segments);
  remote_tell(*read);
}

// The bytes that end at begun_bytes.
void Server::remote_move(const std::shared_ptr<RemoteRead>& read, const Strip& run, std::uint32_t segments) {
  const Transfer& transfer = transfers_.at(read->id);
  if (read->code != Code::ok || transfer.cancelled->load(std::memory_order_relaxed)) return;
  const transfer::Place to{{read->want.slot.slot, read->want.slot.generation}, run.offset, run.bytes};
  const Result<transfer::OpId> op = fabric_->write(
      read->id.first, read->id.second, to,
      read->payload.first(read->begun_bytes).subspan(read->begun_bytes - run.bytes), transfer::Class::fetch);
  if (!op) return remote_fail(*read, op.error().code);
  read->moving.insert(*op);
  moving_.emplace(*op, [this, read, segments, op = *op, bytes = run.bytes](Code code) {
    read->moving.erase(op);
    if (code == Code::ok) read->bytes += bytes;
    remote_moved(read, segments, code);
  });
}

// Segments that arrived in a row and were not told of.
void Server::remote_tell(RemoteRead& read) {
  if (read.code != Code::ok || transfers_.at(read.id).cancelled->load(std::memory_order_relaxed)) return;
  std::uint32_t there = read.told;
  while ((read.arrived >> there & 1u) != 0) ++there;
  if (there == read.told) return;
  read.told = there;
  send(read.id.first, wire::kv_read_done{read.id.second, 0, there - 1});
}

void Server::remote_moved(const std::shared_ptr<RemoteRead>& read, std::uint32_t segments, Code code) {
  const bool cancelled = transfers_.at(read->id).cancelled->load(std::memory_order_relaxed);
  if (code != Code::ok) {
    if (!cancelled) remote_fail(*read, code);
  } else {
    read->arrived |= segments;
    remote_tell(*read);
  }
  remote_settle(read);
}

void Server::remote_fail(RemoteRead& read, Code code) {
  if (read.code == Code::ok) read.code = code;
  for (const transfer::OpId op : std::set<transfer::OpId>(read.moving)) fabric_->cancel(op);
}

void Server::remote_settle(const std::shared_ptr<RemoteRead>& read) {
  if (!read->disk_over || !read->moving.empty()) return;
  --held_.remote;
  --held_by_[read->mount->number()].remote;
  ColumnEnd end;
  if (read->code != Code::ok) {
    end.status =
        read->disk.ok() ? Error{read->code, 0, "a transfer to another machine failed"} : read->disk.error();
  }
  end.bytes = read->bytes;
  end.verified = read->verified;
  read_ended(read->id, *read->mount, read->read, end, !read->disk.ok());
}

void Server::moved(transfer::OpId op, Code code) {
  const auto found = moving_.find(op);
  if (found == moving_.end()) return;
  const std::function<void(Code)> done = std::move(found->second);
  moving_.erase(found);
  done(code);
}

// Brings the column from its host into the buffer.
void Server::put_fetch(const std::shared_ptr<PutWork>& work) {
  const std::uint64_t bytes = work->put.header.shard.payload_bytes();
  work->remote = buffers_->take(bytes);
  std::uint64_t at = 0;
  for (const Strip& piece : work->pieces) {
    const transfer::Place from{{work->want.slot.slot, work->want.slot.generation}, piece.offset, piece.bytes};
    const Result<transfer::OpId> op =
        fabric_->read(work->host, work->want.transfer, from, work->remote.first(at + piece.bytes).subspan(at),
                      transfer::Class::writeback);
    if (!op) {
      work->moved = op.error().code;
      break;
    }
    at += piece.bytes;
    work->moving.insert(*op);
    moving_.emplace(*op, [this, work, op = *op](Code code) {
      work->moving.erase(op);
      put_fetched(work, code);
    });
  }
  if (work->moved != Code::ok) put_fetched(work, work->moved);
}

void Server::put_fetched(const std::shared_ptr<PutWork>& work, Code code) {
  if (code != Code::ok) {
    if (work->moved == Code::ok) work->moved = code;
    for (const transfer::OpId op : std::set<transfer::OpId>(work->moving)) fabric_->cancel(op);
  }
  if (!work->moving.empty()) return;
  if (work->moved == Code::ok) return put_write(work);
  PutOutcome outcome;
  outcome.status = Error{work->moved, 0, "the column could not be read from its host"};
  put_ended(work, outcome);
}

}  // namespace di::store
