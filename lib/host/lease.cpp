#include "host/lease.h"

#include <algorithm>

namespace di::host {

namespace {

constexpr Duration renew_min = milliseconds(100);  // a lease shorter than 300 ms is an error of its giver

}  // namespace

void Leases::hold(std::uint64_t lease, std::uint32_t ttl_ms, const Now& now) {
  if (lease == 0) return;
  Lease& held = leases_[lease];
  if (held.users++ > 0) return;
  held.every = std::max<Duration>(Duration(milliseconds(ttl_ms)) / 3, renew_min);
  held.renew_at = now.liveness + held.every;
  held.cap = now.liveness + cap_;
}

void Leases::hold_again(std::uint64_t lease) {
  if (const auto found = leases_.find(lease); found != leases_.end()) ++found->second.users;
}

void Leases::drop(std::uint64_t lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end() || --found->second.users > 0) return;
  leases_.erase(found);
  to_meta(wire::meta_release{{lease}});
}

void Leases::release_unused(std::uint64_t lease) {
  if (lease != 0 && !leases_.contains(lease)) to_meta(wire::meta_release{{lease}});
}

std::vector<std::uint64_t> Leases::on_time(const Now& now) {
  std::vector<std::uint64_t> over;
  wire::meta_renew renew;
  for (auto& [number, lease] : leases_) {
    if (lease.cap <= now.liveness) {
      over.push_back(number);
    } else if (lease.renew_at <= now.liveness) {
      renew.leases.push_back(number);
      lease.renew_at = now.liveness + lease.every;
    }
  }
  if (!renew.leases.empty()) to_meta(renew);
  for (const std::uint64_t number : over) {
    leases_.erase(number);
    to_meta(wire::meta_release{{number}});
  }
  return over;
}

Due Leases::next_due() const {
  Due due;
  for (const auto& [number, lease] : leases_) {
    due.sooner_liveness(lease.renew_at);
    due.sooner_liveness(lease.cap);
  }
  return due;
}

Status Leases::check(const std::map<std::uint64_t, std::size_t>& users) const {
  for (const auto& [number, lease] : leases_) {
    const auto counted = users.find(number);
    if (lease.users == 0 || counted == users.end() || counted->second != lease.users)
      return Error{Code::corrupt, 0, "a lease outlives its users, or they it"};
  }
  return {};
}

}  // namespace di::host
