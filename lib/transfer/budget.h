// transfer/budget.h: whose turn it is on the link.
//
// Deficit round robin (Shreedhar and Varghese, 1995) between the classes of operations, by weight and in
// bytes, under an optional total rate.  The caller owns the queues and says what their heads are; a class
// that has nothing to send costs the others nothing.
//
// Pure; owner: whoever holds it.  Bound: a class saves up at most one round and one unit.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/time.h"
#include "transfer/fabric.h"

namespace di::transfer {

class Budget {
 public:
  struct Options {
    // A decode seat waits for a hand-over, a prefill for a fetch, nobody for a write-back.
    std::array<std::uint32_t, classes> weights = {4, 2, 1};
    std::uint64_t quantum_bytes = 256 << 10;  // of weight 1 in one round
    std::uint64_t bytes_per_s = 0;            // 0: as fast as the link is
    std::uint64_t burst_bytes = 4 << 20;      // sent at once after a pause
  };
  // The next unit of a class.
  struct Head {
    std::uint64_t bytes = 0;  // 0: no unit can go now
    bool backlog = false;     // there are units, though none can go now (their peers' windows are full)
  };
  using Heads = std::array<Head, classes>;

  explicit Budget(const Options& options);

  // The class whose head goes now; it is charged.  None when nothing can go, or not before ready_at().
  [[nodiscard]] std::optional<Class> take(const Heads& heads, Instant now);
  // When the total rate lets the next unit go; not later than `now` without a rate.
  [[nodiscard]] Instant ready_at(Instant now);

 private:
  void refill(Instant now);
  void next_class();

  const Options options_;
  std::array<std::uint64_t, classes> saved_{};
  std::size_t turn_ = 0;
  double tokens_;  // may be in debt by one unit: a unit larger than the burst goes all the same
  std::optional<Instant> filled_at_;
};

}  // namespace di::transfer
