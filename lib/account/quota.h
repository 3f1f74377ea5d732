// account/quota.h: how many requests of one tenant run at a time.
//
// Owner: the loop thread of di-router.  A Ticket is the one owner of a place and gives it back when it
// goes, on every path; the book must outlive its tickets.  Bound: tenants that hold a place.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace di::account {

class Concurrency;

class Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&& other) noexcept
      : book_(std::exchange(other.book_, nullptr)), tenant_(std::move(other.tenant_)) {}
  Ticket& operator=(Ticket&& other) noexcept;
  ~Ticket() { release(); }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  void release();

 private:
  friend class Concurrency;
  Ticket(Concurrency* book, std::string tenant) : book_(book), tenant_(std::move(tenant)) {}
  Concurrency* book_ = nullptr;
  std::string tenant_;
};

class Concurrency {
 public:
  explicit Concurrency(std::uint32_t per_tenant_max) : per_tenant_max_(per_tenant_max) {}
  Concurrency(const Concurrency&) = delete;
  Concurrency& operator=(const Concurrency&) = delete;

  // nullopt when the tenant has all its places taken; nothing changes then.
  [[nodiscard]] std::optional<Ticket> acquire(const std::string& tenant);
  [[nodiscard]] std::uint64_t held() const { return held_; }

 private:
  friend class Ticket;
  void give_back(const std::string& tenant);

  std::uint32_t per_tenant_max_;
  std::uint64_t held_ = 0;
  std::map<std::string, std::uint32_t> by_tenant_;
};

}  // namespace di::account
