// host/hedge.h: which column of a stripe not to ask for, and when to stop waiting for one (spec/store.md 4.5).
//
// For each source (a volume of a store) it keeps a moving average of how long a column took, per byte with a
// start-up of startup_bytes, and of all sources together how far single reads are off their source's average.
//   skip    a source whose average is above skip_ratio times the median of the stripe's sources; now and then
//           it is asked all the same, because it may have become better
//   hedge   a read that takes longer than the greater of hedge_ratio times that median and the `quantile` of
//           what reads take when nothing is wrong
// Extra reads, which are those that a healthy store would not have needed, are at most `budget` of all, over
// the last `window` reads or so, and a burst.
//
// Pure: time is given.  Owner: the core of a di-kvd host.  Bounds: sources_max, and those asked for longest
// ago go first; spread_max samples.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/time.h"

namespace di::host {

struct HedgeCounters {
  std::uint64_t skips = 0;
  std::uint64_t probes = 0;  // asked although they were to be skipped
  std::uint64_t hedges = 0;
  std::uint64_t hedges_refused = 0;  // the budget
};

class Hedge {
 public:
  struct Limits {
    double skip_ratio = 3;
    double hedge_ratio = 2.5;
    double quantile = 0.95;
    double budget = 0.05;                     // kv.hedge_budget_pct
    double burst = 4;                         // extra reads
    double window = 4096;                     // reads
    double weight = 0.2;                      // of a new sample in the average
    std::uint32_t samples_min = 4;            // before a source is judged
    std::uint32_t probe_every = 64;           // skips of a source
    std::uint64_t startup_bytes = 256 << 10;  // what the start of a read costs, in bytes
    std::size_t sources_max = 4096;
    std::size_t spread_max = 512;
  };
  using Source = std::pair<std::string, std::uint16_t>;  // store instance, volume

  explicit Hedge(const Limits& limits) : limits_(limits) {}

  // A read that the stripe needed, from here on to be paid for extra ones.
  void asked(const Source& source);
  // It came after this time.
  void came(const Source& source, std::uint64_t bytes, Duration took);
  // It was given up after this time: it would have taken at least so long.
  void gave_up(const Source& source, std::uint64_t bytes, Duration after);

  // Above skip_ratio.  `members`: the sources of the stripe's columns.
  [[nodiscard]] bool slow(const Source& source, std::span<const Source> members) const;
  // The same for a column that is about to be asked for, now and then not; counts what it advises.
  [[nodiscard]] bool skip(const Source& source, std::span<const Source> members);
  // After which time a column of so many bytes is late; duration_never without enough samples.
  [[nodiscard]] Duration late_after(std::uint64_t bytes, std::span<const Source> members) const;
  // Pays for `reads` extra ones; false when the budget does not have them.
  [[nodiscard]] bool hedge(std::uint32_t reads);
  // The hedge came to nothing before it read anything.
  void refund(std::uint32_t reads) { extra_ -= reads; }

  static constexpr Duration duration_never = Duration::max();
  [[nodiscard]] const HedgeCounters& counters() const { return counters_; }
  [[nodiscard]] std::size_t sources() const { return sources_.size(); }

 private:
  struct State {
    double average = 0;  // ns per byte, startup_bytes included
    std::uint32_t samples = 0;
    std::uint32_t skipped = 0;
    std::uint64_t used = 0;
  };
  [[nodiscard]] double per_byte(std::uint64_t bytes, Duration took) const;
  // Of those with enough samples; 0 when they are less than half of the members.
  [[nodiscard]] double median(std::span<const Source> members) const;
  State& state(const Source& source);

  const Limits limits_;
  std::map<Source, State> sources_;
  std::uint64_t uses_ = 0;
  std::vector<double> spread_;  // sample / average of its source, a ring
  std::size_t spread_next_ = 0;
  double spread_quantile_ = 0;
  std::size_t spread_new_ = 0;  // samples since it was computed
  double asked_ = 0;
  double extra_ = 0;
  HedgeCounters counters_;
};

}  // namespace di::host
