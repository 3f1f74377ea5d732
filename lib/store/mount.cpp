#include "store/mount.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace di::store {

namespace {

std::uint64_t bytes_of(const std::vector<MetaWrite>& writes) {
  std::uint64_t bytes = 0;
  for (const MetaWrite& write : writes) bytes += write.bytes.size();
  return bytes;
}

}  // namespace

Mount::Mount(loop::Loop& loop, std::uint16_t number, Backing backing, const Options& options, Hooks hooks)
    : number_(number),
      path_(std::move(backing.path)),
      options_(options),
      hooks_(std::move(hooks)),
      disk_(std::move(backing.disk)),
      volume_(std::move(backing.volume)),
      refused_(std::move(backing.refused)),
      budget_(options.budget, loop.monotonic_now()),
      loop_(loop),
      sync_timer_(loop, loop::TimerKind::liveness, "store-sync", [this] { sync_now(); }),
      health_timer_(loop, loop::TimerKind::liveness, "store-health", [this] { health_look(); }),
      pool_(std::move(backing.pool)) {
  DI_ASSERT(refused_.has_value() != (disk_ && volume_ && pool_));
  figures_ = pool_ ? pool_->figures_shared() : std::make_shared<DiskFigures>();
  if (is_open()) start();
}

void Mount::start() {
  kv::WriteBudget::Options budget = options_.budget;
  budget.written_bytes = volume_->wear().written_bytes;
  budget.spent_bytes = volume_->wear().spent_bytes;
  budget_ = kv::WriteBudget(budget, loop_.monotonic_now());
  spent_ = false;
  vetoed_bytes_ = 0;
  budget_look();
  health_timer_.start_every(DiskHealth::interval);
  // An open list left by a kill shrinks without waiting for the first put.
  sync_soon();
  const auto busy = [this] {
    const Volume::Stats stats = volume_->stats();
    return stats.reading > 0 || stats.writing > 0;
  };
  scrub_ = std::make_unique<Scrub>(
      loop_, *volume_, *pool_, options_.scrub,
      Scrub::Hooks{busy, [this](const Read& read, Code code) { column_bad(read, code); },
                   [this] { hooks_.scrub_beat(); },
                   [this] {
                     close_when_idle();
                     hooks_.ended();
                   }});
}

// ---- columns

Result<Read> Mount::read_begin(std::uint64_t stripe, std::uint16_t column) {
  if (!serves()) return Error{Code::not_found, 0, "the volume is not open"};
  return volume_->read_begin(stripe, column);
}

void Mount::read_end(const Read& read, bool verified) {
  volume_->read_end(read, verified);
  close_when_idle();
}

Result<Put> Mount::put_begin(const Shard& shard, bool repair) {
  const std::uint64_t bytes = shard.slot_class.header_bytes + shard.payload_bytes();
  if (!repair && !budget_.allows(bytes, loop_.monotonic_now())) {
    log_warn("store", "a put is above the write budget of the disk",
             {{"path", path_}, {"vetoes", budget_.vetoes()}, {"vetoed_bytes", budget_.vetoed_bytes()}});
    vetoed_bytes_ = bytes;
    budget_look();
    return Error{Code::over_budget, 0, "the write budget of the disk is used up for now"};
  }
  Result<Put> put = volume_->put_begin(shard);
  if (put) wrote(bytes + bytes_of(put->before));
  return put;
}

bool Mount::put_end(const Put& put, const PutOutcome& outcome) {
  const bool was_broken = volume_->broken();
  const bool there = volume_->put_end(put, outcome);
  if (volume_->broken() && !was_broken) tell_broken(outcome.status.error());
  sync_soon();
  close_when_idle();
  return there;
}

std::uint32_t Mount::free(std::uint64_t stripe, std::optional<std::uint16_t> column) {
  if (!is_open()) return 0;
  const std::uint32_t count = volume_->free(stripe, column);
  sync_soon();
  return count;
}

std::uint32_t Mount::free(const Read& read) {
  return is_open() && volume_->holds(read) ? free(read.stripe, read.column) : 0;
}

void Mount::column_bad(const Read& read, Code code) {
  // A read behind the end: every column there is gone, not only this one.
  if (code == Code::io && !cut_short_ && cut_at()) return health_look();
  if (!volume_->holds(read)) return;
  hooks_.bad(read.stripe, read.column, code);
  if (code != Code::corrupt) return;
  // Nobody will ever read it: its room is worth more.
  hooks_.dropped(free(read));
  log_warn("store", "dropped a column that is not what it was",
           {{"path", path_}, {"stripe", read.stripe}, {"column", read.column}});
}

// ---- write behind

void Mount::after_flush(std::function<void(Code)> then) {
  if (volume_->broken() || closed_) return then(Code::io);
  if (volume_->clean()) return then(Code::ok);
  unflushed_.push_back(std::move(then));
  sync_now();
}

void Mount::sync_soon() {
  if (!syncing_ && !closed_ && !sync_timer_.armed() && !volume_->clean() && !volume_->broken()) {
    sync_timer_.start_after(options_.flush_every);
  }
}

void Mount::sync_now() {
  if (syncing_) return;
  sync_timer_.cancel();
  std::optional<Sync> sync = volume_->sync_begin();
  if (!sync) {
    sync_soon();
    hooks_.ended();
    return;
  }
  wrote(bytes_of(sync->table) + bytes_of(sync->superblock));
  syncing_ = true;
  flushing_ = std::exchange(unflushed_, {});
  const Status queued = pool_->sync(*std::move(sync), [this](const Status& status) { sync_ended(status); });
  DI_ASSERT(queued.ok());
}

void Mount::sync_ended(const Status& status) {
  syncing_ = false;
  ++syncs_;
  volume_->sync_end(status);
  for (const auto& then : std::exchange(flushing_, {})) then(status.ok() ? Code::ok : Code::io);
  if (!status.ok()) tell_broken(status.error());
  if (!closed_ && (!unflushed_.empty() || stopping_)) {
    sync_now();
  } else {
    sync_soon();
  }
  close_when_idle();
  hooks_.ended();
}

void Mount::tell_broken(const Error& error) {
  log_error("store", "volume broken: a write of its tables failed", {{"path", path_}, {"error", error}});
  // No sync follows that they could wait for.
  for (const auto& then : std::exchange(unflushed_, {})) then(Code::io);
  hooks_.changed();
}

// ---- write budget

void Mount::wrote(std::uint64_t bytes) {
  const Instant now = loop_.monotonic_now();
  budget_.wrote(bytes, now);
  volume_->set_wear({budget_.written_bytes(), budget_.spent_bytes(now)});
  budget_look();
}

void Mount::budget_look() {
  const std::uint64_t per_day = budget_.budget_bytes_per_day();
  if (per_day == 0) return;
  const std::uint64_t left = budget_.left_today_bytes(loop_.monotonic_now());
  const bool spent =
      left <
      std::max(per_day / (spent_ ? options_.budget.unspent_part : options_.budget.spent_part), vetoed_bytes_);
  if (!spent) vetoed_bytes_ = 0;
  if (spent == spent_) return;
  spent_ = spent;
  if (spent) {
    log_warn("store", "the write budget of the disk is used up",
             {{"path", path_}, {"bytes_per_day", per_day}, {"written_bytes", budget_.written_bytes()}});
  } else {
    log_info("store", "the disk has a write budget again", {{"path", path_}});
  }
  hooks_.changed();
}

// ---- health

DiskState Mount::state() const {
  return !serves() || volume_->broken() ? DiskState::failed : health_.state();
}

std::string_view Mount::reason() const {
  if (!serves()) return "not open";
  return volume_->broken() ? "broken" : health_.reason();
}

DiskState Mount::state_told() const {
  if (!serves()) return DiskState::failed;
  return volume_->broken() ? std::max(health_.state(), DiskState::avoid) : health_.state();
}

Volume::Stats Mount::stats() const {
  return is_open() ? volume_->stats() : Volume::Stats{};
}

Code Mount::put_refusal() const {
  switch (state()) {
    case DiskState::good:
      return Code::ok;
    case DiskState::avoid:
      return health_.reason() == "full" ? Code::no_space : Code::busy;
    case DiskState::failed:
      return Code::io;
  }
  return Code::ok;
}

Scrub::Counters Mount::scrubbed() const {
  Scrub::Counters sum = scrubbed_;
  if (scrub_) sum += scrub_->counters();
  return sum;
}

DiskHealth::Sample Mount::figures_now() const {
  const DiskFigures& figures = *figures_;
  DiskHealth::Sample sample;
  // Before what has ended, so that what ends in between is not taken for something that never began.
  sample.ended = figures.read_us.count() + figures.write_us.count() + figures.flush_us.count();
  sample.begun = figures.begun.load(std::memory_order_relaxed);
  sample.errors = figures.read_errors.load(std::memory_order_relaxed) +
                  figures.write_errors.load(std::memory_order_relaxed);
  sample.no_space = figures.no_space.load(std::memory_order_relaxed);
  sample.corrupt = figures.corrupt.load(std::memory_order_relaxed);
  return sample;
}

std::optional<std::uint64_t> Mount::cut_at() const {
  const Result<std::uint64_t> bytes = disk_->bytes_now();
  if (!bytes || *bytes >= volume_->geometry().volume_bytes) return std::nullopt;
  return *bytes;
}

void Mount::give_up_behind(std::uint64_t end) {
  cut_short_ = true;
  const auto gone = volume_->free_behind(end);
  log_error("store", "the volume was cut short",
            {{"path", path_},
             {"bytes", end},
             {"of_bytes", volume_->geometry().volume_bytes},
             {"columns", gone.size()}});
  for (const auto& [stripe, column] : gone) hooks_.bad(stripe, column, Code::not_found);
  hooks_.dropped(static_cast<std::uint32_t>(gone.size()));
  sync_soon();
}

void Mount::health_look() {
  DiskHealth::Sample sample = figures_now();
  sample.p99_us = std::max(read_p99_.p99(figures_->read_us), write_p99_.p99(figures_->write_us));
  if (const auto end = cut_short_ ? std::nullopt : cut_at()) give_up_behind(*end);
  sample.cut_short = cut_short_;
  const Result<std::uint64_t> length = disk_->bytes_now();
  sample.removed = !length && length.error().code == Code::not_found;
  budget_look();
  const DiskState before = health_.state();
  const DiskState now = health_.step(sample, loop_.monotonic_now());
  if (now != DiskState::failed && !volume_->broken()) hooks_.looked();
  if (now == before) return;
  if (now == DiskState::good) {
    log_info("store", "the disk is in service again", {{"path", path_}});
  } else {
    log_error("store", "the disk takes no more puts",
              {{"path", path_},
               {"state", disk_state_name(now)},
               {"reason", health_.reason()},
               {"errors", sample.errors},
               {"corrupt", sample.corrupt},
               {"p99_us", sample.p99_us},
               {"past_p99_us", static_cast<std::uint64_t>(health_.past_p99_us())}});
  }
  hooks_.changed();
}

// ---- close and open

void Mount::close(std::function<void()> closed) {
  DI_ASSERT(!closed_);
  if (!is_open()) return loop_.post("store-closed", std::move(closed));
  closed_ = std::move(closed);
  scrub_->stop();
  health_timer_.cancel();
  sync_timer_.cancel();
  for (auto& then : std::exchange(unflushed_, {})) then(Code::io);
  hooks_.changed();
  close_when_idle();
}

void Mount::close_when_idle() {
  if (!closed_ || syncing_) return;
  const Volume::Stats stats = volume_->stats();
  if (stats.reading > 0 || stats.writing > 0) return;
  // Not from inside what has just ended.  Nothing is begun meanwhile.
  loop_.post("store-closed", [this, alive = alive_] {
    if (!*alive || !closed_) return;
    scrubbed_ = scrubbed();
    scrub_.reset();
    pool_.reset();
    volume_.reset();
    disk_.reset();
    log_info("store", "volume closed", {{"path", path_}});
    std::exchange(closed_, nullptr)();
    hooks_.ended();
  });
}

void Mount::open(Backing backing) {
  DI_ASSERT(!is_open() && !closed_);
  if (stopping_) return;
  refused_ = std::move(backing.refused);
  if (refused_) return hooks_.changed();
  DI_ASSERT(backing.disk && backing.volume && backing.pool && backing.pool->figures_shared() == figures_);
  disk_ = std::move(backing.disk);
  volume_ = std::move(backing.volume);
  pool_ = std::move(backing.pool);
  cut_short_ = false;
  health_ = DiskHealth(figures_now());
  static_cast<void>(read_p99_.p99(figures_->read_us));
  static_cast<void>(write_p99_.p99(figures_->write_us));
  start();
  hooks_.changed();
}

// ---- stop

void Mount::stop() {
  stopping_ = true;
  if (!is_open()) return;
  scrub_->stop();
  health_timer_.cancel();
}

bool Mount::settled() {
  if (!serves()) return !is_open();
  const Volume::Stats stats = volume_->stats();
  if (syncing_ || stats.reading > 0 || stats.writing > 0) return false;
  if (!volume_->clean() && !volume_->broken()) {
    // Each sync lets idle segments close; a few of them and the open list is empty.
    if (!sync_timer_.armed()) sync_timer_.start_after(Duration{0});
    return false;
  }
  sync_timer_.cancel();
  return true;
}

}  // namespace di::store
