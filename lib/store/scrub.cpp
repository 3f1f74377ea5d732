#include "store/scrub.h"

#include <algorithm>

#include "base/rng.h"

namespace di::store {

namespace {

constexpr std::uint8_t priority_bulk = 2;

Duration time_for(std::uint64_t bytes, double bytes_per_s) {
  return Duration(static_cast<std::int64_t>(static_cast<double>(bytes) / bytes_per_s * 1e9));
}

}  // namespace

Scrub::Scrub(loop::Loop& loop, Volume& volume, IoPool& pool, const Options& options, Hooks hooks)
    : loop_(loop),
      volume_(volume),
      pool_(pool),
      options_(options),
      hooks_(std::move(hooks)),
      next_pass_at_(options.interval > Duration{0} ? loop.now() : instant_never),
      timer_(loop, loop::TimerKind::product, "store-scrub", [this] { step(); }) {
  DI_ASSERT(options_.bytes_per_s > 0);
  timer_.start_after(Duration{0});
}

void Scrub::start() {
  if (stopped_) return;
  begin(true);
  if (!reading_) step();
}

void Scrub::stop() {
  stopped_ = true;
  pass_.running = false;
  timer_.cancel();
}

void Scrub::begin(bool asked) {
  const Volume::Stats stats = volume_.stats();
  const std::uint64_t number = pass_.number + 1;
  pass_ = Pass{};
  pass_.number = number;
  pass_.running = true;
  pass_.asked = asked;
  pass_.slots = stats.slots_live;
  pass_.began = loop_.now();
  first_segment_ = 0;
  if (!asked)
    first_segment_ = static_cast<std::uint32_t>(Rng(stats.epoch).below(volume_.geometry().segments));
  from_ = {first_segment_, 0};
  wrapped_ = false;
  next_read_at_ = pass_.began;
  if (options_.interval > Duration{0}) next_pass_at_ = pass_.began + options_.interval;
}

void Scrub::sleep_until(Instant at) {
  timer_.start_at(std::min(at, loop_.now() + tick_max));
}

void Scrub::step() {
  if (stopped_ || reading_) return;
  hooks_.beat();
  const Instant now = loop_.now();
  if (!pass_.running) {
    if (now < next_pass_at_) return sleep_until(next_pass_at_);
    begin(false);
  }
  if (now < next_read_at_) return sleep_until(next_read_at_);
  if (hooks_.busy()) {
    if (!paused_since_) paused_since_ = now;
    if (now - *paused_since_ < pause_max) return sleep_until(now + pause);
  }
  paused_since_.reset();
  const std::optional<Read> column = next();
  if (!column) {
    pass_.running = false;
    ++counters_.passes;
    return sleep_until(next_pass_at_);
  }
  // So that all of it takes the interval, or less when that is long.
  const std::uint64_t bytes = column->slot_class.header_bytes + column->payload_bytes;
  double bytes_per_s = static_cast<double>(options_.bytes_per_s);
  if (!pass_.asked) {
    const std::uint64_t all = std::max(volume_.stats().slot_bytes_live, bytes);
    bytes_per_s = std::min(bytes_per_s, static_cast<double>(all) / to_s(options_.interval));
  }
  next_read_at_ = now + time_for(bytes, bytes_per_s);
  read(*column, false);
}

std::optional<Read> Scrub::next() {
  while (true) {
    std::vector<Read> found;
    static_cast<void>(volume_.list(from_, 1, found));
    if (!found.empty()) {
      if (!wrapped_ || found.front().at.segment < first_segment_) return found.front();
      volume_.read_end(found.front());
      return std::nullopt;
    }
    if (wrapped_ || first_segment_ == 0) return std::nullopt;
    wrapped_ = true;
    from_ = {};
  }
}

void Scrub::read(const Read& column, bool again) {
  reading_ = true;
  buffer_.reserve(column.payload_bytes);
  const MutableByteView to = buffer_.first(column.payload_bytes);
  ColumnRead job;
  job.read = column;
  job.priority = priority_bulk;
  job.verify = true;
  job.again = again;
  job.whole = [to] { return to; };
  job.place = [to](const SlotHeader& header, std::uint32_t group) -> Result<MutableByteView> {
    if (header.shard.payload_bytes() != to.size()) {
      return Error{Code::corrupt, 0, "a column has another length than its slot's record"};
    }
    return to.subspan(header.shard.segment_offset(group), header.shard.segments[group]);
  };
  job.done = [this, column, again, pass = pass_.number](const ColumnEnd& end) {
    ended(column, end, again, pass);
  };
  const Status queued = pool_.read(std::move(job));
  DI_ASSERT(queued.ok());
}

void Scrub::ended(const Read& column, const ColumnEnd& end, bool again, std::uint64_t pass) {
  reading_ = false;
  const Code code = end.status.ok() ? Code::ok : end.status.error().code;
  const bool bad = code == Code::corrupt || code == Code::io;
  if (bad && !again && !stopped_) return read(column, true);
  volume_.read_end(column, end.verified);
  const std::uint64_t bytes = column.slot_class.header_bytes + column.payload_bytes;
  const bool counts = bad && again;
  ++counters_.columns;
  counters_.bytes += bytes;
  if (counts) ++(code == Code::corrupt ? counters_.corrupt : counters_.unreadable);
  if (pass == pass_.number) {  // not of one that another was asked for
    ++pass_.slots_done;
    pass_.bytes_done += bytes;
    if (counts) ++(code == Code::corrupt ? pass_.corrupt : pass_.unreadable);
  }
  if (counts) hooks_.bad(column, code);
  hooks_.over();
  if (!stopped_) step();
}

}  // namespace di::store
