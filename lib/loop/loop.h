// loop/loop.h: one thread's event loop (a Boost.Asio io_context underneath, none of it visible here).
//
// Owner: the thread that calls run(), the "loop thread".  Everything but post(), stop() and the
// clocks is for that thread alone; before run() the constructing thread stands in for it.
//
// Two time lines.  *Product* time comes from the Clock given to the loop; when that is a ManualClock
// only advance() moves it and runs its timers.  *Liveness* time (heartbeats, leases, peer loss,
// watchdog) is always the monotonic clock.
//
// A turn: wait for the first event, run at most `loop_turn_handlers_max` ready handlers, run the
// turn-end hooks (flush), check stop.  The length of each turn goes into a histogram, and a turn
// longer than Options::stall is logged with the name of its slowest handler.
//
// Bounds: one queue entry per armed Timer and per post(); posts come from code of ours, and what
// comes from other threads goes through a bounded Mailbox (loop/mailbox.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/histogram.h"
#include "base/result.h"
#include "base/time.h"

namespace di::loop {

// Handlers run between two looks at stop and the turn-end hooks; 64 keeps a turn below a
// millisecond when handlers are what they should be (about 10 us).
inline constexpr int loop_turn_handlers_max = 64;

using Callback = std::function<void()>;

enum class TimerKind : std::uint8_t { product, liveness };

class Loop {
 public:
  struct Options {
    std::string name = "loop";
    ManualClock* manual = nullptr;  // outlives the loop; null: product time is monotonic time
    Duration stall = milliseconds(250);
  };

  Loop();
  explicit Loop(Options options);
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs until stop().  May be called again afterwards.
  void run();
  // Runs handlers that are ready now and returns how many: for tests and for draining.
  int run_ready();
  // Runs turns until `done()` is true; false when `limit` of monotonic time passed first.
  bool run_until(const std::function<bool()>& done, Duration limit);
  // Any thread, any time; run() returns after the present turn.
  void stop();

  // Runs `callback` in a later turn, in the order of the posts.  Any thread.
  void post(std::string_view name, Callback callback);
  // Runs at the end of every turn that ran a handler (flush of batched sends).  Loop thread.
  void on_turn_end(Callback callback);

  // Product time and liveness time.  Any thread.
  [[nodiscard]] Instant now() const { return clock_->now(); }
  [[nodiscard]] Instant monotonic_now() const { return monotonic_.now(); }
  [[nodiscard]] const Clock& clock() const { return *clock_; }
  [[nodiscard]] bool manual() const { return manual_ != nullptr; }

  // Manual clock only: moves product time forward by `by`, stopping at every product timer that
  // becomes due on the way, in order of time; whatever those post runs in between.  `done` is
  // called when the target is reached and all of that has run.  One at a time: the next call waits
  // for the one before it.
  void advance(Duration by, Callback done);

  // Length of turns in microseconds.  Any thread.
  [[nodiscard]] const Histogram& turn_us() const { return turn_us_; }
  [[nodiscard]] std::uint64_t stalls() const { return stalls_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::string_view name() const { return options_.name; }

 private:
  friend class Timer;
  friend class Watch;
  struct Impl;

  Options options_;
  MonotonicClock monotonic_;
  ManualClock* manual_;
  const Clock* clock_;
  Histogram turn_us_;
  std::atomic<std::uint64_t> stalls_{0};
  std::unique_ptr<Impl> impl_;
};

// One timer, owned by whoever waits.  Destroying or restarting it forgets the earlier deadline; the
// callback may do either.  `name` must outlive the timer (a literal).
class Timer {
 public:
  Timer(Loop& loop, TimerKind kind, std::string_view name, Callback callback);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // A deadline that has passed fires in the next turn.  instant_never cancels.
  void start_at(Instant at);
  void start_after(Duration after);
  // Fires every `period` from now on; periods that were missed are skipped, not made up.
  void start_every(Duration period);
  void cancel();
  [[nodiscard]] bool armed() const;
  [[nodiscard]] Instant at() const;  // instant_never when not armed

 private:
  friend class Loop;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Readiness of a descriptor that somebody else owns and that stays open while the Watch lives; at
// most one Watch per descriptor and loop.  Level-triggered: a callback that leaves bytes unread is
// called again.  No callback runs after the destructor, which a callback may call.  An error or
// hang-up shows as readable (and writable when that is wanted): the next read or write says which.
class Watch {
 public:
  Watch(Loop& loop, int fd, std::string_view name);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Null stops watching that direction.  The callback stays until replaced.
  void on_readable(Callback callback);
  void on_writable(Callback callback);
  [[nodiscard]] int fd() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace di::loop
