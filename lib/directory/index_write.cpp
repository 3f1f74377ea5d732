// Puts, publishing, freeing and eviction.
#include <algorithm>

#include "base/assert.h"
#include "directory/index.h"
#include "kv/stripe.h"

namespace di::directory {

namespace {

// A store is emptied a little when its columns are above this part of its volumes (spec/store.md 4.8).
constexpr std::uint64_t evict_high_pct = 92;
// Stripes of other stores that one eviction walks past.
constexpr std::size_t evict_visits_max = 65536;

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
  if (blocks_.entries() + blocks > options_.blocks_max) {
    evict_blocks(blocks, now);
    return refuse(Code::busy, counters_.puts_busy);
  }
  put.pages.assign(offered.begin() + static_cast<std::ptrdiff_t>(first),
                   offered.begin() + static_cast<std::ptrdiff_t>(first + count));
  put.form = StripeForm::of_put(geometry, put.pages);
  auto choice = placements_.choose(next_stripe_, put.form);
  if (!choice) return refuse(Code::busy, counters_.puts_busy);
  put.id = next_stripe_++;
  put.holder = holder;
  put.fingerprint = message.fingerprint;
  put.targets = std::move(choice->targets);
  put.deadline = now + put_ttl;
  std::vector<std::uint64_t> page_bytes;
  for (const wire::PutPage& page : put.pages) page_bytes.push_back(page.bytes);
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
    put.column_bytes.push_back(column_bytes_of(put.form, page_bytes, put.form.stored_column(i)));
    add_bytes(put.targets[i], put.column_bytes.back());
  }
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
  for (const std::uint32_t column : message.failed_columns) {
    const bool known =
        put.form.is_stored(column) && std::find(failed.begin(), failed.end(), column) == failed.end();
    if (known) failed.push_back(column);
  }
  const auto is_failed = [&](std::uint32_t column) {
    return std::find(failed.begin(), failed.end(), column) != failed.end();
  };
  if (!failed.empty()) {
    // Why a column failed is not known here; a store that is nearly full gets room for the next attempt.
    for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
      if (!is_failed(put.form.stored_column(i))) continue;
      const Store& store = stores_[put.targets[i].store];
      std::uint64_t total = 0;
      for (const auto& [volume, state] : store.volumes) total += state.bytes_total;
      if (store.up && (total == 0 || store.bytes * 2 > total))
        evict(put.targets[i].store, put.column_bytes[i], now);
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
  const std::uint32_t slot =
      publish(Stripe(put.id, put.fingerprint, put.pages, put.form, message.code.crcs), now);
  for (std::uint32_t i = 0; i < put.targets.size(); ++i) {
    const std::uint16_t column = put.form.stored_column(i);
    if (is_failed(column)) continue;
    const Target target = put.targets[i];
    column_add(slot, {target.store, target.volume, column, stores_[target.store].inventory});
  }
  ++counters_.puts_committed;
  if (!failed.empty()) {
    ++counters_.puts_degraded;
    consider_repair(slot, now);
  }
  evict_above_mark(stripes_.at(slot), now);
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
  for (const auto& [store, sum] : bytes) frees_.schedule(store, put.id, Frees::every_column, sum, free_at);
}

// ---- Committed stripes -------------------------------------------------------------------------

std::uint32_t Index::publish(Stripe stripe, Instant now) {
  stripe.published = next_published_++;
  stripe.used_at = now;
  const std::uint64_t id = stripe.id();
  const std::uint32_t slot = stripes_.add(std::move(stripe));
  const auto keys = stripes_.at(slot).keys();
  for (std::uint32_t block = 0; block < keys.size(); ++block) {
    if (!blocks_.insert(keys[block], {slot, static_cast<std::uint16_t>(block), false}))
      ++counters_.blocks_refused;
  }
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
  std::map<std::uint32_t, std::uint64_t> bytes;  // by store
  while (!stripe.columns().empty()) {
    const StripeColumn column = stripe.columns().back();
    bytes[column.store] += stripe.column_bytes(column.column);
    column_remove(slot, column.column);
  }
  for (const auto& [store, sum] : bytes) frees_.schedule(store, id, Frees::every_column, sum, free_at);
  const auto keys = stripe.keys();
  for (std::uint32_t block = 0; block < keys.size(); ++block) {
    blocks_.erase(keys[block], {slot, static_cast<std::uint16_t>(block), false});
  }
  children_.erase({BlockMap::hash_of(stripe.parent()), id});
  if (const auto since = adopting_since_.find(id); since != adopting_since_.end()) {
    adopting_.erase({since->second, id});
    adopting_since_.erase(since);
  }
  repairs_.drop(id);
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
  frees_.schedule(store, stripe, has_other_column(store, stripe, column) ? column : Frees::every_column,
                  bytes, at);
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

// Goes down the chain while something hangs on the stripe.  Chained hashes have no cycles; what peers
// claim may have, so the walk is bounded and then ends where it is.
std::uint32_t Index::leaf_under(std::uint32_t slot) const {
  for (int depth = 0; depth < 65536; ++depth) {
    const Stripe& stripe = stripes_.at(slot);
    std::uint64_t child = 0;
    for (const Key& key : stripe.keys()) {
      const std::uint64_t hash = BlockMap::hash_of(key);
      auto at = children_.lower_bound({hash, 0});
      if (at != children_.end() && at->first == hash && at->second == stripe.id()) ++at;
      if (at == children_.end() || at->first != hash) continue;
      child = at->second;
      break;
    }
    if (child == 0) return slot;
    slot = stripes_.find(child);
  }
  return slot;
}

void Index::evict(std::uint32_t number, std::uint64_t put_bytes, Instant now) {
  const std::uint64_t want =
      std::max(put_bytes * evict_put_multiple, stores_[number].bytes / evict_store_part);
  std::uint32_t slot = stripes_.oldest();
  std::size_t evicted = 0;
  for (std::size_t visits = 0; visits < evict_visits_max && slot != none; ++visits) {
    if (evicted >= evict_stripes_max || frees_.bytes(number) >= want) return;
    const auto columns = stripes_.at(slot).columns();
    const bool here = std::any_of(columns.begin(), columns.end(),
                                  [&](const StripeColumn& column) { return column.store == number; });
    const std::uint32_t next = stripes_.newer(slot);
    if (!here) {
      slot = next;
      continue;
    }
    const std::uint32_t leaf = leaf_under(slot);
    ++counters_.stripes_evicted;
    ++evicted;
    if (leaf == slot) slot = next;
    drop(leaf, now);
  }
}

void Index::evict_blocks(std::size_t blocks, Instant now) {
  const std::size_t want = std::max(blocks * evict_put_multiple, blocks_.entries() / evict_store_part);
  std::size_t freed = 0;
  for (std::size_t i = 0; i < evict_stripes_max && freed < want && stripes_.oldest() != none; ++i) {
    const std::uint32_t leaf = leaf_under(stripes_.oldest());
    freed += stripes_.at(leaf).blocks();
    ++counters_.stripes_evicted;
    drop(leaf, now);
  }
}

void Index::evict_above_mark(const Stripe& stripe, Instant now) {
  std::vector<std::uint32_t> full;
  std::uint64_t bytes = 0;
  for (const StripeColumn& column : stripe.columns()) {
    const Store& store = stores_[column.store];
    std::uint64_t total = 0;
    for (const auto& [volume, state] : store.volumes) {
      if (state.state != volume_failed) total += state.bytes_total;
    }
    bytes = std::max(bytes, stripe.column_bytes(column.column));
    if (total > 0 && store.bytes > total / 100 * evict_high_pct) full.push_back(column.store);
  }
  for (const std::uint32_t store : full) evict(store, bytes, now);
}

void Index::expire(Instant now) {
  if (options_.stripe_ttl.count() <= 0) return;
  for (std::size_t i = 0; i < evict_stripes_max && stripes_.oldest() != none; ++i) {
    const std::uint32_t oldest = stripes_.oldest();
    if (stripes_.at(oldest).used_at + options_.stripe_ttl > now) return;
    const std::uint32_t leaf = leaf_under(oldest);
    if (stripes_.at(leaf).used_at + options_.stripe_ttl > now) {
      stripes_.touch(oldest);  // what hangs on it is in use
      stripes_.at(oldest).used_at = now;
      continue;
    }
    ++counters_.stripes_expired;
    drop(leaf, now);
  }
}

}  // namespace di::directory
