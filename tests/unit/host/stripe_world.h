// A host's core over real bytes, with a directory that knows stripes and stores that keep their columns.
//
// Messages wait in `mail` until the test delivers them, in order or not; stores write and read the arena's
// bytes when their work is done, a layer group at a time, as long as the slot is what they were told.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/rng.h"
#include "host/core.h"
#include "tests/support/byte_arena.h"
#include "tests/support/fake_data.h"

namespace di::host {

inline Key stripe_key(std::uint32_t chain, std::uint32_t block) {
  Key key;
  key.raw[0] = std::byte{2};
  put_le<std::uint32_t>(&key.raw[4], chain);
  put_le<std::uint32_t>(&key.raw[8], block);
  return key;
}
inline std::vector<Key> stripe_keys(std::uint32_t chain, std::uint32_t first, std::uint32_t count) {
  std::vector<Key> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(stripe_key(chain, first + i));
  return keys;
}
inline RequestId stripe_request(std::uint32_t number) {
  RequestId id;
  id.raw[15] = std::byte{0xcd};
  put_le<std::uint32_t>(id.raw.data(), number);
  return id;
}
// Three groups of 16 KiB a block: a page of four blocks has 192 KiB.
inline kv::Layout stripe_layout() {
  return *kv::layout_mla("stripe-1", 4, 3, 4096);
}

class StripeWorld {
 public:
  struct Setup {
    std::uint16_t data_columns = 2;
    std::uint16_t parity_columns = 1;
    std::uint32_t stores = 4;
    std::uint32_t remote_stores = 0;  // of them, on other machines
    std::uint64_t units = 64;
    std::uint64_t seed = 1;
    Writeback::Limits writeback;
    Fetches::Limits fetch;
    Hedge::Limits hedge;
  };
  struct Store {
    Peer peer;
    bool remote = false;
    bool up = true;
    bool mapped = false;
    std::map<std::pair<std::uint64_t, std::uint16_t>, Bytes> columns;  // (stripe, column)
  };
  struct Stripe {
    std::vector<wire::PutPage> pages;
    wire::StripeCode code;
    std::map<std::uint16_t, std::size_t> columns;  // -> store
    bool published = false;
    [[nodiscard]] std::vector<std::uint32_t> blocks() const {
      std::vector<std::uint32_t> all;
      for (const wire::PutPage& page : pages) all.push_back(static_cast<std::uint32_t>(page.keys.size()));
      return all;
    }
  };
  // What a store has to do.
  struct Work {
    std::size_t store = 0;
    std::optional<wire::kv_read> read;
    std::optional<wire::kv_put> put;
    std::uint32_t group = 0;
    bool cancelled = false;
  };

  explicit StripeWorld(const Setup& with)
      : setup(with),
        rng(with.seed),
        layout(stripe_layout()),
        arena(with.units * stripe_layout().page_bytes(1)) {
    Core::Options options;
    options.self = {"di-kvd.host0", 7};
    options.arena = {.payload_bytes = arena.payload.size(), .slots_max = 512};
    options.entries_max = 64;
    options.writeback = with.writeback;
    options.fetch = with.fetch;
    options.hedge = with.hedge;
    core.emplace(options, arena, data);
    EXPECT_TRUE(core->set_layout(layout).ok());
    for (std::uint32_t i = 0; i < with.stores; ++i) {
      stores.push_back({});
      stores.back().peer = {"di-kvd.store" + std::to_string(i), 20 + i};
      stores.back().remote = i < with.remote_stores;
      core->on_peer_up(stores.back().peer, PeerKind::store, stores.back().remote, now);
    }
    core->on_peer_up(meta, PeerKind::meta, false, now);
    core->on_peer_up(rank, PeerKind::rank, false, now);
    turn();
  }

  // ---- bytes

  // What a page of these blocks holds.
  [[nodiscard]] Bytes page_bytes(const std::vector<Key>& keys) const {
    Bytes bytes(layout.page_bytes(static_cast<std::uint32_t>(keys.size())));
    std::uint64_t from = keys.size();
    for (const Key& key : keys) from = from * 1000003 + get_le<std::uint64_t>(&key.raw[4]);
    Rng content(from);
    for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) put_le<std::uint64_t>(&bytes[i], content.next());
    return bytes;
  }
  [[nodiscard]] std::vector<std::uint32_t> page_crcs(const std::vector<Key>& keys) const {
    const Bytes bytes = page_bytes(keys);
    const auto blocks = static_cast<std::uint32_t>(keys.size());
    std::vector<std::uint32_t> crcs;
    for (std::uint32_t g = 0; g < layout.groups(); ++g) {
      crcs.push_back(
          crc32c(ByteView(bytes).subspan(layout.segment_offset(g, blocks), layout.segment_bytes(g, blocks))));
    }
    return crcs;
  }
  // Every byte that a reader may look at is the right one.
  void verify_shown() {
    for (const auto& [slot, page] : core->pages().all()) {
      if (page.keys.empty() || (page.state != PageState::filling && page.state != PageState::sealed))
        continue;
      const auto shown = arena.slots.find(slot);
      ASSERT_TRUE(shown != arena.slots.end());
      const Bytes right = page_bytes(page.keys);
      for (std::uint32_t g = 0; g < layout.groups(); ++g) {
        if ((shown->second.segments >> g & 1) == 0) continue;
        const std::uint64_t at = layout.segment_offset(g, page.blocks);
        const std::uint64_t bytes = layout.segment_bytes(g, page.blocks);
        const MutableByteView there = arena.at(page.place.offset + at, bytes);
        ASSERT_TRUE(std::equal(there.begin(), there.end(), right.begin() + static_cast<std::ptrdiff_t>(at)))
            << "wrong bytes in group " << g << " of slot " << slot;
      }
    }
  }

  // ---- the core

  template <class M>
  void say(const Peer& from, const wire::Scope& scope, const M& message) {
    core->on_message(wire::Envelope::make(from.instance, from.generation, scope, message), now);
    turn();
  }
  void turn() {
    core->flush(now);
    for (Outbox sent = core->take_outgoing(); !sent.empty(); sent = core->take_outgoing()) {
      for (wire::Envelope& message : sent) sort(message);
      core->flush(now);
    }
    const Status status = core->check();
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
  void advance(Duration by) {
    now.product = now.product + by;
    now.liveness = now.liveness + by;
    core->on_time(now);
    turn();
  }
  // The steps that the core asks for.
  bool step() {
    if (core->next_due().liveness > now.liveness) return false;
    core->on_time(now);
    turn();
    return true;
  }
  // Everything that can happen now, in order.
  void settle() {
    turn();
    for (int rounds = 0; rounds < 100'000; ++rounds) {
      if (::testing::Test::HasFatalFailure()) return;
      if (!mail.empty()) {
        deliver(0);
      } else if (!work.empty()) {
        now.product = now.product + work_time;
        now.liveness = now.liveness + work_time;
        work_on(0);
      } else if (!data.concealing.empty()) {
        answer_conceal();
      } else if (!step()) {
        return;
      }
    }
    FAIL() << "it does not end";
  }
  // The next thing that happens besides time: a message comes, or a store works.  False: there is none.
  bool go_on() {
    if (!mail.empty()) {
      deliver(0);
    } else if (!work.empty()) {
      work_on(0);
    } else {
      return false;
    }
    return true;
  }
  void deliver(std::size_t i) {
    const wire::Envelope message = mail[i];
    mail.erase(mail.begin() + static_cast<std::ptrdiff_t>(i));
    core->on_message(message, now);
    turn();
  }
  void answer_conceal() {
    const auto [peer, transfer] = data.take_concealed();
    core->on_concealed(peer, transfer, now);
    turn();
  }
  [[nodiscard]] std::uint64_t gauge(const std::string& name) const {
    for (const Gauge& gauge : core->gauges()) {
      if (gauge.name == name) return gauge.count;
    }
    ADD_FAILURE() << "no gauge " << name;
    return 0;
  }
  [[nodiscard]] ::testing::AssertionResult idle() const {
    for (const Gauge& gauge : core->gauges()) {
      if (gauge.count != 0) return ::testing::AssertionFailure() << gauge.name << " is " << gauge.count;
    }
    return ::testing::AssertionSuccess();
  }

  // ---- the rank

  // Blocks [first, first + count) of a chain, written and sealed, and let go of.
  void write(std::uint32_t chain, std::uint32_t first, std::uint32_t count) {
    const std::vector<Key> keys = stripe_keys(chain, first, count);
    const wire::Scope scope{stripe_request(100000 + next_write++), 1, 0, 0};
    say(rank, scope, wire::kv_open{{count}, 1});
    if (granted.empty()) return;  // no room
    const wire::SlotRef slot = granted.front();
    granted.clear();
    const Bytes bytes = page_bytes(keys);
    std::copy(bytes.begin(), bytes.end(),
              arena.at(arena.slots.at(slot.slot).assigned.offset, bytes.size()).begin());
    const Key parent = first == 0 ? stripe_key(chain, 99999) : stripe_key(chain, first - 1);
    say(rank, scope, wire::kv_sealed{slot, parent, keys, page_crcs(keys), 0, tenant_of(keys)});
    say(rank, scope, wire::kv_release{});
  }
  // Every chain has one.  From block 500 on it is another, as no honest rank says it.
  static std::uint64_t tenant_of(const std::vector<Key>& keys) {
    const Key& first = keys.front();
    return 1 + 2 * get_le<std::uint32_t>(&first.raw[4]) +
           (get_le<std::uint32_t>(&first.raw[8]) < 500 ? 0 : 1);
  }
  // Throws out every page that nobody holds, by asking for more than there is.
  void evict_all() {
    const wire::Scope scope{stripe_request(99), 1, 0, 0};
    while (true) {
      say(rank, scope, wire::kv_open{{1}, 1});
      if (granted.empty()) break;
      granted.clear();
    }
    say(rank, scope, wire::kv_release{});
  }

  // ---- the directory

  [[nodiscard]] std::vector<std::uint32_t> crcs_of(const Stripe& stripe) const {
    std::vector<std::uint32_t> crcs;
    for (const wire::PutPage& page : stripe.pages)
      crcs.insert(crcs.end(), page.crcs.begin(), page.crcs.end());
    return crcs;
  }
  [[nodiscard]] kv::StripeShape shape_of(const Stripe& stripe) const {
    return *kv::StripeShape::of(layout, stripe.code.data_columns, stripe.code.parity_columns,
                                stripe.blocks());
  }
  [[nodiscard]] wire::Column column_of(const Stripe& stripe, std::uint16_t column) const {
    return {stores[stripe.columns.at(column)].peer.instance, 0, column};
  }
  [[nodiscard]] wire::PlannedStripe planned_stripe(std::uint64_t id) const {
    const Stripe& stripe = stripes.at(id);
    wire::PlannedStripe planned{id, stripe.blocks(), crcs_of(stripe), stripe.code, {}};
    for (const auto& [column, store] : stripe.columns) planned.columns.push_back(column_of(stripe, column));
    return planned;
  }
  // Where a key is: stripe and page.
  [[nodiscard]] std::optional<std::pair<std::uint64_t, std::uint32_t>> find(const Key& key) const {
    for (const auto& [id, stripe] : stripes) {
      if (!stripe.published) continue;
      for (std::uint32_t page = 0; page < stripe.pages.size(); ++page) {
        const auto& keys = stripe.pages[page].keys;
        if (std::find(keys.begin(), keys.end(), key) != keys.end()) return std::pair{id, page};
      }
    }
    return std::nullopt;
  }

  const Setup setup;
  Rng rng;
  const kv::Layout layout;
  test::ByteArena arena;
  test::FakeData data;
  std::optional<Core> core;
  Now now{{1'000'000'000}, {1'000'000'000}};
  const Peer meta{"di-meta.0", 1};
  const Peer rank{"di-prefill.0", 3};
  std::vector<Store> stores;
  std::map<std::uint64_t, Stripe> stripes;
  std::deque<wire::Envelope> mail;  // to the core
  std::deque<Work> work;
  std::vector<wire::SlotRef> granted;  // of the last kv_open
  std::map<RequestId, wire::kv_fetching> fetching;
  std::map<RequestId, wire::kv_ready> ready;
  std::vector<wire::meta_read_failed> read_failed;
  std::vector<wire::meta_put_commit> commits;
  std::vector<wire::meta_put_open> opens;
  std::vector<wire::meta_repaired> repaired;
  std::set<std::uint64_t> leases;
  // Chances that a store says no, and that it writes or keeps wrong bytes.
  double fails = 0;
  double flips = 0;
  double no_space = 0;
  double over_budget = 0;
  Duration work_time{0};  // that a store takes for a layer group, while settle() runs
  std::uint64_t aborts = 0;
  std::uint64_t reads = 0;  // kv_read
  std::uint64_t next_stripe = 1;
  std::uint64_t next_lease = 1;
  std::uint32_t next_write = 0;

 private:
  template <class M>
  void answer(const Peer& from, const wire::Scope& scope, const M& message) {
    mail.push_back(wire::Envelope::make(from.instance, from.generation, scope, message));
  }

  void sort(const wire::Envelope& message) {
    if (message.peer == core->self().instance) {
      wire::Envelope back = message;
      back.peer_generation = core->self().generation;
      mail.push_back(std::move(back));
    } else if (message.peer == meta.instance) {
      to_meta(message);
    } else if (message.peer == rank.instance) {
      to_rank(message);
    } else {
      for (std::size_t i = 0; i < stores.size(); ++i) {
        if (stores[i].peer.instance == message.peer && stores[i].up) to_store(i, message);
      }
    }
  }
  void to_rank(const wire::Envelope& message) {
    if (message.number == wire::kv_opened::number) granted = message.as<wire::kv_opened>()->slots;
    if (message.number == wire::kv_fetching::number)
      fetching[message.scope.request] = *message.as<wire::kv_fetching>();
    if (message.number == wire::kv_ready::number)
      ready[message.scope.request] = *message.as<wire::kv_ready>();
  }
  void to_meta(const wire::Envelope& message) {
    switch (message.number) {
      case wire::meta_put_open::number:
        opens.push_back(*message.as<wire::meta_put_open>());
        put_open(message.scope, opens.back());
        break;
      case wire::meta_put_commit::number:
        commits.push_back(*message.as<wire::meta_put_commit>());
        put_commit(message.scope, commits.back());
        break;
      case wire::meta_put_abort::number:
        ++aborts;
        stripes.erase(message.as<wire::meta_put_abort>()->stripe);
        break;
      case wire::meta_plan::number:
        plan(message.scope, *message.as<wire::meta_plan>());
        break;
      case wire::meta_renew::number: {
        const auto renew = *message.as<wire::meta_renew>();
        for (const std::uint64_t lease : renew.leases)
          EXPECT_TRUE(leases.contains(lease)) << "a lease is renewed that is not held";
        break;
      }
      case wire::meta_release::number: {
        const auto release = *message.as<wire::meta_release>();
        for (const std::uint64_t lease : release.leases)
          EXPECT_EQ(leases.erase(lease), 1u) << "a lease is given back twice";
        break;
      }
      case wire::meta_read_failed::number: {
        const auto failed = *message.as<wire::meta_read_failed>();
        read_failed.push_back(failed);
        const auto found = stripes.find(failed.page >> 8);
        if (found == stripes.end()) break;
        const auto column = found->second.columns.find(failed.column);
        if (column == found->second.columns.end()) break;  // it was reported before
        const Peer& store = stores[column->second].peer;
        EXPECT_EQ(failed.instance, store.instance);
        EXPECT_EQ(failed.generation, store.generation);
        EXPECT_EQ(failed.volume, 0u);
        found->second.columns.erase(column);
        break;
      }
      case wire::meta_repaired::number: {
        repaired.push_back(*message.as<wire::meta_repaired>());
        break;
      }
      default:
        break;
    }
  }

  void put_open(const wire::Scope& scope, const wire::meta_put_open& open) {
    wire::meta_put_opened opened;
    opened.ttl_ms = 30000;
    EXPECT_EQ(open.tenant, tenant_of(open.pages.front().keys));
    std::size_t first = 0;
    const auto known = [&](const wire::PutPage& page) {
      return std::all_of(page.keys.begin(), page.keys.end(),
                         [&](const Key& key) { return find(key).has_value(); });
    };
    while (first < open.pages.size() && known(open.pages[first])) ++first;
    if (first == open.pages.size()) {
      opened.code = static_cast<std::uint16_t>(Code::exists);
      return answer(meta, scope, opened);
    }
    std::size_t count = 0;
    while (first + count < open.pages.size() && count < setup.data_columns &&
           !known(open.pages[first + count]))
      ++count;
    opened.stripe = next_stripe++;
    opened.data_columns = setup.data_columns;
    opened.parity_columns = setup.parity_columns;
    opened.first = static_cast<std::uint16_t>(first);
    opened.pages = static_cast<std::uint16_t>(count);
    Stripe& stripe = stripes[opened.stripe];
    stripe.pages.assign(open.pages.begin() + static_cast<std::ptrdiff_t>(first),
                        open.pages.begin() + static_cast<std::ptrdiff_t>(first + count));
    stripe.code = {setup.data_columns, setup.parity_columns, {}};
    const kv::StripeShape shape = shape_of(stripe);
    for (std::uint32_t i = 0; i < shape.columns_stored(); ++i) {
      const auto column = static_cast<std::uint16_t>(shape.stored_column(i));
      stripe.columns[column] = (i + opened.stripe) % stores.size();
      opened.columns.push_back(column_of(stripe, column));
    }
    answer(meta, scope, opened);
  }

  void put_commit(const wire::Scope& scope, const wire::meta_put_commit& commit) {
    wire::meta_put_committed committed{0, commit.stripe};
    const auto found = stripes.find(commit.stripe);
    if (found == stripes.end() || commit.failed_columns.size() > setup.parity_columns) {
      committed.code = static_cast<std::uint16_t>(Code::no_space);
      stripes.erase(commit.stripe);
    } else {
      found->second.published = true;
      found->second.code = commit.code;
      for (const wire::FailedColumn& failed : commit.failed_columns)
        found->second.columns.erase(failed.column);
    }
    answer(meta, scope, committed);
  }

  void plan(const wire::Scope& scope, const wire::meta_plan& question) {
    wire::meta_planned planned;
    planned.ttl_ms = 9000;
    std::set<std::uint64_t> named;
    std::size_t at = 0;
    while (at < question.keys.size()) {
      const auto place = find(question.keys[at]);
      if (!place) break;
      const Stripe& stripe = stripes.at(place->first);
      const kv::StripeShape shape = shape_of(stripe);
      wire::PlannedPage page;
      page.page = place->first << 8 | place->second;
      page.keys = stripe.pages[place->second].keys;
      page.crcs = stripe.pages[place->second].crcs;
      page.page_blocks = static_cast<std::uint32_t>(page.keys.size());
      page.count = page.page_blocks;
      std::uint32_t own = 0;
      for (const auto& [column, store] : stripe.columns) {
        if (shape.is_parity(column) || shape.page_of(column) != place->second) continue;
        ++own;
        page.columns.push_back(column_of(stripe, column));
      }
      // neither read nor rebuilt
      if (own < shape.parts() && stripe.columns.size() < shape.data_stored()) break;
      if (named.insert(place->first).second && (shape.parity_columns() > 0 || shape.parts() > 1))
        planned.stripes.push_back(planned_stripe(place->first));
      while (at < question.keys.size() &&
             std::find(page.keys.begin(), page.keys.end(), question.keys[at]) != page.keys.end()) {
        ++at;
      }
      planned.pages.push_back(std::move(page));
    }
    if (!planned.pages.empty()) {
      planned.lease = next_lease++;
      leases.insert(planned.lease);
    }
    answer(meta, scope, planned);
  }

  // ---- stores

  void to_store(std::size_t i, const wire::Envelope& message) {
    Work fresh;
    fresh.store = i;
    if (message.number == wire::kv_read::number) {
      fresh.read = *message.as<wire::kv_read>();
      fresh.group = fresh.read->from_group;
      ++reads;
    } else if (message.number == wire::kv_put::number) {
      fresh.put = *message.as<wire::kv_put>();
    } else if (message.number == wire::kv_read_cancel::number) {
      const std::uint64_t transfer = message.as<wire::kv_read_cancel>()->transfer;
      bool known = false;
      for (Work& item : work) {
        if (item.store == i && item.read && item.read->transfer == transfer) known = item.cancelled = true;
      }
      if (!known) answer(stores[i].peer, {}, wire::kv_read_cancelled{transfer});
      return;
    } else {
      return;
    }
    // It maps the arena when it first has work there.
    if (!stores[i].mapped && !stores[i].remote) {
      stores[i].mapped = true;
      core->on_attached(stores[i].peer);
    }
    work.push_back(std::move(fresh));
  }

 public:
  // A store does a piece of its work.
  void work_on(std::size_t i) {
    Work item = work[i];
    const auto done = [&] { work.erase(work.begin() + static_cast<std::ptrdiff_t>(i)); };
    Store& store = stores[item.store];
    if (item.put) {
      done();
      const Code code = put(store, *item.put);
      answer(store.peer, {},
             wire::kv_put_done{item.put->stripe, item.put->column, static_cast<std::uint16_t>(code)});
      return;
    }
    if (item.cancelled) {
      done();
      answer(store.peer, {}, wire::kv_read_cancelled{item.read->transfer});
      return;
    }
    const Code code = read_group(store, *item.read, item.group);
    const bool last = item.group + 1 == layout.groups();
    if (code != Code::ok) {
      answer(store.peer, {}, wire::kv_read_done{item.read->transfer, static_cast<std::uint16_t>(code), 0});
      return done();
    }
    answer(store.peer, {}, wire::kv_read_done{item.read->transfer, 0, item.group});
    if (last) return done();
    ++work[i].group;
  }
  // kill -9 of a store, with what it was to do.
  void kill_store(std::size_t i) {
    Store& store = stores[i];
    if (!store.up) return;
    store.up = false;
    std::erase_if(work, [&](const Work& item) { return item.store == i; });
    if (store.mapped) core->on_detached(store.peer, now);
    store.mapped = false;
    core->on_peer_lost(store.peer, now);
    turn();
  }
  void start_store(std::size_t i) {
    Store& store = stores[i];
    if (store.up) return;
    store.up = true;
    store.peer.generation += 100;
    core->on_peer_up(store.peer, PeerKind::store, store.remote, now);
    turn();
  }
  // One byte of a column on its store is wrong from now on, anywhere or at `at`.  Each group of layers is made of
  // the others by itself: columns that are wrong in different groups do each other no harm.
  void spoil(std::uint64_t stripe, std::uint16_t column, std::optional<std::size_t> at = {}) {
    Bytes& bytes = stores[stripes.at(stripe).columns.at(column)].columns.at({stripe, column});
    bytes[at ? *at : rng.below(bytes.size())] ^= std::byte{0x10};
  }

 private:
  // The bytes of a slot that the store may use; nothing when it may not.
  MutableByteView slot_bytes(const Store& store, const wire::SlotRef& ref, std::uint64_t transfer,
                             transfer::Access access) {
    if (store.remote) {
      const auto exposure = data.exposures.find({store.peer, transfer});
      if (exposure == data.exposures.end() || exposure->second.access != access ||
          !exposure->second.slots.contains({ref.slot, ref.generation})) {
        return {};
      }
    }
    const auto slot = arena.slots.find(ref.slot);
    if (slot == arena.slots.end() || slot->second.assigned.generation != ref.generation) return {};
    return arena.at(slot->second.assigned.offset, slot->second.assigned.bytes);
  }
  Code put(Store& store, const wire::kv_put& put) {
    EXPECT_EQ(put.tenant, tenant_of(put.pages.front().keys));
    if (rng.chance(fails)) return Code::io;
    if (!put.repair && rng.chance(over_budget)) return Code::over_budget;
    if (rng.chance(no_space)) return Code::no_space;
    const MutableByteView slot = slot_bytes(store, put.slot, put.transfer, transfer::Access::read);
    if (slot.empty()) return Code::stale;
    std::vector<std::uint32_t> blocks;
    for (const wire::PutPage& page : put.pages)
      blocks.push_back(static_cast<std::uint32_t>(page.keys.size()));
    const auto shape = kv::StripeShape::of(layout, put.code.data_columns, put.code.parity_columns, blocks);
    if (!shape || put.code.crcs.size() != shape->crcs_count()) return Code::invalid;
    Bytes bytes;
    for (std::uint32_t g = 0; g < layout.groups(); ++g) {
      const std::uint64_t at = shape->is_parity(put.column) ? shape->column_offset(put.column, g)
                                                            : shape->page_offset(put.column, g);
      const auto segment = slot.subspan(at, shape->segment_bytes(put.column, g));
      const auto place = shape->crc_index(put.column, g);
      const std::uint32_t crc = place ? put.code.crcs[*place] : put.pages[shape->page_of(put.column)].crcs[g];
      if (crc32c(segment) != crc) return Code::corrupt;
      bytes.insert(bytes.end(), segment.begin(), segment.end());
    }
    if (rng.chance(flips)) bytes[rng.below(bytes.size())] ^= std::byte{1};
    store.columns[{put.stripe, put.column}] = std::move(bytes);
    return Code::ok;
  }
  Code read_group(Store& store, const wire::kv_read& read, std::uint32_t group) {
    if (rng.chance(fails)) return rng.chance(0.5) ? Code::io : Code::corrupt;
    const auto found = store.columns.find({read.stripe, read.column});
    const auto stripe = stripes.find(read.stripe);
    if (found == store.columns.end() || stripe == stripes.end()) return Code::not_found;
    const kv::StripeShape shape = shape_of(stripe->second);
    // A slot in quarantine is not in the index any more, and still the reader's: nobody else may have it.
    const Page* page = core->pages().find(read.slot.slot, read.slot.generation);
    if (page == nullptr) {
      ADD_FAILURE() << "a slot was given away while a store may write into it";
      return Code::stale;
    }
    if (slot_bytes(store, read.slot, read.transfer, transfer::Access::write).empty()) return Code::stale;
    const std::uint64_t at = shape.is_parity(read.column) ? shape.column_offset(read.column, group)
                                                          : shape.page_offset(read.column, group);
    const std::uint64_t from = shape.column_offset(read.column, group);
    const std::uint64_t bytes = shape.segment_bytes(read.column, group);
    EXPECT_LE(at + bytes, page->place.bytes);
    const MutableByteView to = arena.at(page->place.offset + at, bytes);
    std::copy_n(found->second.begin() + static_cast<std::ptrdiff_t>(from), bytes, to.begin());
    if (bytes > 0 && rng.chance(flips)) to[rng.below(bytes)] ^= std::byte{4};
    return Code::ok;
  }
};

inline StripeWorld::Setup stripe_setup(std::uint16_t k, std::uint16_t m, std::uint32_t remote_stores = 0) {
  StripeWorld::Setup setup;
  setup.data_columns = k;
  setup.parity_columns = m;
  setup.stores = k + m;
  setup.remote_stores = remote_stores;
  return setup;
}

}  // namespace di::host
