// daemon/faults.h: the places of faults.def, armed by the parameter `fault.at`.
//
// `fault.at = "NAME[:n]=kill|stop|drop|delay"`, several between commas: at the n-th hit (default the
// first) of the named place the process kills itself (SIGKILL), stops itself (SIGSTOP), is told to
// drop what it was about to send, or to delay it.  A fault fires once: it is written to
// RUNDIR/faults/INSTANCE.NAME first, so that the restarted instance goes on.  The count of hits
// starts over with the process.
//
// Any thread hits; arming is done once, before threads start.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace di::daemon {

enum class FaultPoint : std::uint8_t {
#define DI_FAULT(name, program, sentence) name,
#include "daemon/faults.def"
#undef DI_FAULT
};

// What the caller does.  `delay`: at least `fault_delay`, by a liveness timer of its own.
enum class FaultAction : std::uint8_t { none, drop, delay };

struct FaultState {
  std::string_view name;
  std::string_view program;
  std::string_view sentence;
  std::uint64_t hits = 0;
  std::string armed;   // "kill:3", or empty
  bool fired = false;  // by this process or by an earlier one with the same run directory
};

// The cost when nothing is armed is one relaxed increment.
FaultAction fault(FaultPoint point);

// Syntax only; the message names what is wrong.
[[nodiscard]] Status fault_check(const std::string& spec);
// Arms `spec` for `instance`; faults that fired before stay off.
[[nodiscard]] Status fault_arm(const std::string& spec, const std::string& run_dir,
                               const std::string& instance);
// Whether something is to happen at `point`, or has happened there.
[[nodiscard]] bool fault_armed(FaultPoint point);
// All places, for `di-ctl show faults`.
[[nodiscard]] std::vector<FaultState> fault_states();
// For tests: forgets counts and what is armed.
void test_fault_reset();

}  // namespace di::daemon
