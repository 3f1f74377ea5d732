#include "directory/blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "base/rng.h"

namespace di::directory {
namespace {

// Keys by slot and block, as stripes and arena pages have them.
class Places final : public BlockMap::Keys {
 public:
  [[nodiscard]] const Key& key_of(BlockRef ref) const override { return keys_.at(number(ref)); }
  void set(BlockRef ref, const Key& key) { keys_[number(ref)] = key; }

 private:
  static std::uint64_t number(BlockRef ref) {
    return (std::uint64_t{ref.slot} << 20) | (std::uint64_t{ref.block} << 1) | std::uint64_t{ref.in_arena};
  }
  std::map<std::uint64_t, Key> keys_;
};

// `home` of 256 says where in the table the key wants to be.
Key key_at(std::uint64_t home, std::uint64_t which) {
  Key key;
  key.raw[7] = static_cast<std::byte>(home);  // the high byte of the hash
  for (int i = 0; i < 4; ++i) key.raw[static_cast<std::size_t>(i)] = static_cast<std::byte>(which >> (8 * i));
  return key;
}

std::vector<BlockRef> places_of(const BlockMap& map, const Key& key) {
  std::vector<BlockRef> out;
  map.find(key, [&](BlockRef ref) {
    out.push_back(ref);
    return true;
  });
  return out;
}

TEST(BlockMap, ABlockMayBeInSeveralPlaces) {
  Places places;
  BlockMap map(10, places);
  const Key key = key_at(3, 1);
  const std::vector<BlockRef> refs{
      {0, 0, false}, {0, 0, true}, {7, 500, false}, {BlockMap::slots_max, 65535, true}};
  for (const BlockRef ref : refs) {
    places.set(ref, key);
    EXPECT_TRUE(map.insert(key, ref));
  }
  EXPECT_EQ(map.entries(), 4U);
  EXPECT_EQ(map.distinct(), 1U);
  EXPECT_EQ(places_of(map, key).size(), 4U);
  EXPECT_FALSE(map.erase(key, {1, 0, false}));
  for (const BlockRef ref : refs) EXPECT_TRUE(map.erase(key, ref));
  EXPECT_EQ(map.distinct(), 0U);
  EXPECT_TRUE(places_of(map, key).empty());
}

TEST(BlockMap, IsFullAtItsBound) {
  Places places;
  BlockMap map(3, places);
  for (std::uint32_t slot = 0; slot < 4; ++slot) {
    const Key key = key_at(200, slot);
    places.set({slot, 0, false}, key);
    EXPECT_EQ(map.insert(key, {slot, 0, false}), slot < 3);
  }
  EXPECT_EQ(map.entries(), 3U);
}

// Few homes, so that runs are long, meet, and go over the end of the table.
TEST(BlockMap, AgreesWithAMapAtFullLoad) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed=" + std::to_string(seed));
    Rng rng(seed);
    Places places;
    BlockMap map(60, places);
    std::vector<std::pair<Key, BlockRef>> model;
    for (int step = 0; step < 3000; ++step) {
      if (model.size() < 60 && (model.empty() || rng.chance(0.55))) {
        const std::uint64_t homes[] = {0, 1, 120, 121, 250, 254, 255};
        const Key key = key_at(homes[rng.below(7)], rng.below(12));
        const BlockRef ref{static_cast<std::uint32_t>(step), static_cast<std::uint16_t>(rng.below(9)),
                           rng.chance(0.5)};
        places.set(ref, key);
        ASSERT_TRUE(map.insert(key, ref));
        model.emplace_back(key, ref);
      } else {
        const std::size_t at = rng.below(model.size());
        ASSERT_TRUE(map.erase(model[at].first, model[at].second));
        model.erase(model.begin() + static_cast<std::ptrdiff_t>(at));
      }
      ASSERT_EQ(map.entries(), model.size());
      std::map<Key, std::size_t> counts;
      for (const auto& [key, ref] : model) ++counts[key];
      ASSERT_EQ(map.distinct(), counts.size());
      if (step % 10 != 0) continue;
      for (const auto& [key, count] : counts) ASSERT_EQ(places_of(map, key).size(), count);
      for (const auto& [key, ref] : model) {
        const auto found = places_of(map, key);
        ASSERT_NE(std::find(found.begin(), found.end(), ref), found.end());
      }
    }
  }
}

}  // namespace
}  // namespace di::directory
