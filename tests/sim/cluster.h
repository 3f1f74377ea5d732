// tests/sim/cluster.h: one run of a simulated fleet from a seed: a router, di-meta, one or two hosts, a
// store with or apart from the first, two prefill and two decode processes of one or two ranks; clients that
// ask and leave; faults; checks while it runs and at the end.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace di::sim {

struct Report {
  std::string failure;  // empty when everything held
  int requests = 0;
  int ok = 0;
  int cancelled = 0;
  int out_of_attempts = 0;
  int turned_away = 0;  // submits that found no rank up and were tried again
  int faults = 0;
  int lost = 0;  // messages, alone
  int reentries = 0;
  std::uint64_t cached_tokens = 0;
  std::uint64_t tokens = 0;
  std::uint64_t events = 0;
  std::uint64_t moved = 0;  // segments between machines
  // Of hosts as they are at the end.
  std::uint64_t cut = 0;            // fetches of which some was sooner computed
  std::uint64_t rebuilt = 0;        // pages of which columns were missing
  std::uint64_t repaired = 0;       // columns
  std::uint64_t cross_checked = 0;  // stripes
  std::uint64_t encoded_wrong = 0;  // of them; found since di-meta started
  std::uint64_t degraded = 0;       // stripes published without all columns
  double seconds = 0;               // of virtual time
  double slowest_s = 0;             // longest request, without those that stall
};

// Everything follows from `seed`.  `trace` prints every delivered message.
[[nodiscard]] Report run_cluster(std::uint64_t seed, bool trace);
// Nothing goes wrong but that one message of this number is lost, or none when so many are not sent: whoever
// waits for its answer asks again, and all is over in seconds.
[[nodiscard]] Report run_loss(std::uint64_t seed, std::uint16_t message, bool trace);
// Those messages.
[[nodiscard]] std::span<const std::uint16_t> said_again();

}  // namespace di::sim
