// directory/frees.h: slots of stores that nothing in the directory names any more.
//
// Freeing is two-phase (I3 of spec/store.md): out of the directory first, then `kv_free` when the time has come
// and no lease holds the stripe that was taken before: later plans do not name the column.  What a store that is away has to free waits
// until it is back and has told what it holds: a free that went before would be forgotten here when the store shows
// what it had then.  An entry is one column of a stripe on one store, or all that the store has of it.
//
// Pure.  Owner: the directory's thread.  Bound: one entry per column that was in the directory.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/time.h"
#include "directory/lease.h"

namespace di::directory {

class Frees {
 public:
  static constexpr std::uint32_t every_column = UINT32_MAX;

  // Under `leases` as they are now.  Of two for the same column the later counts.
  void schedule(const LeaseTable& leases, std::uint32_t store, std::uint64_t stripe, std::uint32_t column,
                std::uint64_t bytes, Instant at);
  // It is there, and has told what it holds.
  void store_ready(std::uint32_t store, Instant now);
  void store_away(std::uint32_t store);
  // It will not be back: nothing is to be freed there.
  void store_gone(std::uint32_t store);

  struct Due {
    std::uint32_t store = 0;
    std::uint64_t stripe = 0;
    std::uint32_t column = 0;
  };
  // Takes out what is due and held by no lease of before; has the leases watch the rest of it.
  [[nodiscard]] std::vector<Due> take(LeaseTable& leases, Instant now);
  // Of what no lease keeps.
  [[nodiscard]] Instant next_due() const { return due_.empty() ? instant_never : due_.begin()->first; }

  // Something of the stripe on that store is on its way out: the column, or all of it.
  [[nodiscard]] bool pending(std::uint32_t store, std::uint64_t stripe, std::uint32_t column) const;
  [[nodiscard]] bool pending(std::uint32_t store, std::uint64_t stripe) const;
  [[nodiscard]] std::uint64_t bytes(std::uint32_t store) const;
  [[nodiscard]] std::size_t count() const { return pending_.size(); }

  void test_check() const;

 private:
  struct Id {
    std::uint32_t store;
    std::uint64_t stripe;
    std::uint32_t column;
    friend auto operator<=>(const Id&, const Id&) = default;
  };
  struct Pending {
    Instant at;
    std::uint64_t before = 0;  // only leases below hold it
    std::uint64_t bytes = 0;
  };
  std::map<Id, Pending> pending_;
  std::set<std::pair<Instant, Id>> due_;  // of stores that are ready
  std::map<std::uint64_t, std::set<Id>>
      held_;  // by stripe: was due, and waits for the end of leases of before
  std::set<std::uint32_t> ready_;
  std::map<std::uint32_t, std::uint64_t> bytes_;
};

}  // namespace di::directory
