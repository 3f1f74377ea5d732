#include "directory/lease.h"

#include <algorithm>

#include "base/assert.h"

namespace di::directory {

std::uint64_t LeaseTable::take(const Holder& holder, const RequestId& request,
                               std::vector<std::uint64_t> stripes, Instant now) {
  if (leases_.size() >= options_.leases_max) return 0;
  const std::uint64_t number = next_++;
  for (const std::uint64_t stripe : stripes) held_[stripe].leases.push_back(number);
  const Instant expires = now + options_.ttl;
  leases_.emplace(number, Lease{holder, request, std::move(stripes), expires, now + options_.cap});
  due_.emplace(expires, number);
  return number;
}

bool LeaseTable::renew(const Holder& holder, std::uint64_t lease, Instant now) {
  const auto at = leases_.find(lease);
  if (at == leases_.end() || at->second.holder != holder) return false;
  due_.erase({at->second.expires, lease});
  at->second.expires = std::min(std::max(at->second.expires, now + options_.ttl), at->second.cap);
  due_.emplace(at->second.expires, lease);
  return true;
}

bool LeaseTable::release(const Holder& holder, std::uint64_t lease) {
  const auto at = leases_.find(lease);
  if (at == leases_.end() || at->second.holder != holder) return false;
  end(at);
  return true;
}

std::size_t LeaseTable::release_holder(const Holder& holder) {
  std::size_t ended = 0;
  for (auto at = leases_.begin(); at != leases_.end();) {
    if (at->second.holder == holder) {
      at = end(at);
      ++ended;
    } else {
      ++at;
    }
  }
  return ended;
}

bool LeaseTable::holds(std::uint64_t stripe, std::uint64_t before) const {
  const auto held = held_.find(stripe);
  return held != held_.end() && held->second.leases.front() < before;
}

void LeaseTable::watch(std::uint64_t stripe, std::uint64_t before) {
  DI_ASSERT(holds(stripe, before));
  Hold& held = held_.at(stripe);
  held.watched = std::min(held.watched, before);
}

std::size_t LeaseTable::expire(Instant now) {
  std::size_t ended = 0;
  while (!due_.empty() && due_.begin()->first <= now) {
    const auto at = leases_.find(due_.begin()->second);
    DI_ASSERT(at != leases_.end());
    end(at);
    ++ended;
  }
  return ended;
}

LeaseTable::Leases::iterator LeaseTable::end(Leases::iterator at) {
  for (const std::uint64_t stripe : at->second.stripes) {
    const auto held = held_.find(stripe);
    DI_ASSERT(held != held_.end());
    Hold& hold = held->second;
    const auto mine = std::lower_bound(hold.leases.begin(), hold.leases.end(), at->first);
    DI_ASSERT(mine != hold.leases.end() && *mine == at->first);
    hold.leases.erase(mine);
    if (hold.watched != UINT64_MAX && (hold.leases.empty() || hold.leases.front() >= hold.watched)) {
      let_go_.push_back(stripe);
      hold.watched = UINT64_MAX;
    }
    if (hold.leases.empty()) held_.erase(held);
  }
  due_.erase({at->second.expires, at->first});
  return leases_.erase(at);
}

}  // namespace di::directory
