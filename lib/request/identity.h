// request/identity.h: what all ranks of the router's model agree on, and by which their pages are named: the layout
// of the cache and the revision of the weights.
//
// di-meta refuses a rank that differs from those that are there, and only from those: when all were away, what
// comes may be another model under the same name, and nothing that was cached or begun with the old one is
// of use to it.  One that the router still has may be gone for di-meta already: what then comes beside it waits
// until it is gone here too.  Pure; owner: the loop thread of di-router.  Bound: the ranks' instances that are up.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "kv/layout.h"
#include "wire/messages.h"

namespace di::request {

class Identity {
 public:
  enum class Joined { same, first, other };
  // The instance is up, perhaps again.  `other`: every one that was is gone, and this is another model; what was
  // derived from layout() and revision() is stale.  Errors: invalid (a layout that this build does not
  // read), exists (ranks with another layout or revision are up; it must not be used, and waits).
  Result<Joined> join(const wire::Member& rank);
  // The instance of this number is gone.  Says who waits, when it was the last one that was used: those may join()
  // now, and whoever is first decides for the others.
  std::vector<std::uint32_t> leave(std::uint32_t id);
  // Was refused beside those that are up, or were until now.
  [[nodiscard]] bool waits(std::uint32_t id) const { return waiting_.contains(id); }

  // After the first join().
  [[nodiscard]] const kv::Layout& layout() const { return *layout_; }
  [[nodiscard]] const Key& revision() const { return revision_; }
  [[nodiscard]] bool script() const { return script_; }

 private:
  std::optional<kv::Layout> layout_;
  Key revision_;
  bool script_ = false;
  std::set<std::uint32_t> up_;
  std::set<std::uint32_t> waiting_;
};

}  // namespace di::request
