// host/lease.h: the leases of plans and repairs.  Each lives as long as somebody uses it: a read that was
// planned under it, a rebuild.  It is renewed every third of its life, at most for `cap`.
//
// Leases of a directory that is lost are forgotten: its successor knows none of them, and the stores free
// nothing while no directory tells them to.  Who used one and drops it later drops nothing.
//
// Owner: the core of a di-kvd host.  Bounds: those of its users.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "host/port.h"

namespace di::host {

class Leases {
 public:
  Leases(Duration cap, const Peers& peers, Outbox& out) : cap_(cap), peers_(peers), out_(out) {}

  // One more uses it.  0 is no lease.
  void hold(std::uint64_t lease, std::uint32_t ttl_ms, const Now& now);
  // One more of a lease that is held; nothing when it is forgotten.
  void hold_again(std::uint64_t lease);
  // One less; the last gives it back.
  void drop(std::uint64_t lease);
  // A plan that nobody used.
  void release_unused(std::uint64_t lease);
  void meta_lost() { leases_.clear(); }

  // Renews; returns the leases whose time is over for good, which are given back and forgotten.
  [[nodiscard]] std::vector<std::uint64_t> on_time(const Now& now);
  [[nodiscard]] Due next_due() const;
  [[nodiscard]] std::size_t count() const { return leases_.size(); }

  // `users`: how many there are of each.
  [[nodiscard]] Status check(const std::map<std::uint64_t, std::size_t>& users) const;

 private:
  struct Lease {
    Duration every{};
    Instant renew_at;
    Instant cap;
    std::size_t users = 0;
  };
  template <class M>
  void to_meta(const M& message) {
    if (const std::optional<Peer> meta = peers_.meta_up())
      out_.push_back(wire::Envelope::make(meta->instance, meta->generation, {}, message));
  }

  const Duration cap_;
  const Peers& peers_;
  Outbox& out_;
  std::map<std::uint64_t, Lease> leases_;
};

}  // namespace di::host
