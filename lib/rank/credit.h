// rank/credit.h: how much work a rank grants each router.
//
// Granted minus taken is what a router may still send.  Both are totals since both generations began, so a
// bind that is on its way counts once, whichever message is older.  The book keeps the sum of open grants at the
// rank's free room, shared evenly: what one router fills is taken back from the others, or they would bind to
// a full rank while another has nothing to do.  A bind that crosses with such a credit is refused; the credit
// that says why goes out in front of the refusal.
// Owner: the rank's core.  Bound: routers_max.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "wire/envelope.h"

namespace di::rank {

inline constexpr std::size_t routers_max = 64;

class CreditBook {
 public:
  // A router (re)appears: its account starts over.  Both sides reset with either generation.
  void open(const std::string& router, std::uint32_t generation);
  void close(const std::string& router);
  // A bind or seat request with this number and predicted cost arrived from `router`.
  void take(const std::string& router, std::uint64_t bind, std::uint64_t cost_us);
  // Sets the room: requests and predicted work that may still be sent by all routers together.
  void grant(std::uint32_t free_requests, std::uint64_t free_us);

  // True when some account changed since take_changed() was called last for it.
  // Calls visit(router, generation, credit) for each; the caller fills in the load fields.
  template <class F>
  void take_changed(F visit) {
    for (auto& [router, account] : accounts_) {
      if (!account.changed) continue;
      account.changed = false;
      wire::rank_credit credit;
      credit.seq = ++account.seq;
      credit.granted_us = account.granted_us;
      credit.granted_requests = account.granted_requests;
      credit.last_bind = account.last_bind;
      visit(router, account.generation, credit);
    }
  }
  // Load fields moved: every router hears of it with the next take_changed().
  void touch();
  // Grants that routers have not used yet, for `show gauges`.
  [[nodiscard]] std::uint64_t open_requests() const;

 private:
  struct Account {
    std::uint32_t generation = 0;
    std::uint64_t seq = 0;
    std::uint64_t granted_us = 0;
    std::uint64_t granted_requests = 0;
    std::uint64_t taken_us = 0;
    std::uint64_t taken_requests = 0;
    std::uint64_t last_bind = 0;
    bool changed = true;
  };
  std::map<std::string, Account> accounts_;
};

}  // namespace di::rank
