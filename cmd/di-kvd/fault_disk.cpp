#include "fault_disk.h"

#include <algorithm>

#include "base/rng.h"
#include "daemon/faults.h"

namespace di::kvd {

using daemon::FaultPoint;
using store::disk_align_bytes;

std::unique_ptr<store::Disk> with_faults(std::unique_ptr<store::Disk> disk) {
  if (daemon::fault_armed(FaultPoint::store_before_flush))
    disk = std::make_unique<UnflushedDisk>(std::move(disk));
  if (daemon::fault_armed(FaultPoint::store_mid_slot_write))
    disk = std::make_unique<TornDisk>(std::move(disk));
  return disk;
}

Status TornDisk::write_pieces(std::uint64_t offset, std::span<const ByteView> from) {
  std::uint64_t bytes = 0;
  for (const ByteView& piece : from) bytes += piece.size();
  if (bytes <= disk_align_bytes) return disk_->write_pieces(offset, from);
  const std::uint64_t half = align_up(bytes / 2, disk_align_bytes);
  std::uint64_t at = 0;
  for (const ByteView& piece : from) {
    const std::uint64_t before = at < half ? std::min<std::uint64_t>(piece.size(), half - at) : 0;
    if (before > 0) DI_TRY(disk_->write(offset + at, piece.first(before)));
    if (at < half && at + piece.size() >= half) daemon::fault(FaultPoint::store_mid_slot_write);
    if (before < piece.size()) DI_TRY(disk_->write(offset + at + before, piece.subspan(before)));
    at += piece.size();
  }
  return {};
}

Status UnflushedDisk::read_pieces(std::uint64_t offset, std::span<const MutableByteView> to) {
  const std::lock_guard lock(mutex_);
  DI_TRY(disk_->read_pieces(offset, to));
  std::uint64_t at = offset;
  for (const MutableByteView& piece : to) {
    for (auto page = unflushed_.lower_bound(at); page != unflushed_.end() && page->first < at + piece.size();
         ++page) {
      const MutableByteView bytes = page->second.first(disk_align_bytes);
      std::copy(bytes.begin(), bytes.end(), piece.subspan(page->first - at).begin());
    }
    at += piece.size();
  }
  return {};
}

Status UnflushedDisk::write_pieces(std::uint64_t offset, std::span<const ByteView> from) {
  const std::lock_guard lock(mutex_);
  Rng luck(offset + unflushed_.size());
  std::uint64_t at = offset;
  for (const ByteView& piece : from) {
    for (std::size_t page = 0; page < piece.size(); page += disk_align_bytes) {
      const ByteView bytes = piece.subspan(page, disk_align_bytes);
      if (luck.chance(0.3)) DI_TRY(disk_->write(at + page, bytes));
      std::copy(bytes.begin(), bytes.end(), unflushed_[at + page].first(disk_align_bytes).begin());
    }
    at += piece.size();
  }
  return {};
}

Status UnflushedDisk::flush() {
  daemon::fault(FaultPoint::store_before_flush);
  const std::lock_guard lock(mutex_);
  for (auto& [offset, page] : unflushed_) DI_TRY(disk_->write(offset, page.first(disk_align_bytes)));
  DI_TRY(disk_->flush());
  unflushed_.clear();
  return {};
}

}  // namespace di::kvd
