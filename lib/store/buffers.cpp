#include "store/buffers.h"

#include "base/assert.h"

namespace di::store {

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  pool_ = std::move(other.pool_);
  memory_ = std::move(other.memory_);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

MutableByteView Buffer::first(std::size_t bytes) {
  DI_ASSERT(bytes <= bytes_);
  return memory_.first(bytes);
}

void Buffer::give_back() {
  if (pool_) std::exchange(pool_, nullptr)->put(std::move(memory_));
}

Buffer BufferPool::take(std::size_t bytes) {
  AlignedBuffer memory;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = kept_.lower_bound(bytes); found != kept_.end()) {
      kept_bytes_ -= found->first;
      memory = std::move(kept_.extract(found).mapped());
    }
  }
  memory.reserve(bytes);
  return {shared_from_this(), std::move(memory), bytes};
}

void BufferPool::put(AlignedBuffer memory) {
  const std::size_t capacity = memory.capacity();
  const std::lock_guard lock(mutex_);
  if (kept_bytes_ + capacity > kept_bytes_max_) return;
  kept_bytes_ += capacity;
  kept_.emplace(capacity, std::move(memory));
}

std::size_t BufferPool::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

}  // namespace di::store
