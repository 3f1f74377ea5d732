// The whole fleet's cores on one clock, from a seed: `sim_cluster --seed N` runs one seed and prints every
// message, `--seeds N` that many from 1 (or `--from N`) on, and a tenth as many with each message that is
// said again lost (`--lost NAME` with one seed).  What a seed finds gets a unit test of its core:
// a seed means something else as soon as the simulation changes.
#include "tests/sim/cluster.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "wire/messages.h"

namespace {

bool run(std::uint64_t seed, std::optional<std::uint16_t> lost, bool trace, di::sim::Report& sum) {
  // Before it runs: a panic leaves this as the last line.
  const std::string without = lost ? std::string(di::wire::message_name(*lost)) : "";
  std::printf("seed=%llu lost=%s ", static_cast<unsigned long long>(seed), without.c_str());
  if (trace) std::printf("\n");
  std::fflush(stdout);
  const di::sim::Report report =
      lost ? di::sim::run_loss(seed, *lost, trace) : di::sim::run_cluster(seed, trace);
  std::printf(
      "requests=%d ok=%d cancelled=%d out_of_attempts=%d faults=%d reentries=%d tokens=%llu "
      "cached_tokens=%llu "
      "moved=%llu events=%llu virtual_s=%.1f slowest_s=%.1f\n",
      report.requests, report.ok, report.cancelled, report.out_of_attempts, report.faults, report.reentries,
      static_cast<unsigned long long>(report.tokens), static_cast<unsigned long long>(report.cached_tokens),
      static_cast<unsigned long long>(report.moved), static_cast<unsigned long long>(report.events),
      report.seconds, report.slowest_s);
  sum.requests += report.requests;
  sum.ok += report.ok;
  sum.cancelled += report.cancelled;
  sum.out_of_attempts += report.out_of_attempts;
  sum.faults += report.faults;
  sum.reentries += report.reentries;
  sum.tokens += report.tokens;
  sum.cached_tokens += report.cached_tokens;
  sum.events += report.events;
  sum.moved += report.moved;
  sum.lost += report.lost;
  sum.cut += report.cut;
  sum.rebuilt += report.rebuilt;
  sum.repaired += report.repaired;
  sum.cross_checked += report.cross_checked;
  sum.encoded_wrong += report.encoded_wrong;
  sum.degraded += report.degraded;
  if (report.failure.empty()) return true;
  std::printf("FAILED seed=%llu lost=%s: %s\n", static_cast<unsigned long long>(seed), without.c_str(),
              report.failure.c_str());
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t seeds = 200;
  std::uint64_t from = 1;
  bool one = false;
  bool trace = false;
  std::optional<std::uint16_t> lost;
  for (int i = 1; i < argc; ++i) {
    if (i + 1 < argc && std::strcmp(argv[i], "--seed") == 0) {
      from = std::strtoull(argv[++i], nullptr, 10);
      one = trace = true;
    } else if (i + 1 < argc && std::strcmp(argv[i], "--seeds") == 0) {
      seeds = std::strtoull(argv[++i], nullptr, 10);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--from") == 0) {
      from = std::strtoull(argv[++i], nullptr, 10);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--lost") == 0) {
      const std::string name = argv[++i];
      for (const std::uint16_t message : di::sim::said_again()) {
        if (di::wire::message_name(message) == name) lost = message;
      }
    } else {
      std::fprintf(stderr, "usage: sim_cluster [--seed N [--lost MESSAGE]] [--from N] [--seeds N]\n");
      return 64;
    }
  }
  di::sim::Report sum;
  if (one) return run(from, lost, trace, sum) ? 0 : 1;
  int failed = 0;
  for (std::uint64_t seed = from; seed < from + seeds; ++seed)
    failed += run(seed, std::nullopt, false, sum) ? 0 : 1;
  std::printf(
      "seeds=%llu failed=%d requests=%d ok=%d cancelled=%d out_of_attempts=%d faults=%d reentries=%d "
      "tokens=%llu "
      "cached_tokens=%llu moved=%llu events=%llu\n",
      static_cast<unsigned long long>(seeds), failed, sum.requests, sum.ok, sum.cancelled,
      sum.out_of_attempts, sum.faults, sum.reentries, static_cast<unsigned long long>(sum.tokens),
      static_cast<unsigned long long>(sum.cached_tokens), static_cast<unsigned long long>(sum.moved),
      static_cast<unsigned long long>(sum.events));
  // A fleet that never hits and never re-enters would prove nothing.
  std::printf(
      "cut=%llu rebuilt=%llu repaired=%llu cross_checked=%llu encoded_wrong=%llu degraded=%llu\n",
      static_cast<unsigned long long>(sum.cut), static_cast<unsigned long long>(sum.rebuilt),
      static_cast<unsigned long long>(sum.repaired), static_cast<unsigned long long>(sum.cross_checked),
      static_cast<unsigned long long>(sum.encoded_wrong), static_cast<unsigned long long>(sum.degraded));
  if (seeds >= 100 && (sum.cached_tokens == 0 || sum.reentries == 0 || sum.cancelled == 0 || sum.moved == 0 ||
                       sum.cut == 0 || sum.rebuilt == 0 || sum.repaired == 0 || sum.cross_checked == 0 ||
                       sum.encoded_wrong == 0 || sum.degraded == 0)) {
    std::printf(
        "FAILED: nothing was cached, re-entered, cancelled, moved, cut, rebuilt, repaired, cross-checked, "
        "found wrong or degraded\n");
    ++failed;
  }
  for (const std::uint16_t message : di::sim::said_again()) {
    di::sim::Report losses;
    for (std::uint64_t seed = from; seed < from + seeds / 10; ++seed)
      failed += run(seed, message, false, losses) ? 0 : 1;
    if (seeds < 50 || losses.lost > 0) continue;
    std::printf("FAILED: no %s was lost\n", std::string(di::wire::message_name(message)).c_str());
    ++failed;
  }
  return failed == 0 ? 0 : 1;
}
