#include "loop/loop.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/log.h"

namespace di::loop {

namespace asio = boost::asio;

namespace {

// run_until() looks at its condition this often even when nothing happens in the loop: the condition
// may be about something outside.
constexpr Duration run_until_look = milliseconds(5);

using TimerKey = std::pair<std::int64_t, std::uint64_t>;  // deadline, then order of arming

std::chrono::steady_clock::time_point steady_at(Instant at) {
  return std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(Duration(at.ns)));
}

}  // namespace

struct Timer::Impl {
  Impl(Loop& l, TimerKind k, std::string_view n, Callback c)
      : loop(l), kind(k), name(n), callback(std::move(c)) {}

  Loop& loop;
  const TimerKind kind;
  const std::string_view name;
  const Callback callback;
  bool armed = false;
  TimerKey key;
  Duration period{0};
};

struct Loop::Impl {
  explicit Impl(Loop& owner) : loop(owner), io(1), work(io.get_executor()), wake(io) {}

  using Queue = std::map<TimerKey, std::shared_ptr<Timer::Impl>>;

  Queue& queue(TimerKind kind) { return kind == TimerKind::product ? product : liveness; }
  Instant time_of(TimerKind kind) const {
    return kind == TimerKind::product ? loop.now() : loop.monotonic_now();
  }

  void run_handler(std::string_view name, const Callback& callback) {
    const Instant start = loop.monotonic_.now();
    if (turn_handlers == 0) turn_start = start;
    ++turn_handlers;
    callback();
    const Duration took = loop.monotonic_.now() - start;
    if (took > slowest) {
      slowest = took;
      slowest_name = name;
    }
  }

  // One turn.  `wait` blocks for the first event, until `until` at most when that is not never.
  int turn(bool wait, Instant until) {
    turn_handlers = 0;
    slowest = Duration(-1);
    if (wait) {
      if (until == instant_never) {
        io.run_one();
      } else {
        io.run_one_until(steady_at(until));
      }
    }
    for (int i = 0; i < loop_turn_handlers_max && io.poll_one() > 0; ++i) {
    }
    if (turn_handlers > 0) end_turn();
    return turn_handlers;
  }

  void end_turn() {
    for (const Callback& hook : turn_end) hook();
    const Duration took = loop.monotonic_.now() - turn_start;
    loop.turn_us_.record(static_cast<std::uint64_t>(to_us(took)));
    if (took > loop.options_.stall) {
      loop.stalls_.fetch_add(1, std::memory_order_relaxed);
      log_warn("loop", "turn took long",
               {{"loop", loop.options_.name},
                {"turn_ms", to_ms(took)},
                {"handler", slowest_name},
                {"handler_ms", to_ms(slowest)}});
    }
  }

  // Timers due at `now`; the rest of a crowd waits for the next turn.
  void run_due(TimerKind kind) {
    Queue& timers = queue(kind);
    const Instant now = time_of(kind);
    for (int i = 0; i < loop_turn_handlers_max && !timers.empty() && timers.begin()->first.first <= now.ns;
         ++i) {
      const std::shared_ptr<Timer::Impl> timer = timers.begin()->second;
      const Instant at{timer->key.first};
      disarm(*timer);
      if (timer->period.count() > 0) {
        const std::int64_t periods = (now - at).count() / timer->period.count() + 1;
        arm(timer, at + timer->period * periods);
      }
      run_handler(timer->name, timer->callback);
    }
  }

  void arm(const std::shared_ptr<Timer::Impl>& timer, Instant at) {
    DI_ASSERT(!timer->armed);
    timer->armed = true;
    timer->key = {at.ns, ++arm_count};
    queue(timer->kind).emplace(timer->key, timer);
    if (timer->kind == TimerKind::product && loop.manual()) {
      if (at <= loop.now()) post_due_product();
    } else {
      set_wake();
    }
  }
  void disarm(Timer::Impl& timer) {
    if (!timer.armed) return;
    timer.armed = false;
    queue(timer.kind).erase(timer.key);
  }

  // On a manual clock nothing wakes the loop for a product timer that is due already.
  void post_due_product() {
    if (due_posted) return;
    due_posted = true;
    asio::post(io, [this] {
      due_posted = false;
      run_due(TimerKind::product);
      if (!product.empty() && product.begin()->first.first <= loop.now().ns) post_due_product();
    });
  }

  // The one asio timer waits for the earliest deadline on monotonic time.  A deadline that moved
  // later is left to a spurious wake.
  void set_wake() {
    std::int64_t earliest = instant_never.ns;
    if (!liveness.empty()) earliest = liveness.begin()->first.first;
    if (!loop.manual() && !product.empty()) earliest = std::min(earliest, product.begin()->first.first);
    if (earliest >= wake_at) return;
    wake_at = earliest;
    wake.expires_at(steady_at({earliest}));
    wake.async_wait([this](const boost::system::error_code& error) {
      if (error) return;  // replaced by an earlier one
      wake_at = instant_never.ns;
      run_due(TimerKind::liveness);
      if (!loop.manual()) run_due(TimerKind::product);
      set_wake();
    });
  }

  void advance_step() {
    DI_ASSERT(!advances.empty());
    const Instant target = advances.front().target;
    if (!product.empty() && product.begin()->first.first <= target.ns) {
      const Instant due{product.begin()->first.first};
      if (due > loop.now()) loop.manual_->advance(due - loop.now());
      run_due(TimerKind::product);
    } else if (loop.now() < target) {
      loop.manual_->advance(target - loop.now());
    } else {
      const Callback done = std::move(advances.front().done);
      advances.pop_front();
      if (!advances.empty()) begin_advance();
      run_handler("advance", done);
      return;
    }
    // Behind everything that the timers posted.
    asio::post(io, [this] { advance_step(); });
  }
  void begin_advance() {
    advances.front().target = loop.now() + advances.front().by;
    asio::post(io, [this] { advance_step(); });
  }

  struct Advance {
    Duration by;
    Callback done;
    Instant target;
  };

  Loop& loop;
  asio::io_context io;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  asio::steady_timer wake;
  std::int64_t wake_at = instant_never.ns;
  Queue product;
  Queue liveness;
  std::uint64_t arm_count = 0;
  bool due_posted = false;
  std::deque<Advance> advances;
  std::vector<Callback> turn_end;
  std::atomic<bool> stopping{false};

  int turn_handlers = 0;
  Instant turn_start;
  Duration slowest{-1};
  std::string_view slowest_name;
};

Loop::Loop() : Loop(Options{}) {}

Loop::Loop(Options options) : options_(std::move(options)), manual_(options_.manual) {
  clock_ = manual_ != nullptr ? static_cast<const Clock*>(manual_) : &monotonic_;
  impl_ = std::make_unique<Impl>(*this);
}

Loop::~Loop() = default;

void Loop::run() {
  while (!impl_->stopping.load(std::memory_order_acquire)) impl_->turn(true, instant_never);
  impl_->stopping.store(false, std::memory_order_release);
}

int Loop::run_ready() {
  return impl_->turn(false, instant_never);
}

bool Loop::run_until(const std::function<bool()>& done, Duration limit) {
  const Instant end = monotonic_now() + limit;
  while (!done()) {
    const Instant now = monotonic_now();
    if (now >= end) return false;
    impl_->turn(true, std::min(end, now + run_until_look));
  }
  return true;
}

void Loop::stop() {
  impl_->stopping.store(true, std::memory_order_release);
  asio::post(impl_->io, [] {});
}

void Loop::post(std::string_view name, Callback callback) {
  asio::post(impl_->io, [this, name, callback = std::move(callback)] { impl_->run_handler(name, callback); });
}

void Loop::on_turn_end(Callback callback) {
  impl_->turn_end.push_back(std::move(callback));
}

void Loop::advance(Duration by, Callback done) {
  DI_ASSERT(manual());
  DI_ASSERT(by.count() >= 0);
  impl_->advances.push_back({by, std::move(done), {}});
  if (impl_->advances.size() == 1) impl_->begin_advance();
}

Timer::Timer(Loop& loop, TimerKind kind, std::string_view name, Callback callback)
    : impl_(std::make_shared<Impl>(loop, kind, name, std::move(callback))) {}

Timer::~Timer() {
  cancel();
}

void Timer::start_at(Instant at) {
  cancel();
  if (at != instant_never) impl_->loop.impl_->arm(impl_, at);
}

void Timer::start_after(Duration after) {
  start_at(impl_->loop.impl_->time_of(impl_->kind) + after);
}

void Timer::start_every(Duration period) {
  DI_ASSERT(period.count() > 0);
  start_after(period);
  impl_->period = period;
}

void Timer::cancel() {
  impl_->period = Duration(0);
  // A timer that is not armed may outlive its loop: programs end after the daemon that ran them.
  if (impl_->armed) impl_->loop.impl_->disarm(*impl_);
}

bool Timer::armed() const {
  return impl_->armed;
}

Instant Timer::at() const {
  return impl_->armed ? Instant{impl_->key.first} : instant_never;
}

struct Watch::Impl {
  Impl(Loop& l, int descriptor, std::string_view n) : loop(l), name(n), fd(descriptor), stream(l.impl_->io) {}

  struct Side {
    std::shared_ptr<const Callback> callback;
    bool waiting = false;
  };

  static void wait(const std::shared_ptr<Impl>& self, Side& side,
                   asio::posix::stream_descriptor::wait_type type) {
    if (side.waiting || !self->alive || !side.callback) return;
    side.waiting = true;
    self->stream.async_wait(type, [self, &side, type](const boost::system::error_code& error) {
      side.waiting = false;
      if (!self->alive || error == asio::error::operation_aborted) return;
      if (const std::shared_ptr<const Callback> callback = side.callback) {
        self->loop.impl_->run_handler(self->name, *callback);
      }
      wait(self, side, type);
    });
  }

  Loop& loop;
  const std::string_view name;
  const int fd;
  bool alive = true;
  asio::posix::stream_descriptor stream;
  Side read;
  Side write;
};

Watch::Watch(Loop& loop, int fd, std::string_view name) : impl_(std::make_shared<Impl>(loop, fd, name)) {
  boost::system::error_code error;
  impl_->stream.assign(fd, error);
  // A closed, a regular or a doubly watched descriptor is a bug of the caller.
  DI_ASSERT(!error);
}

Watch::~Watch() {
  impl_->alive = false;
  impl_->read.callback = nullptr;
  impl_->write.callback = nullptr;
  impl_->stream.release();  // the descriptor belongs to somebody else
}

void Watch::on_readable(Callback callback) {
  impl_->read.callback = callback ? std::make_shared<const Callback>(std::move(callback)) : nullptr;
  Impl::wait(impl_, impl_->read, asio::posix::stream_descriptor::wait_read);
}

void Watch::on_writable(Callback callback) {
  impl_->write.callback = callback ? std::make_shared<const Callback>(std::move(callback)) : nullptr;
  Impl::wait(impl_, impl_->write, asio::posix::stream_descriptor::wait_write);
}

int Watch::fd() const {
  return impl_->fd;
}

}  // namespace di::loop
