#include "directory/index.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/assert.h"
#include "kv/chain.h"

namespace di::directory {

namespace {

constexpr std::uint64_t stripe_of(std::uint64_t page) {
  return page >> 8;
}
constexpr std::uint32_t index_of(std::uint64_t page) {
  return static_cast<std::uint32_t>(page & 0xff);
}

// Consecutive keys from `at` that are the blocks of `page` from `block`.
std::uint32_t run_length(const std::vector<Key>& keys, std::size_t at, std::span<const Key> page,
                         std::uint32_t block) {
  std::uint32_t count = 0;
  while (at + count < keys.size() && block + count < page.size() && keys[at + count] == page[block + count]) {
    ++count;
  }
  return count;
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

// ---- What can be read --------------------------------------------------------------------------

bool Index::can_read(const StripeColumn& column) const {
  return stores_[column.store].up && !on_failed_volume(column);
}

bool Index::on_failed_volume(const StripeColumn& column) const {
  const Store& store = stores_[column.store];
  if (!store.some_failed) return false;
  const auto volume = store.volumes.find(column.volume);
  return volume != store.volumes.end() && volume->second.state == volume_failed;
}

Index::Redundancy Index::redundancy() const {
  Redundancy out;
  for (const auto& [id, slot] : stripes_.ids()) {
    const Stripe& stripe = stripes_.at(slot);
    if (readable_columns(stripe) == stripe.form().columns_stored()) continue;
    bool readable = true;
    for (std::uint32_t page = 0; page < stripe.pages() && readable; ++page)
      readable = page_readable(stripe, page);
    ++(readable ? out.degraded : out.unreadable);
  }
  return out;
}

std::uint32_t Index::readable_columns(const Stripe& stripe) const {
  const auto columns = stripe.columns();
  return static_cast<std::uint32_t>(
      std::count_if(columns.begin(), columns.end(), [this](const StripeColumn& c) { return can_read(c); }));
}

bool Index::page_readable(const Stripe& stripe, std::uint32_t page) const {
  const std::uint32_t parts = stripe.form().parts;
  std::uint32_t own = 0;
  std::uint32_t all = 0;
  for (const StripeColumn& column : stripe.columns()) {
    if (!can_read(column)) continue;
    ++all;
    if (column.column / parts == page && !stripe.form().is_parity(column.column)) ++own;
    if (own == parts || all == stripe.form().data_stored()) return true;
  }
  return false;
}

std::optional<BlockRef> Index::owner(const Key& key) const {
  std::optional<BlockRef> found;
  blocks_.find(key, [&](BlockRef ref) {
    if (ref.in_arena) return true;
    const Stripe& stripe = stripes_.at(ref.slot);
    if (found && stripes_.at(found->slot).published < stripe.published) return true;
    if (page_readable(stripe, stripe.page_of_block(ref.block))) found = ref;
    return true;
  });
  return found;
}

bool Index::knows_all(std::span<const Key> keys) const {
  return std::all_of(keys.begin(), keys.end(), [this](const Key& key) { return owner(key).has_value(); });
}

// ---- Places ------------------------------------------------------------------------------------

bool Index::host_up(const Holder& host) {
  return arenas_.host_up(host);
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
  frees_.store_up(*number, now);
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
  if (more) {  // there may be a place now for what waits for one
    repairs_.hurry();
    if (std::exchange(repairs_wait_for_places_, false)) {
      scan_after_ = 0;
      scan_at_ = Instant{};
    }
  }
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

// ---- Match and plan ----------------------------------------------------------------------------

wire::meta_matched Index::match(const wire::meta_match& message) {
  struct Run {
    std::uint32_t host = 0;
    std::uint32_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  constexpr std::size_t prefetch_ahead = 16;
  const std::vector<Key>& keys = message.keys;
  wire::meta_matched answer;
  const std::size_t wanted = std::min(keys.size(), match_keys_max);
  Run store;
  std::vector<Run> hosts;  // those that hold every block so far, then those that stopped
  std::vector<std::uint32_t> holders;
  std::size_t alive = 0;
  bool store_alive = true;
  std::uint64_t arena_bytes = 0;
  std::uint64_t store_bytes = 0;
  for (std::size_t i = 0; i < std::min(prefetch_ahead, wanted); ++i) blocks_.prefetch(keys[i]);
  // Where the last block was found in the store: the next one is usually beside it.
  const Stripe* last = nullptr;
  std::uint32_t last_block = 0;
  std::uint32_t last_page = 0;
  std::uint32_t last_end = 0;  // of its page
  std::uint64_t last_bytes = 0;
  std::span<const Key> last_keys;
  bool last_whole = false;  // every page of it can be read
  // So many blocks from keys[i] on go on from there, at most to the end of a page.
  const auto following = [&](std::size_t i) -> std::uint32_t {
    const std::uint32_t next = last_block + 1;
    if (last == nullptr || next >= last_keys.size() || last_keys[next] != keys[i]) return 0;
    if (next == last_end) {
      if (!last_whole && !page_readable(*last, last_page + 1)) return 0;
      ++last_page;
      last_end += last->page_blocks(last_page);
      last_bytes = last->page_bytes(last_page) / last->page_blocks(last_page);
    }
    const auto most = static_cast<std::uint32_t>(std::min<std::size_t>(last_end - next, wanted - i));
    if (std::memcmp(&keys[i], &last_keys[next], most * sizeof(Key)) == 0) return most;
    std::uint32_t count = 1;
    while (last_keys[next + count] == keys[i + count]) ++count;
    return count;
  };
  for (std::size_t i = 0; i < wanted; ++i) {
    if (const std::uint32_t run = alive == 0 && i > 0 && store_alive ? following(i) : 0; run > 0) {
      last_block += run;
      answer.hit_blocks += run;
      store.blocks += run;
      store.bytes += run * last_bytes;
      store_bytes += run * last_bytes;
      i += run - 1;
      continue;
    }
    if (i + prefetch_ahead < wanted) blocks_.prefetch(keys[i + prefetch_ahead]);
    holders.clear();
    bool stored = false;
    std::uint64_t bytes = block_bytes_;
    last = nullptr;
    blocks_.find(keys[i], [&](BlockRef ref) {
      if (ref.in_arena) {
        holders.push_back(arenas_.at(ref.slot).host);
        return true;
      }
      const Stripe& stripe = stripes_.at(ref.slot);
      const std::uint32_t page = stripe.page_of_block(ref.block);
      bytes = stripe.page_bytes(page) / stripe.page_blocks(page);
      if (stored) return true;
      last_whole = readable_columns(stripe) >= stripe.form().data_stored();
      if (!last_whole && !page_readable(stripe, page)) return true;
      stored = true;
      last = &stripe;
      last_keys = stripe.keys();
      last_block = ref.block;
      last_page = page;
      last_end = stripe.page_first(page) + stripe.page_blocks(page);
      last_bytes = bytes;
      return true;
    });
    if (!stored && holders.empty()) break;
    ++answer.hit_blocks;
    (holders.empty() ? store_bytes : arena_bytes) += bytes;
    store_alive = store_alive && stored;
    if (store_alive) {
      ++store.blocks;
      store.bytes += bytes;
    }
    if (i == 0) {
      for (const std::uint32_t host : holders) {
        if (std::none_of(hosts.begin(), hosts.end(), [&](const Run& run) { return run.host == host; })) {
          hosts.push_back({host, 0, 0});
        }
      }
      alive = hosts.size();
    }
    for (std::size_t h = 0; h < alive;) {
      if (std::find(holders.begin(), holders.end(), hosts[h].host) != holders.end()) {
        ++hosts[h].blocks;
        hosts[h].bytes += bytes;
        ++h;
      } else {
        std::swap(hosts[h], hosts[--alive]);
      }
    }
  }
  if (store.blocks > 0) answer.tiers.push_back({"", store.blocks, store.bytes});
  for (const Run& run : hosts)
    answer.tiers.push_back({arenas_.host(run.host).instance, run.blocks, run.bytes});
  std::sort(answer.tiers.begin(), answer.tiers.end(),
            [](const wire::TierHit& a, const wire::TierHit& b) { return a.instance < b.instance; });
  std::uint64_t fetch_us = arena_bytes / fetch_arena_bytes_per_us;
  if (store_bytes > 0) fetch_us += fetch_store_us + store_bytes / fetch_store_bytes_per_us;
  answer.fetch_us = static_cast<std::uint32_t>(std::min<std::uint64_t>(fetch_us, UINT32_MAX));
  ++counters_.matches;
  counters_.match_blocks += wanted;
  counters_.match_hit_blocks += answer.hit_blocks;
  return answer;
}

void Index::asked(const wire::meta_match& message) {
  if (block_bytes_ == 0) return;  // no model has registered yet
  const Geometry& geometry = options_.placement.geometry;
  const std::uint64_t bytes = block_bytes_ * geometry.columns() / geometry.data_columns;
  // From the deepest on, so that what is above stays longer.
  for (std::size_t i = std::min(message.keys.size(), match_keys_max); i > 0; --i) {
    miss_ratio_.reference(BlockMap::hash_of(message.keys[i - 1]), bytes);
  }
}

wire::PlannedStripe Index::planned_stripe(const Stripe& stripe) const {
  wire::PlannedStripe out;
  out.stripe = stripe.id();
  for (std::uint32_t p = 0; p < stripe.pages(); ++p) out.page_blocks.push_back(stripe.page_blocks(p));
  const auto crcs = stripe.all_page_crcs();
  out.crcs.assign(crcs.begin(), crcs.end());
  out.code = stripe.code();
  for (const StripeColumn& column : stripe.columns()) {
    if (can_read(column)) out.columns.push_back(wire_column(column));
  }
  return out;
}

wire::meta_planned Index::plan(const Holder& holder, const RequestId& request, const wire::meta_plan& message,
                               Instant now) {
  leases_.expire(now);
  wire::meta_planned answer;
  answer.ttl_ms = static_cast<std::uint32_t>(to_ms(leases_.ttl()));
  std::vector<Key> keys = message.keys;
  if (keys.size() > match_keys_max) keys.resize(match_keys_max);
  ++counters_.plans;
  counters_.plan_blocks += keys.size();
  std::vector<std::uint64_t> stripes;
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < keys.size();) {
    wire::PlannedPage planned;
    if (const auto ref = owner(keys[i])) {
      const Stripe& stripe = stripes_.at(ref->slot);
      const std::uint32_t page = stripe.page_of_block(ref->block);
      const auto page_keys = stripe.page_keys(page);
      const auto crcs = stripe.page_crcs(page);
      planned.page = (stripe.id() << 8) | page;
      planned.first = ref->block - stripe.page_first(page);
      planned.keys.assign(page_keys.begin(), page_keys.end());
      planned.crcs.assign(crcs.begin(), crcs.end());
      for (const StripeColumn& column : stripe.columns()) {
        const bool own =
            !stripe.form().is_parity(column.column) && column.column / stripe.form().parts == page;
        if (own && can_read(column)) planned.columns.push_back(wire_column(column));
      }
      if (std::find(stripes.begin(), stripes.end(), stripe.id()) == stripes.end()) {
        stripes.push_back(stripe.id());
        if (stripe.form().has_code()) answer.stripes.push_back(planned_stripe(stripe));
      }
    } else {
      // Only in arenas (page id 0): the page that covers most; of equals the one of the lowest host and
      // number.
      const Arenas::Page* best = nullptr;
      std::uint32_t best_count = 0;
      blocks_.find(keys[i], [&](BlockRef place) {
        if (!place.in_arena) return true;
        const Arenas::Page& held = arenas_.at(place.slot);
        const std::uint32_t count = run_length(keys, i, held.page.keys, place.block);
        const bool first =
            best == nullptr || std::pair(held.host, held.page.page) < std::pair(best->host, best->page.page);
        if (count < best_count || (count == best_count && !first)) return true;
        best = &held;
        best_count = count;
        planned.first = place.block;
        return true;
      });
      if (best == nullptr) break;
      planned.keys = best->page.keys;
      planned.crcs = best->page.crcs;
    }
    // The same bytes elsewhere: two writers of the same blocks may differ in bits, so the CRCs count.
    blocks_.find(keys[i], [&](BlockRef place) {
      if (!place.in_arena) return true;
      const Arenas::Page& held = arenas_.at(place.slot);
      if (held.page.keys == planned.keys && held.page.crcs == planned.crcs) {
        planned.arenas.push_back(arenas_.host(held.host).instance);
      }
      return true;
    });
    std::sort(planned.arenas.begin(), planned.arenas.end());
    planned.arenas.erase(std::unique(planned.arenas.begin(), planned.arenas.end()), planned.arenas.end());
    planned.count = run_length(keys, i, planned.keys, planned.first);
    planned.page_blocks = static_cast<std::uint32_t>(planned.keys.size());
    DI_ASSERT(planned.count > 0);
    i += planned.count;
    found += planned.count;
    answer.pages.push_back(std::move(planned));
  }
  if (answer.pages.empty()) return answer;
  // A use goes up the chain by itself; where its links are missing it begins anew.
  kv::Evictor::Item above = kv::Evictor::item_none;
  for (auto at = stripes.rbegin(); at != stripes.rend(); ++at) {
    const std::uint32_t slot = stripes_.find(*at);
    Stripe& stripe = stripes_.at(slot);
    if (stripe.item != above) evictor_.touch(stripe.item, now);
    above = evictor_.parent(stripe.item);
    const bool cold = stripe.used_at + options_.repair_hot <= now;
    stripe.used_at = now;
    if (cold && !lost_columns(stripe).empty()) consider_repair(slot, now);
  }
  answer.lease = leases_.take(holder, request, std::move(stripes), now);
  if (answer.lease == 0) {
    ++counters_.plan_refused;
    answer.pages.clear();
    answer.stripes.clear();
    return answer;
  }
  counters_.plan_found_blocks += found;
  return answer;
}

void Index::renew(const Holder& holder, const wire::meta_renew& message, Instant now) {
  leases_.expire(now);
  for (const std::uint64_t lease : message.leases) leases_.renew(holder, lease, now);
}

void Index::release(const Holder& holder, const wire::meta_release& message) {
  for (const std::uint64_t lease : message.leases) leases_.release(holder, lease);
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
