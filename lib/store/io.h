// store/io.h: the blocking half of a volume's work, and the threads that do it.
//
// The functions are pure but for the disk and may run on any thread; what they are given was begun by
// Volume on the loop thread.  IoPool owns the threads: `readers` that take from one queue, urgent work
// first, and one writer per volume, because the order of its writes carries meaning (store/volume.h).
// Bounds: `queue_max` waiting tasks for the readers and as many for the writer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "loop/mailbox.h"
#include "store/volume.h"

namespace di::store {

// Fills `to` with the payload of a column.  Errors: stale, corrupt.
using PayloadSource = std::function<Status(MutableByteView to)>;

// Writes `put.before`, then header and payload in one write.  The payload is compared with the header's
// checksums before.  `broken` is the writer's: set by a failed metadata write, and then nothing is
// written any more.  Errors: what the source says, corrupt, io, no_space.
PutOutcome put_run(Disk& disk, const Put& put, const PayloadSource& source, AlignedBuffer& scratch,
                   bool& broken);

// Reads the slot's header and compares it with what `read` expects.  Errors: corrupt, io.
Result<SlotHeader> read_header(Disk& disk, const Read& read, AlignedBuffer& scratch);
// Reads one segment into `to`, which has its length, and compares its checksum.  Errors: corrupt, io.
Status read_segment(Disk& disk, const Read& read, const SlotHeader& header, std::uint32_t group,
                    MutableByteView to);

Status sync_run(Disk& disk, const Sync& sync, AlignedBuffer& scratch, bool& broken);

class IoPool {
 public:
  struct Options {
    std::uint32_t readers = 4;
    std::size_t queue_max = 1024;
    std::string name = "store";  // threads are NAME-r0.. and NAME-w
  };
  static constexpr std::uint32_t priorities = 3;  // 0 urgent, 1 normal, 2 bulk
  // Reports that one task may send to the loop, besides its end.
  static constexpr std::size_t reports_max = kv::groups_max + 1;

  // What a task gets: a buffer that stays with its thread, and a way to the loop thread.  Callbacks run
  // on the loop thread in the order of one task's reports.
  struct Context {
    AlignedBuffer scratch;
    bool broken = false;
    std::function<void(std::function<void()>)> report;
  };
  using Task = std::function<void(Context&)>;

  IoPool(loop::Loop& loop, const Options& options);
  // Runs what is queued, then joins.  Reports that the loop has not handled are dropped.
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  // Errors: busy.
  Status read(std::uint8_t priority, Task task);
  Status write(Task task);
  // Tasks queued or running.
  [[nodiscard]] std::size_t pending() const { return pending_.load(std::memory_order_relaxed); }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable ready;
    std::deque<Task> tasks[priorities];
    std::size_t count = 0;
    bool closed = false;
  };
  Status push(Queue& queue, std::uint8_t priority, Task task);
  void serve(Queue& queue, const std::string& name);

  const std::size_t queue_max_;
  Queue reads_;
  Queue writes_;
  std::atomic<std::size_t> pending_{0};
  std::atomic<bool> stopping_{false};
  loop::Mailbox<std::function<void()>> reports_;
  loop::MailboxReader<std::function<void()>> reader_;
  std::vector<std::thread> threads_;
};

}  // namespace di::store
