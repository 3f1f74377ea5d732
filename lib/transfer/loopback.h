// transfer/loopback.h: fabrics of several processes inside one, over a network that does what it is told:
// for the simulator and for tests.
//
// Time is the caller's: everything happens inside advance(), in an order that the seed determines.  The
// network delays, loses, damages, reorders and cuts; a fabric on it keeps the promises of
// transfer/fabric.h all the same.  A frame takes its bytes along when it leaves, so one that is under way
// at cancel still arrives, and is checked like any other.  A lost frame is sent again after `resend`, at
// most resends_max times: then the connection ends.
//
// Owner: one thread.  Bounds: transfer/fabric.h; window_bytes of copies under way per link.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transfer/budget.h"
#include "transfer/fabric.h"

namespace di::transfer {

struct LoopbackFaults {
  Duration delay_min = microseconds(50);  // of a frame, one way
  Duration delay_max = microseconds(50);
  double loss = 0;                // of a frame
  double flip = 0;                // of one bit in a frame with payload
  double reset = 0;               // of the connection, at a frame
  bool reorder = false;           // frames of one operation may pass those of another
  std::uint64_t bytes_per_s = 0;  // of each direction of each pair; 0: no limit
  Duration resend = milliseconds(200);
  unsigned resends_max = 8;
};

struct LoopbackOptions {
  std::uint64_t seed = 1;
  LoopbackFaults faults;
  std::uint32_t max_unit_bytes = 1 << 20;
  std::uint64_t window_bytes = 8 << 20;
  Budget::Options budget;
  Duration stall_max = seconds(10);
};

class LoopbackNet {
 public:
  explicit LoopbackNet(const LoopbackOptions& options);
  ~LoopbackNet();  // after its fabrics
  LoopbackNet(const LoopbackNet&) = delete;
  LoopbackNet& operator=(const LoopbackNet&) = delete;

  // The fabric of a process; to destroy it is to kill the process: the others see their connections end.
  // `region` outlives it; null: nothing can be exposed.  One per peer.
  [[nodiscard]] std::unique_ptr<Fabric> attach(const Peer& self, Region* region);

  // Everything that is due up to and at `to`, in order of time.  Events are called from here only.
  void advance(Instant to);
  // When something is due; instant_never when nothing is.
  [[nodiscard]] Instant next_due() const;
  [[nodiscard]] Instant now() const;

  // From now on.
  void set_faults(const LoopbackFaults& faults);
  // Nothing passes from one process to the other, until mended.  The other direction is another matter.
  void cut(const Peer& from, const Peer& to);
  void mend(const Peer& from, const Peer& to);
  // The connections between the two end, both ways.
  void reset(const Peer& one, const Peer& other);
  // One bit of the next payload in this direction.
  void flip_next(const Peer& from, const Peer& to);

 private:
  friend class LoopbackFabric;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace di::transfer
