// store/disk.h: a volume's bytes, behind an interface whose test double tears, loses and flips.
//
// Every offset, length and address is a multiple of 4 KiB (asserted): the file is opened with O_DIRECT.
// Threads: read and write from any thread at once; they block.  Bound: the length fixed at creation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/result.h"

namespace di::store {

inline constexpr std::uint64_t disk_align_bytes = 4096;

class Disk {
 public:
  virtual ~Disk() = default;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
  // All of `to`, or an error.  Errors: io.
  virtual Status read(std::uint64_t offset, MutableByteView to) = 0;
  // One write; after an error or a crash any part of it may be there.  Errors: io, no_space.
  virtual Status write(std::uint64_t offset, ByteView from) = 0;
  // What was written before is durable afterwards.
  virtual Status flush() = 0;
};

// Memory for O_DIRECT, zeroed.  Grows only.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t bytes) { reserve(bytes); }

  // At least `bytes`; what was inside is lost when it grows.
  void reserve(std::size_t bytes);
  [[nodiscard]] MutableByteView first(std::size_t bytes);

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
};
// Opens an existing volume file and locks it against a second process.
// Errors: not_found, busy (locked), invalid (length), denied, io.
Result<DiskFile> disk_open(const std::string& path);
// A new file of `bytes` bytes at `path`, which must not exist; space is allocated now, and with
// `prewrite` every byte is written once, so that later writes never allocate.
// Errors: exists, no_space, denied, io.
Result<DiskFile> disk_create(const std::string& path, std::uint64_t bytes, bool prewrite);

}  // namespace di::store
