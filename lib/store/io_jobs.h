// store/io_jobs.h: what the disk thread of a volume (store/io.h) can be asked for, and what it counts.
//
// A job goes to the disk thread whole and its end comes back to the loop thread.  Functions in a job that are
// marked "disk thread" run there and must not block.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/histogram.h"
#include "base/result.h"
#include "store/format.h"
#include "store/volume.h"

namespace di::store {

struct ColumnEnd {
  Status status;
  std::uint64_t bytes = 0;  // payload that arrived
  bool verified = false;    // all of it, from the first group on, against the checksums
};

// A column on its way off the disk.
struct ColumnRead {
  Read read;
  std::uint8_t priority = 1;  // 0 urgent, 1 normal, 2 bulk
  std::uint32_t from_group = 0;
  // Compare the payload with the header's checksums.
  bool verify = false;
  // The second look at what a first one found bad: that is in the figures already.
  bool again = false;
  // Asked before each access; may be null.  Once true nothing is begun any more, and the end is `cancelled`.
  std::shared_ptr<std::atomic<bool>> cancelled = {};
  // Disk thread: where the payload goes when it goes into one piece and the header need not be known for
  // that.  May be null, or give nothing.
  std::function<MutableByteView()> whole = {};
  // Disk thread, before each access: where segment `group` goes; it has the segment's length, and what was
  // given is written to until `done`.  An error ends the read with it.  Not asked when `segments` do.
  std::function<Result<MutableByteView>(const SlotHeader& header, std::uint32_t group)> place = {};
  // Lengths of the payload's segments, when the caller knows them and needs no header: with a `whole`, and
  // without `verify`, the payload alone is read.
  std::vector<std::uint32_t> segments = {};
  // Disk thread.  A fault point: with it each segment is read in two halves, and it runs between them.
  std::function<void()> half = {};
  // Loop thread.  Segments up to and including `group` are in their places.
  std::function<void(std::uint32_t group)> arrived = {};
  // Loop thread, once, after everything else: no access of it runs any more.
  std::function<void(const ColumnEnd& end)> done = {};
};

// Headers of slots, for an inventory.
struct HeadersRead {
  std::vector<Read> reads;
  // Loop thread.
  std::function<void(std::vector<Result<SlotHeader>> headers)> done = {};
};

struct ColumnPut {
  Put put;
  // Disk thread: the payload in its order, in pieces of whole 4 KiB; at most one for each group.  They are
  // written from where they are.  Errors: what it says.
  std::function<Result<std::vector<ByteView>>()> payload = {};
  // Disk thread, after the write: whether what `payload` gave was the column all the while.  May be null.
  std::function<bool()> current = {};
  // Loop thread.
  std::function<void(const PutOutcome& outcome)> done = {};
};

struct SyncJob {
  Sync sync;
  // Loop thread.
  std::function<void(const Status&)> done;
};

// What the disk does, counted where it is done.  Any thread reads.
struct DiskFigures {
  // One access, from its submission.
  Histogram read_us;
  Histogram write_us;
  Histogram flush_us;
  std::atomic<std::uint64_t> begun{0};
  std::atomic<std::uint64_t> read_errors{0};
  std::atomic<std::uint64_t> write_errors{0};  // with flushes
  std::atomic<std::uint64_t> no_space{0};
  std::atomic<std::uint64_t> corrupt{0};  // headers and payloads that do not match
};

}  // namespace di::store
