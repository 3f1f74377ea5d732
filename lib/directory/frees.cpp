#include "directory/frees.h"

#include <algorithm>

#include "base/assert.h"

namespace di::directory {

void Frees::schedule(const LeaseTable& leases, std::uint32_t store, std::uint64_t stripe,
                     std::uint32_t column, std::uint64_t bytes, Instant at) {
  const Id id{store, stripe, column};
  const auto [known, fresh] = pending_.emplace(id, Pending{at, leases.next(), bytes});
  if (!fresh) {
    Pending& pending = known->second;
    const bool armed = due_.erase({pending.at, id}) > 0;
    pending.at = std::max(pending.at, at);
    pending.before = leases.next();
    if (armed) due_.emplace(pending.at, id);
    return;
  }
  bytes_[store] += bytes;
  if (ready_.contains(store)) due_.emplace(at, id);
}

void Frees::store_ready(std::uint32_t store, Instant now) {
  ready_.insert(store);
  for (auto at = pending_.lower_bound({store, 0, 0}); at != pending_.end() && at->first.store == store;
       ++at) {
    due_.erase({at->second.at, at->first});
    at->second.at = std::max(at->second.at, now);
    due_.emplace(at->second.at, at->first);
  }
}

void Frees::store_away(std::uint32_t store) {
  ready_.erase(store);
  for (auto at = pending_.lower_bound({store, 0, 0}); at != pending_.end() && at->first.store == store;
       ++at) {
    due_.erase({at->second.at, at->first});
  }
}

void Frees::store_gone(std::uint32_t store) {
  store_away(store);
  const auto first = pending_.lower_bound({store, 0, 0});
  const auto behind =
      std::find_if(first, pending_.end(), [&](const auto& entry) { return entry.first.store != store; });
  for (auto at = first; at != behind; ++at) {
    const auto held = held_.find(at->first.stripe);
    if (held == held_.end() || held->second.erase(at->first) == 0 || !held->second.empty()) continue;
    held_.erase(held);
  }
  pending_.erase(first, behind);
  bytes_.erase(store);
}

std::vector<Frees::Due> Frees::take(LeaseTable& leases, Instant now) {
  std::vector<Due> out;
  for (const std::uint64_t stripe : leases.take_let_go()) {
    const auto held = held_.extract(stripe);
    if (held.empty()) continue;
    for (const Id& id : held.mapped()) {
      if (ready_.contains(id.store)) due_.emplace(pending_.at(id).at, id);
    }
  }
  while (!due_.empty() && due_.begin()->first <= now) {
    const Id id = due_.begin()->second;
    const auto at = pending_.find(id);
    due_.erase(due_.begin());
    if (leases.holds(id.stripe, at->second.before)) {
      leases.watch(id.stripe, at->second.before);
      held_[id.stripe].insert(id);
      continue;
    }
    bytes_.at(id.store) -= at->second.bytes;
    pending_.erase(at);
    out.push_back({id.store, id.stripe, id.column});
  }
  return out;
}

bool Frees::pending(std::uint32_t store, std::uint64_t stripe, std::uint32_t column) const {
  return pending_.contains({store, stripe, column}) || pending_.contains({store, stripe, every_column});
}

bool Frees::pending(std::uint32_t store, std::uint64_t stripe) const {
  const auto at = pending_.lower_bound({store, stripe, 0});
  return at != pending_.end() && at->first.store == store && at->first.stripe == stripe;
}

std::uint64_t Frees::bytes(std::uint32_t store) const {
  const auto at = bytes_.find(store);
  return at == bytes_.end() ? 0 : at->second;
}

void Frees::test_check() const {
  std::map<std::uint32_t, std::uint64_t> bytes;
  std::size_t due = 0;
  for (const auto& [id, pending] : pending_) {
    bytes[id.store] += pending.bytes;
    const bool armed = due_.contains({pending.at, id});
    const auto held = held_.find(id.stripe);
    const bool waits = held != held_.end() && held->second.contains(id);
    DI_ASSERT(ready_.contains(id.store) ? armed || waits : !armed);
    due += armed ? 1 : 0;
  }
  DI_ASSERT(due == due_.size());
  for (const auto& [store, sum] : bytes_) DI_ASSERT(sum == bytes[store]);
}

}  // namespace di::directory
