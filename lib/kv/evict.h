// kv/evict.h: what is thrown out when a cache of chains is full, too old, or more than its tenant may have.
//
// An item is what is stored and freed as one: a stripe for di-meta, a page for an arena.  The caller keeps
// the handle that put() returns and tells of uses; the core names victims, and a victim is forgotten here
// before the caller hears of it, so bytes that are still being freed do not count as held.
//
// Order.  Two queues by last use and a list of ghosts, after S3-FIFO (Yang et al., "FIFO queues are all you
// need for cache eviction", SOSP 2023): a new item is on probation (`small`), a second use moves it to
// `main`, victims come from `small` while it holds more than its share, and the key of a victim is remembered
// as a ghost, whose return goes to `main` at once.  A scan therefore passes through `small` and takes nothing
// else with it.  Two things differ from that paper, both measured with tests/bench/evict_trace:
//   - uses reorder a queue.  Here a use is a plan of di-meta, not a memory access, so the cost that a FIFO
//     saves does not exist, and a turn that comes back refreshes its whole chain.
//   - the share of `small` is not 10 %: a conversation returns after minutes, and with 10 % its blocks are
//     gone by then.  It starts at one half and follows the ghosts between 10 % and 90 % (as in ARC, Megiddo
//     and Modha, FAST 2003): the return of a victim of `small` makes it larger, of `main` smaller.
//
// Tree.  An item may have a parent, without which it cannot be reached.  No item is named before its
// children; a use of an item is a use of all above it, and a new child refreshes what it hangs on.  When the
// oldest item has children, the least recently used leaf below it goes first.  What is above a held item
// stays.
//
// Life.  An item that nobody used for `ttl` expires, and any item `cap` after its put, or sooner by the `age` that it
// was put with, with what hangs on it, at the next whole second.  A wheel of one-second slots finds them (Varghese
// and Lauck, SOSP 1987, scheme 6); a use only writes a number.
//
// Tenants.  A quota is never silent: put() either refuses or names victims of the same tenant, and counts
// both.  Tenant 0 is nobody's: it has no quota.
//
// A directory calls put() held when a stripe is opened, open() when it is committed, remove() when it is
// aborted or lost, touch() with the last stripe of a plan, step() after a put and at next_due().
//
// Pure: time is given, equal calls give equal victims.  Owner: one thread, the caller's.  Bounds: Options.
// Memory: item_bytes an item, ghost_bytes a ghost, 16 KiB for the wheel.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/time.h"

namespace di::kv {

class Evictor {
 public:
  using Item = std::uint32_t;
  static constexpr Item item_none = UINT32_MAX;
  static constexpr std::size_t life_classes_max = 8;
  static constexpr std::size_t item_bytes = 88;   // checked where the record is
  static constexpr std::size_t ghost_bytes = 80;  // 24 in the list, the rest in its index; about

  // Zero means without end.
  struct Life {
    Duration ttl{0};  // after the last use
    Duration cap{0};  // after the put, whatever the use
  };
  enum class OverQuota : std::uint8_t { refuse, evict_own };
  struct TenantRule {
    std::uint64_t quota_bytes = 0;  // zero: none
    OverQuota over = OverQuota::refuse;
    std::optional<Life> life = std::nullopt;  // instead of the class's
  };
  struct Options {
    std::uint64_t capacity_bytes = 0;
    std::uint32_t high_pct = 92;  // of capacity_bytes or items_max: step() evicts above it,
    std::uint32_t low_pct = 88;   // down to here
    std::size_t items_max = std::size_t{4} << 20;
    std::size_t ghosts_max = std::size_t{1} << 20;  // and at most capacity_bytes of them
    std::size_t tenants_max = 4096;
    std::size_t victims_max = 1024;  // of one call
    std::array<Life, life_classes_max> life{};
  };

  enum class Why : std::uint8_t { room, expired, quota };
  struct Victim {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    std::uint64_t tenant = 0;
    Why why = Why::room;

    bool operator==(const Victim&) const = default;
  };
  struct Spec {
    std::uint64_t id = 0;   // the caller's; comes back in a Victim
    std::uint64_t key = 0;  // what the ghost remembers: a hash of the content's name
    std::uint64_t bytes = 0;
    std::uint64_t tenant = 0;
    std::uint8_t life_class = 0;
    Item parent = item_none;
    bool held = false;  // is no victim until open()
    bool present =
        false;        // it is stored already: counts against its tenant's quota, and is not refused for it
    Duration age{0};  // it is there for so long already, for its cap
  };
  enum class PutCode : std::uint8_t { ok, over_quota, items_full, tenants_full };
  struct PutAnswer {
    PutCode code = PutCode::ok;
    Item item = item_none;        // when ok
    std::vector<Victim> victims;  // of the same tenant; also when the put was refused all the same
  };

  struct Counters {
    std::uint64_t puts = 0;
    std::uint64_t uses = 0;
    std::uint64_t ghost_hits = 0;
    std::uint64_t evicted = 0;  // by reason
    std::uint64_t evicted_bytes = 0;
    std::uint64_t expired = 0;
    std::uint64_t expired_bytes = 0;
    std::uint64_t quota_evicted = 0;
    std::uint64_t quota_evicted_bytes = 0;
    std::uint64_t quota_refused = 0;
    std::uint64_t quota_refused_bytes = 0;
    std::uint64_t items_refused = 0;  // items_max, tenants_max
  };
  struct TenantRow {
    std::uint64_t tenant = 0;
    std::uint64_t bytes = 0;
    std::uint64_t items = 0;
    std::uint64_t quota_bytes = 0;
    std::uint64_t refused = 0;
    std::uint64_t evicted = 0;
  };

  Evictor(const Options& options, Instant now);

  // That of what the tenant puts.
  [[nodiscard]] Life life(std::uint64_t tenant, std::uint8_t life_class = 0) const;

  // As stores come and go; step() does the rest.
  void set_capacity(std::uint64_t bytes);
  // A smaller quota makes the tenant shrink at its next put.  False: tenants_max.
  [[nodiscard]] bool set_tenant(std::uint64_t tenant, const TenantRule& rule);

  // Capacity is not checked here: call step() afterwards.  `parent` is a live item or item_none.
  [[nodiscard]] PutAnswer put(const Spec& spec, Instant now);
  // A held item becomes a candidate (a put that was committed, a page that was unpinned), and one again.
  void open(Item item);
  void hold(Item item);
  // A use of this item and of everything above it: once per plan, with the deepest item used.
  void touch(Item deepest, Instant now);
  // The parent came after its child.  False, and nothing done: the child has one, or is above the parent.
  bool adopt(Item child, Item parent, Instant now);
  [[nodiscard]] Item parent(Item item) const { return node(item).parent; }
  // It is gone for a reason of the caller's; its children stay, without a parent.
  void remove(Item item);

  // What expired, and, above high_pct, what has to go until low_pct.  At most victims_max; when behind() says
  // so, there are more.
  [[nodiscard]] std::vector<Victim> step(Instant now);
  [[nodiscard]] bool behind() const { return behind_; }
  [[nodiscard]] Instant next_due() const;
  // Victims of `bytes` altogether, now: a store is full, or a run of slots is wanted.  With `wanted`, only
  // items for which it is true, oldest first, and what hangs on them; it looks at scan_max items at most.
  using Wanted = std::function<bool(std::uint64_t id)>;
  [[nodiscard]] std::vector<Victim> make_room(std::uint64_t bytes, const Wanted& wanted = {});

  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::size_t items() const { return count_; }
  [[nodiscard]] std::size_t ghosts() const { return ghost_index_.size(); }
  [[nodiscard]] std::uint64_t capacity_bytes() const { return options_.capacity_bytes; }
  [[nodiscard]] std::uint64_t small_share_bytes() const { return small_share_; }
  [[nodiscard]] const Counters& counters() const { return counters_; }
  // Those that have something or a rule, in the order of their numbers.
  [[nodiscard]] std::vector<TenantRow> tenants() const;
  // All zeros but for the number when it is not among them.
  [[nodiscard]] TenantRow tenant(std::uint64_t tenant) const;

  static constexpr std::size_t scan_max = 65536;

  // Panics when the structures disagree with each other; slow.
  void test_check() const;

 private:
  static constexpr std::size_t small_queue = 0;
  static constexpr std::size_t main_queue = 1;
  struct Links {
    Item prev = item_none;  // towards the most recent
    Item next = item_none;
  };
  struct List {
    Item head = item_none;  // the most recent
    Item tail = item_none;
  };
  struct Node {
    std::uint64_t id = 0;
    std::uint64_t key = 0;
    std::uint64_t bytes = 0;
    Item parent = item_none;
    List children;  // by last use
    Links sibling;
    Links queue;  // while not held
    Links own;    // of its tenant
    Links wheel;
    std::uint32_t tenant = 0;   // index in tenants_
    std::uint32_t used = 0;     // ticks
    std::uint32_t born = 0;     // ticks
    std::uint32_t expires = 0;  // ticks; tick_never
    std::uint16_t slot = 0;     // of the wheel; slot_none
    std::uint8_t life_class = 0;
    bool taken : 1 = false;
    bool held : 1 = false;
    bool in_main : 1 = false;
  };
  static_assert(sizeof(Node) == item_bytes);
  struct Tenant {
    std::uint64_t name = 0;
    std::uint64_t bytes = 0;
    std::uint64_t items = 0;
    std::uint64_t refused = 0;
    std::uint64_t evicted = 0;
    std::optional<TenantRule> rule;
    List own;
  };
  struct Ghost {
    std::uint64_t key = 0;
    std::uint64_t bytes = 0;
    bool in_main = false;
    bool dead = false;  // came back
  };
  static constexpr std::uint32_t wheel_slots = 4096;
  static constexpr std::uint16_t slot_none = UINT16_MAX;
  static constexpr std::uint32_t tick_never = UINT32_MAX;
  static constexpr std::uint32_t ticks_per_slot = 10;
  static constexpr Duration tick = milliseconds(100);
  // Of three years before the clock's origin: an item may be older than the machine has been up.
  static constexpr std::int64_t ticks_before = 1'000'000'000;
  static_assert(ticks_before % ticks_per_slot == 0);

  [[nodiscard]] static std::uint32_t tick_of(Instant now);
  [[nodiscard]] static std::uint32_t ticks_of(Duration length);
  [[nodiscard]] static std::uint64_t second_of(std::uint32_t expires);
  [[nodiscard]] Node& node(Item item);
  [[nodiscard]] const Node& node(Item item) const;
  void push_front(List& list, Links Node::*links, Item item);
  void unlink(List& list, Links Node::*links, Item item);
  void move_front(List& list, Links Node::*links, Item item);

  void enqueue(Item item);
  void dequeue(Item item);
  // Newest use of an item; does not go up.
  void use(Item item, std::uint32_t now, bool promote);
  // The same for what is above it, up to where it was used within the same tick.
  void refresh_from(Item item, std::uint32_t now);
  void attach(Item child, Item parent);
  void detach(Item child);
  // When it expires, as of now; puts it on the wheel, or takes it off.
  void set_expiry(Item item);
  void wheel_place(Item item);
  void wheel_remove(Item item);
  // False: no room in `out`, go on later.
  bool expire(Item item, std::vector<Victim>& out);
  [[nodiscard]] Item coldest_leaf(Item item) const;
  void drop(Item item, Why why, std::vector<Victim>& out);
  void forget(Item item);
  [[nodiscard]] bool small_above_share() const;
  // Until so many bytes and so many items are gone, or there is nothing to take.
  void collect(std::uint64_t bytes, std::size_t items, const Wanted& wanted, std::vector<Victim>& out);
  // Evicts the tenant's own, but for `keep`, until `bytes` more fit; false when they do not.
  bool fit_quota(Tenant& tenant, std::uint64_t bytes, Item keep, std::vector<Victim>& out);
  [[nodiscard]] static TenantRow row_of(const Tenant& tenant);
  [[nodiscard]] Tenant* tenant_of(std::uint64_t name, std::uint32_t& index);
  [[nodiscard]] const Life& life_of(const Tenant& tenant, std::uint8_t life_class) const;
  void tenant_forget(std::uint32_t index);

  void ghost_add(const Node& node);
  void ghost_trim();
  // The queue that the key goes to; a ghost that comes back moves the share.
  [[nodiscard]] bool ghost_take(std::uint64_t key, std::uint64_t bytes);

  Options options_;
  Counters counters_;
  std::deque<Node> nodes_;
  std::vector<Item> free_;
  std::size_t count_ = 0;
  std::uint64_t bytes_ = 0;
  std::array<List, 2> queues_;
  std::array<std::uint64_t, 2> queue_bytes_{};
  std::uint64_t small_share_ = 0;
  bool shrinking_ = false;  // above low_pct since it was above high_pct
  bool behind_ = false;

  std::deque<Tenant> tenants_;
  std::vector<std::uint32_t> tenants_free_;
  std::map<std::uint64_t, std::uint32_t> tenant_index_;

  std::deque<Ghost> ghosts_;                                      // oldest first
  std::uint64_t ghosts_begin_ = 0;                                // number of the first one
  std::unordered_map<std::uint64_t, std::uint64_t> ghost_index_;  // key -> number; looked up only
  std::array<std::uint64_t, 2> ghost_bytes_{};

  std::array<Item, wheel_slots> wheel_;
  std::uint64_t hand_ = 0;  // second whose slot was looked at last
};

}  // namespace di::kv
