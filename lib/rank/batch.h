// rank/batch.h: what a rank's core asks of its engine thread, and the answer.
//
// One batch is in flight per rank.  The engine thread carries it out in the order of the fields:
// releases, cancels, truncations, admissions, exports, then one step.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace di::rank {

// A request inside one rank's core; never reused within a process.
using Handle = std::uint64_t;

struct AdmitCommand {
  Handle handle = 0;
  engine::SequenceSpec spec;         // without `source`: the shell makes it from the next two
  std::uint32_t entry = 0;           // readiness entry in the arena's index page
  std::vector<wire::SlotRef> slots;  // pages of the cached prefix; empty when nothing is cached
};

struct ExportCommand {
  Handle handle = 0;
  engine::SequenceId sequence = 0;
  std::uint32_t first = 0;  // block of the sequence
  std::uint32_t count = 0;
  bool tail = false;  // the partial last block
  wire::SlotRef slot;
};

struct Batch {
  std::vector<engine::SequenceId> releases;
  std::vector<std::pair<Handle, engine::SequenceId>> cancels;
  std::vector<std::pair<engine::SequenceId, std::uint32_t>> truncations;  // (sequence, blocks)
  std::vector<AdmitCommand> admissions;
  std::vector<ExportCommand> exports;
  engine::StepPlan plan;

  [[nodiscard]] bool empty() const {
    return releases.empty() && cancels.empty() && truncations.empty() && admissions.empty() &&
           exports.empty() && plan.rows.empty();
  }
};

struct Admitted {
  Handle handle = 0;
  Result<engine::SequenceId> sequence = Error{};
};

struct Exported {
  Handle handle = 0;
  std::uint32_t first = 0;
  bool tail = false;
  Result<std::vector<std::uint32_t>> crcs = Error{};  // one CRC32C per segment
};

struct BatchDone {
  std::vector<std::pair<Handle, bool>> cancelled;  // true: over, to be released
  std::vector<Admitted> admitted;
  std::vector<Exported> exported;
  engine::StepResult step;
  Duration step_took{};  // of the step alone
};

}  // namespace di::rank
