// store/io.h: a volume's work on its disk: the thread that keeps many reads and writes in flight.
//
// What it is given (store/io_jobs.h) was begun by Volume on the loop thread, which also gets every end.  IoPool
// owns one thread for each volume; it drives a DiskQueue (store/queue.h), never waits for one access while
// others could be begun, and compares headers and payloads with their checksums.  What it does in which order:
// store/io_read.h and store/io_write.h.
//
// Bounds: `queue_max` reads and as many puts, waiting or running; of them in flight as much as store/io_access.h
// says.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "base/result.h"
#include "loop/loop.h"
#include "store/io_ends.h"
#include "store/io_jobs.h"
#include "store/queue.h"
#include "store/volume.h"

namespace di::store {

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

  // Errors: unsupported, denied, io: only with IoMode::uring, when the kernel refuses it.
  static Result<std::unique_ptr<IoPool>> create(loop::Loop& loop, Disk& disk, const Options& options);
  // Ends what is queued, then joins.  Ends that the loop has not handled are dropped.
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  // Errors: busy.
  Status read(ColumnRead read);
  Status headers(HeadersRead headers);
  // The `cancelled` of a read was set: it need not wait for its turn to end.
  void look_at_cancelled();
  Status put(ColumnPut put);
  // Loop thread: `done`.
  Status sync(Sync sync, std::function<void(const Status&)> done);
  // Memory that columns will often be read into; it stays until it was removed and `removed` ran on the
  // loop thread.
  void memory_add(MutableByteView memory);
  void memory_remove(MutableByteView memory, std::function<void()> removed);

  // Jobs waiting or running.
  [[nodiscard]] std::size_t pending() const { return ends_.pending(); }
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
  struct Inbox {
    std::deque<ColumnRead> reads;
    std::deque<HeadersRead> headers;
    // Puts and syncs in their order.
    std::deque<std::variant<ColumnPut, SyncJob>> writes;
    std::deque<MemoryChange> memory;
    bool cancelled = false;  // a read was
    [[nodiscard]] bool empty() const {
      return reads.empty() && headers.empty() && writes.empty() && memory.empty() && !cancelled;
    }
  };

  IoPool(loop::Loop& loop, Disk& disk, const Options& options);
  template <class Add>
  Status push(JobEnds::Kind kind, const Add& add);
  template <class Add>
  void tell(const Add& add);
  void serve();

  Disk& disk_;
  const Options options_;
  std::mutex mutex_;
  Inbox inbox_;                       // under mutex_
  bool closed_ = false;               // under mutex_
  bool sleeping_ = false;             // under mutex_: the thread waits, or is about to
  std::unique_ptr<DiskQueue> queue_;  // made and ended by the thread
  std::string mode_;
  std::optional<Error> refused_;
  const std::shared_ptr<DiskFigures> figures_;
  JobEnds ends_;
  std::thread thread_;
};

}  // namespace di::store
