// store/io_ends.h: the way of jobs' ends from the disk thread to the loop thread, and how many jobs there are.
//
// A job counts from begin() until ended(), which comes before its end is told: what is told is not pending any
// more.  Bounds: `queue_max` reads and as many puts; of what is told, room for all that these may tell.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

#include "base/result.h"
#include "loop/mailbox.h"

namespace di::store {

class JobEnds {
 public:
  enum class Kind : std::uint8_t { read, put, other };

  JobEnds(loop::Loop& loop, std::size_t queue_max);

  // Any thread.  One more; never refused: `other`.  Errors: busy.
  Status begin(Kind kind);
  // Disk thread.  One less.
  void ended(Kind kind);
  // Disk thread.  Runs `callback` on the loop thread.
  void tell(std::function<void()> callback);
  // Nobody will listen: what finds no room is dropped.
  void stop() { stopping_.store(true, std::memory_order_relaxed); }

  // Jobs waiting or running.
  [[nodiscard]] std::size_t pending() const { return pending_.load(std::memory_order_relaxed); }

 private:
  // Null: not bounded.
  [[nodiscard]] std::atomic<std::size_t>* count(Kind kind);

  const std::size_t queue_max_;
  std::atomic<std::size_t> pending_{0};
  std::atomic<std::size_t> reads_{0};
  std::atomic<std::size_t> puts_{0};
  std::atomic<bool> stopping_{false};
  loop::Mailbox<std::function<void()>> told_;
  loop::MailboxReader<std::function<void()>> reader_;
};

}  // namespace di::store
