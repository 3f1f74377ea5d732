// host/repair.h: columns of stripes that di-meta wants made anew, because they are lost or their store
// leaves; and stripes that it wants cross-checked.
//
// A column that its store can still give is copied, which is the only way without parity; the others are made
// out of those that are left.  A repair, one per meta_repair:
//   state    event                                      next
//   (none)   meta_repair, a place and scratch           copying; lease held, columns read that can be
//   (none)   no place, no scratch, not our layout, no sense  (none); meta_repaired with why
//   copying  a column is there and matches              copying
//   copying  a column does not come, or does not match  copying; it is to be made
//   copying  nothing is read any more                   making, a rebuild of what is to be made; putting when
//                                                       nothing is; without what parity cannot make up for
//   making   the rebuild is done                        putting; kv_put per column whose store is up
//   making   the rebuild failed                         (none); meta_repaired: unreachable
//   making   what it makes is not what the plan says    (none); meta_repaired: corrupt, the stripe was encoded wrong
//   putting  the last kv_put_done, its store lost       (none); meta_repaired with what is written and what may be
// A cross-check is a repair without targets: it reads the data columns and parity 0, which is to be their XOR.
// That finds what no checksum can: a stripe that was encoded wrong, of which every column is what it was.
//   (none)   meta_repair without targets, all of those can be read, a place and scratch  copying
//   copying  a column does not come, or does not match  (none); meta_repaired: unreachable
//   copying  all of them are there and match            checking
//   checking a step                                     checking the next layer group; (none) after the last
//   checking the XOR of a group is not zero             (none); meta_repaired: corrupt
//
//   any      the lease or repair_wait is over           (none); meta_repaired: timeout, with what is written
//   any      di-meta lost                               (none)
// With (none) scratch and lease are given back, and reads are given up.  Its reads are the last of all
// (priority 2), and its steps, one layer group each, come after those of rebuilds and write-backs.
//
// Owner: the core of a di-kvd host.  Bounds: repairs_max, each with the scratch of one stripe.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "host/lease.h"
#include "host/pages.h"
#include "host/port.h"
#include "host/read.h"
#include "host/rebuild.h"
#include "wire/messages.h"

namespace di::host {

struct RepairCounters {
  std::uint64_t repairs = 0;
  std::uint64_t checks = 0;  // begun
  std::uint64_t groups_checked = 0;
  std::uint64_t refused = 0;
  std::uint64_t failed = 0;
  std::uint64_t columns = 0;  // written
  std::uint64_t copied = 0;   // of them, as their stores gave them
  std::uint64_t bytes = 0;
};

class Repairs {
 public:
  struct Limits {
    std::size_t repairs_max = 2;  // kv.repairs_max
    Duration repair_wait = seconds(60);
  };

  Repairs(const Limits& limits, Pages& pages, ArenaPort& port, DataPort& data, const Peers& peers,
          Reads& reads, Rebuilds& rebuilds, Leases& leases, Numbers& numbers, Outbox& out);

  void begin(const wire::Scope& scope, const wire::meta_repair& message, const Now& now);
  // Of reads for repairs.
  void read_progress(const Reads::Progress& progress);
  // Of rebuilds for repairs.
  void rebuild_progress(const Rebuilds::Progress& progress);
  // False when it is not one of these.
  bool put_done(const Peer& store, const wire::kv_put_done& done);
  void store_lost(const Peer& store);
  void meta_lost();
  void lease_over(std::uint64_t lease);
  void on_time(const Now& now);
  // Looks at one layer group of one stripe; false when there was none.
  bool step();
  [[nodiscard]] bool has_step() const;
  [[nodiscard]] Due next_due() const;

  [[nodiscard]] std::size_t count() const { return repairs_.size(); }
  [[nodiscard]] const RepairCounters& counters() const { return counters_; }
  // Adds scratch slots, reads and users of leases; says what disagrees.
  [[nodiscard]] Status check(std::set<std::uint32_t>& scratch, std::set<std::uint64_t>& reads,
                             std::map<std::uint64_t, std::size_t>& leases) const;

 private:
  enum class State : std::uint8_t { copying, making, putting, checking };
  struct Target {
    std::string instance;  // where it is to be written; of a cross-check nowhere
    std::uint16_t volume = 0;
    std::uint32_t slot = 0;
    std::uint64_t read = 0;      // the transfer that brings it; 0: none does
    Reads::Source source;        // of that
    bool copied = false;         // it is in its slot
    Peer store;                  // once it is asked
    std::uint64_t transfer = 0;  // exposed to a store on another machine
  };
  struct Repair {
    wire::Scope scope;
    std::uint64_t lease = 0;
    std::uint64_t stripe = 0;
    StripeRef plan;
    std::vector<wire::PutPage> pages;
    std::uint64_t tenant = 0;
    State state = State::copying;
    bool cross_check = false;
    std::uint32_t group = 0;                  // of a cross-check: the next to look at
    std::map<std::uint16_t, Target> targets;  // not yet written; of a cross-check what it reads
    std::vector<std::uint32_t> scratch;
    std::vector<std::uint32_t> written;
    std::vector<std::uint32_t> unanswered;  // asked for, and their stores lost
    Code code = Code::ok;                   // the first thing that went wrong
    Instant deadline;
  };
  using Found = std::map<std::uint64_t, Repair>::iterator;

  // Where a column can be read now.
  [[nodiscard]] const wire::Column* source_of(const StripePlan& plan, std::uint16_t column) const;
  [[nodiscard]] bool matches(const Repair& repair, std::uint16_t column) const;
  [[nodiscard]] Strip strip(const Repair& repair, std::uint16_t column, std::uint32_t group) const;
  // What comes when nothing is read any more.
  void go_on(Found found);
  void start_puts(Found found);
  void target_over(Found found, std::uint16_t column, Code code);
  // Answers and gives everything back.
  void end(Found found, Code code);
  void answer(const wire::Scope& scope, const wire::meta_repaired& message);

  const Limits limits_;
  Pages& pages_;
  ArenaPort& port_;
  DataPort& data_;
  const Peers& peers_;
  Reads& reads_;
  Rebuilds& rebuilds_;
  Leases& leases_;
  Numbers& numbers_;
  Outbox& out_;
  std::map<std::uint64_t, Repair> repairs_;  // by number
  std::uint64_t next_ = 1;
  std::map<std::uint64_t, std::uint64_t> by_stripe_;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint16_t>> by_transfer_;  // repair, column
  RepairCounters counters_;
};

}  // namespace di::host
