// loop/mailbox.h: a bounded queue into one thread, with an eventfd to wake it.
//
// Any thread pushes; one thread pops.  A loop thread reads with MailboxReader, a worker thread
// without a loop blocks in pop_wait().  Bound: `capacity` items; a full box refuses, and the sender
// decides (it holds credit, says busy, or drops a report).
#pragma once

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "base/assert.h"
#include "base/fd.h"
#include "loop/loop.h"

namespace di::loop {

template <class T>
class Mailbox {
 public:
  explicit Mailbox(std::size_t capacity)
      : capacity_(capacity), event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    DI_ASSERT(capacity > 0);
    DI_ASSERT(event_.valid());
  }

  // False, and `item` untouched, when the box is full or closed.
  [[nodiscard]] bool try_push(T&& item) {
    const std::lock_guard lock(mutex_);
    if (closed_ || items_.size() >= capacity_) return false;
    items_.push_back(std::move(item));
    if (items_.size() == 1) signal();
    return true;
  }

  [[nodiscard]] std::optional<T> try_pop() {
    const std::lock_guard lock(mutex_);
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    if (items_.empty() && !closed_) clear();
    return item;
  }

  // Blocks; nullopt only when the box is closed and empty.  For threads without a loop.
  [[nodiscard]] std::optional<T> pop_wait() {
    while (true) {
      if (std::optional<T> item = try_pop()) return item;
      if (closed()) return try_pop();
      pollfd entry{event_.get(), POLLIN, 0};
      const int ready = ::poll(&entry, 1, -1);
      DI_ASSERT(ready >= 0 || errno == EINTR);
    }
  }

  // No more pushes; what is inside can still be popped.  Wakes the reader for good.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    signal();
  }
  [[nodiscard]] bool closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
  }
  [[nodiscard]] std::size_t count() const {
    const std::lock_guard lock(mutex_);
    return items_.size();
  }
  // Readable while there is something to pop or the box is closed.
  [[nodiscard]] int event_fd() const { return event_.get(); }

 private:
  void signal() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
  }
  void clear() {
    std::uint64_t seen = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &seen, sizeof seen);
  }

  const std::size_t capacity_;
  Fd event_;
  mutable std::mutex mutex_;
  std::deque<T> items_;
  bool closed_ = false;
};

// Hands items to `callback` on the loop thread, at most `batch` per turn so that other sources get
// theirs.  The mailbox outlives the reader.
template <class T>
class MailboxReader {
 public:
  MailboxReader(Loop& loop, Mailbox<T>& box, std::string_view name, std::function<void(T&&)> callback,
                int batch = loop_turn_handlers_max)
      : box_(box), callback_(std::move(callback)), batch_(batch), watch_(loop, box.event_fd(), name) {
    watch_.on_readable([this] { drain(); });
  }

 private:
  void drain() {
    for (int i = 0; i < batch_; ++i) {
      std::optional<T> item = box_.try_pop();
      if (!item) {
        if (box_.closed()) watch_.on_readable(nullptr);
        return;
      }
      callback_(std::move(*item));
    }
  }

  Mailbox<T>& box_;
  std::function<void(T&&)> callback_;
  const int batch_;
  Watch watch_;
};

}  // namespace di::loop
