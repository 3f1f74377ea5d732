// Stores, their volumes, and what they take with them when they go.
#include <utility>

#include "directory/index.h"

namespace di::directory {

// ---- Places ------------------------------------------------------------------------------------

bool Index::host_up(const Holder& host) {
  const bool first = arenas_.numbers().empty();
  if (!arenas_.host_up(host)) return false;
  if (first) end_wait_for_places();
  return true;
}

// There may be a place now for repairs that wait for one, or somebody to make them.
void Index::end_wait_for_places() {
  repairs_.hurry();
  if (!std::exchange(repairs_wait_for_places_, false)) return;
  scan_after_ = 0;
  scan_at_ = Instant{};
}

std::optional<std::uint32_t> Index::store_number(const std::string& instance, Instant now) {
  if (const auto at = store_numbers_.find(instance); at != store_numbers_.end()) return at->second;
  if (stores_.size() >= options_.places_max) return std::nullopt;
  const auto number = static_cast<std::uint32_t>(stores_.size());
  store_numbers_.emplace(instance, number);
  Store& store = stores_.emplace_back();
  store.instance = instance;
  store.away_since = now;
  return number;
}

bool Index::store_up(const Holder& holder, Instant now, const Labels& labels) {
  const auto number = store_number(holder.instance, now);
  if (!number) return false;
  Store& store = stores_[*number];
  store.generation = holder.generation;
  store.labels = labels;
  store.up = true;
  store.draining = false;
  store.complete = false;
  store.gone = false;
  store.next_part = 0;
  store.adopts = true;
  end_reconcile(*number);
  // Until it has told what it holds: what is on its way out must be known as that when it is shown.
  frees_.store_away(*number);
  targets_changed(*number);
  return true;
}

void Index::store_draining(const Holder& holder, bool draining) {
  std::uint32_t number = 0;
  Store* store = store_of(holder, &number);
  if (store == nullptr) return;
  store->draining = draining;
  targets_changed(number);
}

bool Index::store_leaves(const std::string& instance, bool leaves, Instant now) {
  const auto at = store_numbers_.find(instance);
  if (at == store_numbers_.end()) return false;
  Store& store = stores_[at->second];
  store.leaves = leaves;
  targets_changed(at->second);
  if (!leaves) return true;
  for (const auto& [volume, state] : store.volumes) placements_.replace({at->second, volume});
  repair_now(now);
  return true;
}

Result<Index::Given> Index::store_gone(const std::string& instance, Instant now) {
  const auto at = store_numbers_.find(instance);
  if (at == store_numbers_.end()) return Error{Code::not_found, 0, "no store '" + instance + "' is known"};
  const std::uint32_t number = at->second;
  Store& store = stores_[number];
  if (store.up) return Error{Code::busy, 0, instance + " is up"};
  store.gone = true;
  for (const auto& [volume, state] : store.volumes) placements_.replace({number, volume});
  std::vector<std::uint64_t> ids;
  for (const auto& [id, slot] : stripes_.ids()) {
    const auto columns = stripes_.at(slot).columns();
    if (std::any_of(columns.begin(), columns.end(), [&](const StripeColumn& c) { return c.store == number; }))
      ids.push_back(id);
  }
  Given given;
  for (const std::uint64_t id : ids) {
    std::vector<std::uint16_t> there;
    for (const StripeColumn& column : stripes_.at(stripes_.find(id)).columns()) {
      if (column.store == number) there.push_back(column.column);
    }
    for (const std::uint16_t column : there) {
      const std::uint32_t slot = stripes_.find(id);
      if (slot == none) break;  // it went with the one before
      lose_column(slot, column, now);
    }
    given.columns += there.size();
    given.stripes += stripes_.find(id) == none ? 1 : 0;
  }
  frees_.store_gone(number);
  capacity_changed();
  repair_now(now);
  return given;
}

void Index::store_forgotten(const std::string& instance) {
  const auto at = store_numbers_.find(instance);
  if (at != store_numbers_.end() && !stores_[at->second].up) frees_.store_gone(at->second);
}

void Index::volumes(const Holder& holder, const wire::meta_volumes& message, Instant now) {
  std::uint32_t number = 0;
  Store* store = store_of(holder, &number);
  if (store == nullptr || message.volumes.size() > volumes_max) return;
  bool fails = false;
  std::set<std::uint16_t> were_failed;
  // One that is not in the list is not there.
  for (auto& [volume, state] : store->volumes) {
    if (state.state == volume_failed) were_failed.insert(volume);
    state.state = volume_failed;
  }
  store->told.clear();
  for (const wire::VolumeState& state : message.volumes) {
    if (state.volume >= volumes_max) continue;
    store->volumes[state.volume] = state;
    store->told.insert(state.volume);
    // It is back, and may have what was given up meanwhile.
    if (state.state != volume_failed && were_failed.contains(state.volume)) store->adopts = true;
  }
  for (const auto& [volume, state] : store->volumes) {
    if (state.state != volume_failed) continue;
    fails = fails || !were_failed.contains(volume);
    placements_.replace({number, volume});
  }
  targets_changed(number);
  if (fails) forget_failed(now);
  if (std::exchange(repairs_wait_for_stores_, false) || fails) repair_now(now);
}

void Index::forget_failed(Instant now) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, slot] : stripes_.ids()) {
    if (lies_on_failed(stripes_.at(slot))) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) forget(stripes_.find(id), now);
}

bool Index::lies_on_failed(const Stripe& stripe) const {
  const auto columns = stripe.columns();
  return stripe.form().columns_stored() == 1 && columns.size() == 1 && on_failed_volume(columns.front());
}

void Index::forget(std::uint32_t slot, Instant now) {
  const Stripe& stripe = stripes_.at(slot);
  if (forgotten_.size() >= forgotten_max) forgotten_.erase(forgotten_.begin());
  forgotten_[stripe.id()] = stripe.born_s;
  // Nothing is freed there: what the volume has is of use when it is opened anew.
  column_remove(slot, stripe.columns().back().column);
  ++counters_.stripes_lost;
  drop(slot, now);
}

// The store's volumes, as they are now, for the placements.
void Index::targets_changed(std::uint32_t number) {
  Store& store = stores_[number];
  bool more = false;
  store.some_failed = false;
  for (const auto& [volume, state] : store.volumes) {
    const Target target{number, volume};
    store.some_failed = store.some_failed || state.state == volume_failed;
    const bool usable = store.up && store.complete && !store.draining && !store.leaves && state.state == 0;
    more = more || (usable && !placements_.usable(target));
    placements_.set(target, {store.labels, usable, state.bytes_total, state.spent});
  }
  if (more) end_wait_for_places();
  capacity_changed();
}

void Index::add_bytes(Target target, std::uint64_t bytes) {
  Store& store = stores_[target.store];
  if (store.volumes.emplace(target.volume, wire::VolumeState{target.volume, 0, 0, 0}).second) {
    targets_changed(target.store);
  }
  store.bytes += bytes;
  placements_.add_bytes(target, bytes);
}

void Index::remove_bytes(Target target, std::uint64_t bytes) {
  stores_[target.store].bytes -= bytes;
  placements_.remove_bytes(target, bytes);
}

Index::Store* Index::store_of(const Holder& holder, std::uint32_t* number) {
  const auto at = store_numbers_.find(holder.instance);
  if (at == store_numbers_.end()) return nullptr;
  Store& store = stores_[at->second];
  if (number != nullptr) *number = at->second;
  return store.up && store.generation == holder.generation ? &store : nullptr;
}

void Index::lost(const Holder& holder, Instant now) {
  if (arenas_.is_host(holder)) {
    arenas_.lost(holder);
    for (const std::uint64_t id : repairs_.running_of(holder)) give_up_repair(id, Code::unreachable, now);
  }
  std::uint32_t number = 0;
  if (Store* store = store_of(holder, &number)) {
    store->up = false;
    store->complete = false;
    store->away_since = now;
    end_reconcile(number);
    frees_.store_away(number);
    targets_changed(number);
  }
  leases_.release_holder(holder);
  for (const std::uint64_t id : puts_.of(holder)) {
    ++counters_.puts_lapsed;
    abandon(puts_.take(id), {}, now + put_grace);
  }
}

wire::Column Index::wire_column(const StripeColumn& column) const {
  return {stores_[column.store].instance, column.volume, column.column};
}

}  // namespace di::directory
