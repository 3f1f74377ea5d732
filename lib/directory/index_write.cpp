// Puts, publishing, freeing and eviction.
#include <algorithm>

#include "base/assert.h"
#include "directory/index.h"
#include "kv/chain.h"
#include "kv/stripe.h"

namespace di::directory {

namespace {

std::uint16_t wire_code(Code code) {
  return static_cast<std::uint16_t>(code);
}

}  // namespace

// ---- Puts --------------------------------------------------------------------------------------

wire::meta_put_opened Index::put_open(const Holder& holder, const wire::meta_put_open& message, Instant now) {
  const Geometry geometry = placements_.options().geometry;
  wire::meta_put_opened answer;
  answer.data_columns = geometry.data_columns;
  answer.parity_columns = geometry.parity_columns;
  answer.ttl_ms = static_cast<std::uint32_t>(to_ms(put_ttl));
  const auto refuse = [&](Code code, std::uint64_t& counter) {
    ++counter;
    answer.code = wire_code(code);
    return answer;
  };
  const auto name_columns = [&](const OpenPut& put) {
    for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
      const Target target = put.targets[i];
      answer.columns.push_back({stores_[target.store].instance, target.volume, put.form.stored_column(i)});
    }
  };
  if (!pages_valid(message.pages)) return refuse(Code::invalid, counters_.puts_invalid);
  const std::span<const wire::PutPage> offered(message.pages);

  std::size_t first = 0;
  while (first < offered.size() && knows_all(offered[first].keys)) ++first;
  answer.first = static_cast<std::uint16_t>(first);
  if (first == offered.size()) return refuse(Code::exists, counters_.puts_exist);

  // Asked before?
  for (const Key& key : offered[first].keys) {
    const OpenPut* put = puts_.find(key);
    if (put == nullptr || put->holder != holder || put->fingerprint != message.fingerprint) continue;
    const auto rest = offered.subspan(first);
    if (put->pages.size() > rest.size() || !std::equal(put->pages.begin(), put->pages.end(), rest.begin()))
      continue;
    puts_.extend(put->id, now + put_ttl);
    answer.stripe = put->id;
    answer.pages = put->form.pages;
    answer.data_columns = put->form.data_columns;
    answer.parity_columns = put->form.parity_columns;
    name_columns(*put);
    return answer;
  }

  // The run of pages that bring something which nobody else is writing.
  OpenPut put;
  std::size_t blocks = 0;
  std::size_t count = 0;
  const std::size_t count_max = std::min<std::size_t>(geometry.data_columns, kv::stripe_pages_max);
  while (count < count_max && first + count < offered.size()) {
    const wire::PutPage& page = offered[first + count];
    const std::size_t before = put.claims.size();
    for (const Key& key : page.keys) {
      if (puts_.find(key) == nullptr && !owner(key)) put.claims.push_back(key);
    }
    if (put.claims.size() == before) break;
    blocks += page.keys.size();
    ++count;
  }
  if (count == 0) return refuse(Code::busy, counters_.puts_busy);
  if (puts_.full() || next_stripe_ > stripe_id_max) return refuse(Code::busy, counters_.puts_busy);
  if (!has_room(blocks)) {
    evict_blocks(blocks, now);
    return refuse(Code::busy, counters_.puts_busy);
  }
  put.pages.assign(offered.begin() + static_cast<std::ptrdiff_t>(first),
                   offered.begin() + static_cast<std::ptrdiff_t>(first + count));
  put.form = StripeForm::of_put(geometry, put.pages);
  auto choice = placements_.choose(next_stripe_, put.form, now);
  if (!choice) return refuse(Code::busy, counters_.puts_busy);
  if (choice->spent > 0) return refuse(Code::over_budget, counters_.puts_over_budget);
  put.id = next_stripe_;
  put.holder = holder;
  put.fingerprint = message.fingerprint;
  put.tenant = message.tenant;
  put.targets = std::move(choice->targets);
  put.deadline = now + put_ttl;
  std::vector<std::uint64_t> page_bytes;
  for (const wire::PutPage& page : put.pages) page_bytes.push_back(page.bytes);
  kv::Evictor::Spec spec{.id = put.id,
                         .key = BlockMap::hash_of(put.pages.front().keys.front()),
                         .tenant = put.tenant,
                         .held = true};
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
    put.column_bytes.push_back(column_bytes_of(put.form, page_bytes, put.form.stored_column(i)));
    spec.bytes += put.column_bytes.back();
  }
  spec.parent = item_of(put.pages.front().parent);
  const kv::Evictor::PutAnswer placed = put_item(spec, now);
  drop_victims(placed.victims, 0, now);
  if (placed.item == kv::Evictor::item_none) return refuse(Code::over_quota, counters_.puts_over_quota);
  put.item = placed.item;
  ++next_stripe_;
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) add_bytes(put.targets[i], put.column_bytes[i]);
  answer.stripe = put.id;
  answer.pages = put.form.pages;
  name_columns(put);
  puts_.open(std::move(put));
  ++counters_.puts_opened;
  return answer;
}

bool Index::brings_nothing_new(std::span<const wire::PutPage> pages) const {
  return std::all_of(pages.begin(), pages.end(),
                     [this](const wire::PutPage& page) { return knows_all(page.keys); });
}

wire::meta_put_committed Index::put_commit(const Holder& holder, const wire::meta_put_commit& message,
                                           Instant now) {
  wire::meta_put_committed answer;
  answer.stripe = message.stripe;
  // Committed already, or adopted from the inventories before this message came.
  if (stripes_.find(message.stripe) != none) return answer;
  const OpenPut* open = puts_.find(message.stripe);
  if (open == nullptr || open->holder != holder || open->deadline <= now) {
    ++counters_.puts_refused;
    answer.code = wire_code(Code::not_found);
    return answer;
  }
  const OpenPut put = puts_.take(message.stripe);
  std::vector<std::uint32_t> failed;
  std::vector<std::uint32_t> refused;  // for want of room
  for (const wire::FailedColumn& column : message.failed_columns) {
    const bool known = put.form.is_stored(column.column) &&
                       std::find(failed.begin(), failed.end(), column.column) == failed.end();
    if (!known) continue;
    failed.push_back(column.column);
    if (column.code == wire_code(Code::no_space)) refused.push_back(column.column);
  }
  const auto is_among = [](const std::vector<std::uint32_t>& columns, std::uint32_t column) {
    return std::find(columns.begin(), columns.end(), column) != columns.end();
  };
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
    const std::uint32_t store = put.targets[i].store;
    const std::uint32_t column = put.form.stored_column(i);
    if (is_among(refused, column)) {
      if (stores_[store].up) make_room(store, put.column_bytes[i], now);
    } else if (!is_among(failed, column)) {
      stores_[store].evict_part = evict_store_part;
    }
  }
  if (failed.size() > put.form.parity_columns) {
    ++counters_.puts_no_space;
    abandon(put, failed, now + put_grace);
    answer.code = wire_code(Code::no_space);
    return answer;
  }
  const auto form = StripeForm::of_code(message.code, put.pages);
  if (!form || *form != put.form) {
    ++counters_.puts_invalid;
    abandon(put, failed, now + put_grace);
    answer.code = wire_code(Code::invalid);
    return answer;
  }
  if (brings_nothing_new(put.pages)) {
    ++counters_.puts_duplicate;
    abandon(put, failed, now);
    answer.code = wire_code(Code::exists);
    return answer;
  }
  for (std::size_t i = 0; i < put.targets.size(); ++i) remove_bytes(put.targets[i], put.column_bytes[i]);
  const std::uint32_t slot = publish(
      Stripe({put.id, put.fingerprint, put.tenant}, put.pages, put.form, message.code.crcs), put.item, now);
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
    const std::uint16_t column = put.form.stored_column(i);
    if (is_among(failed, column)) continue;
    const Target target = put.targets[i];
    column_add(slot, {target.store, target.volume, column, stores_[target.store].inventory});
  }
  ++counters_.puts_committed;
  if (!failed.empty()) ++counters_.puts_degraded;
  // A store may have been told to leave, or a volume have failed, since the put was opened.
  if (lies_on_failed(stripes_.at(slot))) {
    forget(slot, now);
  } else {
    consider_repair(slot, now);
  }
  capacity_changed();
  drop_victims(evictor_.step(now), 0, now);
  evict_above_mark(put.id, now);
  return answer;
}

void Index::put_abort(const Holder& holder, const wire::meta_put_abort& message, Instant now) {
  const OpenPut* put = puts_.find(message.stripe);
  if (put == nullptr || put->holder != holder) return;
  ++counters_.puts_aborted;
  abandon(puts_.take(message.stripe), {}, now + put_grace);
}

// Nothing was written of a column that failed: nothing to free.
void Index::abandon(const OpenPut& put, std::span<const std::uint32_t> failed, Instant free_at) {
  std::map<std::uint32_t, std::uint64_t> bytes;  // by store
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
    remove_bytes(put.targets[i], put.column_bytes[i]);
    if (std::find(failed.begin(), failed.end(), put.form.stored_column(i)) != failed.end()) continue;
    bytes[put.targets[i].store] += put.column_bytes[i];
  }
  evictor_.remove(put.item);
  adopt_orphans(put.claims);
  for (const auto& [store, sum] : bytes)
    frees_.schedule(leases_, store, put.id, Frees::every_column, sum, free_at);
}

// ---- Committed stripes -------------------------------------------------------------------------

kv::Evictor::Item Index::item_of(const Key& key) const {
  kv::Evictor::Item item = kv::Evictor::item_none;
  blocks_.find(key, [&](BlockRef ref) {
    if (ref.in_arena) return true;
    item = stripes_.at(ref.slot).item;
    return false;
  });
  if (item != kv::Evictor::item_none) return item;
  const OpenPut* put = puts_.find(key);
  return put == nullptr ? item : put->item;
}

void Index::adopt_orphans(std::span<const Key> keys) {
  for (const Key& key : keys) {
    const std::uint64_t hash = BlockMap::hash_of(key);
    auto at = children_.lower_bound({hash, 0});
    if (at == children_.end() || at->first != hash) continue;
    const kv::Evictor::Item parent = item_of(key);
    for (; parent != kv::Evictor::item_none && at != children_.end() && at->first == hash; ++at) {
      const Stripe& child = stripes_.at(stripes_.find(at->second));
      if (child.parent() == key) evictor_.adopt(child.item, parent, child.used_at);
    }
  }
}

kv::Evictor::PutAnswer Index::put_item(kv::Evictor::Spec spec, Instant now) {
  kv::Evictor::PutAnswer answer = evictor_.put(spec, now);
  if (answer.code == kv::Evictor::PutCode::tenants_full) {
    ++counters_.tenants_full;
    spec.tenant = kv::tenant_nobody;
    answer = evictor_.put(spec, now);
  }
  // has_room() said that there is one.
  DI_ASSERT(answer.code == kv::Evictor::PutCode::ok || answer.code == kv::Evictor::PutCode::over_quota);
  return answer;
}

std::uint32_t Index::publish(Stripe stripe, kv::Evictor::Item item, Instant now) {
  stripe.published = next_published_++;
  stripe.used_at = now;
  if (stripe.born_s == 0) stripe.born_s = wall_s(now);
  // The end of one of the same number is still to be written: there is a row.
  if (changed_.contains(stripe.id())) stripe.set_recorded();
  if (item == kv::Evictor::item_none) {
    kv::Evictor::Spec spec{.id = stripe.id(),
                           .key = BlockMap::hash_of(stripe.keys().front()),
                           .tenant = stripe.tenant(),
                           .present = true,
                           .age = age(stripe.born_s, now)};
    for (std::uint32_t i = 0; i < stripe.form().columns_stored(); ++i) {
      spec.bytes += stripe.column_bytes(stripe.form().stored_column(i));
    }
    spec.parent = item_of(stripe.parent());
    stripe.item = put_item(spec, now).item;
  } else {
    stripe.item = item;
    evictor_.open(item);
    const kv::Evictor::Item parent = item_of(stripe.parent());
    if (parent != kv::Evictor::item_none) evictor_.adopt(item, parent, now);
  }
  const std::uint64_t id = stripe.id();
  const std::uint32_t slot = stripes_.add(std::move(stripe));
  const auto keys = stripes_.at(slot).keys();
  for (std::uint32_t block = 0; block < keys.size(); ++block) {
    if (!blocks_.insert(keys[block], {slot, static_cast<std::uint16_t>(block), false}))
      ++counters_.blocks_refused;
  }
  adopt_orphans(keys);
  children_.emplace(BlockMap::hash_of(stripes_.at(slot).parent()), id);
  changed(id);
  return slot;
}

void Index::column_add(std::uint32_t slot, const StripeColumn& column) {
  Stripe& stripe = stripes_.at(slot);
  stripe.column_add(column);
  changed(stripe.id());
  Store& store = stores_[column.store];
  ++store.columns;
  if (column.column < stripe.form().data_stored() && column.column % stripe.form().parts == 0) {
    store.blocks += stripe.page_blocks(column.column / stripe.form().parts);
  }
  add_bytes({column.store, column.volume}, stripe.column_bytes(column.column));
}

void Index::column_remove(std::uint32_t slot, std::uint32_t number) {
  Stripe& stripe = stripes_.at(slot);
  const StripeColumn column = *stripe.column(number);
  Store& store = stores_[column.store];
  --store.columns;
  if (number < stripe.form().data_stored() && number % stripe.form().parts == 0) {
    store.blocks -= stripe.page_blocks(number / stripe.form().parts);
  }
  remove_bytes({column.store, column.volume}, stripe.column_bytes(number));
  stripe.column_remove(number);
  changed(stripe.id());
}

void Index::drop(std::uint32_t slot, Instant free_at) {
  const Stripe& stripe = stripes_.at(slot);
  const std::uint64_t id = stripe.id();
  if (stripe.item != kv::Evictor::item_none) evictor_.remove(stripe.item);
  std::map<std::uint32_t, std::uint64_t> bytes;  // by store
  while (!stripe.columns().empty()) {
    const StripeColumn column = stripe.columns().back();
    bytes[column.store] += stripe.column_bytes(column.column);
    column_remove(slot, column.column);
  }
  for (const auto& [store, sum] : bytes)
    frees_.schedule(leases_, store, id, Frees::every_column, sum, free_at);
  const auto keys = stripe.keys();
  for (std::uint32_t block = 0; block < keys.size(); ++block) {
    blocks_.erase(keys[block], {slot, static_cast<std::uint16_t>(block), false});
  }
  children_.erase({BlockMap::hash_of(stripe.parent()), id});
  // A victim has none.
  if (stripe.item != kv::Evictor::item_none) adopt_orphans(keys);
  if (const auto since = adopting_since_.find(id); since != adopting_since_.end()) {
    adopting_.erase({since->second, id});
    adopting_since_.erase(since);
  }
  repairs_.drop(id);
  // What the catalogue has not heard of need not be taken out of it: such would pile up while it cannot be written.
  if (!stripe.recorded()) changed_.erase(id);
  stripes_.erase(slot);
}

bool Index::has_other_column(std::uint32_t store, std::uint64_t stripe, std::uint32_t column) const {
  const std::uint32_t slot = stripes_.find(stripe);
  if (slot == none) return false;
  const auto columns = stripes_.at(slot).columns();
  const auto other = [&](const StripeColumn& c) { return c.store == store && c.column != column; };
  if (std::any_of(columns.begin(), columns.end(), other)) return true;
  // One that is being made there now.
  const RepairQueue::Running* running = repairs_.running(stripe);
  if (running == nullptr) return false;
  return std::any_of(running->aims.begin(), running->aims.end(),
                     [&](const RepairQueue::Aim& aim) { return aim.target.store == store; });
}

void Index::free_column(std::uint32_t store, std::uint64_t stripe, std::uint32_t column, std::uint64_t bytes,
                        Instant at) {
  frees_.schedule(leases_, store, stripe,
                  has_other_column(store, stripe, column) ? column : Frees::every_column, bytes, at);
}

void Index::lose_column(std::uint32_t slot, std::uint32_t column, Instant now) {
  column_remove(slot, column);
  const Stripe& stripe = stripes_.at(slot);
  const std::size_t left = stripe.columns().size();
  if (left >= stripe.form().data_stored()) return consider_repair(slot, now);
  if (left > 0 && adopting_since_.contains(stripe.id())) return;  // others may still come
  ++counters_.stripes_lost;
  drop(slot, now);
}

// ---- Eviction ----------------------------------------------------------------------------------

std::uint64_t Index::capacity_bytes() const {
  std::uint64_t bytes = 0;
  for (const Store& store : stores_) {
    if (store.gone || store.leaves) continue;
    for (const auto& [volume, state] : store.volumes) {
      if (state.state == volume_failed) continue;
      if (state.bytes_total == 0) return 0;
      bytes += state.bytes_total;
    }
  }
  return bytes;
}

void Index::capacity_changed() {
  // Stores come one after the other, and the first brings stripes with the bytes of all their columns.
  const std::uint64_t bytes = adopting_.empty() ? capacity_bytes() : 0;
  evictor_.set_capacity(bytes == 0 ? capacity_unknown : bytes);
}

std::uint64_t Index::drop_victims(const std::vector<kv::Evictor::Victim>& victims, std::uint32_t store,
                                  Instant now) {
  std::uint64_t bytes = 0;
  for (const kv::Evictor::Victim& victim : victims) {
    ++(victim.why == kv::Evictor::Why::expired ? counters_.stripes_expired : counters_.stripes_evicted);
    const std::uint32_t slot = stripes_.find(victim.id);
    Stripe& stripe = stripes_.at(slot);
    stripe.item = kv::Evictor::item_none;
    for (const StripeColumn& column : stripe.columns()) {
      if (column.store == store && can_read(column)) bytes += stripe.column_bytes(column.column);
    }
    drop(slot, now);
  }
  return bytes;
}

void Index::evict(std::uint32_t number, std::uint64_t want, Instant now) {
  const std::uint64_t pending = frees_.bytes(number);
  std::uint64_t left = want - std::min(want, pending);
  const auto here = [&](std::uint64_t id) {
    const auto columns = stripes_.at(stripes_.find(id)).columns();
    return std::any_of(columns.begin(), columns.end(), [&](const StripeColumn& column) {
      return column.store == number && can_read(column);
    });
  };
  while (left > 0) {
    // A stripe has one column of about the same length on each of its stores.
    const auto victims = evictor_.make_room(left * placements_.options().geometry.columns(), here);
    const std::uint64_t bytes = drop_victims(victims, number, now);
    if (bytes == 0) return;
    left -= std::min(left, bytes);
  }
}

void Index::make_room(std::uint32_t number, std::uint64_t put_bytes, Instant now) {
  Store& store = stores_[number];
  const std::uint64_t pending = frees_.bytes(number);
  evict(number, std::max(put_bytes * evict_put_multiple, store.bytes / store.evict_part), now);
  if (pending == 0) store.evict_part = std::max(store.evict_part / 2, evict_store_part_least);
}

void Index::evict_blocks(std::size_t blocks, Instant now) {
  const std::size_t want = std::max(blocks * evict_put_multiple, blocks_.entries() / evict_store_part);
  const std::size_t before = blocks_.entries();
  for (std::size_t i = 0; i < evict_stripes_max && before - blocks_.entries() < want; ++i) {
    const auto victims = evictor_.make_room(1);
    if (victims.empty()) return;
    drop_victims(victims, 0, now);
  }
}

void Index::evict_above_mark(std::uint64_t id, Instant now) {
  const std::uint32_t slot = stripes_.find(id);
  if (slot == none) return;                                   // it was the next to go
  std::vector<std::pair<std::uint32_t, std::uint64_t>> full;  // store, bytes above the low mark
  for (const StripeColumn& column : stripes_.at(slot).columns()) {
    const Store& store = stores_[column.store];
    std::uint64_t total = 0;
    std::uint64_t bytes = 0;
    // What is on a volume that failed takes no room of the others.
    for (const auto& [volume, state] : store.volumes) {
      if (state.state == volume_failed) continue;
      total += state.bytes_total;
      bytes += placements_.bytes({column.store, volume});
    }
    if (total > 0 && bytes > total / 100 * evict_high_pct) {
      full.emplace_back(column.store, bytes - total / 100 * evict_low_pct);
    }
  }
  for (const auto& [store, bytes] : full) evict(store, bytes + frees_.bytes(store), now);
}

}  // namespace di::directory
