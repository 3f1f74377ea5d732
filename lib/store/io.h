// store/io.h: a volume's work on its disk: the blocking functions that a volume is opened with, and the
// thread that keeps many reads and writes in flight.
//
// What it is given was begun by Volume on the loop thread, which also gets every end.  IoPool owns one
// thread for each volume; it drives a DiskQueue (store/queue.h), never waits for one access while others
// could be begun, and compares headers and payloads with their checksums.  Functions in a job that are
// marked "disk thread" run there and must not block.
//
// Order of writes.  Metadata (the `before` of puts, and syncs) is one lane: first in, first out, one stage
// at a time.  A slot is written when the `before` of its put and of every put queued earlier is on the
// disk; otherwise slots overtake each other and syncs, which carry no meaning among themselves: a sync
// describes only puts that had ended when it began, and a segment with a put under way is not closed.
// When a metadata write fails nothing is written any more.
//
// A read of a column is its header and its payload, in one access when the payload goes into one piece, and
// further ones of run_bytes_max; otherwise the header first, which says what goes where.  The payload alone
// is read when the caller knows all that the header could say.
//
// Bounds: `queue_max` reads and as many puts, waiting or running; of them in flight as much as reads_max,
// read_bytes_max, writes_max and metadata_max say.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "base/histogram.h"
#include "base/result.h"
#include "loop/mailbox.h"
#include "store/queue.h"
#include "store/volume.h"

namespace di::store {

// ---- blocking, for one at a time

// Decodes the slot's header and compares it with what `read` expects.  Errors: corrupt.
Result<SlotHeader> header_check(const Read& read, ByteView bytes);
// The same of the slot on the disk.  Errors: corrupt, io.
Result<SlotHeader> read_header(Disk& disk, const Read& read, AlignedBuffer& scratch);
// Reads one segment into `to`, which has its length, and compares its checksum.  Errors: corrupt, io.
Status read_segment(Disk& disk, const Read& read, const SlotHeader& header, std::uint32_t group,
                    MutableByteView to);

// ---- many at a time

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

enum class IoMode : std::uint8_t { automatic, uring, threads };

class IoPool {
 public:
  struct Options {
    IoMode mode = IoMode::automatic;
    std::uint32_t threads = 4;  // that block, where io_uring is not used
    std::size_t queue_max = 1024;
    std::string name = "store";  // of the thread
    // What goes on counting when a disk is opened anew; null: new ones.
    std::shared_ptr<DiskFigures> figures = {};
  };
  static constexpr std::uint32_t priorities = 3;
  // Accesses at a time.  Deep enough for a fast disk, and shallow enough that an urgent read finds at most
  // some milliseconds in front of it.
  static constexpr std::uint32_t reads_max = 48;
  static constexpr std::uint64_t read_bytes_max = std::uint64_t{24} << 20;
  static constexpr std::uint32_t writes_max = 16;
  static constexpr std::uint32_t metadata_max = 8;
  // A longer payload is read in several parts, so that its first groups are there early; shorter parts cost
  // more CPU (64 KiB: four times as much for a byte).
  static constexpr std::uint64_t run_bytes_max = std::uint64_t{512} << 10;

  // Errors: unsupported, denied, io: only with IoMode::uring, when the kernel refuses it.
  static Result<std::unique_ptr<IoPool>> create(loop::Loop& loop, Disk& disk, const Options& options);
  // Ends what is queued, then joins.  Ends that the loop has not handled are dropped.
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  // Errors: busy.
  Status read(ColumnRead read);
  Status headers(HeadersRead headers);
  Status put(ColumnPut put);
  // Loop thread: `done`.
  Status sync(Sync sync, std::function<void(const Status&)> done);
  // Memory that columns will often be read into; it stays until it was removed and `removed` ran on the
  // loop thread.
  void memory_add(MutableByteView memory);
  void memory_remove(MutableByteView memory, std::function<void()> removed);

  // Jobs waiting or running.
  [[nodiscard]] std::size_t pending() const { return pending_.load(std::memory_order_relaxed); }
  [[nodiscard]] const DiskFigures& figures() const { return *figures_; }
  [[nodiscard]] const std::shared_ptr<DiskFigures>& figures_shared() const { return figures_; }
  // "uring" or "threads", and why not uring when that was wanted.
  [[nodiscard]] std::string_view mode() const { return mode_; }
  [[nodiscard]] const std::optional<Error>& refused() const { return refused_; }

 private:
  class Engine;
  struct MemoryChange {
    MutableByteView memory;
    bool add = false;
    std::function<void()> removed;
  };
  struct SyncJob {
    Sync sync;
    std::function<void(const Status&)> done;
  };
  struct Inbox {
    std::deque<ColumnRead> reads;
    std::deque<HeadersRead> headers;
    // Puts and syncs in their order.
    std::deque<std::variant<ColumnPut, SyncJob>> writes;
    std::deque<MemoryChange> memory;
    [[nodiscard]] bool empty() const {
      return reads.empty() && headers.empty() && writes.empty() && memory.empty();
    }
  };

  IoPool(loop::Loop& loop, Disk& disk, const Options& options);
  template <class Add>
  Status push(std::atomic<std::size_t>* count, const Add& add);
  void serve();
  // Disk thread: runs `callback` on the loop thread.
  void report(std::function<void()> callback);
  // Disk thread: a job is over; before its end is told, so that what is told is not pending any more.
  void ended(std::atomic<std::size_t>* count);

  Disk& disk_;
  const Options options_;
  std::mutex mutex_;
  Inbox inbox_;             // under mutex_
  bool closed_ = false;     // under mutex_
  bool sleeping_ = false;   // under mutex_: the thread waits, or is about to
  std::unique_ptr<DiskQueue> queue_;  // made and ended by the thread
  std::string mode_;
  std::optional<Error> refused_;
  std::atomic<std::size_t> pending_{0};
  std::atomic<std::size_t> reads_{0};
  std::atomic<std::size_t> puts_{0};
  std::atomic<bool> stopping_{false};
  const std::shared_ptr<DiskFigures> figures_;
  loop::Mailbox<std::function<void()>> reports_;
  loop::MailboxReader<std::function<void()>> reader_;
  std::thread thread_;
};

}  // namespace di::store
