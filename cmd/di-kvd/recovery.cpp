#include "recovery.h"

#include <algorithm>
#include <utility>

#include "base/checksum.h"
#include "base/log.h"

namespace di::kvd {

namespace {

// Reading is bound by memory: more threads than this would only be in the way of ranks that start.
constexpr unsigned check_threads_max = 4;
constexpr std::size_t results_a_post = 64;
// Processes let go within a step of their engines, or when they end.
constexpr Duration look_every = milliseconds(20);

}  // namespace

Result<OpenedArena> arena_make(Parking& parking, const kv::ArenaOwner::Options& options) {
  // First the old one, so that there is never memory for two.
  parking.drop();
  auto made = kv::ArenaOwner::create(options);
  if (!made) return made.error();
  OpenedArena opened{*std::move(made), std::nullopt};
  if (const Status parked = parking.put(opened.arena->fd()); !parked.ok())
    log_warn("arena", "not parked: a restart will be cold", {{"error", parked.error()}});
  return opened;
}

Result<OpenedArena> arena_open(Parking& parking, const kv::ArenaOwner::Options& options) {
  Fd parked = parking.take();
  if (!parked.valid()) return arena_make(parking, options);
  OpenedArena opened;
  auto taken = kv::ArenaOwner::take_over(std::move(parked), options, opened.former.emplace());
  if (!taken) {
    log_warn("arena", "the parked arena is of no use", {{"error", taken.error()}});
    return arena_make(parking, options);
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
