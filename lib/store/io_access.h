// store/io_access.h: the accesses of a disk thread that are in flight: their memory for headers and tables, how
// long each takes, and whether more may be read.
//
// Owner: the disk thread.  Bounds: accesses_max at a time, which those that submit keep to; one piece of memory
// for each.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "store/disk.h"
#include "store/io_jobs.h"
#include "store/queue.h"

namespace di::store {

// Memory for headers and pages of tables, most of it in one piece that the queue knows.
class AccessBuffers {
 public:
  static constexpr std::size_t unit_bytes = 32768;

  struct Buffer {
    MutableByteView bytes;
    std::uint32_t unit = UINT32_MAX;
    std::unique_ptr<AlignedBuffer> own;  // of a header that is longer than a unit
  };

  explicit AccessBuffers(std::uint32_t units);
  [[nodiscard]] MutableByteView all() { return slab_.first(units_ * unit_bytes); }
  // There is one for each access in flight (asserted).
  [[nodiscard]] Buffer take(std::size_t bytes);
  void give_back(Buffer& buffer);

 private:
  AlignedBuffer slab_;
  const std::uint32_t units_;
  std::vector<std::uint32_t> free_;
};

struct Access;

// Whose access it is.  It stays where it is until each of its accesses is over.
class AccessOwner {
 public:
  virtual void accessed(Access& access, const Status& status) = 0;

 protected:
  ~AccessOwner() = default;
};

struct Access {
  AccessOwner* owner = nullptr;
  std::size_t index = 0;              // the owner's: which part of its work
  bool head = false;                  // the owner's: a header, perhaps with what follows it
  bool again = false;                 // an error of it is in the figures already
  AccessBuffers::Buffer buffer = {};  // given back when it is over
  // Set when it is submitted.
  DiskOp::Kind kind = DiskOp::Kind::read;
  Instant began = {};
  std::uint64_t bytes = 0;
};

class Accesses {
 public:
  // At a time.  Deep enough for a fast disk, and shallow enough that an urgent read finds at most some
  // milliseconds in front of it.
  static constexpr std::uint32_t reads_max = 48;
  static constexpr std::uint64_t read_bytes_max = std::uint64_t{24} << 20;
  static constexpr std::uint32_t writes_max = 16;  // of slots
  static constexpr std::uint32_t metadata_max = 8;
  static constexpr std::uint32_t accesses_max = reads_max + writes_max + metadata_max;

  // Both outlive it.
  Accesses(DiskQueue& queue, DiskFigures& figures);
  ~Accesses() { queue_.memory_remove(buffers_.all()); }
  Accesses(const Accesses&) = delete;
  Accesses& operator=(const Accesses&) = delete;

  [[nodiscard]] AccessBuffers::Buffer buffer(std::size_t bytes) { return buffers_.take(bytes); }
  // The operation's tag is this object's.
  void submit(DiskOp& op, Access&& access);
  // Tells owners what is over; with `wait` not before something is, or the queue was woken.
  void collect(bool wait);
  [[nodiscard]] bool room_to_read() const { return reads_ < reads_max && read_bytes_ < read_bytes_max; }
  // Headers and payloads that do not match.
  void count_corrupt() { figures_.corrupt.fetch_add(1, std::memory_order_relaxed); }

 private:
  void over(const DiskQueue::Done& done);

  DiskQueue& queue_;
  DiskFigures& figures_;
  AccessBuffers buffers_;
  MonotonicClock clock_;
  std::vector<Access> accesses_;  // by tag
  std::vector<std::uint32_t> free_;
  std::vector<DiskQueue::Done> done_;
  std::uint32_t reads_ = 0;
  std::uint64_t read_bytes_ = 0;
};

}  // namespace di::store
