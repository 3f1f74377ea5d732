// directory/repair.h: which stripe is repaired next, and what is being repaired.
//
//   state      event                            next
//   (none)     want                             waiting, by rank
//   waiting    start                            running
//   waiting    drop: it needs nothing any more  (none)
//   waiting    put_off: there is no place for it            waiting, after a pause as below; (none) when half of
//                                                           those that may wait are in one
//   running    finish, all is well              (none)
//   running    finish, or its host is lost, or no answer in repair_answer_max       waiting, after a pause
//              that doubles from backoff_min to backoff_max
// Rank: the fewer columns a stripe can still lose, the earlier; then those in use; then the longer waiting; and
// last what has lost nothing and is only to be cross-checked.
//
// Pure.  Owner: the directory's thread.  Bounds: Options.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "directory/lease.h"
#include "directory/placement.h"

namespace di::directory {

// The host renews its lease meanwhile; at the cap of a lease it may write no more.
inline constexpr Duration repair_answer_max = lease_cap;

class RepairQueue {
 public:
  struct Options {
    std::size_t waiting_max = 65536;
    std::size_t running_max = 16;
    std::size_t per_host_max = 2;   // a host refuses more than its kv.repairs_max
    std::uint64_t bytes_per_s = 0;  // read and written; 0: no repair
    Duration backoff_min = seconds(1);
    Duration backoff_max = seconds(60);
  };
  struct Rank {
    std::uint32_t redundancy = 0;  // columns it can lose before it cannot be read
    bool cold = false;
    bool cross_check = false;
    bool operator==(const Rank&) const = default;
    friend auto operator<=>(const Rank& a, const Rank& b) {
      return std::tuple(a.cross_check, a.redundancy, a.cold) <=>
             std::tuple(b.cross_check, b.redundancy, b.cold);
    }
  };
  struct Aim {
    std::uint16_t column = 0;
    Target target;
    std::uint64_t bytes = 0;
  };
  struct Running {
    Holder host;
    std::uint64_t lease = 0;
    std::vector<Aim> aims;
    Instant deadline;
    Rank rank;
    std::uint32_t attempts = 0;
  };

  explicit RepairQueue(Options options) : options_(options) {}
  // Hosts that can be asked.
  void set_hosts(std::size_t count) { hosts_ = count; }

  // Adds it, or changes its rank; nothing for one that is running.  False when the queue is full.
  bool want(std::uint64_t stripe, Rank rank);
  void drop(std::uint64_t stripe);

  // The stripe to start with now; it stays in the queue until start(), put_off() or drop().
  [[nodiscard]] std::optional<std::uint64_t> next(Instant now);
  void start(std::uint64_t stripe, Running running, std::uint64_t bytes, Instant now);
  // There is no place for it now.  False, and it is out: pauses may not fill the queue, where others have a place.
  bool put_off(std::uint64_t stripe, Instant now);
  // Takes it out; `again`: it waits for another attempt.
  Running finish(std::uint64_t stripe, bool again, Instant now);

  [[nodiscard]] const Running* running(std::uint64_t stripe) const;
  [[nodiscard]] const std::map<std::uint64_t, Running>& all_running() const { return running_; }
  [[nodiscard]] std::vector<std::uint64_t> running_of(const Holder& host) const;
  [[nodiscard]] std::optional<std::uint64_t> overdue(Instant now) const;
  // Ends all pauses.
  void hurry();

  [[nodiscard]] bool has(std::uint64_t stripe) const {
    return waiting_.contains(stripe) || running_.contains(stripe);
  }
  // It is here for nothing but a cross-check.
  [[nodiscard]] bool cross_checks(std::uint64_t stripe) const;
  [[nodiscard]] bool full() const { return waiting_.size() >= options_.waiting_max; }
  // Without what is only to be cross-checked.
  [[nodiscard]] std::size_t waiting() const { return waiting_.size() - cross_checks_waiting_; }
  [[nodiscard]] std::size_t running() const { return running_.size(); }
  [[nodiscard]] std::size_t waiting_at(std::uint32_t redundancy) const;
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] Instant next_due() const;

  void test_check() const;

 private:
  struct Waiting {
    Rank rank;
    std::uint64_t order = 0;
    std::uint32_t attempts = 0;
    Instant not_before;
    bool paused = false;
  };
  using Place = std::tuple<Rank, std::uint64_t, std::uint64_t>;  // rank, order, stripe
  void pause(std::uint64_t stripe, Waiting& entry, Instant now);

  [[nodiscard]] bool busy() const {
    return running_.size() >=
           std::min(options_.running_max, std::max<std::size_t>(hosts_, 1) * options_.per_host_max);
  }

  Options options_;
  std::size_t hosts_ = 0;
  std::map<std::uint64_t, Waiting> waiting_;
  std::size_t cross_checks_waiting_ = 0;
  std::set<Place> ready_;
  std::set<std::pair<Instant, std::uint64_t>> paused_;
  std::map<std::uint64_t, Running> running_;
  std::set<std::pair<Instant, std::uint64_t>> deadlines_;
  std::uint64_t next_order_ = 1;
  Instant budget_at_;  // the bytes of what was started are paid by then
};

}  // namespace di::directory
