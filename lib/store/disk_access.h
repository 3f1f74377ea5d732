// store/disk_access.h: what the disks that are made of files share.
//
// Owner: the caller.  Bound: disk_pieces_max places in memory.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/assert.h"
#include "base/result.h"
#include "store/disk.h"

namespace di::store {

inline bool disk_aligned(std::uint64_t value) {
  return value % disk_align_bytes == 0;
}

// What is left of an access, as the kernel takes it.
class DiskVector {
 public:
  template <class View>
  explicit DiskVector(std::span<const View> pieces) {
    DI_ASSERT(pieces.size() <= disk_pieces_max);
    for (const View& piece : pieces) {
      if (piece.empty()) continue;
      // The kernel does not change what it writes from.
      entries_[count_++] = {const_cast<std::byte*>(piece.data()), piece.size()};
    }
  }
  [[nodiscard]] const iovec* data() const { return &entries_[first_]; }
  [[nodiscard]] int count() const { return static_cast<int>(count_ - first_); }
  void advance(std::size_t bytes) {
    while (bytes > 0) {
      iovec& entry = entries_[first_];
      const std::size_t part = std::min(bytes, entry.iov_len);
      entry.iov_base = static_cast<std::byte*>(entry.iov_base) + part;
      entry.iov_len -= part;
      bytes -= part;
      if (entry.iov_len == 0) ++first_;
    }
  }

 private:
  std::array<iovec, disk_pieces_max> entries_{};
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

// Asserts what store/disk.h asks of an access to a disk of `bytes` bytes; returns its length.
template <class View>
std::uint64_t disk_check(std::uint64_t offset, std::span<const View> pieces, std::uint64_t bytes) {
  std::uint64_t length = 0;
  for (const View& piece : pieces) {
    DI_ASSERT(disk_aligned(piece.size()) && disk_aligned(reinterpret_cast<std::uintptr_t>(piece.data())));
    length += piece.size();
  }
  DI_ASSERT(disk_aligned(offset) && offset <= bytes && length <= bytes - offset);
  return length;
}

// Writes zeros from end to end, and flushes; `progress` is told how many bytes are written.  Errors: io, no_space.
Status disk_prewrite(Disk& disk, const std::function<void(std::uint64_t)>& progress);

// Keeps a second process out, as long as the file is open.  Errors: busy, io.
Status disk_lock(int fd, const std::string& path);

}  // namespace di::store
