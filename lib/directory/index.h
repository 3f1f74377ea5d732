// directory/index.h: which block is where.  The core of di-meta: prefix match, plans, puts, inventory.
//
// What it owns: the map from block key to the pages that hold the block; the stripes of the store with
// their columns; the pages of every attached arena; the open puts; the leases; what is still to be
// freed on the stores.  Identity is per block, storage per page (path.md section 3): a key belongs to
// the first committed page that brought it and can be read, readers get whole pages and use
// (page, first, count).
//
// Life of a stripe:
//   state      event                                         next
//   (none)     put_open by a holder                          open, keys refused to other writers
//   (none)     inventory brings it                           committed (adopted), or freed
//   open       put_commit by the same holder                 committed, or freed when it brings nothing
//   open       put_abort, failed column, 30 s, holder lost   (none), freed after a grace
//   committed  evicted, a column corrupt                     (none), freed when no lease holds it
//   committed  its store reports an inventory without it     (none)
// A committed stripe whose store is away stays known and is not offered until the store returns.
// Freeing is two-phase: out of the map first, then `kv_free` when no lease is left (I3 of
// spec/store.md).
//
// Pure: time is given (the monotonic clock's), messages go in and answers come out; kv_free messages
// come from step().  Owner: the directory's thread.  Bounds: Options; lists inside messages by the
// constants below, beyond which a message is cut or refused.  Nothing iterates a hash map, so equal
// inputs give equal outputs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "directory/lease.h"
#include "wire/ids.h"
#include "wire/messages.h"

namespace di::directory {

inline constexpr std::uint32_t stripe_data_columns = 1;  // geometry 1+0
inline constexpr std::uint32_t stripe_parity_columns = 0;
inline constexpr Duration put_ttl = seconds(30);
// A store may still be writing a column when the put lapses or its writer dies: the slot is freed this
// much later, when the write has long ended one way or the other.
inline constexpr Duration put_grace = seconds(30);

inline constexpr std::size_t match_keys_max = 65536;     // messages.def, meta_match
inline constexpr std::size_t page_keys_max = 4096;       // far above any layout's page_blocks
inline constexpr std::size_t page_segments_max = 8;      // kv::groups_max
inline constexpr std::size_t inventory_part_max = 1024;  // messages.def, meta_inventory
inline constexpr std::size_t free_batch_max = 4096;      // stripes in one kv_free
inline constexpr std::uint64_t stripe_id_max = (std::uint64_t{1} << 56) - 1;

// The model behind meta_matched.fetch_us: a block costs its bytes at the rate of its best place, and a
// fetch that touches the store one round trip more.  Order of magnitude of one host (spec/store.md
// 1.1 and 1.3: hand-off in memory 9 GB/s, disk 0.8 to 1.9 GB/s); measured rates replace them.
inline constexpr std::uint64_t fetch_arena_bytes_per_us = 5000;
inline constexpr std::uint64_t fetch_store_bytes_per_us = 1000;
inline constexpr std::uint64_t fetch_store_us = 1000;

// Eviction for one put that found no room frees this multiple of its bytes, and at least this part of
// what the store holds (92 % down to 88 %, spec/store.md 4.8), in at most so many stripes.
inline constexpr std::uint64_t evict_put_multiple = 8;
inline constexpr std::uint64_t evict_store_part = 25;
inline constexpr std::size_t evict_stripes_max = 1024;

class Index {
 public:
  struct Options {
    // Number of this start of di-meta (catalogue): stripe and lease numbers of two starts never meet.
    std::uint64_t run = 1;
    // Blocks in the map; about 200 bytes each.
    std::size_t blocks_max = std::size_t{4} << 20;
    std::size_t arena_pages_max = std::size_t{1} << 18;  // per host
    std::size_t places_max = 4096;                       // hosts, and stores
    std::size_t open_puts_max = 65536;
    // A stripe that no plan used for so long is dropped; zero: only when room is needed.
    Duration stripe_ttl{0};
    LeaseTable::Options lease{};
  };

  struct Counters {
    std::uint64_t matches = 0;
    std::uint64_t match_blocks = 0;  // asked for
    std::uint64_t match_hit_blocks = 0;
    std::uint64_t plans = 0;
    std::uint64_t plan_blocks = 0;  // asked for
    std::uint64_t plan_found_blocks = 0;
    std::uint64_t plan_refused = 0;  // no lease left
    std::uint64_t leases_expired = 0;
    std::uint64_t puts_opened = 0;
    std::uint64_t puts_exist = 0;
    std::uint64_t puts_busy = 0;
    std::uint64_t puts_invalid = 0;
    std::uint64_t puts_committed = 0;
    std::uint64_t puts_duplicate = 0;  // committed by another page meanwhile
    std::uint64_t puts_refused = 0;    // commit of a put that lapsed or is another's
    std::uint64_t puts_aborted = 0;
    std::uint64_t puts_lapsed = 0;
    std::uint64_t puts_no_space = 0;
    std::uint64_t stripes_adopted = 0;
    std::uint64_t stripes_missing = 0;  // known, but not in the inventory of their store
    std::uint64_t stripes_evicted = 0;
    std::uint64_t stripes_expired = 0;  // stripe_ttl
    std::uint64_t stripes_freed = 0;    // named in a kv_free or an inventory answer
    std::uint64_t columns_corrupt = 0;
    std::uint64_t columns_not_found = 0;
    std::uint64_t columns_io = 0;
    std::uint64_t inventory_refused = 0;  // parts out of order or from another generation
    std::uint64_t arena_deltas = 0;
    std::uint64_t arena_gaps = 0;
    std::uint64_t arena_refused = 0;   // pages that are malformed or above the bound
    std::uint64_t key_collisions = 0;  // equal first 16 bytes, different rest
    std::uint64_t blocks_refused = 0;  // blocks_max
  };

  Index(Options options, Instant now);

  // A di-kvd came: its generation was registered.  A store starts with its inventory, a host with a
  // snapshot.  The same generation again is a re-attachment and starts over too.
  // False when places_max is reached.
  bool host_up(const Holder& host);
  bool store_up(const Holder& store, Instant now);
  // A draining store takes no new columns.
  void store_draining(const Holder& store, bool draining);
  // Any instance is lost, whatever it was: its arena is forgotten, its store's data becomes
  // unavailable, its leases end, its open puts lapse.  Another generation than the present one: nothing.
  void lost(const Holder& holder, Instant now);

  // Padded bytes per block of the model served; estimates the size of pages that are only in arenas.
  void set_block_bytes(std::uint64_t bytes) { block_bytes_ = bytes; }

  [[nodiscard]] wire::meta_matched match(const wire::meta_match& message);
  [[nodiscard]] wire::meta_planned plan(const Holder& holder, const RequestId& request,
                                        const wire::meta_plan& message, Instant now);
  void renew(const Holder& holder, const wire::meta_renew& message, Instant now);
  void release(const Holder& holder, const wire::meta_release& message);

  // True: ask the host for a snapshot (meta_arena_resync).
  [[nodiscard]] bool arena_delta(const Holder& host, const wire::meta_arena_delta& message);

  // Opening twice the same pages by the same holder answers the same stripe.
  [[nodiscard]] wire::meta_put_opened put_open(const Holder& holder, const wire::meta_put_open& message,
                                               Instant now);
  // `ok` also for a stripe that is published already.  `exists`: every key came from elsewhere
  // meanwhile.  `no_space`: a column failed; room is being made on its store, try again later.
  // `not_found`: the put lapsed or belongs to somebody else.
  [[nodiscard]] wire::meta_put_committed put_commit(const Holder& holder,
                                                    const wire::meta_put_commit& message, Instant now);
  void put_abort(const Holder& holder, const wire::meta_put_abort& message, Instant now);

  // nullopt: the part is out of order or from another generation; no answer.
  [[nodiscard]] std::optional<wire::meta_inventory_ack> inventory(const Holder& store,
                                                                  const wire::meta_inventory& message,
                                                                  Instant now);
  void read_failed(const wire::meta_read_failed& message, Instant now);

  // What became due: leases, open puts, ttl, and stripes to free.
  struct Free {
    std::string store;
    wire::kv_free message;
  };
  [[nodiscard]] std::vector<Free> step(Instant now);
  [[nodiscard]] Instant next_due() const;

  // For gauges and `show kv`.
  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] std::size_t leases() const { return leases_.count(); }
  [[nodiscard]] std::size_t open_puts() const { return open_due_.size(); }
  [[nodiscard]] std::size_t stripes() const { return stripes_.size() - open_due_.size(); }
  [[nodiscard]] std::size_t blocks() const { return entries_.size(); }
  [[nodiscard]] std::size_t pending_frees() const { return frees_.size(); }
  struct Place {
    std::string instance;
    bool store = false;
    bool up = false;
    bool complete = false;  // the snapshot or the inventory is in
    std::uint64_t pages = 0;
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;  // payload; estimated for arenas
    std::uint64_t free_pending_bytes = 0;
  };
  [[nodiscard]] std::vector<Place> places() const;
  struct PageRow {
    std::uint64_t page = 0;
    std::vector<std::string> stores;
    bool readable = false;
    Key parent;
    Key first;
    std::uint32_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  // At most `count` committed pages with ids above `after`, in order.
  [[nodiscard]] std::vector<PageRow> pages_after(std::uint64_t after, std::size_t count) const;

  // Panics when the structures disagree with each other; slow.
  void test_check() const;

 private:
  using Prefix = std::array<std::byte, 16>;
  struct PrefixHash {
    std::size_t operator()(const Prefix& prefix) const noexcept;
  };
  struct StoreRef {
    std::uint64_t page;   // stripe id << 8 | page index
    std::uint32_t block;  // index in the page
  };
  struct ArenaRef {
    std::uint32_t host;
    std::uint32_t block;
    std::uint64_t page;
  };
  struct Entry {
    Prefix rest;                   // the second half of the key, compared on every hit
    std::vector<StoreRef> stores;  // in the order of commits: the first readable one is the owner
    std::vector<ArenaRef> arenas;
  };
  struct Column {
    std::uint32_t store;
    std::uint16_t volume;
    std::uint16_t column;
    std::uint64_t seen;  // number of the store's inventory that showed it
  };
  struct Stripe {
    bool open = false;
    Key fingerprint;
    std::vector<wire::PutPage> pages;
    std::vector<Column> columns;
    Holder opener;            // empty instance when adopted
    Instant deadline;         // of an open put
    std::uint64_t order = 0;  // of the last use; key in Store::by_use
    Instant used_at;
  };
  struct Host {
    std::string instance;
    std::uint32_t generation = 0;
    std::uint64_t seq = 0;
    bool complete = false;  // attached and no gap
    bool resync_asked = false;
    std::map<std::uint64_t, wire::ArenaPage> pages;
    std::uint64_t blocks = 0;
  };
  struct Store {
    std::string instance;
    std::uint32_t generation = 0;
    bool up = false;
    bool draining = false;
    bool complete = false;
    std::uint64_t inventory = 0;  // counts inventories begun
    std::uint64_t next_part = 0;
    std::set<std::pair<std::uint64_t, std::uint64_t>> by_use;  // (order, stripe), committed ones
    std::uint64_t blocks = 0;  // of the pages in by_use whose data column is here
    std::uint64_t bytes = 0;   // of columns here, open ones included
    std::uint64_t freeing_bytes = 0;
  };
  struct Pending {
    Instant at;
    std::uint64_t bytes = 0;
  };
  using FreeKey = std::pair<std::uint32_t, std::uint64_t>;  // store, stripe

  static Prefix prefix_of(const Key& key);
  static Prefix rest_of(const Key& key);
  [[nodiscard]] const Entry* find(const Key& key);
  [[nodiscard]] Entry* find_or_add(const Key& key);
  void drop_if_empty(const Key& key, const Entry& entry);

  [[nodiscard]] bool page_readable(const Stripe& stripe, std::uint32_t page) const;
  [[nodiscard]] const StoreRef* readable(const Entry& entry) const;
  [[nodiscard]] std::uint64_t column_bytes(const Stripe& stripe, std::uint16_t column) const;
  [[nodiscard]] const wire::PutPage& page_of(const StoreRef& ref) const;
  [[nodiscard]] std::uint64_t block_bytes(const StoreRef& ref) const;

  [[nodiscard]] Store* store_of(const Holder& holder);
  [[nodiscard]] Host* host_of(const Holder& holder, std::uint32_t* number = nullptr);
  [[nodiscard]] Store* choose_store();

  void arena_add(std::uint32_t number, Host& host, const wire::ArenaPage& page);
  void arena_remove(std::uint32_t number, Host& host, std::uint64_t page);
  void arena_clear(std::uint32_t number, Host& host);

  void publish(std::uint64_t id, Stripe& stripe, Instant now);
  void touch(std::uint64_t id, Stripe& stripe, Instant now);
  // A committed stripe enters or leaves a store's order of use.
  void enlist(std::uint64_t id, const Stripe& stripe, const Column& column);
  void delist(std::uint64_t id, const Stripe& stripe, const Column& column);
  // Takes the stripe out of every map; frees its columns on their stores at `free_at`.
  void drop(std::uint64_t id, Instant free_at);
  // The column is not there any more; the stripe goes when it cannot be read without it.
  void lose_column(std::uint64_t id, std::uint32_t store);
  void schedule_free(std::uint32_t store, std::uint64_t stripe, std::uint64_t bytes, Instant at);
  // True: the node may free it at once; otherwise it was scheduled.
  bool free_from_inventory(std::uint32_t store, std::uint64_t stripe, Instant now);
  void evict(std::uint32_t store_number, std::uint64_t put_bytes, Instant now);
  [[nodiscard]] std::uint64_t leaf_under(std::uint64_t id) const;
  // True when the shard may be freed.
  [[nodiscard]] bool adopt(std::uint32_t number, Store& store, const wire::ShardRecord& shard, Instant now);
  [[nodiscard]] bool brings_nothing_new(const std::vector<wire::PutPage>& pages);

  Options options_;
  Counters counters_;
  LeaseTable leases_;
  Instant frees_safe_at_;  // holders of leases of an earlier run have given up by then
  std::uint64_t next_stripe_;
  std::uint64_t next_order_ = 1;
  std::uint64_t block_bytes_ = 0;

  std::unordered_map<Prefix, Entry, PrefixHash> entries_;  // never iterated
  std::map<std::uint64_t, Stripe> stripes_;
  std::set<std::pair<Key, std::uint64_t>> children_;  // (parent key, committed stripe below it)
  std::map<Key, std::uint64_t> open_keys_;            // keys of open puts
  std::set<std::pair<Instant, std::uint64_t>> open_due_;
  std::map<FreeKey, Pending> frees_;
  std::set<std::pair<Instant, FreeKey>> frees_due_;  // of stores that are up

  std::map<std::uint32_t, Host> hosts_;
  std::map<std::uint32_t, Store> stores_;
  std::map<std::string, std::uint32_t> host_numbers_;
  std::map<std::string, std::uint32_t> store_numbers_;
  std::uint32_t next_place_ = 1;
};

}  // namespace di::directory
