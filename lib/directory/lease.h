// directory/lease.h: which stripes may still be read under a plan.
//
// A plan takes one lease over its stripes, bound to the request and to the holder (instance and
// generation) that asked.  It lives `ttl` unless renewed, never longer than `cap`, and ends with its
// holder.  While a stripe is held it is not freed on its store, so no slot is written again under a
// reader; whoever waits to free it has it watched, and hears when the last lease over it that is older than the wait
// has ended: numbers are counted up, and a later plan names nothing that is to be freed.
// Pure: time is given; it is the monotonic clock's (path.md section 1).
//
// Owner: the directory's thread.  Bound: Options::leases_max leases, each over at most the stripes of
// one plan; of what is watched, the held stripes.  Numbers start at Options::first, so that a holder of an earlier run of di-meta never
// renews or releases somebody else's.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/time.h"
#include "wire/ids.h"

namespace di::directory {

// Who acquired something: it is given back when this generation of this instance is lost.
struct Holder {
  std::string instance;
  std::uint32_t generation = 0;

  friend auto operator<=>(const Holder&, const Holder&) = default;
};

inline constexpr Duration lease_ttl = seconds(10);
inline constexpr Duration lease_cap = seconds(120);

class LeaseTable {
 public:
  struct Options {
    Duration ttl = lease_ttl;
    Duration cap = lease_cap;
    // A host daemon has a plan per fetch in flight; 65,536 is 64 hosts with 1,024 each.
    std::size_t leases_max = 65536;
    std::uint64_t first = 1;
  };

  explicit LeaseTable(Options options) : options_(options), next_(options.first) {}

  // The number of the new lease; 0 when the table is full.
  [[nodiscard]] std::uint64_t take(const Holder& holder, const RequestId& request,
                                   std::vector<std::uint64_t> stripes, Instant now);
  // False for a lease that is not there or is another holder's.  At its cap a lease stays as it is.
  bool renew(const Holder& holder, std::uint64_t lease, Instant now);
  bool release(const Holder& holder, std::uint64_t lease);
  // All leases of the holder; returns how many.
  std::size_t release_holder(const Holder& holder);
  // Ends the leases that are due; returns how many.
  std::size_t expire(Instant now);

  [[nodiscard]] bool holds(std::uint64_t stripe) const { return held_.contains(stripe); }
  // By a lease with a number below `before`.
  [[nodiscard]] bool holds(std::uint64_t stripe, std::uint64_t before) const;
  // Larger than the number of every lease so far.
  [[nodiscard]] std::uint64_t next() const { return next_; }
  // One that is held by such a lease (asserted).
  void watch(std::uint64_t stripe, std::uint64_t before);
  // Those of the watched that no such lease holds any more, by the lowest `before`, each once.
  [[nodiscard]] std::vector<std::uint64_t> take_let_go() { return std::exchange(let_go_, {}); }
  [[nodiscard]] std::size_t count() const { return leases_.size(); }
  // At once when take_let_go() has something.
  [[nodiscard]] Instant next_due() const {
    if (!let_go_.empty()) return Instant{};
    return due_.empty() ? instant_never : due_.begin()->first;
  }
  [[nodiscard]] Duration ttl() const { return options_.ttl; }
  [[nodiscard]] Duration cap() const { return options_.cap; }

 private:
  struct Lease {
    Holder holder;
    RequestId request;
    std::vector<std::uint64_t> stripes;
    Instant expires;
    Instant cap;
  };
  using Leases = std::map<std::uint64_t, Lease>;
  Leases::iterator end(Leases::iterator at);

  Options options_;
  std::uint64_t next_;
  Leases leases_;
  std::set<std::pair<Instant, std::uint64_t>> due_;
  struct Hold {
    std::vector<std::uint64_t> leases;   // as they came: in order
    std::uint64_t watched = UINT64_MAX;  // the lowest `before`
  };
  std::unordered_map<std::uint64_t, Hold> held_;  // by stripe; never iterated
  std::vector<std::uint64_t> let_go_;
};

}  // namespace di::directory
