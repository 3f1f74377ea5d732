// store/buffers.h: buffers for columns on their way between a disk and another machine, used again.
//
// New memory of some megabytes for every column costs more than the column's way: the kernel zeroes and maps it,
// and takes it away again.  (Twelve stores and one fetch on one machine: 1.14 s of CPU for a GB, of which more than
// half was that.)
//
// Any thread: the last user of a buffer may be the disk's.  Bounds: of those in use the callers'; of those kept for
// the next one kept_bytes_max.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "store/disk.h"

namespace di::store {

class BufferPool;

// Goes back to its pool when it is destroyed.  What is in it at first is whatever was in it before.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept = default;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { give_back(); }

  // At most as many as were taken.
  [[nodiscard]] MutableByteView first(std::size_t bytes);

 private:
  friend class BufferPool;
  Buffer(std::shared_ptr<BufferPool> pool, AlignedBuffer memory, std::size_t bytes)
      : pool_(std::move(pool)), memory_(std::move(memory)), bytes_(bytes) {}
  void give_back();

  std::shared_ptr<BufferPool> pool_;
  AlignedBuffer memory_;
  std::size_t bytes_ = 0;
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static std::shared_ptr<BufferPool> create(std::size_t kept_bytes_max) {
    return std::shared_ptr<BufferPool>(new BufferPool(kept_bytes_max));
  }

  [[nodiscard]] Buffer take(std::size_t bytes);
  [[nodiscard]] std::size_t kept_bytes() const;

 private:
  friend class Buffer;
  explicit BufferPool(std::size_t kept_bytes_max) : kept_bytes_max_(kept_bytes_max) {}
  void put(AlignedBuffer memory);

  const std::size_t kept_bytes_max_;
  mutable std::mutex mutex_;
  std::multimap<std::size_t, AlignedBuffer> kept_;  // by capacity
  std::size_t kept_bytes_ = 0;
};

}  // namespace di::store
