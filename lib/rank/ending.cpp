#include "rank/ending.h"

namespace di::rank {

wire::Envelope ending_of_unknown(const wire::Envelope& stop, wire::Leg leg) {
  wire::request_done done;
  done.leg = static_cast<wire::U8>(leg);
  done.code = static_cast<wire::U16>(Code::not_found);
  done.reason = "the rank does not have the request";
  return wire::Envelope::make(stop.peer, stop.peer_generation, stop.scope, done);
}

wire::Envelope Endings::add(const std::string& router, std::uint32_t generation, const wire::Scope& scope,
                            const wire::request_done& done, Instant now) {
  const Name name{router, scope.request, scope.attempt};
  erase(name);
  if (kept_.size() >= endings_max) {
    const Name oldest = by_age_.begin()->second;
    erase(oldest);
    ++dropped_;
  }
  const Kept kept{wire::Envelope::make(router, generation, scope, done), next_age_++, now + ending_again};
  kept_.emplace(name, kept);
  by_age_.emplace(kept.age, name);
  again_.emplace(std::pair(kept.again, kept.age), name);
  return kept.message;
}

std::vector<wire::Envelope> Endings::due(Instant now) {
  std::vector<wire::Envelope> out;
  while (!again_.empty() && again_.begin()->first.first <= now) {
    const Name name = again_.begin()->second;
    again_.erase(again_.begin());
    Kept& kept = kept_.at(name);
    kept.again = now + ending_again;
    again_.emplace(std::pair(kept.again, kept.age), name);
    out.push_back(kept.message);
  }
  return out;
}

void Endings::acknowledge(const std::string& router, const wire::Scope& scope) {
  erase(Name{router, scope.request, scope.attempt});
}

void Endings::forget(const std::string& router) {
  std::vector<Name> gone;
  for (auto it = kept_.lower_bound(Name{router, RequestId{}, 0});
       it != kept_.end() && std::get<0>(it->first) == router; ++it) {
    gone.push_back(it->first);
  }
  for (const Name& name : gone) erase(name);
}

std::vector<wire::Envelope> Endings::of(const std::string& router) const {
  std::vector<wire::Envelope> out;
  for (auto it = kept_.lower_bound(Name{router, RequestId{}, 0});
       it != kept_.end() && std::get<0>(it->first) == router; ++it) {
    out.push_back(it->second.message);
  }
  return out;
}

void Endings::erase(const Name& name) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  by_age_.erase(found->second.age);
  again_.erase({found->second.again, found->second.age});
  kept_.erase(found);
}

}  // namespace di::rank
