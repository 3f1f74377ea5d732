// The index with 2+1 and 4+2 against the disks: hosts that write, degrade, abandon and repair; stores that
// die, are given up, lose columns, find second copies; restarts of the directory.  All from one seed.  After each step what
// the directory plans is looked for on the disks, and at the end every stripe is whole and nothing else is
// there.  Of three tenants one may have all, one is refused above its quota, and of one the oldest goes.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <set>

#include "base/crypto.h"
#include "base/rng.h"
#include "directory/index.h"

namespace di::directory {
namespace {

constexpr int chains = 12;
constexpr int chain_pages = 10;
constexpr std::uint64_t quota_bytes = 2 << 20;
constexpr int seeds = 60;
constexpr int steps = 250;

Key key_of(int chain, int block) {
  Key out;
  out.raw = sha256(as_bytes(std::to_string(chain) + "/" + std::to_string(block)));
  return out;
}

class World {
 public:
  World(std::uint64_t seed, Geometry geometry, int stores) : rng_(seed), geometry_(geometry) {
    for (int n = 0; n < stores; ++n) stores_["di-kvd.store" + std::to_string(10 + n)] = {};
    for (int chain = 0; chain < chains; ++chain) {
      // Pages of one block; long ones split, the same in every offer.
      chain_bytes_.push_back(rng_.chance(0.3) ? 256 << 10 : 4096);
    }
    restart();
  }

  void step() {
    now_ = now_ + milliseconds(static_cast<std::int64_t>(rng_.below(4000)));
    switch (rng_.below(13)) {
      case 0:
      case 1:
      case 2:
        open_put();
        break;
      case 3:
      case 4:
      case 5:
        end_put();
        break;
      case 6:
        store_event();
        break;
      case 7:
        failed_read();
        break;
      case 8:
      case 9:
        end_repair();
        break;
      case 10:
        if (rng_.chance(0.3)) host_restart();
        break;
      case 11:
        decay();
        answer();
        break;
      default:
        if (rng_.chance(0.08)) restart();
        break;
    }
    if (rng_.chance(0.7)) run_due();
    compare();
    index_->test_check();
    if (rng_.chance(0.3)) {
      for (const StripeChange& change : index_->take_changes(1 + rng_.below(8))) {
        if (change.row) {
          catalogue_[change.id] = *change.row;
        } else {
          catalogue_.erase(change.id);
        }
      }
    }
  }

  // Everybody is there and time passes: every stripe becomes whole, and the disks have nothing else.
  void finish() {
    settling_ = true;
    for (auto& [name, store] : stores_) {
      if (!store.up) returns(name);
    }
    for (int i = 0; i < 600; ++i) {
      now_ = now_ + seconds(1);
      run_due();
      while (!running_.empty()) end_repair();
      // Every minute each store shows what a lost answer left behind.
      answer();
    }
    leases_.clear();
    ASSERT_EQ(index_->open_puts(), 0U);
    ASSERT_EQ(index_->leases(), 0U);
    ASSERT_EQ(index_->pending_frees(), 0U);
    ASSERT_EQ(index_->repair_queue().waiting(), 0U);
    std::size_t columns = 0;
    for (const Index::PageRow& row : index_->pages_after(0, 100000)) {
      ASSERT_TRUE(row.readable);
      ASSERT_EQ(row.columns, row.columns_stored) << "stripe " << (row.page >> 8);
      if ((row.page & 0xff) == 0) columns += row.columns;
    }
    std::size_t on_disk = 0;
    std::map<std::uint64_t, std::set<std::uint64_t>> of_tenants;
    for (const auto& [name, store] : stores_) {
      on_disk += store.disk.size();
      for (const auto& [id, shard] : store.disk) of_tenants[shard.tenant].insert(id.first);
    }
    ASSERT_EQ(on_disk, columns);
    for (std::uint64_t tenant = 1; tenant <= 3; ++tenant)
      ASSERT_EQ(index_->evictor().tenant(tenant).items, of_tenants[tenant].size());
    ASSERT_FALSE(of_tenants.contains(0));
    index_->test_check();
  }

  [[nodiscard]] const Index::Counters& counters() const { return index_->counters(); }
  [[nodiscard]] std::size_t restored() const { return restored_; }
  [[nodiscard]] std::uint64_t lost_unanswered() const { return lost_unanswered_; }
  [[nodiscard]] std::uint64_t refused() const { return refused_ + index_->evictor().tenant(2).refused; }
  [[nodiscard]] std::uint64_t evicted() const { return evicted_ + index_->evictor().tenant(3).evicted; }

 private:
  using ColumnId = std::pair<std::uint64_t, std::uint16_t>;  // stripe, column
  struct Store {
    std::uint32_t generation = 1;
    bool up = false;
    std::map<ColumnId, wire::ShardRecord> disk;
  };
  std::deque<Index::Question> questions_;
  bool settling_ = false;  // no stripe is found wrong any more
  std::vector<wire::meta_read_failed> late_reports_;
  struct Put {
    std::string host;
    std::uint32_t generation = 0;
    std::uint64_t tenant = 0;
    std::vector<wire::PutPage> pages;
    wire::meta_put_opened opened;
    Instant deadline;
  };

  std::vector<wire::PutPage> pages_of(int chain, int first, int count) {
    std::vector<wire::PutPage> out;
    for (int p = first; p < first + count; ++p) {
      out.push_back({key_of(chain, p - 1),
                     {key_of(chain, p)},
                     {static_cast<std::uint32_t>(p), 1},
                     static_cast<std::uint64_t>(chain_bytes_[static_cast<std::size_t>(chain)])});
    }
    return out;
  }
  wire::StripeCode code_of(const Put& put) {
    const StripeForm form = StripeForm::of_put(geometry_, put.pages);
    return {geometry_.data_columns, geometry_.parity_columns,
            std::vector<std::uint32_t>(form.code_crcs(2), static_cast<std::uint32_t>(put.opened.stripe))};
  }
  template <class M>
  typename M::iterator pick(M& map) {
    return std::next(map.begin(), static_cast<std::ptrdiff_t>(rng_.below(map.size())));
  }

  void open_put() {
    const auto host = pick(hosts_);
    const int chain = static_cast<int>(rng_.below(chains));
    const int first = static_cast<int>(rng_.below(chain_pages));
    const int count = 1 + static_cast<int>(rng_.below(static_cast<std::uint64_t>(chain_pages - first)));
    const auto offered = pages_of(chain, first, count);
    const std::uint64_t tenant = 1 + static_cast<std::uint64_t>(chain % 3);
    const std::uint64_t before = index_->evictor().tenant(tenant).bytes;
    const auto opened = index_->put_open({host->first, host->second}, {Key{}, offered, tenant}, now_);
    const std::uint64_t after = index_->evictor().tenant(tenant).bytes;
    // What came back from the disks may be above the quota; nothing new is.
    ASSERT_TRUE(tenant == 1 || after <= std::max(before, quota_bytes));
    if (opened.code != 0) return;
    ASSERT_TRUE(tenant == 1 || after == before || after <= quota_bytes);
    ASSERT_GE(opened.pages, 1);
    ASSERT_LE(opened.pages, geometry_.data_columns);
    Put put;
    put.host = host->first;
    put.generation = host->second;
    put.tenant = tenant;
    put.pages.assign(offered.begin() + opened.first, offered.begin() + opened.first + opened.pages);
    put.opened = opened;
    put.deadline = now_ + put_ttl;
    const auto known = puts_.find(opened.stripe);
    if (known != puts_.end()) {
      ASSERT_EQ(known->second.pages, put.pages);
      ASSERT_EQ(known->second.opened.columns, opened.columns);
      known->second.deadline = put.deadline;
      return;
    }
    const StripeForm form = StripeForm::of_put(geometry_, put.pages);
    ASSERT_EQ(opened.columns.size(), form.columns_stored());
    std::set<std::string> nodes;
    for (const wire::Column& column : opened.columns) nodes.insert(column.instance);
    ASSERT_EQ(nodes.size(), opened.columns.size());
    puts_[opened.stripe] = put;
  }
  void end_put() {
    if (puts_.empty()) return;
    const auto at = pick(puts_);
    const Put put = at->second;
    const std::uint64_t id = at->first;
    puts_.erase(at);
    if (rng_.chance(0.1)) {
      index_->put_abort({put.host, put.generation}, {id}, now_);
      return;
    }
    std::vector<wire::FailedColumn> failed;
    for (const wire::Column& column : put.opened.columns) {
      Store& store = stores_.at(column.instance);
      if (!store.up || rng_.chance(0.05)) {
        failed.push_back({column.column, static_cast<std::uint16_t>(Code::no_space)});
        continue;
      }
      store.disk[{id, column.column}] = {id,    column.volume, column.column, 1,
                                         Key{}, put.pages,     code_of(put),  put.tenant};
    }
    if (rng_.chance(0.1)) return;  // the writer is slow or dead
    const auto code = index_->put_commit({put.host, put.generation}, {id, failed, code_of(put)}, now_).code;
    ASSERT_TRUE(code != 0 || failed.size() <= geometry_.parity_columns);
  }

  void store_event() {
    const auto at = pick(stores_);
    Store& store = at->second;
    if (!store.up) return returns(at->first);
    index_->lost({at->first, store.generation}, now_);
    store.up = false;
    // The operator gives it up, and is wrong.
    if (rng_.chance(0.1)) {
      ASSERT_TRUE(index_->store_gone(at->first, now_));
    }
    if (store.disk.empty()) return;
    if (rng_.chance(0.3)) store.disk.erase(pick(store.disk));  // a slot is damaged
    if (rng_.chance(0.2)) {                                    // a column that was somewhere else once
      auto& from = pick(stores_)->second;
      if (from.disk.empty()) return;
      const auto twin = *pick(from.disk);
      const bool other = std::any_of(store.disk.begin(), store.disk.end(),
                                     [&](const auto& d) { return d.first.first == twin.first.first; });
      if (!other) store.disk.insert(twin);
    }
  }
  void returns(const std::string& name) {
    Store& store = stores_.at(name);
    const Holder holder{name, ++store.generation};
    store.up = true;
    ASSERT_TRUE(index_->store_up(holder, now_, {name, "", ""}));
    index_->volumes(holder, {{{0, 0, std::uint64_t{1} << 40, std::uint64_t{1} << 40}}}, now_);
    tell(name, holder, 0);
  }
  // Something happens on a disk that nobody notices.
  void decay() {
    Store& store = pick(stores_)->second;
    if (store.disk.empty()) return;
    if (rng_.chance(0.5)) {
      store.disk.erase(pick(store.disk));
    } else {
      // A stripe that was given up, and whose kv_free did not arrive.
      wire::ShardRecord stray = pick(store.disk)->second;
      stray.stripe = 1 + rng_.below(1000);
      store.disk[{stray.stripe, stray.column}] = stray;
    }
  }
  void answer() {
    if (questions_.empty()) return;
    const Index::Question asked = questions_.front();
    questions_.pop_front();
    const Store& store = stores_.at(asked.store.instance);
    if (store.up && store.generation == asked.store.generation)
      tell(asked.store.instance, asked.store, asked.message.asked);
  }
  void tell(const std::string& name, const Holder& holder, std::uint32_t asked) {
    std::vector<wire::ShardRecord> all;
    for (const auto& [id, shard] : stores_.at(name).disk) all.push_back(shard);
    const std::size_t part = 1 + rng_.below(6);
    std::uint64_t cursor = 0;
    for (std::size_t from = 0; from == 0 || from < all.size(); from += part, ++cursor) {
      // What one that comes is listing is not freed before all of it is told.
      if (asked == 0 && rng_.chance(0.5)) run_due();
      wire::meta_inventory message;
      message.cursor = cursor;
      message.asked = asked;
      for (std::size_t i = from; i < std::min(all.size(), from + part); ++i) message.shards.push_back(all[i]);
      message.last = from + part >= all.size();
      const auto ack = index_->inventory(holder, message, now_);
      ASSERT_TRUE(ack);
      for (const std::uint64_t id : ack->unknown) free(name, id, std::nullopt);
    }
  }
  void failed_read() {
    if (!late_reports_.empty() && rng_.chance(0.3)) return late_report();
    const auto rows = index_->pages_after(0, 100000);
    if (rows.empty()) return;
    const Index::PageRow& row = rows[rng_.below(rows.size())];
    const std::uint64_t id = row.page >> 8;
    for (auto& [name, store] : stores_) {
      for (const auto& [column, shard] : store.disk) {
        if (column.first != id || !store.up || !rng_.chance(0.5)) continue;
        const wire::meta_read_failed report{
            row.page, column.second,    static_cast<std::uint16_t>(Code::corrupt),
            name,     store.generation, shard.volume};
        index_->read_failed(report, now_);
        if (rng_.chance(0.5)) late_reports_.push_back(report);  // of a second reader
        return;
      }
    }
  }
  // Only what is still where it was read may go.
  void late_report() {
    const std::size_t at = rng_.below(late_reports_.size());
    const wire::meta_read_failed report = late_reports_[at];
    late_reports_.erase(late_reports_.begin() + static_cast<std::ptrdiff_t>(at));
    const std::uint64_t id = report.page >> 8;
    const auto before = columns_known(id);
    index_->read_failed(report, now_);
    const auto after = columns_known(id);
    if (after == before) return;
    const wire::Column column{report.instance, report.volume, report.column};
    ASSERT_EQ(std::count(before.begin(), before.end(), column), 1) << "another column of " << id << " went";
    ASSERT_EQ(stores_.at(column.instance).generation, report.generation);
    // Or all of them, when it was one too many.
    ASSERT_TRUE(after.empty() || after.size() + 1 == before.size());
  }
  void end_repair() {
    if (running_.empty()) return;
    const std::size_t at = rng_.below(running_.size());
    const Index::Repair repair = running_[at];
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));
    wire::meta_repaired answer{repair.message.stripe.stripe, 0, {}, {}};
    for (const wire::Column& column : repair.message.targets) {
      Store& store = stores_.at(column.instance);
      const bool there = store.disk.contains({answer.stripe, column.column});
      const bool answered = rng_.chance(0.9);
      if (!store.up || there || (answered && rng_.chance(0.1))) {
        answer.code = static_cast<std::uint16_t>(!there && rng_.chance(0.5) ? Code::no_space : Code::io);
        continue;
      }
      if (!answered) {
        answer.code = static_cast<std::uint16_t>(Code::unreachable);
        answer.unanswered.push_back(column.column);
        if (rng_.chance(0.5)) continue;  // nor was it written
      }
      store.disk[{answer.stripe, column.column}] = {answer.stripe,
                                                    column.volume,
                                                    column.column,
                                                    1,
                                                    Key{},
                                                    repair.message.pages,
                                                    repair.message.stripe.code,
                                                    repair.message.tenant};
      if (answered) answer.written.push_back(column.column);
      if (!answered && !settling_ && rng_.chance(0.5)) {  // it is what took the answer with it
        index_->lost({column.instance, store.generation}, now_);
        store.up = false;
        ++lost_unanswered_;
      }
    }
    if (repair.message.targets.empty() && !settling_ && rng_.chance(0.4))
      answer.code = static_cast<std::uint16_t>(rng_.chance(0.5) ? Code::corrupt : Code::unreachable);
    index_->repaired(repair.host, answer, now_);
  }
  void host_restart() {
    const auto host = pick(hosts_);
    index_->lost({host->first, host->second}, now_);
    std::erase_if(running_, [&](const auto& r) { return r.host.instance == host->first; });
    std::erase_if(puts_, [&](const auto& p) { return p.second.host == host->first; });
    std::erase_if(leases_, [&](const auto& l) { return l.second.host == host->first; });
    ASSERT_TRUE(index_->host_up({host->first, ++host->second}));
  }
  void restart() {
    Index::Options options;
    options.run = ++run_;
    options.blocks_max = 10000;
    options.placement = {geometry_, false};
    options.repair_after = seconds(40);
    options.repairs.bytes_per_s = 100 << 20;
    options.record_changes = true;
    options.tenants[2] = {.quota_bytes = quota_bytes, .over = kv::Evictor::OverQuota::refuse};
    options.tenants[3] = {.quota_bytes = quota_bytes, .over = kv::Evictor::OverQuota::evict_own};
    if (index_) {
      refused_ = refused();
      evicted_ = evicted();
    }
    options.reconcile = seconds(60);
    options.cross_check = seconds(30);
    questions_.clear();
    index_.emplace(options, now_);
    if (rng_.chance(0.5)) {
      std::size_t refused = 0;  // those that were being adopted
      for (const auto& [id, row] : catalogue_) refused += index_->restore(row, now_) ? 0 : 1;
      ASSERT_EQ(index_->stripes() + refused, catalogue_.size());
      ASSERT_EQ(index_->changes(), refused);
      restored_ += index_->stripes();
    } else {
      catalogue_.clear();  // the file was lost
    }
    running_.clear();
    puts_.clear();
    leases_.clear();
    for (auto& [name, generation] : hosts_) ASSERT_TRUE(index_->host_up({name, ++generation}));
    for (auto& [name, store] : stores_) store.up = false;
    for (auto& [name, store] : stores_) {
      if (rng_.chance(0.8)) returns(name);
    }
  }

  void free(const std::string& name, std::uint64_t stripe, std::optional<std::uint16_t> column) {
    Store& store = stores_.at(name);
    ASSERT_TRUE(store.up);
    for (const auto& [lease, held] : leases_) {
      if (held.expires <= now_) continue;
      for (const auto& [id, there] : held.columns) {
        ASSERT_FALSE(id == stripe && there.instance == name && (!column || there.column == *column))
            << "freed under a lease";
      }
    }
    // Nothing that a plan may name.
    for (const wire::Column& there : columns_known(stripe)) {
      if (there.instance == name && (!column || there.column == *column)) {
        ADD_FAILURE() << "column " << there.column << " of " << stripe << " freed on " << name;
      }
    }
    std::erase_if(store.disk, [&](const auto& d) {
      return d.first.first == stripe && (!column || d.first.second == *column);
    });
  }
  // As the directory has it.
  std::vector<wire::Column> columns_known(std::uint64_t stripe) {
    for (const Index::PageRow& row : index_->pages_after((stripe << 8) - 1, 1)) {
      if ((row.page >> 8) != stripe) break;
      const auto planned = index_->plan({"di-kvd.spy", 1}, RequestId{}, {{row.first}}, now_);
      index_->release({"di-kvd.spy", 1}, {{planned.lease}});
      for (const wire::PlannedStripe& found : planned.stripes) {
        if (found.stripe == stripe) return found.columns;
      }
    }
    return {};
  }
  void run_due() {
    std::erase_if(leases_, [&](const auto& l) { return l.second.expires <= now_; });
    std::erase_if(puts_, [&](const auto& p) { return p.second.deadline <= now_; });
    for (const Index::Free& freed : index_->step(now_)) {
      ASSERT_TRUE(freed.message.columns.empty() ||
                  freed.message.columns.size() == freed.message.stripes.size());
      for (std::size_t i = 0; i < freed.message.stripes.size(); ++i) {
        std::optional<std::uint16_t> column;
        if (!freed.message.columns.empty()) column = freed.message.columns[i];
        free(freed.store, freed.message.stripes[i], column);
      }
    }
    for (const Index::Repair& repair : index_->repairs(now_)) {
      std::set<std::string> nodes;
      for (const wire::Column& column : repair.message.targets) {
        ASSERT_TRUE(nodes.insert(column.instance).second);
        ASSERT_TRUE(stores_.at(column.instance).up);
      }
      check_stripe(repair.message.stripe);
      running_.push_back(repair);
    }
    if (const auto asked = index_->reconcile(now_)) questions_.push_back(*asked);
    ASSERT_GT(index_->next_due(), now_);
  }

  void check_stripe(const wire::PlannedStripe& stripe) {
    const std::size_t rows = stripe.code.crcs.size() / 2 - geometry_.parity_columns;
    const std::size_t needed = rows == 0 ? stripe.page_blocks.size() : rows;
    std::set<std::uint16_t> columns;
    for (const wire::Column& column : stripe.columns) {
      ASSERT_TRUE(columns.insert(column.column).second);
      ASSERT_TRUE(stores_.at(column.instance).up);
    }
    ASSERT_LE(columns.size(), needed + geometry_.parity_columns);
  }
  void compare() {
    const int chain = static_cast<int>(rng_.below(chains));
    std::vector<Key> keys;
    for (int p = 0; p < chain_pages; ++p) keys.push_back(key_of(chain, p));
    const auto matched = index_->match({Key{}, keys});
    const auto host = pick(hosts_);
    const auto planned = index_->plan({host->first, host->second}, RequestId{}, {keys}, now_);
    std::uint32_t blocks = 0;
    std::set<std::uint64_t> stripes;
    for (const wire::PlannedStripe& stripe : planned.stripes) {
      check_stripe(stripe);
      ASSERT_TRUE(stripes.insert(stripe.stripe).second);
    }
    for (const wire::PlannedPage& page : planned.pages) {
      ASSERT_EQ(page.keys.at(0), keys.at(blocks));
      blocks += page.count;
      const auto stripe = std::find_if(planned.stripes.begin(), planned.stripes.end(),
                                       [&](const auto& s) { return s.stripe == page.page >> 8; });
      ASSERT_NE(stripe, planned.stripes.end());
      const std::size_t rows = stripe->code.crcs.size() / 2 - geometry_.parity_columns;
      const std::size_t parts = rows == 0 ? 1 : rows / stripe->page_blocks.size();
      const std::size_t needed = stripe->page_blocks.size() * parts;
      ASSERT_TRUE(page.columns.size() == parts || stripe->columns.size() >= needed);
    }
    ASSERT_EQ(blocks, matched.hit_blocks);
    // The chain ends where nothing on the disks of those that are up could go on.
    if (blocks < keys.size()) never_readable(keys[blocks]);
    if (planned.lease == 0) return;
    if (rng_.chance(0.5)) {
      index_->release({host->first, host->second}, {{planned.lease}});
    } else {
      Lease& lease = leases_[planned.lease] = {host->first, now_ + lease_ttl, {}};
      for (const wire::PlannedStripe& stripe : planned.stripes) {
        for (const wire::Column& column : stripe.columns) lease.columns.emplace_back(stripe.stripe, column);
      }
    }
  }
  // No committed stripe with this key that the directory shows as whole may be refused.
  void never_readable(const Key& key) {
    for (const Index::PageRow& row : index_->pages_after(0, 100000)) {
      ASSERT_FALSE(row.first == key && row.readable);
    }
  }

  struct Lease {
    std::string host;
    Instant expires;
    std::vector<std::pair<std::uint64_t, wire::Column>> columns;  // that the plan names, with their stripes
  };

  Rng rng_;
  Geometry geometry_;
  Instant now_ = Instant{} + seconds(1000);
  std::uint64_t run_ = 0;
  std::vector<int> chain_bytes_;
  std::optional<Index> index_;
  std::map<std::string, std::uint32_t> hosts_{{"di-kvd.host0", 1}, {"di-kvd.host1", 1}};
  std::map<std::string, Store> stores_;
  std::map<std::uint64_t, StripeRow> catalogue_;
  std::size_t restored_ = 0;
  std::uint64_t lost_unanswered_ = 0;
  std::uint64_t refused_ = 0;  // by directories of before
  std::uint64_t evicted_ = 0;
  std::map<std::uint64_t, Put> puts_;
  std::vector<Index::Repair> running_;
  std::map<std::uint64_t, Lease> leases_;
};

class IndexStripeModel : public testing::TestWithParam<std::pair<const char*, int>> {};

TEST_P(IndexStripeModel, EveryStripeEndsWholeAndNothingElseIsThere) {
  const auto [geometry, stores] = GetParam();
  Index::Counters sum;
  std::size_t restored = 0;
  std::uint64_t lost_unanswered = 0;
  std::uint64_t refused = 0;
  std::uint64_t evicted = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    World world(seed, *Geometry::parse(geometry), stores);
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE("step=" + std::to_string(i));
      world.step();
    }
    if (!testing::Test::HasFailure()) world.finish();
    const Index::Counters& seen = world.counters();
    restored += world.restored();
    lost_unanswered += world.lost_unanswered();
    refused += world.refused();
    evicted += world.evicted();
    sum.puts_committed += seen.puts_committed;
    sum.puts_degraded += seen.puts_degraded;
    sum.puts_no_space += seen.puts_no_space;
    sum.stripes_adopted += seen.stripes_adopted;
    sum.stripes_incomplete += seen.stripes_incomplete;
    sum.stripes_missing += seen.stripes_missing;
    sum.stripes_lost += seen.stripes_lost;
    sum.columns_duplicate += seen.columns_duplicate;
    sum.columns_corrupt += seen.columns_corrupt;
    sum.reports_late += seen.reports_late;
    sum.cross_checks_right += seen.cross_checks_right;
    sum.cross_checks_wrong += seen.cross_checks_wrong;
    sum.cross_checks_undecided += seen.cross_checks_undecided;
    sum.columns_repaired += seen.columns_repaired;
    sum.repairs_failed += seen.repairs_failed;
    sum.repairs_unneeded += seen.repairs_unneeded;
    sum.reconciles += seen.reconciles;
    sum.reconciled_missing += seen.reconciled_missing;
    sum.reconciled_unknown += seen.reconciled_unknown;
    if (testing::Test::HasFailure()) {
      std::cout << "seed=" << seed << "\n";
      return;
    }
  }
  for (const std::uint64_t count : {sum.puts_committed,
                                    sum.puts_degraded,
                                    sum.puts_no_space,
                                    sum.stripes_adopted,
                                    sum.stripes_incomplete,
                                    sum.stripes_missing,
                                    sum.stripes_lost,
                                    sum.columns_duplicate,
                                    sum.columns_corrupt,
                                    sum.reports_late,
                                    sum.cross_checks_right,
                                    sum.cross_checks_wrong,
                                    sum.cross_checks_undecided,
                                    sum.columns_repaired,
                                    sum.repairs_failed,
                                    sum.repairs_unneeded,
                                    sum.reconciles,
                                    sum.reconciled_missing,
                                    sum.reconciled_unknown,
                                    lost_unanswered,
                                    refused,
                                    evicted}) {
    EXPECT_GT(count, 3U);
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, IndexStripeModel,
                         testing::Values(std::pair{"2+1", 4}, std::pair{"4+2", 7}),
                         [](const auto& row) { return row.index == 0 ? "two_and_one" : "four_and_two"; });

}  // namespace
}  // namespace di::directory
