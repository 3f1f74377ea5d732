#include "transfer/exposure.h"

#include <algorithm>

#include "base/assert.h"

namespace di::transfer {

bool Exposures::open(const Peer& to, TransferId transfer, Access access, const std::vector<SlotName>& slots) {
  const auto [at, fresh] = exposures_.try_emplace({to, transfer});
  if (!fresh) return false;
  closed_.erase(at->first);
  at->second.access = access;
  for (const SlotName& name : slots) at->second.slots[name.slot] = name.generation;
  return true;
}

bool Exposures::extend(const Peer& to, TransferId transfer, const std::vector<SlotName>& slots) {
  const auto at = exposures_.find({to, transfer});
  if (at == exposures_.end()) return false;
  for (const SlotName& name : slots) at->second.slots[name.slot] = name.generation;
  return true;
}

bool Exposures::close(const Peer& to, TransferId transfer, Instant now) {
  const auto at = exposures_.find({to, transfer});
  if (at == exposures_.end()) return false;
  while (!closed_order_.empty() &&
         (closed_order_.size() >= closed_max || closed_order_.front().second <= now)) {
    const auto oldest = closed_.find(closed_order_.front().first);
    if (oldest != closed_.end() && oldest->second.until == closed_order_.front().second)
      closed_.erase(oldest);
    closed_order_.pop_front();
  }
  closed_.insert_or_assign(at->first, Closed{at->second.access, now + late_wait});
  closed_order_.emplace_back(at->first, now + late_wait);
  exposures_.erase(at);
  return true;
}

std::vector<TransferId> Exposures::transfers_of(const Peer& to) const {
  std::vector<TransferId> transfers;
  for (auto at = exposures_.lower_bound({to, 0}); at != exposures_.end() && at->first.first == to; ++at) {
    transfers.push_back(at->first.second);
  }
  return transfers;
}

Admission Exposures::check(const Peer& from, TransferId transfer, Access access, const Place& place,
                           Region& region, Instant now) const {
  const auto at = exposures_.find({from, transfer});
  if (at == exposures_.end()) {
    const auto closed = closed_.find({from, transfer});
    const bool late =
        closed != closed_.end() && closed->second.access == access && now < closed->second.until;
    return {Refusal{late ? Refused::late : Refused::transfer, Code::not_found}, {}};
  }
  if (at->second.access != access) return {Refusal{Refused::transfer, Code::denied}, {}};
  const auto slot = at->second.slots.find(place.slot.slot);
  if (slot == at->second.slots.end()) return {Refusal{Refused::transfer, Code::denied}, {}};
  if (slot->second != place.slot.generation) return {Refusal{Refused::stale, Code::stale}, {}};
  const Result<MutableByteView> bytes = region.resolve(place.slot);
  if (!bytes) {
    // What was opened: its owner has taken it back, and the end of the transfer is on its way here.
    if (bytes.error().code == Code::stale) return {Refusal{Refused::late, Code::stale}, {}};
    return {Refusal{Refused::bounds, Code::invalid}, {}};
  }
  if (place.bytes == 0 || place.offset > bytes->size() || place.bytes > bytes->size() - place.offset) {
    return {Refusal{Refused::bounds, Code::invalid}, {}};
  }
  return {std::nullopt, bytes->subspan(place.offset, place.bytes)};
}

std::uint64_t FabricCounters::*refusal_counter(Refused why) {
  switch (why) {
    case Refused::transfer:
      return &FabricCounters::refused_transfer;
    case Refused::late:
      return &FabricCounters::refused_late;
    case Refused::stale:
      return &FabricCounters::refused_stale;
    case Refused::bounds:
      return &FabricCounters::refused_bounds;
  }
  DI_PANIC("a refusal without a reason");
}

void Tickets::add(const Peer& to, const Ticket& ticket, Instant until) {
  granted_[ticket.secret] = {to, ticket, until};
}

std::optional<Tickets::Granted> Tickets::use(const std::array<std::uint8_t, ticket_bytes>& secret,
                                             Instant now) {
  const auto at = granted_.find(secret);
  if (at == granted_.end() || at->second.until <= now) return std::nullopt;
  Granted granted = at->second;
  granted_.erase(at);
  return granted;
}

std::size_t Tickets::expire(Instant now) {
  return std::erase_if(granted_, [now](const auto& entry) { return entry.second.until <= now; });
}

std::size_t Tickets::forget(const Peer& to) {
  return std::erase_if(granted_, [&to](const auto& entry) { return entry.second.to == to; });
}

Duration dial_pause(unsigned failures, Duration first, Duration longest) {
  Duration pause = first;
  for (unsigned n = 1; n < failures && pause < longest; ++n) pause *= 2;
  return std::min(pause, longest);
}

}  // namespace di::transfer
