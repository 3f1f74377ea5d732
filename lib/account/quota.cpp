#include "account/quota.h"

#include "base/assert.h"

namespace di::account {

Ticket& Ticket::operator=(Ticket&& other) noexcept {
  if (this != &other) {
    release();
    book_ = std::exchange(other.book_, nullptr);
    tenant_ = std::move(other.tenant_);
  }
  return *this;
}

void Ticket::release() {
  if (book_ != nullptr) std::exchange(book_, nullptr)->give_back(tenant_);
}

std::optional<Ticket> Concurrency::acquire(const std::string& tenant) {
  const auto found = by_tenant_.find(tenant);
  if (found != by_tenant_.end() && found->second >= per_tenant_max_) return std::nullopt;
  ++by_tenant_[tenant];
  ++held_;
  return Ticket(this, tenant);
}

void Concurrency::give_back(const std::string& tenant) {
  const auto found = by_tenant_.find(tenant);
  DI_ASSERT(found != by_tenant_.end() && found->second > 0 && held_ > 0);
  --held_;
  if (--found->second == 0) by_tenant_.erase(found);
}

}  // namespace di::account
