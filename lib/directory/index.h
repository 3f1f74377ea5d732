// directory/index.h: which block is where.  The core of di-meta: prefix match, plans, puts, inventory,
// repair.
//
// What it owns: the map from block key to the pages that hold the block (blocks.h); the stripes of the store
// with their columns (stripes.h); the pages of every attached arena (arenas.h); where new columns go
// (placement.h); the open puts (puts.h); the leases (lease.h); what is still to be freed on the stores
// (frees.h); what is to be repaired (repair.h).  Identity is per block, storage per page (path.md section 3):
// a key belongs to the first committed page that brought it and can be read, readers get whole pages and use
// (page, first, count).
//
// Life of a stripe:
//   state      event                                         next
//   (none)     put_open by a holder                          open, keys refused to other writers
//   (none)     inventory brings a column                     committed (adopted), or freed
//   open       put_commit, at most m columns failed          committed, degraded when some did
//   open       put_commit that brings nothing, or too little (none), freed
//   open       put_abort, 30 s, holder lost                  (none), freed after a grace
//   committed  a column is corrupt, or its store has it not  committed and queued for repair, while enough
//                                                            distinct columns are left; else (none), freed
//   committed  its only column is on a volume that failed     (none), not freed: that may be opened anew
//   committed  evicted                                       (none), freed when no lease holds it
//   adopted    adopt_grace, and every store that is up has   committed with the columns it has, or freed when
//              told what it holds                            they are too few
// A column on a store that is away stays known and is not offered until the store returns; after repair_after
// it is made anew elsewhere, and so is what lies on a store that the operator drains.  A page can be read
// when its own columns can, or enough others of its stripe.
//
// A store tells what it holds when it comes, and again when reconcile() says that it is to be asked: one
// store at a time, which goes on taking columns meanwhile.  What was committed before the question and is not
// shown is lost as above, a column that a known stripe had lost is back, and what no stripe names is freed;
// only a store that comes, or has a volume again, may bring stripes.
//
// Now and then one stripe that has lost nothing is cross-checked: a host reads its data columns and parity 0, in the
// place and with the budget of a repair.  What was encoded wrong goes, with every column: no checksum says which of
// them is wrong, and the next reader computes the pages anew.
//
// The cap of a stripe's life is about the wall: its row says when it was committed.  A stripe that only stores know of
// is as old as it can be: its number says in which run of di-meta it was made, and the living one before it there
// when that was at the earliest.
//
// Freeing is two-phase: out of the map first, then `kv_free` when no lease is left (I3 of spec/store.md).
//
// What is evicted, and when, kv/evict.h says for all stores together: a stripe is one of its items from
// put_open on, held until it is committed.  A store that is above its mark, or says that it has no room,
// takes the next victims that have a column there.
//
// Pure: time is given (the monotonic clock's), messages go in and answers come out; kv_free messages come
// from step(), meta_repair from repairs().  Owner: the directory's thread.  Bounds: Options; lists inside
// messages by the constants below, beyond which a message is cut or refused.  Nothing iterates a hash map, so
// equal inputs give equal outputs.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/result.h"
#include "base/rng.h"
#include "base/time.h"
#include "directory/arenas.h"
#include "directory/blocks.h"
#include "directory/frees.h"
#include "directory/lease.h"
#include "directory/placement.h"
#include "directory/puts.h"
#include "directory/repair.h"
#include "directory/stripes.h"
#include "kv/evict.h"
#include "kv/miss_ratio.h"
#include "wire/ids.h"
#include "wire/messages.h"

namespace di::directory {

inline constexpr Duration put_ttl = seconds(30);
// A column may still be on its way to a store when the put lapses or its writer dies: what is freed meanwhile, the
// store frees when it is written, so the free only has to come after the column.  Longer than a peer may be silent
// before it is given up, and what it sent with it; what comes later still, an inventory finds.
inline constexpr Duration put_grace = seconds(5);

inline constexpr std::size_t match_keys_max = 65536;     // messages.def, meta_match
inline constexpr std::size_t inventory_part_max = 1024;  // messages.def, meta_inventory
inline constexpr std::size_t free_batch_max = 4096;      // stripes in one kv_free
inline constexpr std::size_t volumes_max = 256;          // of one store, in meta_volumes

// The model behind meta_matched.fetch_us: a block costs its bytes at the rate of its best place, and a
// fetch that touches the store one round trip more.  Order of magnitude of one host (spec/store.md
// 1.1 and 1.3: hand-off in memory 9 GB/s, disk 0.8 to 1.9 GB/s); measured rates replace them.
inline constexpr std::uint64_t fetch_arena_bytes_per_us = 5000;
inline constexpr std::uint64_t fetch_store_bytes_per_us = 1000;
inline constexpr std::uint64_t fetch_store_us = 1000;

// Eviction for one put that found no room frees this multiple of its bytes, and at least this part of
// what the store holds (92 % down to 88 %, spec/store.md 4.8), in at most so many stripes.  A store that still
// has no room when all that has arrived there gives twice that part, and so on up to half of it: its room may be
// in segments that are bound to columns of another length, and those come back when they are empty.
inline constexpr std::uint64_t evict_put_multiple = 8;
inline constexpr std::uint64_t evict_store_part = 25;
inline constexpr std::uint64_t evict_store_part_least = 2;
inline constexpr std::size_t evict_stripes_max = 1024;
// One evicted stripe is remembered for so many blocks of the map: two and a half bytes a block.
inline constexpr std::size_t evict_ghost_blocks = 32;
// Marks of a store, and of all together.
inline constexpr std::uint64_t evict_high_pct = 92;
inline constexpr std::uint64_t evict_low_pct = 88;
// While a store has not said how large it is; such are evicted only when they refuse a column.
inline constexpr std::uint64_t capacity_unknown = std::uint64_t{1} << 62;
// Stripes looked at in one step for what has to be repaired, and the pause before the next.
inline constexpr std::size_t repair_scan_stripes = 4096;
inline constexpr Duration repair_scan_pause = milliseconds(10);
// Stripes for which a place is looked for in one step, and how much later those are looked at again that were passed
// over without one, when no other volume takes columns meanwhile.
inline constexpr int repair_tries_max = 256;
inline constexpr Duration repair_look_again = seconds(600);
// A store that was asked what it holds and has not told all of it by then is asked again next time.
inline constexpr Duration reconcile_wait = seconds(600);
// Stripes of a run so far above this one's are nobody's: the catalogue may have been lost, and the count with it, but
// one number near the end of them all would leave none for new stripes.
inline constexpr std::uint64_t runs_ahead_max = std::uint64_t{1} << 20;
// Draws for one stripe to cross-check, until one can be.
inline constexpr int cross_check_draws = 16;

enum class RepairPolicy : std::uint8_t { off, hot, all };

class Index final : private BlockMap::Keys {
 public:
  struct Options {
    // Number of this start of di-meta (catalogue): stripe and lease numbers of two starts never meet.
    std::uint64_t run = 1;
    // When earlier starts were, and this one, in seconds by the wall.
    std::map<std::uint64_t, std::uint32_t> run_starts{};
    // The wall clock (since 1970) less the clock of `now`.
    std::int64_t wall_ahead_s = 0;
    // Places of blocks in the map; one that is in an arena and in the store counts twice.
    std::size_t blocks_max = std::size_t{4} << 20;
    std::size_t arena_pages_max = std::size_t{1} << 18;  // per host
    std::size_t places_max = 4096;                       // hosts, and stores
    std::size_t open_puts_max = 65536;
    // Of a stripe: after the last plan that used it, and after its put.
    kv::Evictor::Life stripe_life{};
    // By number (kv/chain.h).  What counts against a quota is what the columns of the tenant's stripes take
    // on the stores, parity and stripes that are being written included.
    std::map<std::uint64_t, kv::Evictor::TenantRule> tenants{};
    LeaseTable::Options lease{};
    Placements::Options placement{};
    // What the inventories bring has so long to become complete.
    Duration adopt_grace = seconds(60);
    RepairPolicy repair = RepairPolicy::all;
    // A store may be away for so long before its columns are made anew elsewhere.
    Duration repair_after = seconds(300);
    // `hot`: stripes that were written or planned so recently.
    Duration repair_hot = seconds(3600);
    RepairQueue::Options repairs{};
    // A store is asked so often what it holds; 0: only when it comes.
    Duration reconcile{0};
    // One stripe is cross-checked so often; 0: none.
    Duration cross_check{0};
    // Committed stripes are kept in a catalogue: say what changed.
    bool record_changes = false;
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
    std::uint64_t puts_over_budget = 0;
    std::uint64_t puts_invalid = 0;
    std::uint64_t puts_committed = 0;
    std::uint64_t puts_degraded = 0;   // of them, with failed columns
    std::uint64_t puts_duplicate = 0;  // committed by another page meanwhile
    std::uint64_t puts_refused = 0;    // commit of a put that lapsed or is another's
    std::uint64_t puts_aborted = 0;
    std::uint64_t puts_lapsed = 0;
    std::uint64_t puts_no_space = 0;
    std::uint64_t puts_over_quota = 0;
    std::uint64_t tenants_full = 0;  // stripes that count as nobody's: too many tenants have some
    std::uint64_t stripes_adopted = 0;
    std::uint64_t stripes_incomplete = 0;  // adopted, and dropped with too few columns
    std::uint64_t stripes_missing = 0;     // columns that the inventory of their store does not show
    std::uint64_t stripes_lost = 0;        // too few columns left
    std::uint64_t stripes_evicted = 0;
    std::uint64_t stripes_expired = 0;  // stripe_life
    std::uint64_t stripes_freed = 0;    // named in a kv_free or an inventory answer
    std::uint64_t columns_duplicate = 0;
    std::uint64_t columns_corrupt = 0;
    std::uint64_t columns_not_found = 0;
    std::uint64_t columns_io = 0;
    std::uint64_t reports_late = 0;  // of a column that is not where it was read any more
    std::uint64_t columns_repaired = 0;
    std::uint64_t repairs_started = 0;
    std::uint64_t repairs_failed = 0;
    std::uint64_t repairs_unneeded = 0;  // the column came back in time
    std::uint64_t cross_checks_right = 0;
    std::uint64_t cross_checks_wrong = 0;      // stripes that went for it
    std::uint64_t cross_checks_undecided = 0;  // not everything could be read
    std::uint64_t reconciles = 0;              // stores asked again what they hold
    std::uint64_t reconciles_failed = 0;       // that did not tell all of it
    std::uint64_t reconciled_missing = 0;      // columns that they did not show
    std::uint64_t reconciled_back = 0;         // that were thought to be lost
    std::uint64_t reconciled_unknown = 0;      // of no stripe
    std::uint64_t inventory_refused = 0;       // parts out of order or from another generation
    std::uint64_t blocks_refused = 0;          // blocks_max
  };

  Index(Options options, Instant now);

  // A di-kvd came: its generation was registered.  A store starts with its volumes and its inventory, a host
  // with a snapshot.  The same generation again is a re-attachment and starts over too.
  // False when places_max is reached.
  bool host_up(const Holder& host);
  bool store_up(const Holder& store, Instant now, const Labels& labels = {});
  // A draining store takes no new columns.
  void store_draining(const Holder& store, bool draining);
  // The operator takes the store away for good (or does not any more): what it holds is made anew elsewhere.
  // False when there is no such store.
  bool store_leaves(const std::string& instance, bool leaves, Instant now);
  // The operator says that a store that is away will not be back: the columns that it had are lost, so that
  // stripes with enough others are made whole without further pause and the rest is dropped.  Looks at every
  // stripe.  Should it come all the same, its inventory brings back what is still of use.  Errors: not_found;
  // busy, when it is up.
  struct Given {
    std::uint64_t columns = 0;
    std::uint64_t stripes = 0;  // dropped
  };
  Result<Given> store_gone(const std::string& instance, Instant now);
  // Nobody knows a store of this name any more, unless it has come again meanwhile: nothing is to be freed there.
  void store_forgotten(const std::string& instance);
  void volumes(const Holder& store, const wire::meta_volumes& message, Instant now);
  // Any instance is lost, whatever it was: its arena is forgotten, its store's data becomes
  // unavailable, its leases end, its open puts lapse.  Another generation than the present one: nothing.
  void lost(const Holder& holder, Instant now);

  // Padded bytes per block of the model served; estimates the size of pages that are only in arenas.
  void set_block_bytes(std::uint64_t bytes) { block_bytes_ = bytes; }

  [[nodiscard]] wire::meta_matched match(const wire::meta_match& message);
  // The same question, for the miss ratio of caches of other sizes; its answer need not wait for this.
  void asked(const wire::meta_match& message);
  [[nodiscard]] wire::meta_planned plan(const Holder& holder, const RequestId& request,
                                        const wire::meta_plan& message, Instant now);
  void renew(const Holder& holder, const wire::meta_renew& message, Instant now);
  void release(const Holder& holder, const wire::meta_release& message);

  // True: ask the host for a snapshot (meta_arena_resync).
  [[nodiscard]] bool arena_delta(const Holder& host, const wire::meta_arena_delta& message) {
    return arenas_.delta(host, message);
  }

  // Pages that are known are skipped; the stripe is the run of pages behind them that nobody else writes.
  // Opening twice the same pages by the same holder answers the same stripe.  `over_quota`: the tenant may
  // not have more; stripes of its own that had to go for this one are gone in either case.  `over_budget`:
  // there are not enough volumes that have a write budget left; a stripe that begins without a column would be
  // repaired at once, and repairs have no budget.
  [[nodiscard]] wire::meta_put_opened put_open(const Holder& holder, const wire::meta_put_open& message,
                                               Instant now);
  // `ok` also for a stripe that is published already.  `exists`: every key came from elsewhere
  // meanwhile.  `no_space`: more columns failed than there is parity; on stores that had no room some is being made, try
  // again later.  `not_found`: the put lapsed or belongs to somebody else.  `invalid`: the code is not that
  // of the put.
  [[nodiscard]] wire::meta_put_committed put_commit(const Holder& holder,
                                                    const wire::meta_put_commit& message, Instant now);
  void put_abort(const Holder& holder, const wire::meta_put_abort& message, Instant now);

  // nullopt: the part is out of order or from another generation; no answer.
  [[nodiscard]] std::optional<wire::meta_inventory_ack> inventory(const Holder& store,
                                                                  const wire::meta_inventory& message,
                                                                  Instant now);
  // Nothing when the column is not where it was read any more.
  void read_failed(const wire::meta_read_failed& message, Instant now);
  // What an answer of a host says: unknown, of nothing that was asked; wrong, of a stripe that goes.
  enum class RepairEnd : std::uint8_t { unknown, repaired, failed, right, wrong, undecided };
  RepairEnd repaired(const Holder& host, const wire::meta_repaired& message, Instant now);
  // The placements are made anew; nothing moves.
  void rebalance() { placements_.rebuild(); }
  // Repairs that waited for room, a pause or the age of a loss are looked at now.
  void repair_now(Instant now);

  // What became due: leases, open puts, ttl, adoptions, and stripes to free.
  struct Free {
    std::string store;
    wire::kv_free message;
  };
  [[nodiscard]] std::vector<Free> step(Instant now);
  // Repairs to start.
  struct Repair {
    Holder host;
    wire::meta_repair message;
  };
  [[nodiscard]] std::vector<Repair> repairs(Instant now);
  // A store to ask for its inventory.
  struct Question {
    Holder store;
    wire::meta_inventory_want message;
  };
  [[nodiscard]] std::optional<Question> reconcile(Instant now);
  [[nodiscard]] Instant next_due() const;

  // A stripe that the catalogue had, before anybody is there.  Its columns are offered when their stores are
  // up, until the inventories say what is true; false when it is malformed or there is no room.
  bool restore(const StripeRow& row, Instant now);
  // store_leaves for one that may come later.
  void restore_leaving(const std::string& instance, Instant now);
  // What is to be written to the catalogue, at most `count`, with record_changes.  While nobody takes it, it stays
  // within the stripes that are there and the rows that the catalogue has.
  [[nodiscard]] std::vector<StripeChange> take_changes(std::size_t count);
  [[nodiscard]] std::size_t changes() const { return changed_.size(); }

  // For gauges and `show kv`.
  [[nodiscard]] const Counters& counters() const { return counters_; }
  [[nodiscard]] const Arenas::Counters& arena_counters() const { return arenas_.counters(); }
  [[nodiscard]] const Placements& placements() const { return placements_; }
  [[nodiscard]] const RepairQueue& repair_queue() const { return repairs_; }
  [[nodiscard]] const kv::Evictor& evictor() const { return evictor_; }
  // Of the blocks that matches ask for, wherever they are found.  A block has the bytes that it takes on the
  // volumes in a whole stripe, parity included.
  [[nodiscard]] const kv::MissRatio& miss_ratio() const { return miss_ratio_; }
  // Of the volumes in service; 0 when there is none or one has not said.
  [[nodiscard]] std::uint64_t capacity_bytes() const;
  [[nodiscard]] std::size_t leases() const { return leases_.count(); }
  [[nodiscard]] std::size_t open_puts() const { return puts_.count(); }
  [[nodiscard]] std::size_t stripes() const { return stripes_.count(); }
  [[nodiscard]] std::size_t blocks() const { return blocks_.distinct(); }
  [[nodiscard]] std::size_t pending_frees() const { return frees_.count(); }
  struct Place {
    std::string instance;
    bool store = false;
    bool up = false;
    Instant away_since;  // of one that is not up
    bool leaves = false;
    bool complete = false;    // the snapshot or the inventory is in
    std::uint64_t pages = 0;  // of an arena; columns of a store
    std::uint64_t blocks = 0;
    std::uint64_t bytes = 0;        // payload; estimated for arenas
    std::uint64_t bytes_total = 0;  // of the volumes in service; 0 when not known
    std::uint64_t free_pending_bytes = 0;
    std::vector<wire::VolumeState> volumes;  // of a store, as it told of them last
  };
  // Without stores that are away for repair_after and have nothing that is not elsewhere.
  [[nodiscard]] std::vector<Place> places() const;
  // How the committed stripes stand now, by what the stores that are up have.  Looks at every stripe.
  struct Redundancy {
    std::uint64_t degraded = 0;    // some column cannot be read, and every page can
    std::uint64_t unreadable = 0;  // some page cannot be read
  };
  [[nodiscard]] Redundancy redundancy() const;
  // What stands between these figures and none, for the operator; empty: nothing, or only time.
  [[nodiscard]] std::string repairs_wait_for(const Redundancy& now_is, Instant now) const;
  struct PageRow {
    std::uint64_t page = 0;
    std::vector<std::string> stores;
    bool readable = false;
    std::uint32_t columns = 0;         // of the stripe that can be read
    std::uint32_t columns_stored = 0;  // of a whole stripe
    Key parent;
    Key first;
    std::uint32_t blocks = 0;
    std::uint64_t bytes = 0;
  };
  // At most `count` committed pages with ids above `after`, in order.
  [[nodiscard]] std::vector<PageRow> pages_after(std::uint64_t after, std::size_t count) const;
  struct Usage {
    Key fingerprint;
    std::string geometry;
    std::uint64_t stripes = 0;
    std::uint64_t blocks = 0;
    std::uint64_t page_bytes = 0;
    std::uint64_t column_bytes = 0;  // on the stores, parity included
  };
  // Per layout and geometry.
  [[nodiscard]] std::vector<Usage> usage() const;
  // Takes one stripe out, as eviction does.  False when it is not there.
  bool drop_stripe(std::uint64_t id, Instant now);

  // Panics when the structures disagree with each other; slow.
  void test_check() const;

 private:
  static constexpr std::uint32_t none = StripeTable::none;

  struct Store {
    std::string instance;
    std::uint32_t generation = 0;
    Labels labels;
    bool up = false;
    bool draining = false;
    bool leaves = false;
    bool complete = false;
    bool gone = false;         // away for repair_after
    bool some_failed = false;  // of its volumes
    std::uint64_t evict_part = evict_store_part;
    Instant away_since;
    std::uint32_t inventory = 0;  // counts inventories begun
    std::uint64_t next_part = 0;
    bool adopts = false;  // its next inventory may bring stripes
    bool asked = false;   // for an inventory, by the number of `inventory`
    Instant reconcile_at = instant_never;
    std::map<std::uint16_t, wire::VolumeState> volumes;
    std::set<std::uint16_t> told;  // those of them that it has
    std::uint64_t columns = 0;     // of committed stripes
    std::uint64_t blocks = 0;      // of pages whose first column is among them
    std::uint64_t bytes = 0;       // of columns here, open ones included
  };

  [[nodiscard]] const Key& key_of(BlockRef ref) const override;
  void add_blocks(std::uint32_t slot);

  // For a stripe with so many keys.
  [[nodiscard]] bool has_room(std::size_t keys) const {
    return blocks_.entries() + keys <= options_.blocks_max &&
           evictor_.items() < options_.blocks_max + options_.open_puts_max;
  }
  // The number of a store, which is made when there is room.
  [[nodiscard]] std::optional<std::uint32_t> store_number(const std::string& instance, Instant now);
  void changed(std::uint64_t id) {
    if (options_.record_changes && !restoring_) changed_.insert(id);
  }
  [[nodiscard]] Store* store_of(const Holder& holder, std::uint32_t* number = nullptr);
  void targets_changed(std::uint32_t number);
  void end_wait_for_places();
  void add_bytes(Target target, std::uint64_t bytes);
  void remove_bytes(Target target, std::uint64_t bytes);
  [[nodiscard]] wire::Column wire_column(const StripeColumn& column) const;

  [[nodiscard]] bool can_read(const StripeColumn& column) const;
  [[nodiscard]] std::uint32_t readable_columns(const Stripe& stripe) const;
  [[nodiscard]] bool page_readable(const Stripe& stripe, std::uint32_t page) const;
  // The place in the store that owns the key; nullopt when none can be read.
  [[nodiscard]] std::optional<BlockRef> owner(const Key& key) const;
  [[nodiscard]] bool knows_all(std::span<const Key> keys) const;
  [[nodiscard]] bool brings_nothing_new(std::span<const wire::PutPage> pages) const;
  [[nodiscard]] wire::PlannedStripe planned_stripe(const Stripe& stripe) const;

  // Makes the stripe committed, now when it does not say when; its columns are added after this.  Without an item
  // it becomes one.
  std::uint32_t publish(Stripe stripe, kv::Evictor::Item item, Instant now);
  void column_add(std::uint32_t slot, const StripeColumn& column);
  void column_remove(std::uint32_t slot, std::uint32_t column);
  void abandon(const OpenPut& put, std::span<const std::uint32_t> failed, Instant free_at);
  [[nodiscard]] bool id_valid(std::uint64_t id) const {
    return id != 0 && id <= stripe_id_max && (id >> 32) <= options_.run + runs_ahead_max;
  }
  [[nodiscard]] std::uint32_t wall_s(Instant now) const;
  // When the stripe was committed, at the earliest.
  [[nodiscard]] std::uint32_t born_not_before(std::uint64_t id, Instant now) const;
  [[nodiscard]] Duration age(std::uint32_t born_s, Instant now) const;
  // Older than what the tenant puts may become.
  [[nodiscard]] bool past_cap(std::uint64_t tenant, std::uint32_t born_s, Instant now) const;
  // Takes the stripe out of every map; frees its columns on their stores at `free_at`.
  void drop(std::uint32_t slot, Instant free_at);
  // The column is not there any more; the stripe goes when too few are left.
  void lose_column(std::uint32_t slot, std::uint32_t column, Instant now);
  // Frees that column, or all that the store has of the stripe when it has no other.
  void free_column(std::uint32_t store, std::uint64_t stripe, std::uint32_t column, std::uint64_t bytes,
                   Instant at);
  [[nodiscard]] bool has_other_column(std::uint32_t store, std::uint64_t stripe, std::uint32_t column) const;

  // What is counted as a tenant's; beyond the tenants that are told apart, as nobody's.
  [[nodiscard]] kv::Evictor::PutAnswer put_item(kv::Evictor::Spec spec, Instant now);
  // The item of the stripe, committed or being written, that brings this key.
  [[nodiscard]] kv::Evictor::Item item_of(const Key& key) const;
  // What hangs on these keys, and on no item, hangs on the item that brings them now: it came before it, or
  // the one that it hung on is gone.
  void adopt_orphans(std::span<const Key> keys);
  // Out of the directory.  Returns how many bytes that gives on the store.
  std::uint64_t drop_victims(const std::vector<kv::Evictor::Victim>& victims, std::uint32_t store,
                             Instant now);
  // `want` bytes on that store, with what is on its way out.
  void evict(std::uint32_t store, std::uint64_t want, Instant now);
  // It refused a column of so many bytes.
  void make_room(std::uint32_t store, std::uint64_t put_bytes, Instant now);
  void evict_blocks(std::size_t blocks, Instant now);
  void evict_above_mark(std::uint64_t stripe, Instant now);
  void capacity_changed();

  // True when the shard may be freed.
  [[nodiscard]] bool adopt(std::uint32_t number, const wire::ShardRecord& shard, Instant now);
  void settle_adoptions(Instant now);
  // True when every column is there: none is awaited any more.
  bool adopted_whole(std::uint32_t slot);
  // The store is not being asked any more, nor again before it has told what it holds.
  void end_reconcile(std::uint32_t number);
  // It has told all that it holds.
  void reconciled(std::uint32_t number, Instant now);

  [[nodiscard]] bool on_failed_volume(const StripeColumn& column) const;
  // Stripes of one column that is on such a volume: its inventory brings them back, should it be opened anew.
  // Those of several columns stay in the books, as their volumes come back one by one.
  void forget_failed(Instant now);
  [[nodiscard]] bool lies_on_failed(const Stripe& stripe) const;
  void forget(std::uint32_t slot, Instant now);
  [[nodiscard]] bool is_lost(const StripeColumn& column) const;
  // Has a column on a store that is emptied.
  [[nodiscard]] bool leaves(const Stripe& stripe) const;
  [[nodiscard]] std::vector<std::uint16_t> lost_columns(const Stripe& stripe) const;
  void consider_repair(std::uint32_t slot, Instant now);
  void scan_for_repairs(Instant now);
  // There is no place for its columns, or no host.
  void put_off_repair(std::uint64_t id, Instant now);
  // The host with the fewest repairs; among equals they take turns.
  [[nodiscard]] std::optional<Holder> repair_host();
  [[nodiscard]] std::optional<Repair> start_repair(std::uint64_t id, Instant now);
  // Its host is gone, or says nothing.
  RepairEnd give_up_repair(std::uint64_t id, Code code, Instant now);
  RepairEnd end_repair(const wire::meta_repaired& message, Instant now);
  // Of a cross-check.
  RepairEnd verdict(std::uint64_t id, Code code, Instant now);
  // Draws one when it is time.
  void want_cross_check(Instant now);
  [[nodiscard]] bool can_cross_check(const Stripe& stripe) const;

  Options options_;
  Counters counters_;
  LeaseTable leases_;
  Instant frees_safe_at_;  // holders of leases of an earlier run have given up by then
  std::uint64_t next_stripe_;
  std::uint64_t next_published_ = 1;
  std::uint64_t block_bytes_ = 0;
  kv::MissRatio miss_ratio_{kv::MissRatio::Options{}};

  // When stripes were written that were forgotten with a failed volume, which may bring them back; the last ones.
  static constexpr std::size_t forgotten_max = std::size_t{1} << 18;
  std::map<std::uint64_t, std::uint32_t> forgotten_;
  StripeTable stripes_;
  kv::Evictor evictor_;
  BlockMap blocks_;
  Arenas arenas_;
  Placements placements_;
  OpenPuts puts_;
  Frees frees_;
  RepairQueue repairs_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> children_;  // (first bytes of the parent's key, stripe)
  std::set<std::pair<Instant, std::uint64_t>> adopting_;        // stripes that miss columns
  std::map<std::uint64_t, Instant> adopting_since_;
  std::uint64_t scan_after_ = 0;  // stripe id
  Instant scan_at_ = instant_never;
  bool repairs_wait_for_places_ = false;  // one without a place was passed over
  std::set<std::uint64_t> changed_;
  bool restoring_ = false;
  std::size_t next_repair_host_ = 0;
  Rng draws_;
  Instant cross_check_at_ = instant_never;
  std::uint64_t cross_check_ = 0;         // the stripe that was drawn last
  bool repairs_wait_for_stores_ = false;  // a stripe with too few columns that can be read was passed over

  std::optional<std::uint32_t> reconciling_;  // a store that was asked
  Instant reconcile_until_;

  std::deque<Store> stores_;  // by number
  std::map<std::string, std::uint32_t> store_numbers_;
};

}  // namespace di::directory
