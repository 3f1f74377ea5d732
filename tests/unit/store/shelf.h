// tests/unit/store/shelf.h: a volume with its disk and its I/O in one thread, one access at a time: the order
// of writes of store/volume.h in its simplest form.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/crypto.h"
#include "store/slot_read.h"
#include "store/volume.h"
#include "tests/unit/store/memory_disk.h"

namespace di::store {

// The payload that a page has in these tests: a function of its stripe and length, different in every 4 KiB.
inline Bytes payload_of(const kv::Layout& layout, std::uint64_t stripe, std::uint32_t blocks) {
  Rng rng(stripe * 977 + blocks);
  Bytes bytes(layout.page_bytes(blocks));
  for (std::size_t at = 0; at < 4096; at += 8) put_le<std::uint64_t>(&bytes[at], rng.next());
  for (std::size_t at = 4096; at < bytes.size(); at += 4096) {
    std::copy_n(bytes.begin(), 4096, bytes.begin() + static_cast<std::ptrdiff_t>(at));
    put_le<std::uint64_t>(&bytes[at + 8 * (at / 4096 % 512)], rng.next());
  }
  return bytes;
}

inline wire::PutPage page_of(const kv::Layout& layout, std::uint64_t stripe, std::uint32_t blocks) {
  const Bytes payload = payload_of(layout, stripe, blocks);
  wire::PutPage page;
  page.parent.raw = sha256(as_bytes("parent" + std::to_string(stripe)));
  for (std::uint32_t block = 0; block < blocks; ++block) {
    page.keys.push_back(Key{sha256(as_bytes(std::to_string(stripe) + "/" + std::to_string(block)))});
  }
  for (std::uint32_t group = 0; group < layout.groups(); ++group) {
    page.crcs.push_back(crc32c(ByteView(payload).subspan(layout.segment_offset(group, blocks),
                                                         layout.segment_bytes(group, blocks))));
  }
  page.bytes = payload.size();
  return page;
}

inline Shard shard_of(const kv::Layout& layout, std::uint64_t stripe, std::uint32_t blocks) {
  auto shard = shard_make(layout, stripe, 0, {page_of(layout, stripe, blocks)}, {1, 0, {}});
  EXPECT_TRUE(shard.ok());
  return *std::move(shard);
}

inline Status write_pages(Disk& disk, const std::vector<MetaWrite>& writes, AlignedBuffer& scratch) {
  for (const MetaWrite& write : writes) {
    if (write.flush_before) DI_TRY(disk.flush());
    const MutableByteView page = scratch.first(write.bytes.size());
    std::copy(write.bytes.begin(), write.bytes.end(), page.begin());
    DI_TRY(disk.write(write.offset, page));
  }
  return {};
}

inline Error broken_volume() {
  return Error{Code::io, 0, "the volume is broken: a write of its tables failed"};
}

// Fills `to` with the payload of a column.  Errors: stale, corrupt.
using PayloadSource = std::function<Status(MutableByteView to)>;

// Writes `put.before`, then header and payload in one write.  The payload is compared with the header's
// checksums before.  `broken` is the writer's: set by a failed metadata write, and then nothing is
// written any more.
inline PutOutcome put_run(Disk& disk, const Put& put, const PayloadSource& source, AlignedBuffer& scratch,
                          bool& broken) {
  PutOutcome outcome;
  if (broken) {
    outcome.status = broken_volume();
    return outcome;
  }
  // The metadata goes out even when the payload turns out to be wrong: later puts count on it.
  if (Status before = write_pages(disk, put.before, scratch); !before.ok()) {
    broken = true;
    outcome.metadata_failed = true;
    outcome.status = before;
    return outcome;
  }
  const Shard& shard = put.header.shard;
  const MutableByteView slot = scratch.first(shard.slot_class.header_bytes + shard.payload_bytes());
  const MutableByteView payload = slot.subspan(shard.slot_class.header_bytes);
  if (Status filled = source(payload); !filled.ok()) {
    outcome.status = filled;
    return outcome;
  }
  std::size_t at = 0;
  for (std::size_t group = 0; group < shard.segments.size(); ++group) {
    if (crc32c(payload.subspan(at, shard.segments[group])) != shard.crcs()[group]) {
      outcome.status = Error{Code::corrupt, 0, "the payload does not match its checksums"};
      return outcome;
    }
    at += shard.segments[group];
  }
  slot_header_encode(put.header, slot.first(shard.slot_class.header_bytes));
  outcome.slot_touched = true;
  outcome.status = disk.write(put.offset, slot);
  return outcome;
}

inline Status sync_run(Disk& disk, const Sync& sync, AlignedBuffer& scratch, bool& broken) {
  if (broken) return broken_volume();
  const auto run = [&]() -> Status {
    DI_TRY(disk.flush());
    DI_TRY(write_pages(disk, sync.table, scratch));
    return write_pages(disk, sync.superblock, scratch);
  };
  Status status = run();
  if (!status.ok()) broken = true;
  return status;
}

struct Shelf {
  explicit Shelf(std::uint64_t volume_bytes, std::uint64_t segment_bytes,
                 kv::Layout kv_layout = kv::layout_v41())
      : layout(std::move(kv_layout)), disk(volume_bytes) {
    Uuid uuid{};
    uuid[0] = std::byte{42};
    EXPECT_TRUE(Volume::format(disk, {segment_bytes, uuid}).ok());
    reopen();
  }

  // The process is gone; the disk stays as it is.
  void reopen() {
    volume.reset();
    broken = false;
    auto opened = Volume::open(disk);
    ASSERT_TRUE(opened.ok()) << opened.error().message;
    volume = *std::move(opened);
  }

  Status put(std::uint64_t stripe, std::uint32_t blocks) {
    const Shard shard = shard_of(layout, stripe, blocks);
    Result<Put> begun = volume->put_begin(shard);
    if (!begun) return begun.error();
    const PutOutcome outcome = run(*begun, blocks);
    volume->put_end(*begun, outcome);
    return outcome.status;
  }
  PutOutcome run(const Put& put, std::uint32_t blocks) {
    return put_run(
        disk, put,
        [&](MutableByteView to) -> Status {
          const Bytes payload = payload_of(layout, put.header.shard.stripe, blocks);
          std::copy(payload.begin(), payload.end(), to.begin());
          return {};
        },
        scratch, broken);
  }

  // The payload of a column, read as a store daemon reads it.
  Result<Bytes> get(std::uint64_t stripe, std::uint16_t column = 0) {
    Result<Read> read = volume->read_begin(stripe, column);
    if (!read) return read.error();
    Result<Bytes> bytes = get(*read);
    volume->read_end(*read);
    return bytes;
  }
  Result<Bytes> get(const Read& read) {
    Result<SlotHeader> header = read_header(disk, read, scratch);
    if (!header) return header.error();
    Bytes bytes;
    for (std::uint32_t group = 0; group < header->shard.segments.size(); ++group) {
      const MutableByteView to = scratch.first(header->shard.segments[group]);
      DI_TRY(read_segment(disk, read, *header, group, to));
      bytes.insert(bytes.end(), to.begin(), to.end());
    }
    return bytes;
  }

  Status sync() {
    std::optional<Sync> begun = volume->sync_begin();
    if (!begun) return {};
    Status status = sync_run(disk, *begun, scratch, broken);
    volume->sync_end(status);
    return status;
  }
  void sync_until_clean() {
    for (int turn = 0; turn < 4 && !volume->clean(); ++turn) ASSERT_TRUE(sync().ok());
    ASSERT_TRUE(volume->clean());
  }

  std::vector<std::uint64_t> stripes() {
    std::vector<Read> reads;
    SlotAddress from;
    while (volume->list(from, reads.size() + 7, reads)) {
    }
    std::vector<std::uint64_t> out;
    for (const Read& read : reads) {
      out.push_back(read.stripe);
      volume->read_end(read);
    }
    std::sort(out.begin(), out.end());
    return out;
  }

  kv::Layout layout;
  MemoryDisk disk;
  std::unique_ptr<Volume> volume;
  AlignedBuffer scratch;
  bool broken = false;
};

}  // namespace di::store
