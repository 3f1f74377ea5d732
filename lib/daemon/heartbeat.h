// daemon/heartbeat.h: background loops that must move.  A loop registers with the time after which its
// silence means that it hangs, and beats whenever it comes round; a daemon with a loop that is late is not
// ready, and says which loop it is (`show status`, GET /ready, di_heartbeat_late).
//
// Owner: loop thread; product time, as the loops' own timers.  Bound: one entry a loop, and loops are
// literals in the source.
#pragma once

#include <deque>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/time.h"

namespace di::daemon {

class Heartbeats {
 public:
  class Beat {
   public:
    // The loop moves.
    void operator()();

   private:
    friend class Heartbeats;
    Heartbeats* all_ = nullptr;
    std::string name_;
    Duration late_after_{0};
    Instant last_;
  };

  // `clock` outlives it.
  explicit Heartbeats(const Clock& clock) : clock_(clock) {}

  // Counts as a first beat.  What is returned lives as long as this; a name is given once.
  Beat& add(std::string_view name, Duration late_after);
  // Names of the loops that are late, with blanks between; empty: all move.
  [[nodiscard]] std::string late() const;
  [[nodiscard]] bool is_late(std::string_view name) const;

 private:
  [[nodiscard]] bool is_late(const Beat& beat) const;

  const Clock& clock_;
  std::deque<Beat> beats_;  // their addresses never change
};

}  // namespace di::daemon
