// The index against a naive model: hosts, stores and their disks, puts, plans, losses, restarts of the
// directory, all from one seed.  After each step a random chain is matched and planned, and both must
// say what the model says.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <set>

#include "base/crypto.h"
#include "base/rng.h"
#include "directory/index.h"

namespace di::directory {
namespace {

constexpr int nodes = 120;  // of a random tree of blocks
constexpr int seeds = 200;
constexpr int steps = 400;

class World {
 public:
  explicit World(std::uint64_t seed) : rng_(seed) {
    for (int n = 0; n < nodes; ++n) {
      // Mostly long chains with a few branches.
      parent_.push_back(n == 0             ? -1
                        : rng_.chance(0.7) ? n - 1
                                           : static_cast<int>(rng_.below(static_cast<std::uint64_t>(n))));
      Key key;
      key.raw = sha256(as_bytes(std::to_string(n)));
      key_.push_back(key);
      number_[key] = n;
    }
    restart();
  }

  void step() {
    now_ = now_ + milliseconds(static_cast<std::int64_t>(rng_.below(4000)));
    switch (rng_.below(16)) {
      case 0:
      case 1:
      case 2:
        open_put();
        break;
      case 3:
      case 4:
      case 5:
        commit_put();
        break;
      case 6:
        abort_put();
        break;
      case 7:
      case 8:
      case 9:
        arena_change();
        break;
      case 10:
        host_restart();
        break;
      case 11:
        store_event();
        break;
      case 12:
        failed_read();
        break;
      case 13:
        end_lease();
        break;
      case 14:
        if (rng_.chance(0.3)) no_space();
        break;
      default:
        if (rng_.chance(0.1)) restart();
        break;
    }
    run_due();
    compare();
    index_->test_check();
  }

  [[nodiscard]] const Index::Counters& counters() const { return index_->counters(); }
  [[nodiscard]] std::uint64_t arena_gaps() const { return index_->arena_counters().gaps; }

  // Everybody goes; nothing may be left.
  void finish() {
    for (auto& [name, host] : hosts_) {
      index_->lost({name, host.generation}, now_);
      give_up_puts_of(name);
    }
    leases_.clear();
    for (auto& [name, store] : stores_) {
      if (!store.up) store_returns(name, store);
    }
    for (int i = 0; i < 400; ++i) {
      now_ = now_ + seconds(1);
      lapse();
      take_frees();
    }
    EXPECT_EQ(index_->leases(), 0U);
    EXPECT_EQ(index_->open_puts(), 0U);
    EXPECT_EQ(index_->pending_frees(), 0U);
    std::size_t on_disk = 0;
    for (const auto& [name, store] : stores_) on_disk += store.disk.size();
    EXPECT_EQ(on_disk, committed_.size());  // no slot without a stripe (I4)
    EXPECT_EQ(index_->stripes(), committed_.size());
    index_->test_check();
  }

 private:
  struct HostModel {
    std::uint32_t generation = 1;
    std::uint64_t seq = 0;
    std::uint64_t next_page = 1;
    std::map<std::uint64_t, wire::ArenaPage> pages;
  };
  struct StoreModel {
    std::uint32_t generation = 1;
    bool up = false;
    std::map<std::uint64_t, wire::ShardRecord> disk;
    std::set<std::uint64_t> doomed;  // the directory will free them
  };
  struct Put {
    std::string host;
    std::uint32_t generation;
    std::string store;
    wire::PutPage page;
    Instant deadline;
  };
  struct Committed {
    std::string store;
    wire::PutPage page;
  };
  struct LeaseModel {
    std::string host;
    Instant expires;
    std::vector<std::uint64_t> stripes;
  };

  std::vector<int> random_chain() {
    std::vector<int> chain;
    for (int n = static_cast<int>(rng_.below(nodes)); n >= 0; n = parent_[static_cast<std::size_t>(n)]) {
      chain.push_back(n);
    }
    std::reverse(chain.begin(), chain.end());
    return chain;
  }
  std::vector<Key> keys_of(const std::vector<int>& chain) {
    std::vector<Key> keys;
    for (const int n : chain) keys.push_back(key_[static_cast<std::size_t>(n)]);
    return keys;
  }
  wire::PutPage random_page() {
    const std::vector<int> chain = random_chain();
    const std::size_t first = rng_.below(chain.size());
    const std::size_t count = std::min<std::size_t>(1 + rng_.below(5), chain.size() - first);
    wire::PutPage page;
    if (first > 0) page.parent = key_[static_cast<std::size_t>(chain[first - 1])];
    page.keys = keys_of({chain.begin() + static_cast<std::ptrdiff_t>(first),
                         chain.begin() + static_cast<std::ptrdiff_t>(first + count)});
    page.crcs = {static_cast<std::uint32_t>(rng_.below(3))};
    page.bytes = 4096 * count;
    return page;
  }
  template <class M>
  typename M::iterator pick(M& map) {
    return std::next(map.begin(), static_cast<std::ptrdiff_t>(rng_.below(map.size())));
  }
  Holder holder(const std::string& name) { return {name, hosts_.at(name).generation}; }

  bool stored(const Key& key) {
    return std::any_of(committed_.begin(), committed_.end(), [&](const auto& c) {
      const auto& keys = c.second.page.keys;
      return stores_.at(c.second.store).up && std::find(keys.begin(), keys.end(), key) != keys.end();
    });
  }
  bool in_arena(const std::string& host, const Key& key) {
    const auto& pages = hosts_.at(host).pages;
    return std::any_of(pages.begin(), pages.end(), [&](const auto& p) {
      return std::find(p.second.keys.begin(), p.second.keys.end(), key) != p.second.keys.end();
    });
  }
  bool new_in(const wire::PutPage& page) {
    return std::any_of(page.keys.begin(), page.keys.end(), [&](const Key& key) { return !stored(key); });
  }

  void open_put() {
    const auto host = pick(hosts_);
    const wire::PutPage page = random_page();
    const auto opened = index_->put_open(holder(host->first), {Key{}, {page}}, now_);
    for (auto& [id, put] : open_) {
      if (put.host == host->first && put.page == page && opened.stripe == id) {
        put.deadline = now_ + put_ttl;
        return;
      }
    }
    bool any_new = false;
    bool any_open = false;
    for (const Key& key : page.keys) {
      if (stored(key)) continue;
      (claimed(key) ? any_open : any_new) = true;
    }
    const bool up = std::any_of(stores_.begin(), stores_.end(), [](const auto& s) { return s.second.up; });
    const Code expected = any_new ? (up ? Code::ok : Code::busy) : any_open ? Code::busy : Code::exists;
    ASSERT_EQ(opened.code, static_cast<std::uint16_t>(expected));
    if (expected != Code::ok) return;
    ASSERT_FALSE(issued_.contains(opened.stripe));
    issued_.insert(opened.stripe);
    const std::string store = opened.columns.at(0).instance;
    ASSERT_TRUE(stores_.at(store).up);
    open_[opened.stripe] = {host->first, host->second.generation, store, page, now_ + put_ttl};
    for (const Key& key : page.keys) {
      if (!stored(key) && !claims_.contains(key)) claims_[key] = opened.stripe;
    }
  }
  bool claimed(const Key& key) { return claims_.contains(key); }
  void forget_open(std::uint64_t id) {
    open_.erase(id);
    std::erase_if(claims_, [&](const auto& claim) { return claim.second == id; });
  }
  void write_disk(std::uint64_t id, const Put& put) {
    stores_.at(put.store).disk[id] = {id, 0, 0, 1, Key{}, {put.page}};
  }
  void commit_put() {
    if (open_.empty()) return;
    const auto at = pick(open_);
    const std::uint64_t id = at->first;
    const Put put = at->second;
    if (!stores_.at(put.store).up) return;
    write_disk(id, put);
    if (rng_.chance(0.2)) return;  // written, and the writer is slow or dead
    const auto answer = index_->put_commit({put.host, put.generation}, {id, {}}, now_);
    if (put.deadline <= now_) {
      ASSERT_EQ(answer.code, static_cast<std::uint16_t>(Code::not_found));
      return;
    }
    const bool useful = new_in(put.page);
    ASSERT_EQ(answer.code, static_cast<std::uint16_t>(useful ? Code::ok : Code::exists));
    forget_open(id);
    if (useful) {
      committed_[id] = {put.store, put.page};
    } else {
      stores_.at(put.store).doomed.insert(id);
    }
  }
  void abort_put() {
    if (open_.empty()) return;
    const auto at = pick(open_);
    index_->put_abort({at->second.host, at->second.generation}, {at->first}, now_);
    stores_.at(at->second.store).doomed.insert(at->first);
    forget_open(at->first);
  }
  void no_space() {
    std::vector<std::uint64_t> mine;
    for (const auto& [id, put] : open_) {
      if (put.deadline > now_) mine.push_back(id);
    }
    if (mine.empty()) return;
    const std::uint64_t id = mine[rng_.below(mine.size())];
    const Put put = open_.at(id);
    if (stores_.at(put.store).disk.contains(id)) return;
    ASSERT_EQ(index_
                  ->put_commit({put.host, put.generation},
                               {id, {{0, static_cast<std::uint16_t>(Code::no_space)}}}, now_)
                  .code,
              static_cast<std::uint16_t>(Code::no_space));
    forget_open(id);
    std::set<std::uint64_t> left;
    for (const auto& row : index_->pages_after(0, 100000)) left.insert(row.page >> 8);
    std::set<Key> gone;
    for (auto at = committed_.begin(); at != committed_.end();) {
      if (left.contains(at->first)) {
        ++at;
        continue;
      }
      gone.insert(at->second.page.keys.begin(), at->second.page.keys.end());
      stores_.at(at->second.store).doomed.insert(at->first);
      at = committed_.erase(at);
    }
    ASSERT_EQ(left.size(), committed_.size());
    // Leaf first; a block that somebody else wrote as well is still there.
    for (const auto& [stripe, kept] : committed_) {
      for (const Key& key : kept.page.keys) gone.erase(key);
    }
    for (const auto& [stripe, kept] : committed_) ASSERT_FALSE(gone.contains(kept.page.parent));
  }

  void arena_change() {
    const auto host = pick(hosts_);
    wire::meta_arena_delta delta;
    delta.seq = ++host->second.seq;
    for (std::uint64_t i = rng_.below(3); i > 0; --i) {
      const wire::PutPage page = random_page();
      const std::uint64_t number = host->second.next_page++;
      delta.added.push_back({number, page.parent, page.keys, page.crcs});
      host->second.pages[number] = delta.added.back();
    }
    if (!host->second.pages.empty() && rng_.chance(0.5)) {
      const auto gone = pick(host->second.pages);
      if (std::find(delta.added.begin(), delta.added.end(), gone->second) == delta.added.end()) {
        delta.removed.push_back(gone->first);
        host->second.pages.erase(gone);
      }
    }
    if (rng_.chance(0.1)) {  // this one is lost: the next shows the gap
      wire::meta_arena_delta next;
      next.seq = ++host->second.seq;
      ASSERT_TRUE(index_->arena_delta({host->first, host->second.generation}, next));
      return snapshot(host->first);
    }
    if (index_->arena_delta({host->first, host->second.generation}, delta)) snapshot(host->first);
    if (rng_.chance(0.1)) {
      ASSERT_FALSE(index_->arena_delta({host->first, host->second.generation}, delta));  // repeated
    }
  }
  void snapshot(const std::string& name) {
    HostModel& host = hosts_.at(name);
    wire::meta_arena_delta delta{++host.seq, true, {}, {}};
    for (const auto& [number, page] : host.pages) delta.added.push_back(page);
    ASSERT_FALSE(index_->arena_delta({name, host.generation}, delta));
  }
  void give_up_puts_of(const std::string& host) {
    give_up([&](const Put& put) { return put.host == host; });
  }
  void give_up(const std::function<bool(const Put&)>& which) {
    std::vector<std::uint64_t> ended;
    for (const auto& [id, put] : open_) {
      if (which(put)) ended.push_back(id);
    }
    for (const std::uint64_t id : ended) {
      stores_.at(open_.at(id).store).doomed.insert(id);
      forget_open(id);
    }
  }
  void host_restart() {
    const auto host = pick(hosts_);
    const Holder old{host->first, host->second.generation};
    index_->lost(old, now_);
    std::erase_if(leases_, [&](const auto& lease) { return lease.second.host == host->first; });
    give_up_puts_of(host->first);
    if (rng_.chance(0.5)) {
      ++host->second.generation;
      host->second.pages.clear();
      host->second.seq = 0;
    }
    ASSERT_TRUE(index_->host_up({host->first, host->second.generation}));
    snapshot(host->first);
  }

  void store_event() {
    auto& [name, store] = *pick(stores_);
    if (store.up) {
      index_->lost({name, store.generation}, now_);
      store.up = false;
      if (rng_.chance(0.2) && !store.disk.empty()) store.disk.erase(pick(store.disk));  // a slot is damaged
      return;
    }
    store_returns(name, store);
  }
  void store_returns(const std::string& name, StoreModel& store) {
    ++store.generation;
    store.up = true;
    ASSERT_TRUE(index_->store_up({name, store.generation}, now_));
    std::vector<wire::ShardRecord> all;
    for (const auto& [id, shard] : store.disk) all.push_back(shard);
    const std::size_t part = 1 + rng_.below(4);
    std::uint64_t cursor = 0;
    for (std::size_t from = 0; from == 0 || from < all.size(); from += part, ++cursor) {
      run_due();  // what it is listing now is not freed before all of it is told
      wire::meta_inventory message;
      message.cursor = cursor;
      for (std::size_t i = from; i < std::min(all.size(), from + part); ++i) {
        message.shards.push_back(all[i]);
        const std::uint64_t id = all[i].stripe;
        if (store.doomed.contains(id) || open_.contains(id) || committed_.contains(id)) continue;
        if (new_in(all[i].pages[0])) {
          committed_[id] = {name, all[i].pages[0]};
        } else {
          store.doomed.insert(id);
        }
      }
      message.last = from + part >= all.size();
      const auto ack = index_->inventory({name, store.generation}, message, now_);
      ASSERT_TRUE(ack);
      for (const std::uint64_t id : ack->unknown) freed(name, id);
    }
    std::erase_if(committed_,
                  [&](const auto& c) { return c.second.store == name && !store.disk.contains(c.first); });
  }
  void failed_read() {
    if (committed_.empty()) return;
    const auto at = pick(committed_);
    const bool corrupt = rng_.chance(0.5);
    index_->read_failed({at->first << 8, 0, static_cast<std::uint16_t>(corrupt ? Code::corrupt : Code::io),
                         at->second.store, stores_.at(at->second.store).generation, 0},
                        now_);
    if (!corrupt) return;
    stores_.at(at->second.store).doomed.insert(at->first);
    committed_.erase(at);
  }

  void end_lease() {
    if (leases_.empty()) return;
    const auto at = pick(leases_);
    if (rng_.chance(0.5)) {
      index_->release(holder(at->second.host), {{at->first}});
      leases_.erase(at);
    } else if (at->second.expires > now_) {
      index_->renew(holder(at->second.host), {{at->first}}, now_);
      at->second.expires = now_ + lease_ttl;
    }
  }

  void restart() {
    ++run_;
    index_.emplace(Index::Options{.run = run_}, now_);
    leases_.clear();
    open_.clear();
    claims_.clear();
    committed_.clear();
    if (hosts_.empty()) {
      for (const char* name : {"di-kvd.host0", "di-kvd.host1", "di-kvd.host2"}) hosts_[name] = {};
      for (const char* name : {"di-kvd.store0", "di-kvd.store1"}) stores_[name] = {};
    }
    for (auto& [name, host] : hosts_) {
      ASSERT_TRUE(index_->host_up({name, host.generation}));
      snapshot(name);
    }
    for (auto& [name, store] : stores_) {
      store.up = false;
      store.doomed.clear();
    }
    for (auto& [name, store] : stores_) store_returns(name, store);
  }

  void freed(const std::string& name, std::uint64_t id) {
    StoreModel& store = stores_.at(name);
    ASSERT_TRUE(store.up);
    ASSERT_TRUE(store.doomed.contains(id)) << id;
    ASSERT_FALSE(committed_.contains(id) && committed_.at(id).store == name);
    ASSERT_FALSE(open_.contains(id));
    for (const auto& [lease, model] : leases_) {
      ASSERT_EQ(std::count(model.stripes.begin(), model.stripes.end(), id), 0);
    }
    store.doomed.erase(id);
    store.disk.erase(id);
  }
  void lapse() {
    std::erase_if(leases_, [&](const auto& lease) { return lease.second.expires <= now_; });
    give_up([&](const Put& put) { return put.deadline <= now_; });
  }
  void take_frees() {
    for (const Index::Free& free : index_->step(now_)) {
      for (const std::uint64_t id : free.message.stripes) freed(free.store, id);
    }
    ASSERT_GT(index_->next_due(), now_);
  }
  void run_due() {
    if (rng_.chance(0.5)) return;
    lapse();
    take_frees();
  }

  void compare() {
    const std::vector<Key> keys = keys_of(random_chain());
    std::map<std::string, std::uint32_t> runs;
    const auto run = [&](auto holds) {
      std::uint32_t count = 0;
      while (count < keys.size() && holds(keys[count])) ++count;
      return count;
    };
    runs[""] = run([&](const Key& key) { return stored(key); });
    for (const auto& [name, host] : hosts_)
      runs[name] = run([&](const Key& key) { return in_arena(name, key); });
    const std::uint32_t hit = run([&](const Key& key) {
      if (stored(key)) return true;
      return std::any_of(hosts_.begin(), hosts_.end(), [&](const auto& h) { return in_arena(h.first, key); });
    });
    std::erase_if(runs, [](const auto& r) { return r.second == 0; });
    const auto matched = index_->match({Key{}, keys});
    ASSERT_EQ(matched.hit_blocks, hit);
    std::map<std::string, std::uint32_t> tiers;
    for (const wire::TierHit& tier : matched.tiers) tiers[tier.instance] = tier.blocks;
    ASSERT_EQ(tiers, runs);

    if (rng_.chance(0.5)) return;
    const auto host = pick(hosts_);
    const auto planned = index_->plan(holder(host->first), RequestId{}, {keys}, now_);
    ASSERT_EQ(planned.lease != 0, hit > 0);
    std::size_t at = 0;
    std::vector<std::uint64_t> stripes;
    for (const wire::PlannedPage& page : planned.pages) {
      ASSERT_GT(page.count, 0U);
      ASSERT_EQ(page.page_blocks, page.keys.size());
      for (std::uint32_t i = 0; i < page.count; ++i) ASSERT_EQ(page.keys.at(page.first + i), keys.at(at++));
      if (page.page != 0) {
        const Committed& from = committed_.at(page.page >> 8);
        ASSERT_EQ(page.keys, from.page.keys);
        ASSERT_EQ(page.crcs, from.page.crcs);
        ASSERT_EQ(page.columns, (std::vector<wire::Column>{{from.store, 0, 0}}));
        ASSERT_TRUE(stores_.at(from.store).up);
        stripes.push_back(page.page >> 8);
      } else {
        ASSERT_FALSE(page.arenas.empty());
        ASSERT_TRUE(page.columns.empty());
      }
      for (const std::string& name : page.arenas) {
        const auto& pages = hosts_.at(name).pages;
        ASSERT_TRUE(std::any_of(pages.begin(), pages.end(), [&](const auto& p) {
          return p.second.keys == page.keys && p.second.crcs == page.crcs;
        }));
      }
    }
    ASSERT_EQ(at, hit);
    if (planned.lease != 0) leases_[planned.lease] = {host->first, now_ + lease_ttl, stripes};
  }

  Rng rng_;
  Instant now_ = Instant{} + seconds(1000);
  std::uint64_t run_ = 0;
  std::vector<int> parent_;
  std::vector<Key> key_;
  std::map<Key, int> number_;
  std::optional<Index> index_;
  std::map<std::string, HostModel> hosts_;
  std::map<std::string, StoreModel> stores_;
  std::map<std::uint64_t, Put> open_;
  std::map<Key, std::uint64_t> claims_;
  std::map<std::uint64_t, Committed> committed_;
  std::map<std::uint64_t, LeaseModel> leases_;
  std::set<std::uint64_t> issued_;
};

TEST(IndexModel, AgreesWithANaiveDirectory) {
  Index::Counters sum;  // of the last run of the directory in each world: shows that all of it happened
  std::uint64_t arena_gaps = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    World world(seed);
    for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) {
      SCOPED_TRACE("step=" + std::to_string(i));
      world.step();
    }
    if (!testing::Test::HasFatalFailure()) world.finish();
    const Index::Counters& seen = world.counters();
    sum.match_hit_blocks += seen.match_hit_blocks;
    sum.puts_committed += seen.puts_committed;
    sum.puts_exist += seen.puts_exist;
    sum.puts_busy += seen.puts_busy;
    sum.puts_duplicate += seen.puts_duplicate;
    sum.puts_refused += seen.puts_refused;
    sum.puts_lapsed += seen.puts_lapsed;
    sum.puts_aborted += seen.puts_aborted;
    sum.leases_expired += seen.leases_expired;
    sum.stripes_adopted += seen.stripes_adopted;
    sum.stripes_missing += seen.stripes_missing;
    sum.stripes_evicted += seen.stripes_evicted;
    sum.stripes_freed += seen.stripes_freed;
    sum.columns_corrupt += seen.columns_corrupt;
    arena_gaps += world.arena_gaps();
    if (testing::Test::HasFailure()) {
      std::cout << "seed=" << seed << "\n";
      return;
    }
  }
  for (const std::uint64_t count :
       {sum.match_hit_blocks, sum.puts_committed, sum.puts_exist, sum.puts_busy, sum.puts_duplicate,
        sum.puts_refused, sum.puts_lapsed, sum.puts_aborted, sum.leases_expired, sum.stripes_adopted,
        sum.stripes_missing, sum.stripes_evicted, sum.stripes_freed, sum.columns_corrupt, arena_gaps}) {
    EXPECT_GT(count, 5U);
  }
}

}  // namespace
}  // namespace di::directory
