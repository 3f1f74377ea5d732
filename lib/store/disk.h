// store/disk.h: a volume's bytes, behind an interface whose test double tears, loses and flips.
//
// A file, or a raw block device.  Every offset, length and address is a multiple of 4 KiB (asserted): it is
// opened with O_DIRECT.  Threads: read and write from any thread at once; they block (store/queue.h has
// many of them in flight).  Bound: the length fixed at creation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/result.h"

namespace di::store {

inline constexpr std::uint64_t disk_align_bytes = 4096;
// Places in memory that one access may go to or come from: a header and what may be a piece for each group.
inline constexpr std::size_t disk_pieces_max = 9;

class Disk {
 public:
  virtual ~Disk() = default;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
  // As long as it is now: less than bytes() when somebody has cut it short.  Does not block: a disk of which
  // that asks another machine says what it was at the last flush or failed access.  Errors: io, not_found (a
  // file of it has no name any more: what is written to it will not be there at the next start).
  [[nodiscard]] virtual Result<std::uint64_t> bytes_now() const { return bytes(); }
  // All of `to`, one piece after the other, or an error.  Errors: io.
  virtual Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) = 0;
  // One write; after an error or a crash any part of it may be there.  Errors: io, no_space.
  virtual Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) = 0;
  // What was written before is durable afterwards.
  virtual Status flush() = 0;

  Status read(std::uint64_t offset, MutableByteView to) { return read_pieces(offset, {&to, 1}); }
  Status write(std::uint64_t offset, ByteView from) { return write_pieces(offset, {&from, 1}); }

  // What io_uring may use in place of the functions above; -1: nothing, they are to be called.
  [[nodiscard]] virtual int descriptor() const { return -1; }
  [[nodiscard]] virtual std::string_view path() const { return "disk"; }
};

// Memory for O_DIRECT, zeroed.  Grows only.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes) { reserve(bytes); }

  // At least `bytes`; what was inside is lost when it grows.
  void reserve(std::size_t bytes);
  [[nodiscard]] MutableByteView first(std::size_t bytes);
  [[nodiscard]] std::size_t capacity() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

struct DiskFile {
  std::unique_ptr<Disk> disk;
  bool direct = false;  // false: the file system refuses O_DIRECT, the page cache is in between
  bool device = false;  // a block device: its length is what it is, and it cannot be made
};
// Opens an existing volume file, or a block device, and locks it against a second process; a device that
// is mounted is taken too.  Errors: not_found, busy (locked, mounted), invalid (length, kind), unsupported
// (wants more than 4 KiB of alignment), denied, io.
Result<DiskFile> disk_open(const std::string& path);
// A new file of `bytes` bytes at `path`, which must not exist; space is allocated now, and with
// `prewrite` every byte is written once, so that later writes never allocate.  `progress` is told how many
// bytes are written, after every few.  Errors: exists, no_space, unsupported, denied, io.
Result<DiskFile> disk_create(const std::string& path, std::uint64_t bytes, bool prewrite,
                             const std::function<void(std::uint64_t)>& progress = {});
// What an attempt to make one has left, if there is anything.  Errors: busy (somebody is at it), io.
Status disk_remove(const std::string& path);
// Gives it its name, in place of nothing.  Errors: exists, io.
Status disk_rename(const std::string& from, const std::string& to);
// Whether the beginning of a disk has never been written to: nobody's device is taken for a volume.
Result<bool> disk_is_blank(Disk& disk);

}  // namespace di::store
