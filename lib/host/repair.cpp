#include "host/repair.h"

#include <algorithm>

namespace di::host {

Repairs::Repairs(const Limits& limits, Pages& pages, DataPort& data, const Peers& peers, Rebuilds& rebuilds,
                 Leases& leases, Numbers& numbers, Outbox& out)
    : limits_(limits),
      pages_(pages),
      data_(data),
      peers_(peers),
      rebuilds_(rebuilds),
      leases_(leases),
      numbers_(numbers),
      out_(out) {}

void Repairs::answer(const wire::Scope& scope, std::uint64_t stripe, Code code, std::vector<std::uint32_t> written) {
  const std::optional<Peer> meta = peers_.meta_up();
  if (!meta) return;
  out_.push_back(wire::Envelope::make(meta->instance, meta->generation, {scope.request, scope.attempt, 0, 0},
                                      wire::meta_repaired{stripe, static_cast<std::uint16_t>(code), std::move(written)}));
}

void Repairs::begin(const wire::Scope& scope, const wire::meta_repair& message, const Now& now) {
  const std::uint64_t stripe = message.stripe.stripe;
  // The repair keeps it, or it is given back at once.
  leases_.hold(message.lease, message.ttl_ms, now);
  const auto refuse = [&](Code code) {
    ++counters_.refused;
    answer(scope, stripe, code, {});
    leases_.drop(message.lease);
  };
  if (by_stripe_.contains(stripe)) return leases_.drop(message.lease);  // said twice: one answer is enough
  if (repairs_.size() >= limits_.repairs_max || !pages_.has_layout()) return refuse(Code::busy);
  if (message.fingerprint != pages_.layout().fingerprint()) return refuse(Code::unsupported);
  Result<std::shared_ptr<StripePlan>> plan = StripePlan::of(pages_.layout(), message.stripe);
  if (!plan) return refuse(Code::invalid);
  const kv::StripeShape& shape = (*plan)->shape;
  if (message.pages.size() != shape.pages() || message.targets.empty() ||
      message.targets.size() > shape.parity_columns()) {
    return refuse(Code::invalid);
  }
  for (std::uint32_t page = 0; page < shape.pages(); ++page) {
    const wire::PutPage& described = message.pages[page];
    if (described.keys.size() != shape.page_blocks(page)) return refuse(Code::invalid);
    (*plan)->first_keys[page] = described.keys.front();
  }
  Repair repair;
  std::vector<std::uint32_t> blocks;
  for (const wire::Column& column : message.targets) {
    if (!shape.is_stored(column.column) || repair.targets.contains(column.column)) return refuse(Code::invalid);
    Target& target = repair.targets[column.column];
    target.instance = column.instance;
    target.volume = column.volume;
  }
  for (const auto& [number, target] : repair.targets) {
    blocks.push_back(shape.is_parity(number) ? shape.parity_slot_blocks() : shape.page_blocks(shape.page_of(number)));
  }
  Result<std::vector<std::uint32_t>> slots = pages_.take(blocks, PageState::scratch);
  if (!slots) return refuse(Code::busy);
  repair.scratch = *std::move(slots);
  std::vector<std::pair<std::uint16_t, std::uint32_t>> columns;
  for (auto& [number, target] : repair.targets) {
    target.slot = repair.scratch[columns.size()];
    columns.emplace_back(number, target.slot);
  }
  repair.scope = scope;
  repair.lease = message.lease;
  repair.stripe = stripe;
  repair.plan = *std::move(plan);
  repair.pages = message.pages;
  repair.tenant = message.tenant;
  repair.deadline = now.liveness + limits_.repair_wait;
  ++counters_.repairs;
  const std::uint64_t number = next_++;
  const Repair& begun = repairs_.emplace(number, std::move(repair)).first->second;
  by_stripe_.emplace(stripe, number);
  rebuilds_.repair(number, begun.plan, columns, 2, begun.lease);
}

void Repairs::rebuild_progress(const Rebuilds::Progress& progress) {
  const Found found = repairs_.find(progress.repair);
  if (found == repairs_.end() || found->second.putting) return;
  if (progress.kind == Rebuilds::Progress::Kind::failed) return end(found, Code::unreachable);
  rebuilds_.drop_repair(progress.repair);
  start_puts(found);
}

void Repairs::start_puts(Found found) {
  Repair& repair = found->second;
  repair.putting = true;
  wire::kv_put put;
  put.stripe = repair.stripe;
  put.fingerprint = pages_.layout().fingerprint();
  put.pages = repair.pages;
  put.tenant = repair.tenant;
  put.code = repair.plan->code;
  std::vector<std::uint16_t> unreachable;
  for (auto& [number, target] : repair.targets) {
    const std::optional<Peer> store = peers_.store_up(target.instance);
    put.volume = target.volume;
    put.column = number;
    put.slot = pages_.ref({target.slot, 0, pages_.at(target.slot).blocks, 0});
    put.transfer = 0;
    if (store && peers_.remote(*store)) {
      const std::uint64_t transfer = numbers_.transfer++;
      if (data_.expose(*store, transfer, transfer::Access::read, {{put.slot.slot, put.slot.generation}}))
        put.transfer = target.transfer = transfer;
    }
    if (!store || (peers_.remote(*store) && put.transfer == 0)) {
      unreachable.push_back(number);
      continue;
    }
    target.store = *store;
    out_.push_back(wire::Envelope::make(store->instance, store->generation, {}, put));
  }
  for (const std::uint16_t number : unreachable) {
    const bool last = repair.targets.size() == 1;
    target_over(found, number, Code::unreachable);
    if (last) return;
  }
}

void Repairs::target_over(Found found, std::uint16_t column, Code code) {
  Repair& repair = found->second;
  const auto target = repair.targets.find(column);
  if (target->second.transfer != 0) data_.conceal(target->second.store, target->second.transfer);
  repair.targets.erase(target);
  if (code == Code::ok) {
    repair.written.push_back(column);
    ++counters_.columns;
    counters_.bytes += repair.plan->shape.column_bytes(column);
  } else if (repair.code == Code::ok) {
    repair.code = code;
  }
  if (repair.targets.empty()) end(found, repair.code);
}

bool Repairs::put_done(const Peer& store, const wire::kv_put_done& done) {
  const auto named = by_stripe_.find(done.stripe);
  if (named == by_stripe_.end()) return false;
  const Found found = repairs_.find(named->second);
  const auto target = found->second.targets.find(done.column);
  if (!found->second.putting || target == found->second.targets.end() || target->second.store != store) return true;
  target_over(found, done.column, static_cast<Code>(done.code));
  return true;
}

void Repairs::store_lost(const Peer& store) {
  for (auto next = repairs_.begin(); next != repairs_.end();) {
    const Found found = next++;
    std::vector<std::uint16_t> lost;
    for (const auto& [number, target] : found->second.targets) {
      if (target.store == store) lost.push_back(number);
    }
    for (const std::uint16_t number : lost) {
      const bool last = found->second.targets.size() == 1;
      target_over(found, number, Code::unreachable);
      if (last) break;
    }
  }
}

void Repairs::end(Found found, Code code) {
  const std::uint64_t number = found->first;
  const Repair over = std::move(found->second);
  repairs_.erase(found);
  by_stripe_.erase(over.stripe);
  rebuilds_.drop_repair(number);
  for (const auto& [column, target] : over.targets) {
    if (target.transfer != 0) data_.conceal(target.store, target.transfer);
  }
  for (const std::uint32_t slot : over.scratch) pages_.scrap(slot);
  if (code != Code::ok) ++counters_.failed;
  answer(over.scope, over.stripe, code, over.written);
  leases_.drop(over.lease);
}

void Repairs::meta_lost() {
  while (!repairs_.empty()) end(repairs_.begin(), Code::unreachable);
}

void Repairs::lease_over(std::uint64_t lease) {
  for (auto next = repairs_.begin(); next != repairs_.end();) {
    const Found found = next++;
    if (found->second.lease == lease) end(found, Code::timeout);
  }
}

void Repairs::on_time(const Now& now) {
  for (auto next = repairs_.begin(); next != repairs_.end();) {
    const Found found = next++;
    if (found->second.deadline <= now.liveness) end(found, Code::timeout);
  }
}

Due Repairs::next_due() const {
  Due due;
  for (const auto& [number, repair] : repairs_) due.sooner_liveness(repair.deadline);
  return due;
}

Status Repairs::check(std::set<std::uint32_t>& scratch, std::map<std::uint64_t, std::size_t>& leases) const {
  const auto broken = [](std::string what) { return Error{Code::corrupt, 0, std::move(what)}; };
  if (repairs_.size() > limits_.repairs_max || by_stripe_.size() != repairs_.size())
    return broken("more repairs than there may be, or two of one stripe");
  for (const auto& [number, repair] : repairs_) {
    if (repair.targets.empty()) return broken("a repair of nothing");
    if (repair.lease != 0) ++leases[repair.lease];
    for (const std::uint32_t slot : repair.scratch) {
      if (!scratch.insert(slot).second) return broken("a repair uses what is somebody else's");
    }
  }
  return {};
}

}  // namespace di::host
