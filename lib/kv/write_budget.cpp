#include "kv/write_budget.h"

#include <algorithm>
#include <cmath>

#include "base/assert.h"

namespace di::kv {

namespace {

constexpr double day_s = 86400;

double days(Duration length) {
  return std::max(0.0, to_s(length) / day_s);
}

}  // namespace

WriteBudget::WriteBudget(const Options& options, Instant now)
    : options_(options), begun_(now), at_(now), written_(options.written_bytes) {
  DI_ASSERT(options_.days > 0 && options_.amplification >= 1);
  per_day_ = static_cast<double>(options_.endurance_bytes) / options_.amplification / options_.days;
  left_ = std::max(-per_day_, per_day_ - static_cast<double>(options_.spent_bytes));
}

double WriteBudget::filled(Instant now) const {
  return std::min(per_day_, left_ + per_day_ * days(now - at_));
}

double WriteBudget::faded(Instant now) const {
  return recent_ * std::exp(-days(now - at_));
}

bool WriteBudget::allows(std::uint64_t bytes, Instant now) {
  if (options_.endurance_bytes == 0 || static_cast<double>(bytes) <= filled(now)) return true;
  ++vetoes_;
  vetoed_bytes_ += bytes;
  return false;
}

void WriteBudget::wrote(std::uint64_t bytes, Instant now) {
  const auto more = static_cast<double>(bytes);
  recent_ = faded(now) + more;
  left_ = std::max(-per_day_, filled(now) - more);
  at_ = std::max(at_, now);
  written_ += bytes;
}

std::uint64_t WriteBudget::left_today_bytes(Instant now) const {
  return static_cast<std::uint64_t>(std::max(0.0, filled(now)));
}

std::uint64_t WriteBudget::spent_bytes(Instant now) const {
  return static_cast<std::uint64_t>(per_day_ - filled(now));
}

double WriteBudget::pace_bytes_per_day(Instant now) const {
  // In the first day there is less to look back on; of the first minutes nothing is concluded.
  const double seen = std::max(days(now - begun_), 0.01);
  return faded(now) / (1 - std::exp(-seen));
}

double WriteBudget::days_of_life(Instant now) const {
  const double pace = pace_bytes_per_day(now) * options_.amplification;
  if (options_.endurance_bytes == 0 || pace <= 0) return days_max;
  const double used = static_cast<double>(written_) * options_.amplification;
  return std::clamp((static_cast<double>(options_.endurance_bytes) - used) / pace, 0.0, days_max);
}

}  // namespace di::kv
