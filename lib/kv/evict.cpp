#include "kv/evict.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace di::kv {

namespace {

// The share of `small` in percent of the capacity: where it begins, and between what it moves.
constexpr std::uint64_t small_begin_pct = 50;
constexpr std::uint64_t small_min_pct = 10;
constexpr std::uint64_t small_max_pct = 90;

constexpr std::uint64_t percent(std::uint64_t bytes, std::uint64_t pct) {
  return bytes / 100 * pct + bytes % 100 * pct / 100;
}

}  // namespace

Evictor::Evictor(const Options& options, Instant now) : options_(options) {
  DI_ASSERT(options_.low_pct <= options_.high_pct && options_.high_pct <= 100);
  DI_ASSERT(options_.items_max < item_none && options_.victims_max > 0);
  small_share_ = percent(options_.capacity_bytes, small_begin_pct);
  wheel_.fill(item_none);
  hand_ = tick_of(now) / ticks_per_slot;
}

std::uint32_t Evictor::tick_of(Instant now) {
  const std::int64_t ticks = (now.ns + ticks_before * tick.count()) / tick.count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(ticks, 0, tick_never - 1));
}

std::uint32_t Evictor::ticks_of(Duration length) {
  const std::int64_t ticks = (length.count() - 1) / tick.count() + 1;
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(ticks, 1, tick_never));
}

Evictor::Node& Evictor::node(Item item) {
  DI_ASSERT(item < nodes_.size() && nodes_[item].taken);
  return nodes_[item];
}

const Evictor::Node& Evictor::node(Item item) const {
  DI_ASSERT(item < nodes_.size() && nodes_[item].taken);
  return nodes_[item];
}

// The first whole second at which it is over.
std::uint64_t Evictor::second_of(std::uint32_t expires) {
  return (std::uint64_t{expires} + ticks_per_slot - 1) / ticks_per_slot;
}

void Evictor::push_front(List& list, Links Node::*links, Item item) {
  Links& at = nodes_[item].*links;
  at = {item_none, list.head};
  if (list.head == item_none) {
    list.tail = item;
  } else {
    (nodes_[list.head].*links).prev = item;
  }
  list.head = item;
}

void Evictor::unlink(List& list, Links Node::*links, Item item) {
  Links& at = nodes_[item].*links;
  (at.prev == item_none ? list.head : (nodes_[at.prev].*links).next) = at.next;
  (at.next == item_none ? list.tail : (nodes_[at.next].*links).prev) = at.prev;
  at = {};
}

void Evictor::move_front(List& list, Links Node::*links, Item item) {
  if (list.head == item) return;
  unlink(list, links, item);
  push_front(list, links, item);
}

// ---- Capacity and tenants ----------------------------------------------------------------------

void Evictor::set_capacity(std::uint64_t bytes) {
  // The queues keep their shares.
  const std::uint64_t before = std::exchange(options_.capacity_bytes, bytes);
  const double part = before == 0 ? static_cast<double>(small_begin_pct) / 100
                                  : static_cast<double>(small_share_) / static_cast<double>(before);
  small_share_ = std::clamp(static_cast<std::uint64_t>(part * static_cast<double>(bytes)),
                            percent(bytes, small_min_pct), percent(bytes, small_max_pct));
  ghost_trim();
}

Evictor::Tenant* Evictor::tenant_of(std::uint64_t name, std::uint32_t& index) {
  if (const auto known = tenant_index_.find(name); known != tenant_index_.end()) {
    index = known->second;
    return &tenants_[index];
  }
  if (tenant_index_.size() >= options_.tenants_max) return nullptr;
  if (tenants_free_.empty()) {
    index = static_cast<std::uint32_t>(tenants_.size());
    tenants_.emplace_back();
  } else {
    index = tenants_free_.back();
    tenants_free_.pop_back();
    tenants_[index] = {};
  }
  tenants_[index].name = name;
  tenant_index_.emplace(name, index);
  return &tenants_[index];
}

void Evictor::tenant_forget(std::uint32_t index) {
  const Tenant& tenant = tenants_[index];
  if (tenant.items > 0 || tenant.rule.has_value()) return;
  tenant_index_.erase(tenant.name);
  tenants_free_.push_back(index);
}

bool Evictor::set_tenant(std::uint64_t tenant, const TenantRule& rule) {
  std::uint32_t index = 0;
  Tenant* known = tenant_of(tenant, index);
  if (known == nullptr) return false;
  known->rule = rule;
  for (Item item = known->own.head; item != item_none; item = nodes_[item].own.next) {
    if (nodes_[item].slot != slot_none) wheel_remove(item);  // a shorter life does not wait for its slot
    set_expiry(item);
  }
  return true;
}

bool Evictor::fit_quota(Tenant& tenant, std::uint64_t bytes, Item keep, std::vector<Victim>& out) {
  const std::uint64_t quota = tenant.rule->quota_bytes;
  if (bytes > quota) return false;
  if (tenant.bytes + bytes > quota && tenant.rule->over == OverQuota::refuse) return false;
  Item at = tenant.own.tail;
  for (std::size_t scanned = 0; tenant.bytes + bytes > quota; ++scanned) {
    if (at == item_none || scanned == scan_max || out.size() == options_.victims_max) return false;
    const Item prev = nodes_[at].own.prev;
    if (nodes_[at].children.head != item_none || nodes_[at].held || at == keep) {
      at = prev;
      continue;
    }
    const Item parent = nodes_[at].parent;
    ++tenant.evicted;
    drop(at, Why::quota, out);
    // What it left without children may have been passed by.
    at = parent != item_none && nodes_[parent].children.head == item_none ? tenant.own.tail : prev;
  }
  return true;
}

Evictor::TenantRow Evictor::row_of(const Tenant& tenant) {
  return {.tenant = tenant.name,
          .bytes = tenant.bytes,
          .items = tenant.items,
          .quota_bytes = tenant.rule.has_value() ? tenant.rule->quota_bytes : 0,
          .refused = tenant.refused,
          .evicted = tenant.evicted};
}

std::vector<Evictor::TenantRow> Evictor::tenants() const {
  std::vector<TenantRow> rows;
  for (const auto& [name, index] : tenant_index_) rows.push_back(row_of(tenants_[index]));
  return rows;
}

Evictor::TenantRow Evictor::tenant(std::uint64_t tenant) const {
  const auto known = tenant_index_.find(tenant);
  return known == tenant_index_.end() ? TenantRow{.tenant = tenant} : row_of(tenants_[known->second]);
}

// ---- Items -------------------------------------------------------------------------------------

Evictor::PutAnswer Evictor::put(const Spec& spec, Instant now) {
  DI_ASSERT(spec.life_class < life_classes_max);
  PutAnswer answer;
  const std::uint32_t at = tick_of(now);
  std::uint32_t index = 0;
  Tenant* tenant = count_ < options_.items_max ? tenant_of(spec.tenant, index) : nullptr;
  if (tenant == nullptr) {
    answer.code = count_ < options_.items_max ? PutCode::tenants_full : PutCode::items_full;
    ++counters_.items_refused;
    return answer;
  }
  ++tenant->items;  // of this one, so that it is not forgotten when its last other item goes
  if (spec.parent != item_none) {
    DI_ASSERT(node(spec.parent).taken);
    refresh_from(spec.parent, at);
  }
  if (!spec.present && tenant->rule.has_value() && tenant->rule->quota_bytes > 0 && spec.tenant != 0) {
    // The parent must not go to make room for its child.
    if (!fit_quota(*tenant, spec.bytes, spec.parent, answer.victims)) {
      --tenant->items;
      ++tenant->refused;
      ++counters_.quota_refused;
      counters_.quota_refused_bytes += spec.bytes;
      answer.code = PutCode::over_quota;
      tenant_forget(index);
      return answer;
    }
  }
  Item item;
  if (free_.empty()) {
    item = static_cast<Item>(nodes_.size());
    nodes_.emplace_back();
  } else {
    item = free_.back();
    free_.pop_back();
    nodes_[item] = {};
  }
  Node& fresh = nodes_[item];
  fresh.id = spec.id;
  fresh.key = spec.key;
  fresh.bytes = spec.bytes;
  fresh.tenant = index;
  fresh.life_class = spec.life_class;
  fresh.slot = slot_none;
  fresh.born = tick_of(now - spec.age);
  fresh.used = at;
  fresh.taken = true;
  fresh.held = spec.held;
  fresh.in_main = ghost_take(spec.key, spec.bytes);
  tenant->bytes += spec.bytes;
  push_front(tenant->own, &Node::own, item);
  if (spec.parent != item_none) attach(item, spec.parent);
  if (!spec.held) enqueue(item);
  set_expiry(item);
  ++count_;
  bytes_ += spec.bytes;
  ++counters_.puts;
  answer.item = item;
  return answer;
}

void Evictor::enqueue(Item item) {
  const Node& at = nodes_[item];
  push_front(queues_[at.in_main], &Node::queue, item);
  queue_bytes_[at.in_main] += at.bytes;
}

void Evictor::dequeue(Item item) {
  const Node& at = nodes_[item];
  unlink(queues_[at.in_main], &Node::queue, item);
  queue_bytes_[at.in_main] -= at.bytes;
}

void Evictor::open(Item item) {
  Node& at = node(item);
  DI_ASSERT(at.held);
  at.held = false;
  enqueue(item);
}

void Evictor::hold(Item item) {
  Node& at = node(item);
  DI_ASSERT(!at.held);
  dequeue(item);
  at.held = true;
}

void Evictor::use(Item item, std::uint32_t now, bool promote) {
  Node& at = nodes_[item];
  at.used = std::max(at.used, now);
  const bool moves = promote && !at.in_main;
  if (at.held) {
    at.in_main = at.in_main || moves;
  } else if (moves) {
    dequeue(item);
    at.in_main = true;
    enqueue(item);
  } else {
    move_front(queues_[at.in_main], &Node::queue, item);
  }
  move_front(tenants_[at.tenant].own, &Node::own, item);
  if (at.parent != item_none) move_front(nodes_[at.parent].children, &Node::sibling, item);
  set_expiry(item);
}

void Evictor::touch(Item deepest, Instant now) {
  const std::uint32_t at = tick_of(now);
  ++counters_.uses;
  for (Item item = deepest; item != item_none; item = nodes_[item].parent) {
    DI_ASSERT(node(item).taken);
    use(item, at, true);
  }
}

void Evictor::refresh_from(Item item, std::uint32_t now) {
  for (; item != item_none && nodes_[item].used < now; item = nodes_[item].parent) use(item, now, false);
}

void Evictor::attach(Item child, Item parent) {
  nodes_[child].parent = parent;
  push_front(nodes_[parent].children, &Node::sibling, child);
}

void Evictor::detach(Item child) {
  Node& at = nodes_[child];
  if (at.parent == item_none) return;
  unlink(nodes_[at.parent].children, &Node::sibling, child);
  at.parent = item_none;
}

bool Evictor::adopt(Item child, Item parent, Instant now) {
  if (node(child).parent != item_none) return false;
  for (Item above = parent; above != item_none; above = node(above).parent) {
    if (above == child) return false;
  }
  attach(child, parent);
  refresh_from(parent, std::max(tick_of(now), nodes_[child].used));
  return true;
}

void Evictor::remove(Item item) {
  DI_ASSERT(node(item).taken);
  forget(item);
}

void Evictor::forget(Item item) {
  Node& at = nodes_[item];
  while (at.children.head != item_none) detach(at.children.head);
  detach(item);
  if (!at.held) dequeue(item);
  if (at.slot != slot_none) wheel_remove(item);
  Tenant& tenant = tenants_[at.tenant];
  unlink(tenant.own, &Node::own, item);
  tenant.bytes -= at.bytes;
  --tenant.items;
  bytes_ -= at.bytes;
  --count_;
  at.taken = false;
  free_.push_back(item);
  tenant_forget(at.tenant);
}

// ---- Victims -----------------------------------------------------------------------------------

Evictor::Item Evictor::coldest_leaf(Item item) const {
  for (; !nodes_[item].held; item = nodes_[item].children.tail) {
    if (nodes_[item].children.tail == item_none) return item;
  }
  return item_none;
}

void Evictor::drop(Item item, Why why, std::vector<Victim>& out) {
  const Node& at = nodes_[item];
  out.push_back({.id = at.id, .bytes = at.bytes, .tenant = tenants_[at.tenant].name, .why = why});
  switch (why) {
    case Why::room:
      ++counters_.evicted;
      counters_.evicted_bytes += at.bytes;
      ghost_add(at);
      break;
    case Why::expired:
      ++counters_.expired;
      counters_.expired_bytes += at.bytes;
      break;
    case Why::quota:
      ++counters_.quota_evicted;
      counters_.quota_evicted_bytes += at.bytes;
      break;
  }
  forget(item);
}

// Of what is held: one store may be full long before the capacity is used up.
bool Evictor::small_above_share() const {
  const double held = static_cast<double>(std::min(bytes_, options_.capacity_bytes));
  return static_cast<double>(queue_bytes_[small_queue]) * static_cast<double>(options_.capacity_bytes) >=
         static_cast<double>(small_share_) * held;
}

void Evictor::collect(std::uint64_t bytes, std::size_t items, const Wanted& wanted,
                      std::vector<Victim>& out) {
  std::array<Item, 2> next{queues_[small_queue].tail, queues_[main_queue].tail};
  std::uint64_t freed = 0;
  const std::size_t before = out.size();
  const auto enough = [&] { return freed >= bytes && out.size() - before >= items; };
  for (std::size_t scanned = 0; !enough() && scanned < scan_max; ++scanned) {
    const bool from_small =
        next[small_queue] != item_none && (small_above_share() || next[main_queue] == item_none);
    Item& at = next[from_small ? small_queue : main_queue];
    if (at == item_none) return;
    const Item oldest = at;
    if (wanted && !wanted(nodes_[oldest].id)) {
      at = nodes_[oldest].queue.prev;
      continue;
    }
    for (bool gone = false; !gone;) {
      if (enough() || out.size() >= options_.victims_max) return;
      const Item leaf = coldest_leaf(oldest);
      if (leaf == item_none) {
        at = nodes_[oldest].queue.prev;
        break;
      }
      for (Item& cursor : next) {
        if (cursor == leaf) cursor = nodes_[leaf].queue.prev;
      }
      gone = leaf == oldest;
      freed += nodes_[leaf].bytes;
      drop(leaf, Why::room, out);
    }
  }
}

std::vector<Evictor::Victim> Evictor::make_room(std::uint64_t bytes, const Wanted& wanted) {
  std::vector<Victim> out;
  collect(bytes, 0, wanted, out);
  return out;
}

bool Evictor::expire(Item item, std::vector<Victim>& out) {
  for (;;) {
    const Item leaf = coldest_leaf(item);
    if (leaf == item_none) {  // something below it is being written or used: in a second again
      wheel_place(item);
      return true;
    }
    if (out.size() >= options_.victims_max) return false;
    drop(leaf, Why::expired, out);
    if (leaf == item) return true;
  }
}

std::vector<Evictor::Victim> Evictor::step(Instant now) {
  std::vector<Victim> out;
  behind_ = false;
  const std::uint64_t second = tick_of(now) / ticks_per_slot;
  if (second > hand_ + wheel_slots) hand_ = second - wheel_slots;  // a round looks at every slot
  for (;;) {
    const Item& head = wheel_[hand_ % wheel_slots];
    while (head != item_none) {
      const Item item = head;
      wheel_remove(item);
      // Used meanwhile, or further away than the wheel reaches.
      if (second_of(nodes_[item].expires) > hand_ || nodes_[item].held) {
        wheel_place(item);
        continue;
      }
      if (expire(item, out)) continue;
      nodes_[item].slot = static_cast<std::uint16_t>(hand_ % wheel_slots);
      List list{head, item_none};
      push_front(list, &Node::wheel, item);
      wheel_[hand_ % wheel_slots] = list.head;
      behind_ = true;
      return out;
    }
    if (hand_ >= second) break;
    ++hand_;
  }
  const auto above = [&](std::uint32_t pct) {
    const std::uint64_t bytes = percent(options_.capacity_bytes, pct);
    const std::size_t items = percent(options_.items_max, pct);
    return std::pair{bytes_ - std::min(bytes_, bytes), count_ - std::min(count_, items)};
  };
  const auto none = std::pair<std::uint64_t, std::size_t>{0, 0};
  if (above(options_.high_pct) != none) shrinking_ = true;
  if (shrinking_) {
    const auto [bytes, items] = above(options_.low_pct);
    collect(bytes, items, {}, out);
    shrinking_ = above(options_.low_pct) != none;
    behind_ = shrinking_ && out.size() >= options_.victims_max;
  }
  return out;
}

Instant Evictor::next_due() const {
  if (behind_) return Instant{};
  for (std::uint64_t ahead = 1; ahead < wheel_slots; ++ahead) {
    if (wheel_[(hand_ + ahead) % wheel_slots] == item_none) continue;
    return Instant{(static_cast<std::int64_t>((hand_ + ahead) * ticks_per_slot) - ticks_before) *
                   tick.count()};
  }
  return instant_never;
}

// ---- Life --------------------------------------------------------------------------------------

const Evictor::Life& Evictor::life_of(const Tenant& tenant, std::uint8_t life_class) const {
  const std::optional<TenantRule>& rule = tenant.rule;
  return rule.has_value() && rule->life.has_value() ? *rule->life : options_.life[life_class];
}

Evictor::Life Evictor::life(std::uint64_t tenant, std::uint8_t life_class) const {
  const auto known = tenant_index_.find(tenant);
  return known == tenant_index_.end() ? options_.life[life_class]
                                      : life_of(tenants_[known->second], life_class);
}

void Evictor::set_expiry(Item item) {
  Node& at = nodes_[item];
  const Life& life = life_of(tenants_[at.tenant], at.life_class);
  const auto after = [](std::uint32_t from, Duration length) -> std::uint32_t {
    if (length <= Duration(0)) return tick_never;
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(std::uint64_t{from} + ticks_of(length), tick_never));
  };
  at.expires = std::min(after(at.used, life.ttl), after(at.born, life.cap));
  // One that lives longer is moved when its slot comes.
  if (at.expires == tick_never && at.slot != slot_none) wheel_remove(item);
  if (at.expires != tick_never && at.slot == slot_none) wheel_place(item);
}

void Evictor::wheel_place(Item item) {
  Node& at = nodes_[item];
  const std::uint64_t second = second_of(at.expires);
  const std::uint64_t ahead = second <= hand_ ? 1 : std::min<std::uint64_t>(second - hand_, wheel_slots - 1);
  at.slot = static_cast<std::uint16_t>((hand_ + ahead) % wheel_slots);
  List list{wheel_[at.slot], item_none};
  push_front(list, &Node::wheel, item);
  wheel_[at.slot] = list.head;
}

void Evictor::wheel_remove(Item item) {
  Node& at = nodes_[item];
  List list{wheel_[at.slot], item_none};
  unlink(list, &Node::wheel, item);
  wheel_[at.slot] = list.head;
  at.slot = slot_none;
}

// ---- Ghosts ------------------------------------------------------------------------------------

void Evictor::ghost_add(const Node& node) {
  if (options_.ghosts_max == 0) return;
  if (const auto known = ghost_index_.find(node.key); known != ghost_index_.end()) {
    Ghost& old = ghosts_[known->second - ghosts_begin_];
    ghost_bytes_[old.in_main] -= old.bytes;
    old.dead = true;
    ghost_index_.erase(known);
  }
  ghost_index_.emplace(node.key, ghosts_begin_ + ghosts_.size());
  ghosts_.push_back({node.key, node.bytes, node.in_main, false});
  ghost_bytes_[node.in_main] += node.bytes;
  ghost_trim();
}

void Evictor::ghost_trim() {
  while (!ghosts_.empty()) {
    const Ghost& oldest = ghosts_.front();
    const bool fits = ghosts_.size() <= options_.ghosts_max &&
                      ghost_bytes_[small_queue] + ghost_bytes_[main_queue] <= options_.capacity_bytes;
    if (fits && !oldest.dead) return;
    if (!oldest.dead) {
      ghost_bytes_[oldest.in_main] -= oldest.bytes;
      ghost_index_.erase(oldest.key);
    }
    ghosts_.pop_front();
    ++ghosts_begin_;
  }
}

bool Evictor::ghost_take(std::uint64_t key, std::uint64_t bytes) {
  const auto known = ghost_index_.find(key);
  if (known == ghost_index_.end()) return false;
  ++counters_.ghost_hits;
  Ghost& ghost = ghosts_[known->second - ghosts_begin_];
  const std::uint64_t same = std::max<std::uint64_t>(ghost_bytes_[ghost.in_main], 1);
  const std::uint64_t other = ghost_bytes_[!ghost.in_main];
  // By the item's bytes, more when such ghosts are the rarer ones; half as fast as ARC.
  const auto move = static_cast<std::uint64_t>(
      static_cast<double>(bytes) / 2 *
      std::clamp(static_cast<double>(other) / static_cast<double>(same), 1.0, 16.0));
  const std::uint64_t least = percent(options_.capacity_bytes, small_min_pct);
  const std::uint64_t most = percent(options_.capacity_bytes, small_max_pct);
  if (ghost.in_main) {
    small_share_ -= std::min(move, small_share_ - least);
  } else {
    small_share_ += std::min(move, most - small_share_);
  }
  ghost_bytes_[ghost.in_main] -= ghost.bytes;
  ghost.dead = true;
  ghost_index_.erase(known);
  ghost_trim();
  return true;
}

// ---- Check -------------------------------------------------------------------------------------

void Evictor::test_check() const {
  std::uint64_t bytes = 0;
  std::size_t count = 0;
  std::array<std::uint64_t, 2> in_queue{};
  std::map<std::uint32_t, std::uint64_t> of_tenant;
  for (Item item = 0; item < nodes_.size(); ++item) {
    const Node& at = nodes_[item];
    if (!at.taken) continue;
    ++count;
    bytes += at.bytes;
    of_tenant[at.tenant] += at.bytes;
    if (!at.held) in_queue[at.in_main] += at.bytes;
    DI_ASSERT((at.slot != slot_none) == (at.expires != tick_never));
    if (at.parent != item_none) {
      DI_ASSERT(nodes_[at.parent].taken && nodes_[at.parent].used >= at.used);
    }
    for (Item child = at.children.head; child != item_none; child = nodes_[child].sibling.next) {
      DI_ASSERT(nodes_[child].taken && nodes_[child].parent == item);
    }
  }
  DI_ASSERT(count == count_ && bytes == bytes_);
  for (const std::size_t queue : {small_queue, main_queue}) {
    std::uint64_t sum = 0;
    Item prev = item_none;
    for (Item item = queues_[queue].head; item != item_none; item = nodes_[item].queue.next) {
      DI_ASSERT(nodes_[item].taken && !nodes_[item].held && nodes_[item].in_main == (queue == main_queue));
      DI_ASSERT(nodes_[item].queue.prev == prev);
      sum += nodes_[item].bytes;
      prev = item;
    }
    DI_ASSERT(queues_[queue].tail == prev);
    DI_ASSERT(sum == queue_bytes_[queue] && sum == in_queue[queue]);
  }
  for (const auto& [name, index] : tenant_index_) {
    DI_ASSERT(tenants_[index].name == name);
    DI_ASSERT(tenants_[index].bytes == (of_tenant.contains(index) ? of_tenant.at(index) : 0));
  }
  DI_ASSERT(ghost_index_.size() <= ghosts_.size() && ghosts_.size() <= options_.ghosts_max);
  DI_ASSERT(ghost_bytes_[small_queue] + ghost_bytes_[main_queue] <= options_.capacity_bytes);
}

}  // namespace di::kv
