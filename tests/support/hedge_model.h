// support/hedge_model.h: stripes of 10+2 read from twelve nodes, by the rules of the shipped host/hedge.h.
//
// Times are in units of the median column read.  A node's reads are log-normal with sigma 0.39, which gives
// the figures of spec/store.md 4.5 without any rule; a scenario makes some of them slow.  A stripe is there
// when ten of its columns are.  Deterministic from a seed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "base/rng.h"
#include "host/hedge.h"

namespace di::test {

struct HedgeScenario {
  double slow_read_chance = 0;  // of each read, to take slow_read_ratio times as long
  double slow_read_ratio = 1;
  double slow_node_ratio = 1;   // of node 5
  std::uint32_t slow_from = 0;  // stripes [slow_from, slow_until)
  std::uint32_t slow_until = ~0u;
  bool rules = true;  // without: ten columns, and wait
};

struct HedgeResult {
  std::vector<double> times;  // of stripes
  std::uint64_t needed = 0;   // reads
  std::uint64_t extra = 0;
  std::uint64_t parity_most = 0;  // parity reads of one stripe
  host::HedgeCounters counters;

  [[nodiscard]] double quantile(double q, std::size_t from = 0) const {
    std::vector<double> sorted(times.begin() + static_cast<std::ptrdiff_t>(from), times.end());
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<std::size_t>(q * static_cast<double>(sorted.size() - 1))];
  }
  [[nodiscard]] double extra_share() const {
    return static_cast<double>(extra) / static_cast<double>(needed);
  }
};

inline HedgeResult hedge_model(const HedgeScenario& scenario, std::uint32_t stripes, std::uint64_t seed) {
  constexpr std::uint32_t nodes = 12;
  constexpr std::uint32_t needed = 10;
  constexpr std::uint64_t bytes = 1 << 20;
  constexpr double unit_ns = 1e6;
  Rng rng(seed);
  host::Hedge hedge{{}};
  HedgeResult result;
  const auto draw = [&](std::uint32_t node, std::uint32_t stripe) {
    const double normal =
        std::sqrt(-2 * std::log(1 - rng.uniform())) * std::cos(2 * std::numbers::pi * rng.uniform());
    double time = std::exp(0.39 * normal);
    if (rng.chance(scenario.slow_read_chance)) time *= scenario.slow_read_ratio;
    if (node == 5 && stripe >= scenario.slow_from && stripe < scenario.slow_until)
      time *= scenario.slow_node_ratio;
    return time;
  };
  struct Read {
    host::Hedge::Source source;
    double from = 0;
    double until = 0;
    double late = 0;
    bool hedged = false;
  };
  for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
    std::vector<host::Hedge::Source> members;
    for (std::uint32_t column = 0; column < nodes; ++column)
      members.emplace_back("store" + std::to_string((column + stripe) % nodes), std::uint16_t{0});
    std::vector<Read> reads;
    std::uint32_t parity = 0;
    const auto start = [&](std::uint32_t column, double from) {
      const Duration late = hedge.late_after(bytes, members);
      const double wait =
          late == host::Hedge::duration_never ? 1e18 : static_cast<double>(late.count()) / unit_ns;
      reads.push_back(
          {members[column], from, from + draw((column + stripe) % nodes, stripe), from + wait, false});
    };
    const auto start_parity = [&](double from) { start(needed + parity++, from); };
    std::uint32_t skipped = 0;
    for (std::uint32_t column = 0; column < needed; ++column) {
      hedge.asked(members[column]);
      if (scenario.rules && skipped < 2 && hedge.skip(members[column], members)) {
        ++skipped;
        start_parity(0);
      } else {
        start(column, 0);
      }
    }
    result.needed += needed;
    double now = 0;
    while (true) {
      // What happens next: enough has come, or a read is late.
      std::vector<double> ends;
      for (const Read& read : reads) ends.push_back(read.until);
      std::sort(ends.begin(), ends.end());
      const double there = ends[needed - 1];
      Read* late = nullptr;
      for (Read& read : reads) {
        const bool waits = !read.hedged && read.late < read.until && read.late < there;
        if (waits && (late == nullptr || read.late < late->late)) late = &read;
      }
      if (!scenario.rules || late == nullptr || parity == 2) {
        now = there;
        break;
      }
      late->hedged = true;
      const double at = late->late;
      if (!hedge.hedge(1)) continue;
      ++result.extra;
      start_parity(at);
    }
    for (const Read& read : reads) {
      const Duration took(static_cast<std::int64_t>((std::min(read.until, now) - read.from) * unit_ns));
      read.until <= now ? hedge.came(read.source, bytes, took) : hedge.gave_up(read.source, bytes, took);
    }
    result.times.push_back(now);
    result.parity_most = std::max<std::uint64_t>(result.parity_most, parity);
  }
  result.counters = hedge.counters();
  return result;
}

}  // namespace di::test
