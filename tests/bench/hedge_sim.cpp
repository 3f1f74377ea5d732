// How long stripes take when a store is slow, by the rules that the host daemon ships: a Monte Carlo
// simulation (tests/support/hedge_model.h), not a measurement of this machine.
#include <cstdio>

#include "tests/support/hedge_model.h"

int main() {
  using di::test::HedgeScenario;
  constexpr std::uint32_t stripes = 50'000;
  constexpr std::uint64_t seed = 4;
  std::printf("stripes of 10+2 on 12 nodes, unit: the median read of a column; seed=%llu\n",
              static_cast<unsigned long long>(seed));
  std::printf("%-26s %-6s %7s %7s %7s %8s %7s %7s\n", "scenario", "rules", "p50", "p99", "p99.9", "extra",
              "skips", "hedges");
  double healthy = 0;
  const std::pair<const char*, HedgeScenario> scenarios[] = {
      {"healthy", {}},
      {"1 % of reads 20x slow", {.slow_read_chance = 0.01, .slow_read_ratio = 20}},
      {"one node 10x slow", {.slow_node_ratio = 10}},
      {"one node 3x slow", {.slow_node_ratio = 3}},
  };
  for (const auto& [name, scenario] : scenarios) {
    for (const bool rules : {false, true}) {
      HedgeScenario with = scenario;
      with.rules = rules;
      const di::test::HedgeResult result = di::test::hedge_model(with, stripes, seed);
      if (healthy == 0) healthy = result.quantile(0.99);
      std::printf("%-26s %-6s %7.2f %7.2f %7.2f %7.2f%% %7llu %7llu   p99 is %.2fx healthy\n", name,
                  rules ? "yes" : "no", result.quantile(0.5), result.quantile(0.99), result.quantile(0.999),
                  100 * result.extra_share(), static_cast<unsigned long long>(result.counters.skips),
                  static_cast<unsigned long long>(result.counters.hedges), result.quantile(0.99) / healthy);
    }
  }
  return 0;
}
