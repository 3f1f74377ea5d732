#include "directory/index.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace di::directory {

namespace {

constexpr std::uint64_t stripe_of(std::uint64_t page) {
  return page >> 8;
}
constexpr std::uint32_t index_of(std::uint64_t page) {
  return static_cast<std::uint32_t>(page & 0xff);
}

std::uint16_t wire_code(Code code) {
  return static_cast<std::uint16_t>(code);
}

bool page_valid(const std::vector<Key>& keys, const std::vector<std::uint32_t>& crcs) {
  return !keys.empty() && keys.size() <= page_keys_max && !crcs.empty() && crcs.size() <= page_segments_max;
}

// Payload of 1 TiB in a page is a lie; sums of such sizes stay far inside 64 bits.
constexpr std::uint64_t page_bytes_max = std::uint64_t{1} << 40;

bool pages_valid(const std::vector<wire::PutPage>& pages) {
  if (pages.empty() || pages.size() > stripe_data_columns) return false;
  return std::all_of(pages.begin(), pages.end(), [](const wire::PutPage& page) {
    return page_valid(page.keys, page.crcs) && page.bytes > 0 && page.bytes <= page_bytes_max;
  });
}

// Consecutive keys from `at` that are the blocks of `page` from `block`.
std::uint32_t run_length(const std::vector<Key>& keys, std::size_t at, const std::vector<Key>& page,
                         std::uint32_t block) {
  std::uint32_t count = 0;
  while (at + count < keys.size() && block + count < page.size() && keys[at + count] == page[block + count]) {
    ++count;
  }
  return count;
}

}  // namespace

std::size_t Index::PrefixHash::operator()(const Prefix& prefix) const noexcept {
  std::size_t h;
  std::memcpy(&h, prefix.data(), sizeof h);  // of a SHA-256: any 8 bytes are a hash
  return h;
}

Index::Prefix Index::prefix_of(const Key& key) {
  Prefix prefix;
  std::copy_n(key.raw.begin(), prefix.size(), prefix.begin());
  return prefix;
}

Index::Prefix Index::rest_of(const Key& key) {
  Prefix rest;
  std::copy_n(key.raw.begin() + rest.size(), rest.size(), rest.begin());
  return rest;
}

Index::Index(Options options, Instant now)
    : options_(options),
      leases_([&options] {
        LeaseTable::Options lease = options.lease;
        lease.first = (options.run << 32) + 1;
        return lease;
      }()),
      frees_safe_at_(now + options.lease.cap),
      next_stripe_((options.run << 32) + 1) {
  DI_ASSERT(options.run > 0 && options.run < (std::uint64_t{1} << 24));
}

// ---- Entries -----------------------------------------------------------------------------------

const Index::Entry* Index::find(const Key& key) {
  const auto at = entries_.find(prefix_of(key));
  if (at == entries_.end()) return nullptr;
  if (at->second.rest != rest_of(key)) {
    ++counters_.key_collisions;
    return nullptr;
  }
  return &at->second;
}

Index::Entry* Index::find_or_add(const Key& key) {
  const Prefix prefix = prefix_of(key);
  if (const auto at = entries_.find(prefix); at != entries_.end()) {
    if (at->second.rest == rest_of(key)) return &at->second;
    ++counters_.key_collisions;
    return nullptr;
  }
  if (entries_.size() >= options_.blocks_max) {
    ++counters_.blocks_refused;
    return nullptr;
  }
  return &entries_.emplace(prefix, Entry{rest_of(key), {}, {}}).first->second;
}

void Index::drop_if_empty(const Key& key, const Entry& entry) {
  if (entry.stores.empty() && entry.arenas.empty()) entries_.erase(prefix_of(key));
}

bool Index::page_readable(const Stripe& stripe, std::uint32_t page) const {
  return std::any_of(stripe.columns.begin(), stripe.columns.end(), [&](const Column& column) {
    return column.column == page && stores_.at(column.store).up;
  });
}

const Index::StoreRef* Index::readable(const Entry& entry) const {
  for (const StoreRef& ref : entry.stores) {
    if (page_readable(stripes_.at(stripe_of(ref.page)), index_of(ref.page))) return &ref;
  }
  return nullptr;
}

const wire::PutPage& Index::page_of(const StoreRef& ref) const {
  return stripes_.at(stripe_of(ref.page)).pages[index_of(ref.page)];
}

std::uint64_t Index::block_bytes(const StoreRef& ref) const {
  const wire::PutPage& page = page_of(ref);
  return page.bytes / page.keys.size();
}

std::uint64_t Index::column_bytes(const Stripe& stripe, std::uint16_t column) const {
  if (column < stripe.pages.size()) return stripe.pages[column].bytes;
  std::uint64_t bytes = 0;  // a parity column is as long as the longest data column
  for (const wire::PutPage& page : stripe.pages) bytes = std::max(bytes, page.bytes);
  return bytes;
}

// ---- Places ------------------------------------------------------------------------------------

bool Index::host_up(const Holder& host) {
  if (const auto at = host_numbers_.find(host.instance); at != host_numbers_.end()) {
    Host& known = hosts_.at(at->second);
    arena_clear(at->second, known);
    known = Host{};
    known.instance = host.instance;
    known.generation = host.generation;
    return true;
  }
  if (hosts_.size() >= options_.places_max) return false;
  const std::uint32_t number = next_place_++;
  host_numbers_.emplace(host.instance, number);
  Host& fresh = hosts_[number];
  fresh.instance = host.instance;
  fresh.generation = host.generation;
  return true;
}

bool Index::store_up(const Holder& store, Instant now) {
  auto at = store_numbers_.find(store.instance);
  if (at == store_numbers_.end()) {
    if (stores_.size() >= options_.places_max) return false;
    at = store_numbers_.emplace(store.instance, next_place_++).first;
    stores_[at->second].instance = store.instance;
  }
  const std::uint32_t number = at->second;
  Store& known = stores_.at(number);
  known.generation = store.generation;
  known.up = true;
  known.draining = false;
  known.complete = false;
  known.next_part = 0;
  for (auto pending = frees_.lower_bound({number, 0});
       pending != frees_.end() && pending->first.first == number; ++pending) {
    frees_due_.erase({pending->second.at, pending->first});
    pending->second.at = std::max(pending->second.at, now);
    frees_due_.emplace(pending->second.at, pending->first);
  }
  return true;
}

void Index::store_draining(const Holder& store, bool draining) {
  if (Store* known = store_of(store)) known->draining = draining;
}

Index::Store* Index::store_of(const Holder& holder) {
  const auto at = store_numbers_.find(holder.instance);
  if (at == store_numbers_.end()) return nullptr;
  Store& store = stores_.at(at->second);
  return store.up && store.generation == holder.generation ? &store : nullptr;
}

Index::Host* Index::host_of(const Holder& holder, std::uint32_t* number) {
  const auto at = host_numbers_.find(holder.instance);
  if (at == host_numbers_.end()) return nullptr;
  Host& host = hosts_.at(at->second);
  if (host.generation != holder.generation) return nullptr;
  if (number != nullptr) *number = at->second;
  return &host;
}

// The store with the fewest bytes takes the next column.
Index::Store* Index::choose_store() {
  Store* best = nullptr;
  for (auto& [number, store] : stores_) {
    if (!store.up || store.draining || !store.complete) continue;
    if (best == nullptr || store.bytes < best->bytes) best = &store;
  }
  return best;
}

void Index::lost(const Holder& holder, Instant now) {
  std::uint32_t number = 0;
  if (Host* host = host_of(holder, &number)) {
    arena_clear(number, *host);
    hosts_.erase(number);
    host_numbers_.erase(holder.instance);
  }
  if (Store* store = store_of(holder)) {
    store->up = false;
    store->complete = false;
    const std::uint32_t gone = store_numbers_.at(holder.instance);
    for (auto at = frees_.lower_bound({gone, 0}); at != frees_.end() && at->first.first == gone; ++at) {
      frees_due_.erase({at->second.at, at->first});
    }
  }
  leases_.release_holder(holder);
  std::vector<std::uint64_t> opened;
  for (const auto& [deadline, id] : open_due_) {
    if (stripes_.at(id).opener == holder) opened.push_back(id);
  }
  for (const std::uint64_t id : opened) {
    ++counters_.puts_lapsed;
    drop(id, now + put_grace);
  }
}

// ---- Match and plan ----------------------------------------------------------------------------

wire::meta_matched Index::match(const wire::meta_match& message) {
  struct Run {
    std::uint32_t host = 0;
    std::uint32_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  wire::meta_matched answer;
  const std::size_t wanted = std::min(message.keys.size(), match_keys_max);
  Run store;
  std::vector<Run> hosts;  // those that hold every block so far, then those that stopped
  std::size_t alive = 0;
  bool store_alive = true;
  std::uint64_t arena_bytes = 0;
  std::uint64_t store_bytes = 0;
  for (std::size_t i = 0; i < wanted; ++i) {
    const Entry* entry = find(message.keys[i]);
    if (entry == nullptr) break;
    const StoreRef* ref = readable(*entry);
    if (ref == nullptr && entry->arenas.empty()) break;
    const std::uint64_t bytes = entry->stores.empty() ? block_bytes_ : block_bytes(entry->stores.front());
    ++answer.hit_blocks;
    (entry->arenas.empty() ? store_bytes : arena_bytes) += bytes;
    store_alive = store_alive && ref != nullptr;
    if (store_alive) {
      ++store.blocks;
      store.bytes += bytes;
    }
    if (i == 0) {
      for (const ArenaRef& arena : entry->arenas) {
        const bool known =
            std::any_of(hosts.begin(), hosts.end(), [&](const Run& run) { return run.host == arena.host; });
        if (!known) hosts.push_back({arena.host, 0, 0});
      }
      alive = hosts.size();
    }
    for (std::size_t h = 0; h < alive;) {
      const bool holds = std::any_of(entry->arenas.begin(), entry->arenas.end(),
                                     [&](const ArenaRef& arena) { return arena.host == hosts[h].host; });
      if (holds) {
        ++hosts[h].blocks;
        hosts[h].bytes += bytes;
        ++h;
      } else {
        std::swap(hosts[h], hosts[--alive]);
      }
    }
  }
  if (store.blocks > 0) answer.tiers.push_back({"", store.blocks, store.bytes});
  for (const Run& run : hosts) answer.tiers.push_back({hosts_.at(run.host).instance, run.blocks, run.bytes});
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
    const Entry* entry = find(keys[i]);
    if (entry == nullptr) break;
    wire::PlannedPage planned;
    if (const StoreRef* ref = readable(*entry)) {
      const Stripe& stripe = stripes_.at(stripe_of(ref->page));
      const wire::PutPage& page = page_of(*ref);
      planned.page = ref->page;
      planned.first = ref->block;
      planned.keys = page.keys;
      planned.crcs = page.crcs;
      for (const Column& column : stripe.columns) {
        const bool useful = column.column == index_of(ref->page) || column.column >= stripe_data_columns;
        const Store& store = stores_.at(column.store);
        if (useful && store.up) planned.columns.push_back({store.instance, column.volume, column.column});
      }
      stripes.push_back(stripe_of(ref->page));
    } else {
      // Only in arenas (page id 0): the page that covers most; of equals the one reported first.
      std::uint32_t best = 0;
      for (const ArenaRef& arena : entry->arenas) {
        const wire::ArenaPage& page = hosts_.at(arena.host).pages.at(arena.page);
        const std::uint32_t count = run_length(keys, i, page.keys, arena.block);
        if (count <= best) continue;
        best = count;
        planned.first = arena.block;
        planned.keys = page.keys;
        planned.crcs = page.crcs;
      }
      if (best == 0) break;
    }
    // The same bytes elsewhere: two writers of the same blocks may differ in bits, so the CRCs count.
    for (const ArenaRef& arena : entry->arenas) {
      const Host& host = hosts_.at(arena.host);
      const wire::ArenaPage& page = host.pages.at(arena.page);
      if (page.keys == planned.keys && page.crcs == planned.crcs) planned.arenas.push_back(host.instance);
    }
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
  // From the last to the first, so that a parent is always younger than what hangs on it.
  for (auto at = stripes.rbegin(); at != stripes.rend(); ++at) touch(*at, stripes_.at(*at), now);
  answer.lease = leases_.take(holder, request, std::move(stripes), now);
  if (answer.lease == 0) {
    ++counters_.plan_refused;
    answer.pages.clear();
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

// ---- Arenas ------------------------------------------------------------------------------------

void Index::arena_add(std::uint32_t number, Host& host, const wire::ArenaPage& page) {
  if (!page_valid(page.keys, page.crcs)) {
    ++counters_.arena_refused;
    return;
  }
  if (const auto known = host.pages.find(page.page); known != host.pages.end()) {
    if (known->second == page) return;
    arena_remove(number, host, page.page);
  }
  if (host.pages.size() >= options_.arena_pages_max) {
    ++counters_.arena_refused;
    return;
  }
  for (std::uint32_t block = 0; block < page.keys.size(); ++block) {
    if (Entry* entry = find_or_add(page.keys[block])) entry->arenas.push_back({number, block, page.page});
  }
  host.blocks += page.keys.size();
  host.pages.emplace(page.page, page);
}

void Index::arena_remove(std::uint32_t number, Host& host, std::uint64_t page) {
  const auto at = host.pages.find(page);
  if (at == host.pages.end()) return;
  for (const Key& key : at->second.keys) {
    const auto entry = entries_.find(prefix_of(key));
    if (entry == entries_.end() || entry->second.rest != rest_of(key)) continue;
    std::erase_if(entry->second.arenas,
                  [&](const ArenaRef& ref) { return ref.host == number && ref.page == page; });
    drop_if_empty(key, entry->second);
  }
  host.blocks -= at->second.keys.size();
  host.pages.erase(at);
}

void Index::arena_clear(std::uint32_t number, Host& host) {
  while (!host.pages.empty()) arena_remove(number, host, host.pages.begin()->first);
}

bool Index::arena_delta(const Holder& holder, const wire::meta_arena_delta& message) {
  std::uint32_t number = 0;
  Host* host = host_of(holder, &number);
  if (host == nullptr) return false;
  ++counters_.arena_deltas;
  if (message.snapshot) {
    arena_clear(number, *host);
    for (const wire::ArenaPage& page : message.added) arena_add(number, *host, page);
    host->seq = message.seq;
    host->complete = true;
    host->resync_asked = false;
    return false;
  }
  if (message.seq <= host->seq) return false;  // seen already
  const bool next = message.seq == host->seq + 1 && (host->complete || host->seq == 0);
  if (!next) {
    host->complete = false;
    if (host->resync_asked) return false;
    host->resync_asked = true;
    ++counters_.arena_gaps;
    return true;
  }
  for (const std::uint64_t page : message.removed) arena_remove(number, *host, page);
  for (const wire::ArenaPage& page : message.added) arena_add(number, *host, page);
  host->seq = message.seq;
  host->complete = true;
  return false;
}

// ---- Puts --------------------------------------------------------------------------------------

wire::meta_put_opened Index::put_open(const Holder& holder, const wire::meta_put_open& message, Instant now) {
  wire::meta_put_opened answer;
  answer.data_columns = stripe_data_columns;
  answer.parity_columns = stripe_parity_columns;
  answer.ttl_ms = static_cast<std::uint32_t>(to_ms(put_ttl));
  const auto refuse = [&](Code code, std::uint64_t& counter) {
    ++counter;
    answer.code = wire_code(code);
    return answer;
  };
  if (!pages_valid(message.pages)) return refuse(Code::invalid, counters_.puts_invalid);

  std::vector<Key> fresh;
  std::uint64_t bytes = 0;
  std::uint64_t open_elsewhere = 0;
  for (const wire::PutPage& page : message.pages) {
    bytes += page.bytes;
    for (const Key& key : page.keys) {
      const auto open = open_keys_.find(key);
      if (open != open_keys_.end()) {
        Stripe& stripe = stripes_.at(open->second);
        if (stripe.opener == holder && stripe.fingerprint == message.fingerprint &&
            stripe.pages == message.pages) {
          open_due_.erase({stripe.deadline, open->second});
          stripe.deadline = now + put_ttl;
          open_due_.emplace(stripe.deadline, open->second);
          answer.stripe = open->second;
          for (const Column& column : stripe.columns) {
            answer.columns.push_back({stores_.at(column.store).instance, column.volume, column.column});
          }
          return answer;
        }
      }
      const Entry* entry = find(key);
      if (entry != nullptr && readable(*entry) != nullptr) continue;
      if (open != open_keys_.end()) {
        ++open_elsewhere;
      } else {
        fresh.push_back(key);
      }
    }
  }
  if (fresh.empty()) {
    if (open_elsewhere > 0) return refuse(Code::busy, counters_.puts_busy);
    return refuse(Code::exists, counters_.puts_exist);
  }
  Store* store = choose_store();
  if (store == nullptr || open_due_.size() >= options_.open_puts_max || next_stripe_ > stripe_id_max) {
    return refuse(Code::busy, counters_.puts_busy);
  }
  const std::uint32_t number = store_numbers_.at(store->instance);
  if (entries_.size() + fresh.size() > options_.blocks_max) {
    evict(number, bytes, now);
    return refuse(Code::busy, counters_.puts_busy);
  }

  const std::uint64_t id = next_stripe_++;
  Stripe& stripe = stripes_[id];
  stripe.open = true;
  stripe.fingerprint = message.fingerprint;
  stripe.pages = message.pages;
  stripe.opener = holder;
  stripe.deadline = now + put_ttl;
  stripe.used_at = now;
  stripe.columns.push_back({number, 0, 0, store->inventory});
  store->bytes += column_bytes(stripe, 0);
  for (const Key& key : fresh) open_keys_.emplace(key, id);
  open_due_.emplace(stripe.deadline, id);
  ++counters_.puts_opened;
  answer.stripe = id;
  answer.columns.push_back({store->instance, 0, 0});
  return answer;
}

bool Index::brings_nothing_new(const std::vector<wire::PutPage>& pages) {
  for (const wire::PutPage& page : pages) {
    for (const Key& key : page.keys) {
      const Entry* entry = find(key);
      if (entry == nullptr || readable(*entry) == nullptr) return false;
    }
  }
  return true;
}

wire::meta_put_committed Index::put_commit(const Holder& holder, const wire::meta_put_commit& message,
                                           Instant now) {
  wire::meta_put_committed answer;
  answer.stripe = message.stripe;
  const auto at = stripes_.find(message.stripe);
  if (at != stripes_.end() && !at->second.open &&
      (at->second.opener == holder || at->second.opener.instance.empty())) {
    return answer;  // committed, or adopted from the inventory before this message came
  }
  if (at == stripes_.end() || !at->second.open || at->second.opener != holder || at->second.deadline <= now) {
    ++counters_.puts_refused;
    answer.code = wire_code(Code::not_found);
    return answer;
  }
  Stripe& stripe = at->second;
  const std::uint32_t store = stripe.columns.front().store;
  const std::uint64_t bytes = column_bytes(stripe, 0);
  const std::size_t failed = std::erase_if(stripe.columns, [&](const Column& column) {
    const auto& list = message.failed_columns;
    if (std::find(list.begin(), list.end(), column.column) == list.end()) return false;
    stores_.at(column.store).bytes -= column_bytes(stripe, column.column);
    return true;  // nothing was written: nothing to free
  });
  if (failed > 0) {
    ++counters_.puts_no_space;
    drop(message.stripe, now + put_grace);
    evict(store, bytes, now);
    answer.code = wire_code(Code::no_space);
    return answer;
  }
  if (brings_nothing_new(stripe.pages)) {
    ++counters_.puts_duplicate;
    drop(message.stripe, now);
    answer.code = wire_code(Code::exists);
    return answer;
  }
  publish(message.stripe, stripe, now);
  ++counters_.puts_committed;
  return answer;
}

void Index::put_abort(const Holder& holder, const wire::meta_put_abort& message, Instant now) {
  const auto at = stripes_.find(message.stripe);
  if (at == stripes_.end() || !at->second.open || at->second.opener != holder) return;
  ++counters_.puts_aborted;
  drop(message.stripe, now + put_grace);
}

void Index::publish(std::uint64_t id, Stripe& stripe, Instant now) {
  if (stripe.open) {
    open_due_.erase({stripe.deadline, id});
    for (const wire::PutPage& page : stripe.pages) {
      for (const Key& key : page.keys) {
        const auto open = open_keys_.find(key);
        if (open != open_keys_.end() && open->second == id) open_keys_.erase(open);
      }
    }
    stripe.open = false;
  }
  for (std::uint32_t p = 0; p < stripe.pages.size(); ++p) {
    const wire::PutPage& page = stripe.pages[p];
    for (std::uint32_t block = 0; block < page.keys.size(); ++block) {
      if (Entry* entry = find_or_add(page.keys[block])) entry->stores.push_back({(id << 8) | p, block});
    }
    children_.emplace(page.parent, id);
  }
  stripe.order = next_order_++;
  stripe.used_at = now;
  for (Column& column : stripe.columns) {
    column.seen = stores_.at(column.store).inventory;
    enlist(id, stripe, column);
  }
}

void Index::touch(std::uint64_t id, Stripe& stripe, Instant now) {
  for (const Column& column : stripe.columns) delist(id, stripe, column);
  stripe.order = next_order_++;
  stripe.used_at = now;
  for (const Column& column : stripe.columns) enlist(id, stripe, column);
}

void Index::enlist(std::uint64_t id, const Stripe& stripe, const Column& column) {
  Store& store = stores_.at(column.store);
  const bool added = store.by_use.emplace(stripe.order, id).second;
  DI_ASSERT(added);
  if (column.column < stripe.pages.size()) store.blocks += stripe.pages[column.column].keys.size();
}

void Index::delist(std::uint64_t id, const Stripe& stripe, const Column& column) {
  Store& store = stores_.at(column.store);
  const std::size_t removed = store.by_use.erase({stripe.order, id});
  DI_ASSERT(removed == 1);
  if (column.column < stripe.pages.size()) store.blocks -= stripe.pages[column.column].keys.size();
}

void Index::drop(std::uint64_t id, Instant free_at) {
  const auto at = stripes_.find(id);
  DI_ASSERT(at != stripes_.end());
  Stripe& stripe = at->second;
  if (stripe.open) open_due_.erase({stripe.deadline, id});
  for (std::uint32_t p = 0; p < stripe.pages.size(); ++p) {
    const wire::PutPage& page = stripe.pages[p];
    for (const Key& key : page.keys) {
      if (stripe.open) {
        const auto open = open_keys_.find(key);
        if (open != open_keys_.end() && open->second == id) open_keys_.erase(open);
        continue;
      }
      const auto entry = entries_.find(prefix_of(key));
      if (entry == entries_.end() || entry->second.rest != rest_of(key)) continue;
      std::erase_if(entry->second.stores, [&](const StoreRef& ref) { return stripe_of(ref.page) == id; });
      drop_if_empty(key, entry->second);
    }
    if (!stripe.open) children_.erase({page.parent, id});
  }
  for (const Column& column : stripe.columns) {
    const std::uint64_t bytes = column_bytes(stripe, column.column);
    if (!stripe.open) delist(id, stripe, column);
    stores_.at(column.store).bytes -= bytes;
    schedule_free(column.store, id, bytes, free_at);
  }
  stripes_.erase(at);
}

void Index::lose_column(std::uint64_t id, std::uint32_t number) {
  Stripe& stripe = stripes_.at(id);
  std::erase_if(stripe.columns, [&](const Column& column) {
    if (column.store != number) return false;
    stores_.at(number).bytes -= column_bytes(stripe, column.column);
    delist(id, stripe, column);
    return true;
  });
  if (stripe.columns.size() < stripe_data_columns) drop(id, Instant{});
}

// ---- Freeing and eviction ----------------------------------------------------------------------

void Index::schedule_free(std::uint32_t store, std::uint64_t stripe, std::uint64_t bytes, Instant at) {
  const FreeKey key{store, stripe};
  const auto [pending, added] = frees_.emplace(key, Pending{at, bytes});
  if (!added) return;
  stores_.at(store).freeing_bytes += bytes;
  if (stores_.at(store).up) frees_due_.emplace(at, key);
}

bool Index::free_from_inventory(std::uint32_t store, std::uint64_t stripe, Instant now) {
  if (now >= frees_safe_at_ && !leases_.holds(stripe)) {
    ++counters_.stripes_freed;
    return true;
  }
  schedule_free(store, stripe, 0, std::max(now, frees_safe_at_));
  return false;
}

std::vector<Index::Free> Index::step(Instant now) {
  counters_.leases_expired += leases_.expire(now);
  while (!open_due_.empty() && open_due_.begin()->first <= now) {
    ++counters_.puts_lapsed;
    drop(open_due_.begin()->second, now + put_grace);
  }
  if (options_.stripe_ttl.count() > 0) {
    for (auto& [number, store] : stores_) {
      for (std::size_t i = 0; i < evict_stripes_max && !store.by_use.empty(); ++i) {
        const std::uint64_t oldest = store.by_use.begin()->second;
        if (stripes_.at(oldest).used_at + options_.stripe_ttl > now) break;
        const std::uint64_t leaf = leaf_under(oldest);
        if (stripes_.at(leaf).used_at + options_.stripe_ttl > now) {
          touch(oldest, stripes_.at(oldest), now);  // what hangs on it is in use
          continue;
        }
        ++counters_.stripes_expired;
        drop(leaf, now);
      }
    }
  }
  std::map<std::uint32_t, std::vector<std::uint64_t>> due;
  while (!frees_due_.empty() && frees_due_.begin()->first <= now) {
    const FreeKey key = frees_due_.begin()->second;
    const auto pending = frees_.find(key);
    frees_due_.erase(frees_due_.begin());
    if (leases_.holds(key.second)) {
      pending->second.at = std::max(leases_.next_due(), now + milliseconds(100));
      frees_due_.emplace(pending->second.at, key);
      continue;
    }
    stores_.at(key.first).freeing_bytes -= pending->second.bytes;
    frees_.erase(pending);
    due[key.first].push_back(key.second);
    ++counters_.stripes_freed;
  }
  std::vector<Free> out;
  for (auto& [number, stripes] : due) {
    for (std::size_t from = 0; from < stripes.size(); from += free_batch_max) {
      const std::size_t to = std::min(stripes.size(), from + free_batch_max);
      Free free;
      free.store = stores_.at(number).instance;
      free.message.stripes.assign(stripes.begin() + static_cast<std::ptrdiff_t>(from),
                                  stripes.begin() + static_cast<std::ptrdiff_t>(to));
      out.push_back(std::move(free));
    }
  }
  return out;
}

Instant Index::next_due() const {
  Instant due = leases_.next_due();
  if (!open_due_.empty()) due = std::min(due, open_due_.begin()->first);
  if (!frees_due_.empty()) due = std::min(due, frees_due_.begin()->first);
  if (options_.stripe_ttl.count() > 0) {
    for (const auto& [number, store] : stores_) {
      if (store.by_use.empty()) continue;
      due = std::min(due, stripes_.at(store.by_use.begin()->second).used_at + options_.stripe_ttl);
    }
  }
  return due;
}

// Goes down the chain while something hangs on the stripe.  Chained hashes have no cycles; what peers
// claim may have, so the walk is bounded and then ends where it is.
std::uint64_t Index::leaf_under(std::uint64_t id) const {
  for (int depth = 0; depth < 65536; ++depth) {
    std::uint64_t child = 0;
    for (const wire::PutPage& page : stripes_.at(id).pages) {
      for (const Key& key : page.keys) {
        auto at = children_.lower_bound({key, 0});
        if (at != children_.end() && at->first == key && at->second == id) ++at;
        if (at != children_.end() && at->first == key) child = at->second;
        if (child != 0) break;
      }
      if (child != 0) break;
    }
    if (child == 0) return id;
    id = child;
  }
  return id;
}

void Index::evict(std::uint32_t number, std::uint64_t put_bytes, Instant now) {
  Store& store = stores_.at(number);
  const std::uint64_t want = std::max(put_bytes * evict_put_multiple, store.bytes / evict_store_part);
  for (std::size_t i = 0; i < evict_stripes_max && store.freeing_bytes < want && !store.by_use.empty(); ++i) {
    ++counters_.stripes_evicted;
    drop(leaf_under(store.by_use.begin()->second), now);
  }
}

// ---- Inventory and failed reads ----------------------------------------------------------------

bool Index::adopt(std::uint32_t number, Store& store, const wire::ShardRecord& shard, Instant now) {
  const bool valid = shard.stripe > 0 && shard.stripe <= stripe_id_max && pages_valid(shard.pages) &&
                     shard.column < stripe_data_columns + stripe_parity_columns;
  if (!valid) return true;
  if (frees_.contains({number, shard.stripe})) return false;  // on its way out
  const auto at = stripes_.find(shard.stripe);
  if (at == stripes_.end()) {
    if (brings_nothing_new(shard.pages)) return true;
    std::size_t keys = 0;
    for (const wire::PutPage& page : shard.pages) keys += page.keys.size();
    // Known to nobody, it would be space that never comes back.
    if (entries_.size() + keys > options_.blocks_max) return true;
    next_stripe_ = std::max(next_stripe_, shard.stripe + 1);
    Stripe& stripe = stripes_[shard.stripe];
    stripe.fingerprint = shard.fingerprint;
    stripe.pages = shard.pages;
    stripe.columns.push_back({number, shard.volume, shard.column, store.inventory});
    store.bytes += column_bytes(stripe, shard.column);
    publish(shard.stripe, stripe, now);
    ++counters_.stripes_adopted;
    return false;
  }
  Stripe& stripe = at->second;
  if (stripe.fingerprint != shard.fingerprint || stripe.pages != shard.pages) return true;
  for (Column& column : stripe.columns) {
    if (column.column != shard.column) continue;
    if (column.store != number) return true;  // a second copy of a column that is where it should be
    column.volume = shard.volume;
    column.seen = store.inventory;
    return false;
  }
  stripe.columns.push_back({number, shard.volume, shard.column, store.inventory});
  store.bytes += column_bytes(stripe, shard.column);
  if (!stripe.open) enlist(shard.stripe, stripe, stripe.columns.back());
  return false;
}

std::optional<wire::meta_inventory_ack> Index::inventory(const Holder& holder,
                                                         const wire::meta_inventory& message, Instant now) {
  Store* store = store_of(holder);
  if (store == nullptr || message.shards.size() > inventory_part_max ||
      (message.cursor != 0 && message.cursor != store->next_part)) {
    ++counters_.inventory_refused;
    return std::nullopt;
  }
  const std::uint32_t number = store_numbers_.at(holder.instance);
  if (message.cursor == 0) {
    ++store->inventory;
    store->complete = false;
  }
  store->next_part = message.cursor + 1;
  wire::meta_inventory_ack answer;
  answer.cursor = message.cursor;
  for (const wire::ShardRecord& shard : message.shards) {
    if (adopt(number, *store, shard, now) && free_from_inventory(number, shard.stripe, now)) {
      answer.unknown.push_back(shard.stripe);
    }
  }
  if (message.last) {
    std::vector<std::uint64_t> missing;
    for (const auto& [order, id] : store->by_use) {
      for (const Column& column : stripes_.at(id).columns) {
        if (column.store == number && column.seen != store->inventory) missing.push_back(id);
      }
    }
    for (const std::uint64_t id : missing) {
      ++counters_.stripes_missing;
      lose_column(id, number);
    }
    store->complete = true;
  }
  return answer;
}

void Index::read_failed(const wire::meta_read_failed& message, Instant now) {
  const auto at = stripes_.find(stripe_of(message.page));
  if (at == stripes_.end() || at->second.open) return;
  Stripe& stripe = at->second;
  const auto column = std::find_if(stripe.columns.begin(), stripe.columns.end(),
                                   [&](const Column& c) { return c.column == message.column; });
  if (column == stripe.columns.end()) return;
  if (message.code == wire_code(Code::corrupt)) {
    ++counters_.columns_corrupt;
  } else if (message.code == wire_code(Code::not_found)) {
    ++counters_.columns_not_found;
  } else {
    ++counters_.columns_io;  // the next read may do better
    return;
  }
  const std::uint32_t store = column->store;
  const std::uint64_t id = at->first;
  schedule_free(store, id, column_bytes(stripe, message.column), now);
  lose_column(id, store);
}

// ---- What the control commands show ------------------------------------------------------------

std::vector<Index::Place> Index::places() const {
  std::vector<Place> out;
  for (const auto& [instance, number] : host_numbers_) {
    const Host& host = hosts_.at(number);
    out.push_back({instance, false, true, host.complete, host.pages.size(), host.blocks,
                   host.blocks * block_bytes_, 0});
  }
  for (const auto& [instance, number] : store_numbers_) {
    const Store& store = stores_.at(number);
    out.push_back({instance, true, store.up, store.complete, store.by_use.size(), store.blocks, store.bytes,
                   store.freeing_bytes});
  }
  return out;
}

std::vector<Index::PageRow> Index::pages_after(std::uint64_t after, std::size_t count) const {
  std::vector<PageRow> out;
  for (auto at = stripes_.lower_bound(stripe_of(after)); at != stripes_.end() && out.size() < count; ++at) {
    if (at->second.open) continue;
    for (std::uint32_t p = 0; p < at->second.pages.size(); ++p) {
      PageRow row;
      row.page = (at->first << 8) | p;
      if (row.page <= after) continue;
      const wire::PutPage& page = at->second.pages[p];
      for (const Column& column : at->second.columns) row.stores.push_back(stores_.at(column.store).instance);
      row.readable = page_readable(at->second, p);
      row.parent = page.parent;
      row.first = page.keys.front();
      row.blocks = static_cast<std::uint32_t>(page.keys.size());
      row.bytes = page.bytes;
      out.push_back(std::move(row));
    }
  }
  return out;
}

void Index::test_check() const {
  std::size_t store_refs = 0;
  std::size_t arena_refs = 0;
  for (const auto& [prefix, entry] : entries_) {
    DI_ASSERT(!entry.stores.empty() || !entry.arenas.empty());
    for (const StoreRef& ref : entry.stores) {
      const Stripe& stripe = stripes_.at(stripe_of(ref.page));
      DI_ASSERT(!stripe.open);
      const Key& key = stripe.pages.at(index_of(ref.page)).keys.at(ref.block);
      DI_ASSERT(prefix_of(key) == prefix && rest_of(key) == entry.rest);
      ++store_refs;
    }
    for (const ArenaRef& ref : entry.arenas) {
      const Key& key = hosts_.at(ref.host).pages.at(ref.page).keys.at(ref.block);
      DI_ASSERT(prefix_of(key) == prefix && rest_of(key) == entry.rest);
      ++arena_refs;
    }
  }
  std::map<std::uint32_t, std::uint64_t> bytes;
  std::size_t open = 0;
  std::size_t stored = 0;
  std::size_t uses = 0;
  for (const auto& [id, stripe] : stripes_) {
    DI_ASSERT(!stripe.columns.empty());
    for (const Column& column : stripe.columns) {
      bytes[column.store] += column_bytes(stripe, column.column);
      DI_ASSERT(stores_.at(column.store).by_use.contains({stripe.order, id}) != stripe.open);
      DI_ASSERT(!frees_.contains({column.store, id}));
      uses += stripe.open ? 0 : 1;
    }
    if (stripe.open) {
      ++open;
      DI_ASSERT(open_due_.contains({stripe.deadline, id}));
      continue;
    }
    for (const wire::PutPage& page : stripe.pages) {
      DI_ASSERT(children_.contains({page.parent, id}));
      stored += page.keys.size();
    }
  }
  DI_ASSERT(open == open_due_.size());
  for (const auto& [key, id] : open_keys_) DI_ASSERT(stripes_.at(id).open);
  std::size_t held = 0;
  for (const auto& [number, host] : hosts_) {
    std::uint64_t blocks = 0;
    for (const auto& [page, content] : host.pages) blocks += content.keys.size();
    DI_ASSERT(blocks == host.blocks);
    held += blocks;
  }
  // Keys that the bound or a collision refused have no reference.
  DI_ASSERT(store_refs <= stored && arena_refs <= held);
  if (counters_.blocks_refused == 0 && counters_.key_collisions == 0) {
    DI_ASSERT(store_refs == stored && arena_refs == held);
  }
  for (const auto& [number, store] : stores_) {
    DI_ASSERT(store.bytes == bytes[number]);
    DI_ASSERT(uses >= store.by_use.size());
    uses -= store.by_use.size();
    std::uint64_t freeing = 0;
    for (auto at = frees_.lower_bound({number, 0}); at != frees_.end() && at->first.first == number; ++at) {
      freeing += at->second.bytes;
      DI_ASSERT(frees_due_.contains({at->second.at, at->first}) == store.up);
    }
    DI_ASSERT(store.freeing_bytes == freeing);
  }
  DI_ASSERT(uses == 0);
}

}  // namespace di::directory
