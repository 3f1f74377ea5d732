// rank/carry_out.h: what the engine thread does with a batch, and where the cached prefix of a sequence
// comes from.
//
// Pure but for the engine and the arena it is given; the thread that owns the engine calls it.  Bound:
// one batch.
#pragma once

#include <memory>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "kv/arena.h"
#include "rank/batch.h"

namespace di::rank {

// KV of a sequence's cached prefix in an arena.  Any thread.
class ArenaSource final : public engine::KvSource {
 public:
  // `slots` are the pages in chain order; blocks() is the sum of their counts.  `entry` tells readiness; a
  // source whose pages are all sealed has none (`sealed`).
  ArenaSource(std::shared_ptr<kv::ArenaClient> arena, kv::Layout layout, std::vector<wire::SlotRef> slots,
              std::uint32_t entry, bool sealed);

  [[nodiscard]] std::uint32_t blocks() const override { return blocks_; }
  [[nodiscard]] Readiness readiness() const override;
  void wait(std::uint32_t group, Duration at_most) override;
  // At least the pages in front of a block that failed.
  [[nodiscard]] std::vector<engine::SegmentRun> segments(std::uint32_t group) const override;

 private:
  std::shared_ptr<kv::ArenaClient> arena_;
  kv::Layout layout_;
  std::vector<wire::SlotRef> slots_;
  std::uint32_t entry_;
  bool sealed_;
  std::uint32_t blocks_ = 0;
};

// Carries `batch` out in the order of its fields.  `arena` is the one the batch was made for: its mapping
// outlives the batch even when the arena is lost meanwhile; null when the batch has neither slots nor
// exports.  `clock` is the product clock that step() is told.
[[nodiscard]] BatchDone carry_out(Batch batch, const std::shared_ptr<kv::ArenaClient>& arena,
                                  engine::Engine& engine, const Clock& clock);

}  // namespace di::rank
