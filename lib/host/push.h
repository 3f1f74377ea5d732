// host/push.h: sealed pages on their way into another host's arena, segment by segment.
//
// A push, one per page and target:
//   state    event                                             next
//   queued   the window of its peer has room                   pushing; one DataPort::push per segment
//   queued   cancelled, the peer lost                          over
//   pushing  a segment is there                                pushing; progress when the prefix grew
//   pushing  a segment failed, cancelled                       ending; the others are cancelled
//   pushing  the last segment is there                         over
//   ending   the last segment is answered                      over
// The page is pinned until the push is over: nobody reads its bytes any more then.  What was first to
// go wrong is what the push ends with.
//
// Owner: the core of a di-kvd host.  Bounds: window pages of a peer under way; those queued by their
// owners (Serves, Handovers).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "host/pages.h"
#include "host/port.h"

namespace di::host {

struct PushCounters {
  std::uint64_t pages = 0;  // that arrived
  std::uint64_t bytes = 0;
  std::uint64_t failed = 0;
  std::uint64_t cancelled = 0;
};

class Pushes {
 public:
  struct Limits {
    std::size_t window = 8;  // pages of a peer; several segments of each are under way at a time
  };
  enum class For : std::uint8_t { serve, handover };
  using PushId = std::uint64_t;
  struct Progress {
    For purpose{};
    PushId id = 0;
    std::uint32_t groups = 0;  // segments [0, groups) are there
    bool over = false;         // the last one of this push
    Code code = Code::ok;
  };

  Pushes(const Limits& limits, Pages& pages, DataPort& data, Numbers& numbers);

  // `slot` is sealed here; `target` has as many blocks.
  PushId start(For purpose, const Peer& to, std::uint64_t transfer, const wire::SlotRef& target,
               std::uint32_t slot, transfer::Class cls);
  // Progress with `over` follows.
  void cancel(PushId id);
  // DataPort's answer.
  void pushed(std::uint64_t push, Code code);
  // What is queued for it ends; what is under way is ended by the data plane.
  void peer_lost(const Peer& peer);
  // Starts what the windows have room for.  After every event.
  void pump();
  // A queued push could begin, or there is progress to take.
  [[nodiscard]] bool waiting() const;
  [[nodiscard]] std::vector<Progress> take_progress() { return std::exchange(progress_, {}); }

  [[nodiscard]] std::size_t count() const { return pushes_.size(); }
  [[nodiscard]] const PushCounters& counters() const { return counters_; }
  // Adds the pins held here, by slot; says what disagrees.
  [[nodiscard]] Status check(std::map<std::uint32_t, std::uint32_t>& pins) const;

 private:
  enum class State : std::uint8_t { queued, pushing, ending };
  struct Push {
    For purpose{};
    Peer to;
    std::uint64_t transfer = 0;
    wire::SlotRef target;
    PinSet pins;  // the page
    transfer::Class cls{};
    State state = State::queued;
    std::uint32_t arrived = 0;  // bitmap of segments
    std::uint32_t groups = 0;   // told
    Code code = Code::ok;
    std::map<std::uint64_t, std::uint32_t> segments;  // number of a DataPort::push -> group
  };
  struct Window {
    std::deque<PushId> queued;
    std::size_t outstanding = 0;
  };

  void begin(PushId id, Push& push);
  void fail(Push& push, Code code);
  void over(PushId id);

  const Limits limits_;
  Pages& pages_;
  DataPort& data_;
  Numbers& numbers_;
  std::map<PushId, Push> pushes_;
  std::map<std::uint64_t, PushId> segments_;  // number of a DataPort::push -> push
  std::map<Peer, Window> windows_;
  PushId next_id_ = 1;
  std::vector<Progress> progress_;
  PushCounters counters_;
};

}  // namespace di::host
