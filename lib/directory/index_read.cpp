// What can be read, and what is asked of it: matches, plans and their leases.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/assert.h"
#include "directory/index.h"

namespace di::directory {

namespace {

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

}  // namespace di::directory
