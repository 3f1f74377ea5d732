#include "kv/evict.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/rng.h"
#include "kv/slots.h"

namespace di::kv {
namespace {

using Item = Evictor::Item;
using Spec = Evictor::Spec;
using Victim = Evictor::Victim;
using Why = Evictor::Why;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

Instant at_s(double s) {
  return Instant{static_cast<std::int64_t>(s * 1e9)};
}

std::vector<std::uint64_t> ids_of(const std::vector<Victim>& victims) {
  std::vector<std::uint64_t> ids;
  for (const Victim& victim : victims) ids.push_back(victim.id);
  return ids;
}

class EvictorTest : public ::testing::Test {
 protected:
  void begin(Evictor::Options options) { evictor.emplace(options, now); }
  Item put(std::uint64_t id, std::uint64_t bytes, Item parent = Evictor::item_none,
           std::uint64_t tenant = 0) {
    const auto answer =
        evictor->put({.id = id, .key = id, .bytes = bytes, .tenant = tenant, .parent = parent}, now);
    EXPECT_EQ(answer.code, Evictor::PutCode::ok);
    EXPECT_TRUE(answer.victims.empty());
    items[id] = answer.item;
    return answer.item;
  }
  // Puts it and makes the room that it needs; returns what went.
  std::vector<std::uint64_t> store(std::uint64_t id, std::uint64_t bytes, Item parent = Evictor::item_none) {
    put(id, bytes, parent);
    return gone();
  }
  std::vector<std::uint64_t> gone() {
    const auto victims = ids_of(evictor->step(now));
    for (const std::uint64_t id : victims) items.erase(id);
    evictor->test_check();
    return victims;
  }
  void pass(double s) { now = now + Duration(static_cast<std::int64_t>(s * 1e9)); }
  bool has(std::uint64_t id) const { return items.contains(id); }
  void use(std::uint64_t id) { evictor->touch(items.at(id), now); }

  Instant now = at_s(1000);
  std::optional<Evictor> evictor;
  std::map<std::uint64_t, Item> items;
};

TEST_F(EvictorTest, evicts_above_the_high_mark_down_to_the_low_one) {
  begin({.capacity_bytes = 100 * mib});
  for (std::uint64_t id = 1; id <= 92; ++id) EXPECT_TRUE(store(id, mib).empty());
  EXPECT_EQ(store(93, mib), (std::vector<std::uint64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(evictor->bytes(), 88 * mib);
  EXPECT_EQ(evictor->counters().evicted, 5u);
  EXPECT_EQ(evictor->counters().evicted_bytes, 5 * mib);
}

TEST_F(EvictorTest, a_number_of_items_has_the_same_marks) {
  begin({.capacity_bytes = 100 * mib, .items_max = 100});
  std::size_t victims = 0;
  for (std::uint64_t id = 1; id <= 1000; ++id) victims += store(id, 1).size();
  EXPECT_LE(evictor->items(), 92u);
  EXPECT_EQ(victims + evictor->items(), 1000u);
  EXPECT_EQ(evictor->counters().items_refused, 0u);
}

// Case F12: with a full store the newest objects must not go first, whatever their size, and not those that
// carry no time of use yet.
TEST_F(EvictorTest, F12_the_cold_ones_go_and_the_newest_stay) {
  for (const bool cold_were_used : {false, true}) {
    items.clear();
    begin({.capacity_bytes = 256 * mib});
    std::uint64_t id = 1;
    for (int i = 0; i < 880; ++i, pass(0.1)) store(id++, mib / 4);
    if (cold_were_used) {  // long ago, twice: they are not on probation
      for (std::uint64_t cold = 1; cold <= 880; ++cold) use(cold), use(cold);
    }
    pass(3600);
    std::vector<std::uint64_t> fresh;
    for (int i = 0; i < 100; ++i, pass(0.1)) {
      fresh.push_back(id);
      for (const std::uint64_t victim : store(id++, mib)) EXPECT_LE(victim, 880u) << "the newest went first";
    }
    int hits = 0;
    for (const std::uint64_t one : fresh) {
      if (!has(one)) continue;
      ++hits;
      use(one);
    }
    EXPECT_GE(hits, 95) << "cold ones used before: " << cold_were_used;
  }
}

// Case F13: what is elsewhere is no part of the sum that is to shrink.
TEST_F(EvictorTest, F13_memory_shrinks_by_a_part_of_memory) {
  Evictor disk({.capacity_bytes = 20000 * mib}, now);
  for (std::uint64_t id = 0; id < 10000; ++id) (void)disk.put({.id = id, .key = id, .bytes = mib}, now);
  begin({.capacity_bytes = 1000 * mib, .high_pct = 99, .low_pct = 90});
  for (std::uint64_t id = 0; id < 1000; ++id) put(id, mib);
  const auto victims = gone();
  EXPECT_GE(victims.size(), 80u);
  EXPECT_LE(victims.size(), 120u);
  EXPECT_EQ(disk.items(), 10000u);
}

// Case F15: an arena whose payload is in pieces serves a page of the largest size, once enough has gone.
TEST_F(EvictorTest, F15_the_largest_page_fits_after_hours_of_mixed_sizes) {
  constexpr std::uint64_t unit = 4096;
  auto slots = SlotPool::create({.payload_bytes = 1024 * unit, .unit_bytes = unit, .slots_max = 1024});
  ASSERT_TRUE(slots);
  begin({.capacity_bytes = 1024 * unit, .high_pct = 100, .low_pct = 100});
  std::map<std::uint64_t, std::uint32_t> slot_of;
  constexpr std::uint64_t seed = 15;
  std::printf("seed=%llu\n", static_cast<unsigned long long>(seed));
  Rng rng(seed);
  std::uint64_t id = 0;
  const auto store_page = [&](std::uint64_t units) {
    for (int tries = 0; tries < 1024; ++tries) {
      if (const auto place = slots->take(units * unit)) {
        slot_of[id] = place->slot;
        put(id++, place->bytes);
        return true;
      }
      for (const Victim& victim : evictor->make_room(1)) {
        slots->give_back(slot_of.at(victim.id));
        slot_of.erase(victim.id);
      }
    }
    return false;
  };
  constexpr std::array<std::uint64_t, 3> sizes{1, 4, 16};
  std::uint64_t stored = 0;
  for (; stored < 2 * 1024; pass(1)) {
    const std::uint64_t units = sizes[rng.below(sizes.size())];
    ASSERT_TRUE(store_page(units));
    stored += units;
    if (!slot_of.empty() && rng.chance(0.3)) {
      evictor->touch(
          items.at(std::next(slot_of.begin(), static_cast<std::ptrdiff_t>(rng.below(slot_of.size())))->first),
          now);
    }
  }
  EXPECT_TRUE(store_page(512));
  EXPECT_TRUE(store_page(16));
}

TEST_F(EvictorTest, a_scan_takes_nothing_that_was_used_again) {
  begin({.capacity_bytes = 100 * mib});
  for (std::uint64_t id = 1; id <= 35; ++id) store(id, mib);
  for (std::uint64_t id = 1; id <= 35; ++id) use(id);
  for (std::uint64_t id = 1000; id < 11000; ++id, pass(0.2)) store(id, mib);
  for (std::uint64_t id = 1; id <= 35; ++id) EXPECT_TRUE(has(id)) << id;
}

TEST_F(EvictorTest, what_comes_back_after_it_went_stays_longer) {
  begin({.capacity_bytes = 100 * mib});
  for (std::uint64_t id = 1; id <= 100; ++id) store(id, mib);
  ASSERT_FALSE(has(1));
  store(1, mib);
  EXPECT_EQ(evictor->counters().ghost_hits, 1u);
  for (std::uint64_t id = 1000; id < 1400; ++id, pass(1)) store(id, mib);
  EXPECT_TRUE(has(1));
}

TEST_F(EvictorTest, while_little_is_held_probation_has_its_share_of_that) {
  begin({.capacity_bytes = 10000 * mib});
  for (std::uint64_t id = 1; id <= 10; ++id) put(id, mib);
  for (std::uint64_t id = 1; id <= 4; ++id) use(id);
  EXPECT_EQ(ids_of(evictor->make_room(2 * mib)), (std::vector<std::uint64_t>{5, 6}));
  EXPECT_EQ(ids_of(evictor->make_room(2 * mib)), (std::vector<std::uint64_t>{7, 1}));
}

TEST_F(EvictorTest, the_share_of_probation_follows_the_ghosts_within_its_bounds) {
  begin({.capacity_bytes = 100 * mib});
  EXPECT_EQ(evictor->small_share_bytes(), 50 * mib);
  // A loop that is a little too long for probation.
  for (int round = 0; round < 40; ++round) {
    for (std::uint64_t id = 1; id <= 120; ++id, pass(0.1)) {
      if (has(id)) {
        use(id);
      } else {
        store(id, mib);
      }
    }
    EXPECT_GE(evictor->small_share_bytes(), 10 * mib);
    EXPECT_LE(evictor->small_share_bytes(), 90 * mib);
  }
  EXPECT_GT(evictor->counters().ghost_hits, 0u);
}

TEST_F(EvictorTest, a_leaf_goes_before_its_parent_and_the_coldest_first) {
  begin({.capacity_bytes = 3 * mib});
  const Item root = put(1, mib);
  const Item left = put(2, mib, root);
  const Item right = put(3, mib, root);
  put(4, mib, left);
  put(5, mib, right);
  pass(1);
  use(4);
  EXPECT_EQ(ids_of(evictor->make_room(5 * mib)), (std::vector<std::uint64_t>{5, 3, 4, 2, 1}));
  evictor->test_check();
}

TEST_F(EvictorTest, a_new_child_keeps_an_old_chain) {
  begin({.capacity_bytes = 1000 * mib});
  const Item old = put(1, mib);
  pass(100);
  put(2, mib);
  pass(100);
  put(3, mib, old);  // its reader had the front in an arena: no plan told of a use
  EXPECT_EQ(ids_of(evictor->make_room(mib)), (std::vector<std::uint64_t>{2}));
}

TEST_F(EvictorTest, held_items_and_what_is_above_them_stay) {
  begin({.capacity_bytes = 1000 * mib});
  const Item root = put(1, mib);
  const auto open = evictor->put({.id = 2, .key = 2, .bytes = mib, .parent = root, .held = true}, now);
  put(3, mib);
  EXPECT_EQ(evictor->bytes(), 3 * mib);
  EXPECT_EQ(ids_of(evictor->make_room(10 * mib)), (std::vector<std::uint64_t>{3}));
  evictor->open(open.item);
  evictor->test_check();
  EXPECT_EQ(ids_of(evictor->make_room(10 * mib)), (std::vector<std::uint64_t>{2, 1}));
}

TEST_F(EvictorTest, a_lost_parent_can_come_again) {
  begin({.capacity_bytes = 1000 * mib});
  const Item root = put(1, mib);
  const Item child = put(2, mib, root);
  evictor->remove(root);
  evictor->test_check();
  const Item again = put(1, mib);
  EXPECT_TRUE(evictor->adopt(child, again, now));
  EXPECT_FALSE(evictor->adopt(child, again, now));  // it has one
  EXPECT_FALSE(evictor->adopt(again, child, now));  // a circle
  evictor->test_check();
  EXPECT_EQ(ids_of(evictor->make_room(2 * mib)), (std::vector<std::uint64_t>{2, 1}));
}

TEST_F(EvictorTest, room_on_one_store_is_made_by_what_lies_there) {
  begin({.capacity_bytes = 1000 * mib});
  for (std::uint64_t id = 1; id <= 20; ++id) put(id, mib);
  const auto odd = [](std::uint64_t id) { return id % 2 == 1; };
  EXPECT_EQ(ids_of(evictor->make_room(3 * mib, odd)), (std::vector<std::uint64_t>{1, 3, 5}));
  EXPECT_EQ(ids_of(evictor->make_room(2 * mib)), (std::vector<std::uint64_t>{2, 4}));
}

TEST_F(EvictorTest, a_call_names_so_many_victims_and_says_that_there_are_more) {
  begin({.capacity_bytes = 100 * mib, .victims_max = 2});
  for (std::uint64_t id = 1; id <= 93; ++id) put(id, mib);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{1, 2}));
  EXPECT_TRUE(evictor->behind());
  EXPECT_LE(evictor->next_due(), now);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{3, 4}));
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{5}));
  EXPECT_FALSE(evictor->behind());
}

TEST_F(EvictorTest, what_nobody_uses_expires_and_a_use_puts_it_off_until_the_cap) {
  Evictor::Options options{.capacity_bytes = 1000 * mib};
  options.life[0] = {.ttl = seconds(100), .cap = seconds(250)};
  begin(options);
  put(1, mib);
  put(2, mib);
  EXPECT_GT(evictor->next_due(), now + seconds(99));
  EXPECT_LE(evictor->next_due(), now + seconds(101));
  pass(90);
  use(2);
  EXPECT_TRUE(gone().empty());
  pass(11);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{1}));
  pass(80);
  use(2);
  pass(68);
  use(2);
  EXPECT_TRUE(gone().empty());
  pass(2);  // 251 s after its put
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{2}));
  EXPECT_EQ(evictor->counters().expired, 2u);
  EXPECT_EQ(evictor->next_due(), instant_never);
}

// It was there before the machine was up.
TEST_F(EvictorTest, what_is_put_with_an_age_has_that_much_less_of_its_cap) {
  Evictor::Options options{.capacity_bytes = 1000 * mib};
  options.life[0] = {.ttl = seconds(0), .cap = seconds(1000000)};
  begin(options);
  ASSERT_LT(now, at_s(999'900));
  const auto aged = [&](std::uint64_t id, Duration age) {
    EXPECT_EQ(evictor->put({.id = id, .key = id, .bytes = mib, .present = true, .age = age}, now).code,
              Evictor::PutCode::ok);
  };
  aged(1, seconds(999'900));
  aged(2, seconds(999'999));
  aged(3, seconds(2'000'000));
  aged(4, seconds(4'000'000'000));
  EXPECT_GT(evictor->next_due(), now);
  EXPECT_LE(evictor->next_due(), now + seconds(1));
  pass(2);
  const auto first = gone();
  EXPECT_EQ(std::set<std::uint64_t>(first.begin(), first.end()), (std::set<std::uint64_t>{2, 3, 4}));
  pass(97);
  EXPECT_TRUE(gone().empty());
  pass(2);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{1}));
}

TEST_F(EvictorTest, the_life_of_a_tenant_is_its_own_or_that_of_all) {
  Evictor::Options options{.capacity_bytes = 1000 * mib};
  options.life[0] = {.ttl = seconds(1), .cap = seconds(2)};
  begin(options);
  ASSERT_TRUE(evictor->set_tenant(7, {.life = Evictor::Life{.ttl = seconds(0), .cap = seconds(9)}}));
  ASSERT_TRUE(evictor->set_tenant(8, {.quota_bytes = mib}));
  EXPECT_EQ(evictor->life(7).cap, seconds(9));
  EXPECT_EQ(evictor->life(8).cap, seconds(2));
  EXPECT_EQ(evictor->life(9).cap, seconds(2));
}

TEST_F(EvictorTest, a_life_longer_than_the_wheel_is_kept) {
  Evictor::Options options{.capacity_bytes = 1000 * mib};
  options.life[0] = {.ttl = seconds(100000)};
  begin(options);
  put(1, mib);
  pass(99999);
  EXPECT_TRUE(gone().empty());
  pass(2);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{1}));
}

TEST_F(EvictorTest, an_expired_chain_goes_leaf_first_and_as_a_whole) {
  Evictor::Options options{.capacity_bytes = 1000 * mib};
  options.life[0] = {.ttl = Duration(0), .cap = seconds(100)};
  begin(options);
  const Item root = put(1, mib);
  pass(50);
  const Item child = put(2, mib, root);
  put(3, mib, child);
  pass(51);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{3, 2, 1}));
}

TEST_F(EvictorTest, a_tenant_has_a_life_of_its_own) {
  Evictor::Options options{.capacity_bytes = 1000 * mib};
  options.life[0] = {.ttl = seconds(100)};
  begin(options);
  put(1, mib, Evictor::item_none, 7);
  put(2, mib, Evictor::item_none, 8);
  ASSERT_TRUE(evictor->set_tenant(7, {.life = Evictor::Life{.ttl = seconds(10)}}));
  pass(11);
  EXPECT_EQ(gone(), (std::vector<std::uint64_t>{1}));
}

TEST_F(EvictorTest, a_full_quota_refuses_out_loud) {
  begin({.capacity_bytes = 1000 * mib});
  ASSERT_TRUE(evictor->set_tenant(7, {.quota_bytes = 2 * mib}));
  put(1, mib, Evictor::item_none, 7);
  put(2, mib, Evictor::item_none, 7);
  const auto refused = evictor->put({.id = 3, .key = 3, .bytes = mib, .tenant = 7}, now);
  EXPECT_EQ(refused.code, Evictor::PutCode::over_quota);
  EXPECT_EQ(refused.item, Evictor::item_none);
  EXPECT_TRUE(refused.victims.empty());
  EXPECT_EQ(evictor->counters().quota_refused, 1u);
  EXPECT_EQ(evictor->counters().quota_refused_bytes, mib);
  const auto rows = evictor->tenants();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].bytes, 2 * mib);
  EXPECT_EQ(rows[0].refused, 1u);
  put(4, mib, Evictor::item_none, 8);  // others are not concerned
  evictor->test_check();
}

TEST_F(EvictorTest, or_the_tenants_own_oldest_make_room_and_are_named) {
  begin({.capacity_bytes = 1000 * mib});
  ASSERT_TRUE(evictor->set_tenant(7, {.quota_bytes = 3 * mib, .over = Evictor::OverQuota::evict_own}));
  put(9, mib);  // older, and somebody else's
  const Item root = put(1, mib, Evictor::item_none, 7);
  const Item child = put(2, mib, root, 7);
  put(3, mib, Evictor::item_none, 7);
  pass(1);
  evictor->touch(child, now);
  const auto answer = evictor->put({.id = 4, .key = 4, .bytes = mib, .tenant = 7, .parent = child}, now);
  EXPECT_EQ(answer.code, Evictor::PutCode::ok);
  EXPECT_EQ(answer.victims, (std::vector<Victim>{{3, mib, 7, Why::quota}}));
  // Now everything of the tenant is above the next one.
  const auto last = evictor->put({.id = 5, .key = 5, .bytes = mib, .tenant = 7, .parent = answer.item}, now);
  EXPECT_EQ(last.code, Evictor::PutCode::over_quota);
  EXPECT_EQ(evictor->counters().quota_evicted, 1u);
  EXPECT_EQ(evictor->counters().quota_refused, 1u);
  const auto huge = evictor->put({.id = 6, .key = 6, .bytes = 4 * mib, .tenant = 7}, now);
  EXPECT_EQ(huge.code, Evictor::PutCode::over_quota);
  EXPECT_TRUE(huge.victims.empty());
  evictor->test_check();
}

TEST_F(EvictorTest, too_many_items_or_tenants_are_refused) {
  begin({.capacity_bytes = 1000 * mib, .items_max = 3, .tenants_max = 2});
  put(1, mib, Evictor::item_none, 1);
  put(2, mib, Evictor::item_none, 2);
  EXPECT_EQ(evictor->put({.id = 3, .key = 3, .bytes = 1, .tenant = 3}, now).code,
            Evictor::PutCode::tenants_full);
  put(4, mib, Evictor::item_none, 1);
  EXPECT_EQ(evictor->put({.id = 5, .key = 5, .bytes = 1, .tenant = 1}, now).code,
            Evictor::PutCode::items_full);
  EXPECT_EQ(evictor->counters().items_refused, 2u);
  // A tenant that has nothing any more leaves its place.
  evictor->remove(items.at(2));
  put(6, mib, Evictor::item_none, 3);
  evictor->test_check();
}

// The same rules, told again with nothing but lists that are looked through.
class Plain {
 public:
  struct One {
    Spec spec;
    std::uint32_t used = 0, born = 0;
    bool main = false, held = false;
    std::uint64_t parent = 0;
    std::uint64_t retry = 0;                                // second
    std::uint64_t in_queue = 0, in_family = 0, in_own = 0;  // order numbers: larger is more recent
  };
  explicit Plain(const Evictor::Options& options) : options_(options), share_(options.capacity_bytes / 2) {}

  std::map<std::uint64_t, One> ones;  // by id
  std::map<std::uint64_t, Evictor::TenantRule> rules;
  bool shrinking = false;

  static std::uint32_t tick(Instant now) { return static_cast<std::uint32_t>(now.ns / 100'000'000); }
  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& [id, one] : ones) sum += one.spec.bytes;
    return sum;
  }
  Evictor::PutCode put(Spec spec, std::uint64_t parent, Instant now, std::vector<Victim>& out) {
    const std::uint32_t at = tick(now);
    for (std::uint64_t up = parent; up != 0 && ones.at(up).used < at; up = ones.at(up).parent)
      use(up, at, false);
    if (rules.contains(spec.tenant)) {
      const auto& rule = rules.at(spec.tenant);
      if (spec.bytes > rule.quota_bytes) return Evictor::PutCode::over_quota;
      while (of_tenant(spec.tenant) + spec.bytes > rule.quota_bytes) {
        if (rule.over == Evictor::OverQuota::refuse) return Evictor::PutCode::over_quota;
        std::uint64_t oldest = 0;
        for (const auto& [id, one] : ones) {
          if (one.spec.tenant != spec.tenant || one.held || id == parent || !children(id).empty()) continue;
          if (oldest == 0 || one.in_own < ones.at(oldest).in_own) oldest = id;
        }
        if (oldest == 0) return Evictor::PutCode::over_quota;
        drop(oldest, Why::quota, out);
      }
    }
    One one;
    one.spec = spec;
    one.used = one.born = at;
    one.held = spec.held;
    one.parent = parent;
    one.main = ghost(spec.key, spec.bytes);
    one.in_queue = one.in_family = one.in_own = ++order_;
    ones.emplace(spec.id, one);
    return Evictor::PutCode::ok;
  }
  void touch(std::uint64_t id, Instant now) {
    for (; id != 0; id = ones.at(id).parent) use(id, tick(now), true);
  }
  void open(std::uint64_t id) {
    ones.at(id).held = false;
    ones.at(id).in_queue = ++order_;
  }
  void remove(std::uint64_t id) {
    for (auto& [child, one] : ones) {
      if (one.parent == id) one.parent = 0;
    }
    ones.erase(id);
  }
  bool adopt(std::uint64_t child, std::uint64_t parent, Instant now) {
    if (ones.at(child).parent != 0) return false;
    for (std::uint64_t up = parent; up != 0; up = ones.at(up).parent) {
      if (up == child) return false;
    }
    ones.at(child).parent = parent;
    ones.at(child).in_family = ++order_;
    const std::uint32_t at = std::max(tick(now), ones.at(child).used);
    for (std::uint64_t up = parent; up != 0 && ones.at(up).used < at; up = ones.at(up).parent)
      use(up, at, false);
    return true;
  }
  std::vector<Victim> step(Instant now) {
    std::vector<Victim> out;
    const std::uint32_t at = tick(now);
    for (bool again = true; again;) {
      again = false;
      for (auto& [id, one] : ones) {
        const std::uint64_t expires = expiry(one);
        if ((expires + 9) / 10 > at / 10 || one.retry > at / 10) continue;
        const std::uint64_t leaf = one.held ? 0 : coldest(id);
        if (leaf == 0) {
          one.retry = at / 10 + 1;
          continue;
        }
        drop(leaf, Why::expired, out);
        again = true;
        break;
      }
    }
    if (bytes() > options_.capacity_bytes / 100 * options_.high_pct) shrinking = true;
    const std::uint64_t low = options_.capacity_bytes / 100 * options_.low_pct;
    if (shrinking && bytes() > low) room(bytes() - low, {}, out);
    if (bytes() <= low) shrinking = false;
    return out;
  }
  void room(std::uint64_t bytes, const Evictor::Wanted& wanted, std::vector<Victim>& out) {
    std::uint64_t freed = 0;
    std::set<std::uint64_t> passed;
    while (freed < bytes) {
      std::array<std::uint64_t, 2> oldest{};
      std::array<std::uint64_t, 2> sum{};
      for (const auto& [id, one] : ones) {
        if (one.held) continue;
        sum[one.main] += one.spec.bytes;
        std::uint64_t& best = oldest[one.main];
        if (!passed.contains(id) && (best == 0 || one.in_queue < ones.at(best).in_queue)) best = id;
      }
      std::uint64_t held = 0;
      for (const auto& [id, one] : ones) held += one.spec.bytes;
      const double full = static_cast<double>(options_.capacity_bytes);
      const bool above = static_cast<double>(sum[0]) * full >=
                         static_cast<double>(share_) * std::min(static_cast<double>(held), full);
      const bool from_small = oldest[0] != 0 && (above || oldest[1] == 0);
      const std::uint64_t one = oldest[from_small ? 0 : 1];
      if (one == 0) return;
      if (wanted && !wanted(one)) {
        passed.insert(one);
        continue;
      }
      for (bool gone = false; !gone && freed < bytes;) {
        const std::uint64_t leaf = coldest(one);
        if (leaf == 0) {
          passed.insert(one);
          break;
        }
        gone = leaf == one;
        freed += ones.at(leaf).spec.bytes;
        drop(leaf, Why::room, out);
      }
    }
  }
  std::vector<std::uint64_t> children(std::uint64_t id) const {
    std::vector<std::uint64_t> all;
    for (const auto& [child, one] : ones) {
      if (one.parent == id) all.push_back(child);
    }
    return all;
  }

 private:
  struct Ghost {
    std::uint64_t key, bytes;
    bool main;
    bool dead = false;
  };
  void use(std::uint64_t id, std::uint32_t at, bool promote) {
    One& one = ones.at(id);
    one.used = std::max(one.used, at);
    one.main = one.main || promote;
    one.in_queue = ++order_;
    one.in_own = ++order_;
    one.in_family = ++order_;
  }
  std::uint64_t expiry(const One& one) const {
    const auto rule = rules.find(one.spec.tenant);
    const Evictor::Life& life = rule != rules.end() && rule->second.life.has_value()
                                    ? *rule->second.life
                                    : options_.life[one.spec.life_class];
    const auto after = [](std::uint64_t from, Duration length) {
      return length.count() == 0 ? UINT64_MAX / 2
                                 : from + static_cast<std::uint64_t>(length.count() / 100'000'000);
    };
    return std::min(after(one.used, life.ttl), after(one.born, life.cap));
  }
  std::uint64_t of_tenant(std::uint64_t tenant) const {
    std::uint64_t sum = 0;
    for (const auto& [id, one] : ones) sum += one.spec.tenant == tenant ? one.spec.bytes : 0;
    return sum;
  }
  std::uint64_t coldest(std::uint64_t id) const {
    while (!ones.at(id).held) {
      std::uint64_t next = 0;
      for (const std::uint64_t child : children(id)) {
        if (next == 0 || ones.at(child).in_family < ones.at(next).in_family) next = child;
      }
      if (next == 0) return id;
      id = next;
    }
    return 0;
  }
  void drop(std::uint64_t id, Why why, std::vector<Victim>& out) {
    const One& one = ones.at(id);
    out.push_back({id, one.spec.bytes, one.spec.tenant, why});
    if (why == Why::room) {
      for (Ghost& ghost : ghosts_) ghost.dead = ghost.dead || ghost.key == one.spec.key;
      ghosts_.push_back({one.spec.key, one.spec.bytes, one.main});
      trim();
    }
    ones.erase(id);
  }
  std::uint64_t ghost_sum(bool main) const {
    std::uint64_t sum = 0;
    for (const Ghost& ghost : ghosts_) sum += ghost.main == main && !ghost.dead ? ghost.bytes : 0;
    return sum;
  }
  void trim() {
    while (!ghosts_.empty() && (ghosts_.front().dead || ghosts_.size() > options_.ghosts_max ||
                                ghost_sum(true) + ghost_sum(false) > options_.capacity_bytes)) {
      ghosts_.erase(ghosts_.begin());
    }
  }
  bool ghost(std::uint64_t key, std::uint64_t bytes) {
    const auto found = std::find_if(ghosts_.begin(), ghosts_.end(),
                                    [&](const Ghost& one) { return one.key == key && !one.dead; });
    if (found == ghosts_.end()) return false;
    const double same = static_cast<double>(std::max<std::uint64_t>(ghost_sum(found->main), 1));
    const double other = static_cast<double>(ghost_sum(!found->main));
    const auto move =
        static_cast<std::uint64_t>(static_cast<double>(bytes) / 2 * std::clamp(other / same, 1.0, 16.0));
    const std::uint64_t least = options_.capacity_bytes / 10;
    const std::uint64_t most = options_.capacity_bytes / 10 * 9;
    share_ = found->main ? std::max(least + move, share_) - move : std::min(share_ + move, most);
    found->dead = true;
    trim();
    return true;
  }

  Evictor::Options options_;
  std::uint64_t share_;
  std::uint64_t order_ = 0;
  std::vector<Ghost> ghosts_;
};

TEST(EvictorAgainstAPlainModel, names_the_same_victims) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    Rng rng(seed);
    Evictor::Options options{.capacity_bytes = 10000, .items_max = 1000, .ghosts_max = 20};
    if (seed % 3 == 0) options.life[0] = {.ttl = seconds(60), .cap = seconds(150)};
    if (seed % 3 == 0) options.life[1] = {.ttl = seconds(20)};
    Instant now = at_s(5000);
    Evictor evictor(options, now);
    Plain plain(options);
    for (std::uint64_t tenant = 1; tenant <= 2; ++tenant) {
      const Evictor::TenantRule rule{
          .quota_bytes = 2500,
          .over = tenant == 1 ? Evictor::OverQuota::refuse : Evictor::OverQuota::evict_own,
          .life = std::nullopt};
      ASSERT_TRUE(evictor.set_tenant(tenant, rule));
      plain.rules[tenant] = rule;
    }
    std::map<std::uint64_t, Item> items;
    std::uint64_t next_id = 1;
    const auto any = [&]() -> std::uint64_t {
      return items.empty()
                 ? 0
                 : std::next(items.begin(), static_cast<std::ptrdiff_t>(rng.below(items.size())))->first;
    };
    const auto agree = [&](std::vector<Victim> ours, std::vector<Victim> theirs) {
      for (const Victim& victim : ours) items.erase(victim.id);
      // What expires together has no order.
      const auto expired_first = [](std::vector<Victim>& victims) {
        const auto end = std::find_if(victims.begin(), victims.end(),
                                      [](const Victim& one) { return one.why != Why::expired; });
        std::sort(victims.begin(), end, [](const Victim& a, const Victim& b) { return a.id < b.id; });
      };
      expired_first(ours);
      expired_first(theirs);
      ASSERT_EQ(ours, theirs);
    };
    for (int turn = 0; turn < 1500; ++turn) {
      now = now + milliseconds(rng.below(700));
      const std::uint64_t what = rng.below(100);
      const std::uint64_t one = any();
      if (what < 45 || one == 0) {
        Spec spec{.id = next_id++,
                  .key = rng.below(400),
                  .bytes = 20 + rng.below(400),
                  .tenant = rng.below(4),
                  .life_class = static_cast<std::uint8_t>(rng.below(2)),
                  .parent = Evictor::item_none,
                  .held = rng.chance(0.1)};
        const std::uint64_t parent = rng.chance(0.7) ? one : 0;
        if (parent != 0) spec.parent = items.at(parent);
        std::vector<Victim> victims;
        const auto code = plain.put(spec, parent, now, victims);
        const auto answer = evictor.put(spec, now);
        ASSERT_EQ(answer.code, code);
        agree(answer.victims, victims);
        if (code == Evictor::PutCode::ok) items[spec.id] = answer.item;
      } else if (what < 70) {
        evictor.touch(items.at(one), now);
        plain.touch(one, now);
      } else if (what < 78) {
        if (plain.ones.at(one).held) {
          evictor.open(items.at(one));
          plain.open(one);
        } else if (rng.chance(0.2)) {
          evictor.hold(items.at(one));
          plain.ones.at(one).held = true;
        }
      } else if (what < 82) {
        evictor.remove(items.at(one));
        plain.remove(one);
        items.erase(one);
      } else if (what < 86) {
        const std::uint64_t parent = any();
        ASSERT_EQ(evictor.adopt(items.at(one), items.at(parent), now), plain.adopt(one, parent, now));
      } else if (what < 90) {
        const Evictor::Wanted wanted = [](std::uint64_t id) { return id % 3 != 0; };
        std::vector<Victim> victims;
        plain.room(700, wanted, victims);
        agree(evictor.make_room(700, wanted), victims);
      } else {
        // What is named has no child that stays.
        std::map<std::uint64_t, std::vector<std::uint64_t>> children;
        for (const auto& [id, item] : items) children[id] = plain.children(id);
        const auto ours = evictor.step(now);
        std::set<std::uint64_t> gone;
        for (const Victim& victim : ours) {
          for (const std::uint64_t child : children[victim.id])
            ASSERT_TRUE(gone.contains(child)) << victim.id;
          gone.insert(victim.id);
        }
        agree(ours, plain.step(now));
      }
      ASSERT_EQ(evictor.items(), plain.ones.size());
      ASSERT_EQ(evictor.bytes(), plain.bytes());
      if (turn % 50 == 0) evictor.test_check();
    }
  }
}

TEST(EvictorBounds, work_per_put_does_not_grow_with_the_cache) {
  // Chains of forty in a store that is always full: every put finds its victims without looking through it.
  Instant now = at_s(1);
  Evictor evictor({.capacity_bytes = 20000}, now);
  Rng rng(3);
  std::uint64_t id = 0;
  for (int chain = 0; chain < 2000; ++chain) {
    Item parent = Evictor::item_none;
    for (int i = 0; i < 40; ++i) {
      now = now + milliseconds(5);
      const auto answer = evictor.put({.id = id, .key = id, .bytes = 1, .parent = parent}, now);
      ASSERT_EQ(answer.code, Evictor::PutCode::ok);
      parent = answer.item;
      ++id;
      (void)evictor.step(now);
    }
  }
  EXPECT_LE(evictor.bytes(), 18400u);
  EXPECT_EQ(evictor.counters().evicted + evictor.items(), 80000u);
  evictor.test_check();
}

}  // namespace
}  // namespace di::kv
