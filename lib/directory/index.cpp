#include "directory/index.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/assert.h"
#include "kv/chain.h"

namespace di::directory {

namespace {

constexpr std::uint64_t stripe_of(std::uint64_t page) {
  return page >> 8;
}

}  // namespace

Index::Index(Options options, Instant now)
    : options_(options),
      leases_([&options] {
        LeaseTable::Options lease = options.lease;
        lease.first = (options.run << 32) + 1;
        return lease;
      }()),
      frees_safe_at_(now + options.lease.cap),
      next_stripe_((options.run << 32) + 1),
      evictor_(
          [&options] {
            kv::Evictor::Options evict;
            evict.capacity_bytes = capacity_unknown;
            evict.high_pct = static_cast<std::uint32_t>(evict_high_pct);
            evict.low_pct = static_cast<std::uint32_t>(evict_low_pct);
            evict.items_max = options.blocks_max + options.open_puts_max;
            evict.ghosts_max = options.blocks_max / evict_ghost_blocks;
            evict.victims_max = evict_stripes_max;
            evict.life[0] = options.stripe_life;
            return evict;
          }(),
          now),
      blocks_(options.blocks_max, *this),
      arenas_({options.places_max, options.arena_pages_max},
              {.added =
                   [this](std::uint32_t slot, const Arenas::Page& held) {
                     for (std::uint32_t block = 0; block < held.page.keys.size(); ++block) {
                       const BlockRef ref{slot, static_cast<std::uint16_t>(block), true};
                       if (!blocks_.insert(held.page.keys[block], ref)) ++counters_.blocks_refused;
                     }
                   },
               .removed =
                   [this](std::uint32_t slot, const Arenas::Page& held) {
                     for (std::uint32_t block = 0; block < held.page.keys.size(); ++block) {
                       blocks_.erase(held.page.keys[block], {slot, static_cast<std::uint16_t>(block), true});
                     }
                   }}),
      placements_(options.placement),
      puts_(options.open_puts_max),
      repairs_(options.repairs),
      draws_(options.run) {
  if (options.cross_check > Duration{0}) cross_check_at_ = now + options.cross_check;
  DI_ASSERT(options.run > 0 && options.run < (std::uint64_t{1} << 24));
  // Nobody has a place for good: there what finds none other is counted.
  options_.tenants[kv::tenant_nobody] = {};
  for (const auto& [tenant, rule] : options_.tenants) {
    const bool placed = evictor_.set_tenant(tenant, rule);
    DI_ASSERT(placed);
  }
}

const Key& Index::key_of(BlockRef ref) const {
  return ref.in_arena ? arenas_.at(ref.slot).page.keys[ref.block] : stripes_.at(ref.slot).keys()[ref.block];
}

// ---- Time --------------------------------------------------------------------------------------

std::vector<Index::Free> Index::step(Instant now) {
  counters_.leases_expired += leases_.expire(now);
  while (const auto id = puts_.due(now)) {
    ++counters_.puts_lapsed;
    abandon(puts_.take(*id), {}, now + put_grace);
  }
  capacity_changed();
  drop_victims(evictor_.step(now), 0, now);
  settle_adoptions(now);
  for (std::uint32_t number = 0; number < stores_.size(); ++number) {
    Store& store = stores_[number];
    if (store.up || store.gone || store.away_since + options_.repair_after > now) continue;
    store.gone = true;
    for (const auto& [volume, state] : store.volumes) placements_.replace({number, volume});
    if (store.columns > 0) repair_now(now);
  }
  while (const auto id = repairs_.overdue(now)) give_up_repair(*id, Code::timeout, now);
  if (scan_at_ <= now) scan_for_repairs(now);

  std::map<std::pair<std::uint32_t, bool>, Free> due;  // store, single columns
  std::vector<Free> out;
  const auto send = [&](Free& free) {
    counters_.stripes_freed += free.message.stripes.size();
    out.push_back(std::exchange(free, {}));
  };
  for (const Frees::Due& free : frees_.take(leases_, now)) {
    const bool single = free.column != Frees::every_column;
    Free& batch = due[{free.store, single}];
    batch.store = stores_[free.store].instance;
    batch.message.stripes.push_back(free.stripe);
    if (single) batch.message.columns.push_back(static_cast<std::uint16_t>(free.column));
    if (batch.message.stripes.size() >= free_batch_max) send(batch);
  }
  for (auto& [key, batch] : due) {
    if (!batch.message.stripes.empty()) send(batch);
  }
  return out;
}

Instant Index::next_due() const {
  Instant due = std::min({leases_.next_due(), puts_.next_due(), frees_.next_due(), repairs_.next_due(),
                          evictor_.next_due(), scan_at_, cross_check_at_});
  if (!adopting_.empty()) due = std::min(due, adopting_.begin()->first);
  for (const Store& store : stores_) {
    if (!store.up && !store.gone) due = std::min(due, store.away_since + options_.repair_after);
    if (!reconciling_) due = std::min(due, store.reconcile_at);
  }
  if (reconciling_) due = std::min(due, reconcile_until_);
  return due;
}

// ---- The wall ----------------------------------------------------------------------------------

std::uint32_t Index::wall_s(Instant now) const {
  const std::int64_t s =
      std::chrono::duration_cast<seconds>(Duration(now.ns)).count() + options_.wall_ahead_s;
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(s, 1, UINT32_MAX));
}

std::uint32_t Index::born_not_before(std::uint64_t id, Instant now) const {
  const std::uint64_t run = id >> 32;
  const auto start = options_.run_starts.upper_bound(run);
  std::uint32_t born_s = start == options_.run_starts.begin() ? wall_s(now) : std::prev(start)->second;
  // Numbers grow with time.
  const auto next = stripes_.ids().lower_bound(id);
  if (next == stripes_.ids().begin()) return born_s;
  const auto& [before, slot] = *std::prev(next);
  if ((before >> 32) == run) born_s = std::max(born_s, stripes_.at(slot).born_s);
  return born_s;
}

Duration Index::age(std::uint32_t born_s, Instant now) const {
  const std::uint32_t now_s = wall_s(now);
  return seconds(now_s - std::min(born_s, now_s));
}

bool Index::past_cap(std::uint64_t tenant, std::uint32_t born_s, Instant now) const {
  const Duration cap = evictor_.life(tenant).cap;
  return cap > Duration{0} && age(born_s, now) >= cap;
}

// ---- Catalogue ---------------------------------------------------------------------------------

bool Index::restore(const StripeRow& row, Instant now) {
  if (stripes_.find(row.id) != none) return false;
  // A row that comes to nothing is not wanted any more.
  const auto refuse = [&] {
    if (options_.record_changes) changed_.insert(row.id);
    return false;
  };
  if (!id_valid(row.id) || !pages_valid(row.pages)) return refuse();
  const auto form = StripeForm::of_code(row.code, row.pages);
  std::size_t keys = 0;
  for (const wire::PutPage& page : row.pages) keys += page.keys.size();
  if (!form || !has_room(keys)) return refuse();
  next_stripe_ = std::max(next_stripe_, row.id + 1);
  const std::uint32_t born_s = row.born_s != 0 ? row.born_s : born_not_before(row.id, now);
  if (past_cap(row.tenant, born_s, now)) {  // freed when its stores tell what they hold
    ++counters_.stripes_expired;
    return refuse();
  }
  std::vector<StripeColumn> columns;
  for (const wire::Column& column : row.columns) {
    const auto number = store_number(column.instance, now);
    const bool twice = std::any_of(columns.begin(), columns.end(),
                                   [&](const StripeColumn& c) { return c.column == column.column; });
    if (!number || column.volume >= volumes_max || !form->is_stored(column.column) || twice) continue;
    columns.push_back({*number, column.volume, column.column, unseen});
  }
  if (columns.size() < form->data_stored()) return refuse();  // it was being adopted
  restoring_ = true;
  Stripe stripe({row.id, row.fingerprint, row.tenant}, row.pages, *form, row.code.crcs);
  stripe.born_s = born_s;
  stripe.set_recorded();
  const std::uint32_t slot = publish(std::move(stripe), kv::Evictor::item_none, now);
  for (const StripeColumn& column : columns) column_add(slot, column);
  restoring_ = false;
  // Looked at when the stores are there.
  if (columns.size() < form->columns_stored()) repairs_wait_for_stores_ = true;
  return true;
}

void Index::restore_leaving(const std::string& instance, Instant now) {
  if (store_number(instance, now)) store_leaves(instance, true, now);
}

std::vector<StripeChange> Index::take_changes(std::size_t count) {
  std::vector<StripeChange> out;
  while (!changed_.empty() && out.size() < count) {
    const std::uint64_t id = *changed_.begin();
    changed_.erase(changed_.begin());
    const std::uint32_t slot = stripes_.find(id);
    out.push_back({id, std::nullopt});
    if (slot == none) continue;
    Stripe& stripe = stripes_.at(slot);
    stripe.set_recorded();
    StripeRow row{.id = id,
                  .fingerprint = stripe.fingerprint(),
                  .tenant = stripe.tenant(),
                  .born_s = stripe.born_s,
                  .pages = stripe.put_pages(),
                  .code = stripe.code(),
                  .columns = {}};
    for (const StripeColumn& column : stripe.columns()) row.columns.push_back(wire_column(column));
    out.back().row = std::move(row);
  }
  return out;
}

// ---- What the control commands show ------------------------------------------------------------

std::vector<Index::Place> Index::places() const {
  std::vector<Place> out;
  for (const auto& [instance, number] : arenas_.numbers()) {
    const Arenas::Host& host = arenas_.host(number);
    Place place;
    place.instance = instance;
    place.up = true;
    place.complete = host.complete;
    place.pages = host.pages.size();
    place.blocks = host.blocks;
    place.bytes = host.blocks * block_bytes_;
    out.push_back(std::move(place));
  }
  for (const auto& [instance, number] : store_numbers_) {
    const Store& store = stores_[number];
    if (store.gone && store.columns == 0 && store.bytes == 0) continue;
    Place place;
    place.instance = instance;
    place.store = true;
    place.up = store.up;
    place.away_since = store.away_since;
    place.leaves = store.leaves;
    place.complete = store.complete;
    place.pages = store.columns;
    place.blocks = store.blocks;
    place.bytes = store.bytes;
    for (const auto& [volume, state] : store.volumes) {
      if (state.state != volume_failed) place.bytes_total += state.bytes_total;
      if (!store.up || store.told.contains(volume)) place.volumes.push_back(state);
    }
    place.free_pending_bytes = frees_.bytes(number);
    out.push_back(std::move(place));
  }
  return out;
}

std::vector<Index::PageRow> Index::pages_after(std::uint64_t after, std::size_t count) const {
  std::vector<PageRow> out;
  const auto& ids = stripes_.ids();
  for (auto at = ids.lower_bound(stripe_of(after)); at != ids.end() && out.size() < count; ++at) {
    const Stripe& stripe = stripes_.at(at->second);
    for (std::uint32_t p = 0; p < stripe.pages(); ++p) {
      PageRow row;
      row.page = (at->first << 8) | p;
      if (row.page <= after) continue;
      if (out.size() >= count) break;
      for (const StripeColumn& column : stripe.columns()) {
        const bool own = !stripe.form().is_parity(column.column) && column.column / stripe.form().parts == p;
        if (own) row.stores.push_back(stores_[column.store].instance);
      }
      row.readable = page_readable(stripe, p);
      row.columns = readable_columns(stripe);
      row.columns_stored = stripe.form().columns_stored();
      row.parent = stripe.page_parent(p);
      row.first = stripe.page_keys(p).front();
      row.blocks = stripe.page_blocks(p);
      row.bytes = stripe.page_bytes(p);
      out.push_back(std::move(row));
    }
  }
  return out;
}

std::vector<Index::Usage> Index::usage() const {
  std::map<std::pair<Key, std::string>, Usage> rows;
  for (const auto& [id, slot] : stripes_.ids()) {
    const Stripe& stripe = stripes_.at(slot);
    const std::string geometry = Geometry{stripe.form().data_columns, stripe.form().parity_columns}.text();
    Usage& row = rows[{stripe.fingerprint(), geometry}];
    row.fingerprint = stripe.fingerprint();
    row.geometry = geometry;
    ++row.stripes;
    row.blocks += stripe.blocks();
    for (std::uint32_t p = 0; p < stripe.pages(); ++p) row.page_bytes += stripe.page_bytes(p);
    for (const StripeColumn& column : stripe.columns())
      row.column_bytes += stripe.column_bytes(column.column);
  }
  std::vector<Usage> out;
  for (auto& [key, row] : rows) out.push_back(std::move(row));
  return out;
}

bool Index::drop_stripe(std::uint64_t id, Instant now) {
  const std::uint32_t slot = stripes_.find(id);
  if (slot == none) return false;
  drop(slot, now);
  return true;
}

void Index::test_check() const {
  std::size_t entries = 0;
  std::map<Target, std::uint64_t> bytes;
  std::map<std::uint32_t, std::uint64_t> columns;
  std::map<std::uint32_t, std::uint64_t> blocks;
  const auto has = [this](const Key& key, BlockRef ref) {
    bool found = false;
    blocks_.find(key, [&](BlockRef at) {
      found = found || at == ref;
      return true;
    });
    return found;
  };
  const bool all_fit = counters_.blocks_refused == 0;
  std::size_t chained = 0;
  for (const auto& [id, slot] : stripes_.ids()) {
    const Stripe& stripe = stripes_.at(slot);
    DI_ASSERT(stripe.id() == id && !stripe.columns().empty());
    entries += stripe.blocks();
    for (std::uint32_t block = 0; all_fit && block < stripe.blocks(); ++block) {
      DI_ASSERT(has(stripe.keys()[block], {slot, static_cast<std::uint16_t>(block), false}));
    }
    chained += children_.contains({BlockMap::hash_of(stripe.parent()), id}) ? 1 : 0;
    std::uint32_t last = UINT32_MAX;
    for (const StripeColumn& column : stripe.columns()) {
      DI_ASSERT(last == UINT32_MAX || column.column > last);
      last = column.column;
      DI_ASSERT(!frees_.pending(column.store, id, column.column));
      bytes[{column.store, column.volume}] += stripe.column_bytes(column.column);
      ++columns[column.store];
      if (column.column < stripe.form().data_stored() && column.column % stripe.form().parts == 0) {
        blocks[column.store] += stripe.page_blocks(column.column / stripe.form().parts);
      }
    }
    const bool whole = stripe.columns().size() == stripe.form().columns_stored();
    if (!adopting_since_.contains(id)) DI_ASSERT(stripe.columns().size() >= stripe.form().data_stored());
    if (whole) DI_ASSERT(!adopting_since_.contains(id));
  }
  DI_ASSERT(chained == stripes_.count() && children_.size() == chained);
  DI_ASSERT(adopting_.size() == adopting_since_.size());
  for (const auto& [due, id] : adopting_)
    DI_ASSERT(adopting_since_.at(id) == due && stripes_.find(id) != none);
  for (const auto& [instance, number] : arenas_.numbers()) {
    std::uint64_t held = 0;
    for (const auto& [page, slot] : arenas_.host(number).pages) {
      const Arenas::Page& content = arenas_.at(slot);
      DI_ASSERT(content.host == number && content.page.page == page);
      held += content.page.keys.size();
      for (std::uint32_t block = 0; all_fit && block < content.page.keys.size(); ++block) {
        DI_ASSERT(has(content.page.keys[block], {slot, static_cast<std::uint16_t>(block), true}));
      }
    }
    DI_ASSERT(held == arenas_.host(number).blocks);
    entries += held;
  }
  DI_ASSERT(all_fit ? entries == blocks_.entries() : entries >= blocks_.entries());
  for (const auto& [id, put] : puts_.all()) {
    for (std::size_t i = 0; i < put.targets.size(); ++i) bytes[put.targets[i]] += put.column_bytes[i];
  }
  for (const auto& [id, running] : repairs_.all_running()) {
    for (const RepairQueue::Aim& aim : running.aims) bytes[aim.target] += aim.bytes;
  }
  for (std::uint32_t number = 0; number < stores_.size(); ++number) {
    const Store& store = stores_[number];
    DI_ASSERT(store.columns == columns[number] && store.blocks == blocks[number]);
    std::uint64_t sum = 0;
    for (const auto& [volume, state] : store.volumes) sum += bytes[{number, volume}];
    DI_ASSERT(sum == store.bytes);
  }
  DI_ASSERT(evictor_.items() == stripes_.count() + puts_.count());
  evictor_.test_check();
  puts_.test_check();
  frees_.test_check();
  repairs_.test_check();
}

}  // namespace di::directory
