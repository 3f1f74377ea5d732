// store/queue.h: many accesses to a disk in flight, begun and collected by one thread.
//
// Two ways: io_uring, with the file and often used memory registered; and threads that block, for kernels
// and sandboxes that refuse io_uring and for the disks of tests, which have no descriptor.
//
// Owner: the thread that makes it (io_uring's rings belong to one thread); wake() from any.  Bounds: `depth`
// operations at a time; memory_ranges_max registered ranges.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "store/disk.h"

namespace di::store {

struct DiskOp {
  enum class Kind : std::uint8_t { read, write, flush };
  Kind kind = Kind::read;
  std::uint64_t offset = 0;
  std::uint64_t tag = 0;  // the caller's
  std::uint32_t count = 0;
  // In order; those of a write are not changed.  They stay as they are until the operation is done.
  std::array<MutableByteView, disk_pieces_max> pieces;

  void add(MutableByteView piece);
  void add(ByteView piece);
  [[nodiscard]] std::uint64_t bytes() const;
};

class DiskQueue {
 public:
  struct Done {
    std::uint64_t tag = 0;
    Status status;  // as of Disk
  };
  static constexpr std::size_t memory_ranges_max = 128;

  virtual ~DiskQueue() = default;
  // At most `depth` at a time (asserted).  A write is one write; a read may be several.
  virtual void submit(const DiskOp& op) = 0;
  // Sends what was submitted and appends what is done; with `wait` not before something is, or wake().
  virtual void collect(bool wait, std::vector<Done>& done) = 0;
  virtual void wake() = 0;
  // Memory that operations will often use: cheaper where the kernel can be told, nothing elsewhere.
  virtual void memory_add(MutableByteView memory) { static_cast<void>(memory); }
  virtual void memory_remove(MutableByteView memory) { static_cast<void>(memory); }
  [[nodiscard]] virtual std::string_view name() const = 0;
};

// `disk` outlives the queue.
[[nodiscard]] std::unique_ptr<DiskQueue> disk_queue_threads(Disk& disk, std::uint32_t depth,
                                                            std::uint32_t threads, const std::string& name);
// disk_uring.cpp.  Errors: unsupported (no descriptor, a kernel without it), denied (seccomp, sysctl), io.
[[nodiscard]] Result<std::unique_ptr<DiskQueue>> disk_queue_uring(Disk& disk, std::uint32_t depth);

}  // namespace di::store
