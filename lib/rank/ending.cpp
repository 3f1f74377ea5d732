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
                            const wire::request_done& done) {
  const Name name{router, scope.request, scope.attempt};
  wire::Envelope envelope = wire::Envelope::make(router, generation, scope, done);
  erase(name);
  if (kept_.size() >= endings_max) {
    const Name oldest = by_age_.begin()->second;
    erase(oldest);
    ++dropped_;
  }
  kept_.emplace(name, envelope);
  by_age_.emplace(next_age_, name);
  ages_.emplace(name, next_age_);
  ++next_age_;
  return envelope;
}

void Endings::acknowledge(const std::string& router, const wire::Scope& scope) {
  erase(Name{router, scope.request, scope.attempt});
}

void Endings::forget(const std::string& router) {
  std::vector<Name> gone;
  for (auto it = kept_.lower_bound(Name{router, RequestId{}, 0}); it != kept_.end() && std::get<0>(it->first) == router;
       ++it) {
    gone.push_back(it->first);
  }
  for (const Name& name : gone) erase(name);
}

std::vector<wire::Envelope> Endings::of(const std::string& router) const {
  std::vector<wire::Envelope> out;
  for (auto it = kept_.lower_bound(Name{router, RequestId{}, 0}); it != kept_.end() && std::get<0>(it->first) == router;
       ++it) {
    out.push_back(it->second);
  }
  return out;
}

void Endings::erase(const Name& name) {
  const auto age = ages_.find(name);
  if (age == ages_.end()) return;
  by_age_.erase(age->second);
  ages_.erase(age);
  kept_.erase(name);
}

}  // namespace di::rank
