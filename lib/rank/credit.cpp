#include "rank/credit.h"

#include <algorithm>

namespace di::rank {

void CreditBook::open(const std::string& router, std::uint32_t generation) {
  if (accounts_.size() >= routers_max && !accounts_.contains(router)) return;
  Account account;
  account.generation = generation;
  accounts_.insert_or_assign(router, account);
}

void CreditBook::close(const std::string& router) {
  accounts_.erase(router);
}

void CreditBook::take(const std::string& router, std::uint64_t bind, std::uint64_t cost_us) {
  const auto found = accounts_.find(router);
  if (found == accounts_.end()) return;
  Account& account = found->second;
  ++account.taken_requests;
  account.taken_us += cost_us;
  account.last_bind = std::max(account.last_bind, bind);
  account.changed = true;
}

void CreditBook::grant(std::uint32_t free_requests, std::uint64_t free_us) {
  if (accounts_.empty()) return;
  const auto count = static_cast<std::uint32_t>(accounts_.size());
  // Rounded up: with more routers than room each may still try one, the rank refuses what is too much.
  const std::uint32_t share_requests = (free_requests + count - 1) / count;
  const std::uint64_t share_us = (free_us + count - 1) / count;
  for (auto& [router, account] : accounts_) {
    const std::uint64_t requests = account.taken_requests + share_requests;
    const std::uint64_t us = account.taken_us + share_us;
    if (requests != account.granted_requests || us != account.granted_us) account.changed = true;
    account.granted_requests = requests;
    account.granted_us = us;
  }
}

void CreditBook::touch() {
  for (auto& [router, account] : accounts_) account.changed = true;
}

std::uint64_t CreditBook::open_requests() const {
  std::uint64_t open = 0;
  for (const auto& [router, account] : accounts_) {
    open += account.granted_requests - std::min(account.granted_requests, account.taken_requests);
  }
  return open;
}

}  // namespace di::rank
