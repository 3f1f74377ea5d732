#include "store/io_access.h"

#include <utility>

namespace di::store {

AccessBuffers::AccessBuffers(std::uint32_t units) : slab_(units * unit_bytes), units_(units) {
  for (std::uint32_t unit = units; unit-- > 0;) free_.push_back(unit);
}

AccessBuffers::Buffer AccessBuffers::take(std::size_t bytes) {
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

void AccessBuffers::give_back(Buffer& buffer) {
  if (buffer.unit != UINT32_MAX) free_.push_back(buffer.unit);
  buffer = {};
}

Accesses::Accesses(DiskQueue& queue, DiskFigures& figures)
    : queue_(queue), figures_(figures), buffers_(accesses_max), accesses_(accesses_max) {
  for (std::uint32_t i = accesses_max; i-- > 0;) free_.push_back(i);
  queue_.memory_add(buffers_.all());
}

void Accesses::submit(DiskOp& op, Access&& access) {
  DI_ASSERT(!free_.empty());
  const std::uint32_t index = free_.back();
  free_.pop_back();
  accesses_[index] = std::move(access);
  Access& kept = accesses_[index];
  kept.kind = op.kind;
  kept.bytes = op.bytes();
  kept.began = clock_.now();
  figures_.begun.fetch_add(1, std::memory_order_relaxed);
  if (kept.kind == DiskOp::Kind::read) {
    ++reads_;
    read_bytes_ += kept.bytes;
  }
  op.tag = index;
  queue_.submit(op);
}

void Accesses::collect(bool wait) {
  done_.clear();
  queue_.collect(wait, done_);
  for (const DiskQueue::Done& one : done_) over(one);
}

void Accesses::over(const DiskQueue::Done& done) {
  Access access = std::move(accesses_[done.tag]);
  free_.push_back(static_cast<std::uint32_t>(done.tag));
  const auto us = static_cast<std::uint64_t>(to_us(clock_.now() - access.began));
  switch (access.kind) {
    case DiskOp::Kind::read:
      --reads_;
      read_bytes_ -= access.bytes;
      figures_.read_us.record(us);
      if (!done.status.ok() && !access.again) figures_.read_errors.fetch_add(1, std::memory_order_relaxed);
      break;
    case DiskOp::Kind::write:
    case DiskOp::Kind::flush:
      (access.kind == DiskOp::Kind::write ? figures_.write_us : figures_.flush_us).record(us);
      if (done.status.ok()) break;
      (done.status.error().code == Code::no_space ? figures_.no_space : figures_.write_errors)
          .fetch_add(1, std::memory_order_relaxed);
      break;
  }
  access.owner->accessed(access, done.status);
  buffers_.give_back(access.buffer);
}

}  // namespace di::store
