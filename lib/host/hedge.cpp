#include "host/hedge.h"

#include <algorithm>

namespace di::host {

namespace {

// So often the quantile of the spread is computed anew.
constexpr std::size_t spread_refresh = 32;

}  // namespace

double Hedge::per_byte(std::uint64_t bytes, Duration took) const {
  return static_cast<double>(took.count()) / static_cast<double>(bytes + limits_.startup_bytes);
}

Hedge::State& Hedge::state(const Source& source) {
  const auto known = sources_.find(source);
  if (known == sources_.end() && sources_.size() >= limits_.sources_max) {
    sources_.erase(std::min_element(sources_.begin(), sources_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    }));
  }
  State& found = sources_[source];
  found.used = ++uses_;
  return found;
}

void Hedge::asked(const Source& source) {
  static_cast<void>(state(source));
  asked_ += 1;
  if (asked_ < limits_.window) return;
  asked_ /= 2;
  extra_ /= 2;
}

void Hedge::came(const Source& source, std::uint64_t bytes, Duration took) {
  State& known = state(source);
  const double sample = per_byte(bytes, took);
  if (known.samples >= limits_.samples_min && known.average > 0) {
    const double spread = sample / known.average;
    if (spread_.size() < limits_.spread_max) {
      spread_.push_back(spread);
    } else {
      spread_[spread_next_] = spread;
    }
    spread_next_ = (spread_next_ + 1) % limits_.spread_max;
    if (++spread_new_ >= spread_refresh) {
      spread_new_ = 0;
      std::vector<double> sorted = spread_;
      const auto at = sorted.begin() +
                      static_cast<std::ptrdiff_t>(limits_.quantile * static_cast<double>(sorted.size() - 1));
      std::nth_element(sorted.begin(), at, sorted.end());
      spread_quantile_ = *at;
    }
  }
  known.average = known.samples == 0 ? sample : known.average + limits_.weight * (sample - known.average);
  ++known.samples;
}

void Hedge::gave_up(const Source& source, std::uint64_t bytes, Duration after) {
  State& known = state(source);
  const double sample = per_byte(bytes, after);
  if (known.samples > 0 && sample <= known.average) return;  // says nothing
  known.average = known.samples == 0 ? sample : known.average + limits_.weight * (sample - known.average);
  ++known.samples;
}

double Hedge::median(std::span<const Source> members) const {
  std::vector<double> known;
  for (const Source& member : members) {
    const auto found = sources_.find(member);
    if (found != sources_.end() && found->second.samples >= limits_.samples_min)
      known.push_back(found->second.average);
  }
  if (known.empty() || known.size() * 2 < members.size()) return 0;
  const auto middle = known.begin() + static_cast<std::ptrdiff_t>((known.size() - 1) / 2);
  std::nth_element(known.begin(), middle, known.end());
  return *middle;
}

bool Hedge::slow(const Source& source, std::span<const Source> members) const {
  const auto found = sources_.find(source);
  if (found == sources_.end() || found->second.samples < limits_.samples_min) return false;
  const double middle = median(members);
  return middle > 0 && found->second.average > limits_.skip_ratio * middle;
}

bool Hedge::skip(const Source& source, std::span<const Source> members) {
  if (!slow(source, members)) return false;
  if (++state(source).skipped % limits_.probe_every == 0) {
    ++counters_.probes;
    return false;
  }
  ++counters_.skips;
  return true;
}

Duration Hedge::late_after(std::uint64_t bytes, std::span<const Source> members) const {
  const double middle = median(members);
  if (middle <= 0) return duration_never;
  const double ratio = std::max(limits_.hedge_ratio, spread_quantile_);
  return Duration(
      static_cast<std::int64_t>(middle * ratio * static_cast<double>(bytes + limits_.startup_bytes)));
}

bool Hedge::hedge(std::uint32_t reads) {
  if (extra_ + reads > limits_.budget * asked_ + limits_.burst) {
    ++counters_.hedges_refused;
    return false;
  }
  extra_ += reads;
  ++counters_.hedges;
  return true;
}

}  // namespace di::host
