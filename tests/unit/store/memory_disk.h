// tests/unit/store/memory_disk.h: a Disk in memory that can do what disks do: fail, tear a write, lie
// about a flush, flip a bit, and lose what was not flushed when the power goes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "store/disk.h"

namespace di::store {

class MemoryDisk final : public Disk {
 public:
  explicit MemoryDisk(std::uint64_t bytes) : now_(bytes), durable_(bytes) {}

  [[nodiscard]] std::uint64_t bytes() const override { return now_.size(); }

  Status read_pieces(std::uint64_t offset, std::span<const MutableByteView> pieces) override {
    std::uint64_t bytes = 0;
    for (const MutableByteView& piece : pieces) bytes += piece.size();
    Bytes all(bytes);
    Status status = read_all(offset, all);
    std::uint64_t at = 0;
    for (const MutableByteView& piece : pieces) {
      std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(at), piece.size(), piece.begin());
      at += piece.size();
    }
    return status;
  }

  Status write_pieces(std::uint64_t offset, std::span<const ByteView> pieces) override {
    Bytes all;
    for (const ByteView& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    return write_all(offset, all);
  }

  Status flush() override {
    const std::lock_guard lock(mutex_);
    ++flushes;
    if (fail_flush || dead) return Error{Code::io, 5, "fdatasync: Input/output error"};
    if (lose_flushes) return {};
    for (const auto& [offset, bytes] : unflushed_) {
      std::copy(bytes.begin(), bytes.end(), durable_.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    unflushed_.clear();
    return {};
  }

  // Nothing reaches it any more.
  void cut_power() {
    const std::lock_guard lock(mutex_);
    dead = true;
  }

  // The power goes, and comes back: each write since the last flush is there, not there, or there in part.
  void power_loss(Rng& rng) {
    const std::lock_guard lock(mutex_);
    now_ = durable_;
    for (const auto& [offset, bytes] : unflushed_) {
      const double luck = rng.uniform();
      if (luck < 0.4) continue;
      for (std::size_t sector = 0; sector < bytes.size(); sector += static_cast<std::size_t>(sector_bytes)) {
        if (luck < 0.7 && rng.chance(0.3)) continue;
        std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(sector), sector_bytes,
                    now_.begin() + static_cast<std::ptrdiff_t>(offset + sector));
      }
    }
    durable_ = now_;
    unflushed_.clear();
    dead = false;
  }

  void flip_bit(std::uint64_t offset, int bit) {
    const std::lock_guard lock(mutex_);
    now_[offset] ^= std::byte{1} << bit;
  }
  [[nodiscard]] const Bytes& image() const { return now_; }
  void set_image(Bytes image) { now_ = durable_ = std::move(image); }

  std::optional<std::uint64_t> fail_read_in;  // 0: the next one
  std::optional<std::uint64_t> short_read_in;
  std::set<std::uint64_t> bad_places;  // of 4 KiB, that cannot be read
  std::optional<std::uint64_t> fail_write_in;
  std::optional<std::uint64_t> tear_write_in;
  std::size_t tear_after_bytes = 0;
  std::ptrdiff_t sector_bytes = 512;  // what the device writes at once
  bool fail_flush = false;
  bool lose_flushes = false;
  bool full = false;
  bool dead = false;  // the power is gone already: nothing reaches it any more
  std::uint64_t reads = 0;
  std::uint64_t writes = 0;
  std::uint64_t flushes = 0;

 private:
  Status read_all(std::uint64_t offset, MutableByteView to) {
    const std::lock_guard lock(mutex_);
    ++reads;
    if (fail_read_in && (*fail_read_in)-- == 0) return Error{Code::io, 5, "read: Input/output error"};
    if (short_read_in && (*short_read_in)-- == 0) {
      std::copy_n(now_.begin() + static_cast<std::ptrdiff_t>(offset), to.size() / 2, to.begin());
      return Error{Code::io, 0, "read: the file is shorter than it was"};
    }
    const auto bad = bad_places.lower_bound(offset / 4096 * 4096);
    if (bad != bad_places.end() && *bad < offset + to.size())
      return Error{Code::io, 5, "read: Input/output error"};
    std::copy_n(now_.begin() + static_cast<std::ptrdiff_t>(offset), to.size(), to.begin());
    return {};
  }
  Status write_all(std::uint64_t offset, ByteView from) {
    const std::lock_guard lock(mutex_);
    ++writes;
    if (dead) return Error{Code::io, 5, "write: Input/output error"};
    if (full) return Error{Code::no_space, 28, "write: No space left on device"};
    if (fail_write_in && (*fail_write_in)-- == 0) return Error{Code::io, 5, "write: Input/output error"};
    if (tear_write_in && (*tear_write_in)-- == 0) {
      apply(offset, from.first(std::min(from.size(), tear_after_bytes)));
      return Error{Code::io, 5, "write: Input/output error"};
    }
    apply(offset, from);
    return {};
  }
  void apply(std::uint64_t offset, ByteView from) {
    std::copy(from.begin(), from.end(), now_.begin() + static_cast<std::ptrdiff_t>(offset));
    unflushed_.emplace_back(offset, Bytes(from.begin(), from.end()));
  }

  std::mutex mutex_;
  Bytes now_;
  Bytes durable_;
  std::vector<std::pair<std::uint64_t, Bytes>> unflushed_;
};

}  // namespace di::store
