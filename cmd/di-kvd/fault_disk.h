// cmd/di-kvd/fault_disk.h: disks that fail at the fault points of the write path, over the one that is there.
//
// Only where such a point is armed: they are read and written by threads, not by io_uring.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "store/disk.h"

namespace di::kvd {

// The disk as it is, or under what the armed fault points need.
std::unique_ptr<store::Disk> with_faults(std::unique_ptr<store::Disk> disk);

// Passes slot writes (meta data is single pages) through the fault point in their middle.
class TornDisk final : public store::Disk {
 public:
  explicit TornDisk(std::unique_ptr<store::Disk> disk) : disk_(std::move(disk)) {}

  [[nodiscard]] std::uint64_t bytes() const override { return disk_->bytes(); }
  [[nodiscard]] Result<std::uint64_t> bytes_now() const override { return disk_->bytes_now(); }
  [[nodiscard]] std::string_view path() const override { return disk_->path(); }
  Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override {
    return disk_->read_pieces(offset, to);
  }
  Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override;
  Status flush() override { return disk_->flush(); }

 private:
  std::unique_ptr<store::Disk> disk_;
};

// A disk with a cache of its own: what is written stays in this process until a flush, so that the end of the
// process is for it what the end of the power is for a disk.  As disks do, it writes some of it sooner, in
// any order: of each write some pages, by its place.  Passes each flush through the fault point before it.
//
// Any thread, one at a time.  Bound: the pages of one volume.
class UnflushedDisk final : public store::Disk {
 public:
  explicit UnflushedDisk(std::unique_ptr<store::Disk> disk) : disk_(std::move(disk)) {}

  [[nodiscard]] std::uint64_t bytes() const override { return disk_->bytes(); }
  [[nodiscard]] Result<std::uint64_t> bytes_now() const override { return disk_->bytes_now(); }
  [[nodiscard]] std::string_view path() const override { return disk_->path(); }
  Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) override;
  Status write_pieces(std::uint64_t offset, std::span<const ByteView> from) override;
  Status flush() override;

 private:
  std::unique_ptr<store::Disk> disk_;
  std::mutex mutex_;
  std::map<std::uint64_t, store::AlignedBuffer> unflushed_;  // pages by offset; under mutex_
};

}  // namespace di::kvd
