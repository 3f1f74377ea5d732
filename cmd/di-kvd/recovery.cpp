#include "recovery.h"

#include <fcntl.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/log.h"
#include "daemon/ready.h"

namespace di::kvd {

namespace {

// Reading is bound by memory: more threads than this would only be in the way of ranks that start.
constexpr unsigned check_threads_max = 4;
constexpr std::size_t results_a_post = 64;
// Processes let go within a step of their engines, or when they end.
constexpr Duration look_every = milliseconds(20);

// A prefault that fails has taken and given back what there is.
constexpr Duration make_again_after = milliseconds(500);

// What systemd is asked for while a start waits; longer than arena_let_go_within.
constexpr std::string_view more_time = "EXTEND_TIMEOUT_USEC=30000000";

bool is_stopped(const kv::ArenaOwner::Options& options) {
  return options.stopped && options.stopped();
}

Status let_go(Parking& parking, const kv::ArenaOwner::Options& options, Fd former, Instant until) {
  const MonotonicClock clock;
  kv::ArenaOwner::give_up(former.get());
  parking.drop();
  daemon::notify_supervisor(more_time);
  while (kv::ArenaOwner::mapped(former.get())) {
    if (is_stopped(options)) return Error{Code::cancelled, 0, "waited for the users of the former arena"};
    if (clock.now() >= until) {
      log_warn("arena", "a process keeps the former arena: there may not be memory for two");
      break;
    }
    std::this_thread::sleep_for(look_every);
  }
  return {};
}

}  // namespace

Result<OpenedArena> arena_make(Parking& parking, const kv::ArenaOwner::Options& options, Fd former) {
  const MonotonicClock clock;
  const Instant until = clock.now() + arena_let_go_within;
  if (former.valid()) {
    DI_TRY(let_go(parking, options, std::move(former), until));
  } else {
    parking.drop();
  }
  auto made = kv::ArenaOwner::create(options);
  // That of an owner whose arena was not parked may still be on its way back.
  if (!made && made.error().code == Code::no_space) {
    log_info("arena", "no memory yet", {{"bytes", options.payload_bytes}, {"error", made.error()}});
    daemon::notify_supervisor(more_time);
  }
  while (!made && made.error().code == Code::no_space && clock.now() < until) {
    if (is_stopped(options)) return Error{Code::cancelled, 0, "waited for memory"};
    std::this_thread::sleep_for(make_again_after);
    made = kv::ArenaOwner::create(options);
  }
  if (!made) return made.error();
  OpenedArena opened{*std::move(made), std::nullopt};
  if (const Status parked = parking.put(opened.arena->fd()); !parked.ok())
    log_warn("arena", "not parked: a restart will be cold", {{"error", parked.error()}});
  return opened;
}

Result<OpenedArena> arena_open(Parking& parking, const kv::ArenaOwner::Options& options) {
  Fd parked = parking.take();
  if (!parked.valid()) return arena_make(parking, options, {});
  OpenedArena opened;
  Fd former(::fcntl(parked.get(), F_DUPFD_CLOEXEC, 0));
  auto taken = kv::ArenaOwner::take_over(std::move(parked), options, opened.former.emplace());
  if (!taken) {
    // It stays parked for the next start.
    if (taken.error().code == Code::cancelled) return taken.error();
    log_warn("arena", "the parked arena is of no use", {{"error", taken.error()}});
    return arena_make(parking, options, std::move(former));
  }
  opened.arena = *std::move(taken);
  return opened;
}

Recovery::Recovery(loop::Loop& loop, kv::ArenaOwner& arena, host::Core& core, loop::Callback moved)
    : loop_(loop),
      arena_(arena),
      core_(core),
      moved_(std::move(moved)),
      checks_(core.take_checks()),
      started_(loop.monotonic_now()),
      former_timer_(loop, loop::TimerKind::liveness, "arena users", [this] { look(); }) {
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency() / 2);
  const std::size_t threads = std::min<std::size_t>(std::min(cores, check_threads_max), checks_.size());
  for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  look();
}

Recovery::~Recovery() {
  stop_ = true;
}

void Recovery::work() {
  std::vector<Outcome> outcomes;
  for (std::size_t at = next_++; at < checks_.size() && !stop_; at = next_++) {
    bool good = true;
    for (const host::Recovery::Segment& segment : checks_[at].segments) {
      good = good && crc32c(arena_.payload(segment.offset, segment.bytes)) == segment.crc;
    }
    outcomes.push_back({checks_[at].slot, good});
    if (outcomes.size() == results_a_post) report(std::exchange(outcomes, {}));
  }
  if (!outcomes.empty()) report(std::move(outcomes));
}

void Recovery::report(std::vector<Outcome> outcomes) {
  loop_.post("arena pages checked", [this, outcomes = std::move(outcomes)] {
    for (const Outcome& outcome : outcomes) {
      core_.on_checked(outcome.slot, outcome.good, now());
      good_ += outcome.good ? 1 : 0;
    }
    done_ += outcomes.size();
    if (done_ == checks_.size()) {
      log_info("arena", "pages checked",
               {{"pages", done_}, {"good", good_}, {"took_ms", to_ms(loop_.monotonic_now() - started_)}});
    }
    moved_();
  });
}

void Recovery::look() {
  if (arena_.former_users()) return former_timer_.start_after(look_every);
  log_info("arena", "no process of before uses it any more",
           {{"took_ms", to_ms(loop_.monotonic_now() - started_)}});
  core_.on_former_gone(now());
  moved_();
}

host::Now Recovery::now() const {
  return {loop_.now(), loop_.monotonic_now()};
}

}  // namespace di::kvd
