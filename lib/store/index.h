// store/index.h: stripe -> slots of a volume, by number alone.
//
// Owner: the volume's thread.  An open-addressing table of 4-byte slot numbers in `shards` parts, each of
// which grows by itself, so that growing a table of millions stops nobody for long.  What a number's stripe
// is, the volume knows: the caller gives a function for it.  Bound: the slots of the volume; 5.7 to 11.4
// bytes for each that is in it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace di::store {

class SlotIndex {
 public:
  static constexpr std::uint32_t none = UINT32_MAX;

  // Calls `match(number)` for the slots of `stripe` until it returns true, and returns that one, or none.
  // `stripe_of(number)` is the stripe of a slot that is in the index.
  template <class StripeOf, class Match>
  [[nodiscard]] std::uint32_t find(std::uint64_t stripe, const StripeOf& stripe_of,
                                   const Match& match) const {
    const std::uint64_t hash = hash_of(stripe);
    const Shard& shard = shards_[hash % shards];
    if (shard.cells.empty()) return none;
    for (std::size_t at = home(hash, shard.cells.size());; at = next(at, shard.cells.size())) {
      const std::uint32_t number = shard.cells[at];
      if (number == none) return none;
      if (stripe_of(number) == stripe && match(number)) return number;
    }
  }

  // What to do with a slot when an earlier one may be of the same stripe and column.
  enum class Clash : std::uint8_t { other_stripe, keep_earlier, replace };
  // Fills an empty index with many at once.  `each(add)` calls add(number, stripe) for all of them, and is
  // called twice; `clash(number, earlier)` compares two that look alike.
  //
  // Sorted into the shards first, each of which is then filled inside a processor's cache: what does not look
  // alike is told apart without a look at the slots, which are all over memory.
  template <class Each, class Decide>
  void build(const Each& each, const Decide& clash) {
    DI_ASSERT(count_ == 0);
    struct Entry {
      std::uint32_t number = 0;
      std::uint32_t part = 0;  // of the hash: what home() looks at
    };
    std::array<std::size_t, shards + 1> ends{};
    each([&](std::uint32_t, std::uint64_t stripe) { ++ends[hash_of(stripe) % shards + 1]; });
    for (std::size_t shard = 1; shard <= shards; ++shard) ends[shard] += ends[shard - 1];
    std::vector<Entry> entries(ends[shards]);
    std::array<std::size_t, shards> next_entry{};
    std::copy_n(ends.begin(), shards, next_entry.begin());
    each([&](std::uint32_t number, std::uint64_t stripe) {
      const std::uint64_t hash = hash_of(stripe);
      entries[next_entry[hash % shards]++] = {number, static_cast<std::uint32_t>(hash / shards)};
    });
    std::vector<std::uint32_t> parts;  // beside the cells
    for (std::size_t i = 0; i < shards; ++i) {
      Shard& shard = shards_[i];
      const std::size_t count = ends[i + 1] - ends[i];
      if (count == 0) continue;
      std::size_t cells = cells_min;
      while (room(cells) < count) cells *= 2;
      shard.cells.assign(cells, none);
      parts.assign(cells, 0);
      for (std::size_t entry = ends[i]; entry < ends[i + 1]; ++entry) {
        const auto [number, part] = entries[entry];
        std::size_t at = part & (cells - 1);
        Clash found = Clash::other_stripe;
        for (; shard.cells[at] != none; at = next(at, cells)) {
          if (parts[at] != part) continue;
          found = clash(number, shard.cells[at]);
          if (found != Clash::other_stripe) break;
        }
        if (found == Clash::keep_earlier) continue;
        shard.count += shard.cells[at] == none ? 1 : 0;
        shard.cells[at] = number;
        parts[at] = part;
      }
      count_ += shard.count;
    }
  }

  // `number` is not in the index.
  template <class StripeOf>
  void insert(std::uint64_t stripe, std::uint32_t number, const StripeOf& stripe_of) {
    DI_ASSERT(number != none);
    const std::uint64_t hash = hash_of(stripe);
    Shard& shard = shards_[hash % shards];
    if (shard.count + 1 > room(shard.cells.size())) {
      const std::vector<std::uint32_t> old = std::exchange(
          shard.cells,
          std::vector<std::uint32_t>(shard.cells.empty() ? cells_min : 2 * shard.cells.size(), none));
      for (const std::uint32_t moved : old) {
        if (moved != none) place(shard.cells, hash_of(stripe_of(moved)), moved);
      }
    }
    place(shard.cells, hash, number);
    ++shard.count;
    ++count_;
  }

  // `number` is in the index.
  template <class StripeOf>
  void erase(std::uint64_t stripe, std::uint32_t number, const StripeOf& stripe_of) {
    const std::uint64_t hash = hash_of(stripe);
    Shard& shard = shards_[hash % shards];
    std::vector<std::uint32_t>& cells = shard.cells;
    DI_ASSERT(!cells.empty());
    std::size_t hole = home(hash, cells.size());
    while (cells[hole] != number) {
      DI_ASSERT(cells[hole] != none);
      hole = next(hole, cells.size());
    }
    // What follows moves up as far as its own place allows, so that no search ends too early.
    for (std::size_t at = next(hole, cells.size()); cells[at] != none; at = next(at, cells.size())) {
      const std::size_t wanted = home(hash_of(stripe_of(cells[at])), cells.size());
      const bool stays = hole <= at ? hole < wanted && wanted <= at : hole < wanted || wanted <= at;
      if (stays) continue;
      cells[hole] = cells[at];
      hole = at;
    }
    cells[hole] = none;
    --shard.count;
    --count_;
  }

  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::size_t bytes() const;

 private:
  static constexpr std::size_t shards = 256;
  static constexpr std::size_t cells_min = 8;
  struct Shard {
    std::vector<std::uint32_t> cells;  // as many as a power of two
    std::size_t count = 0;
  };

  // Stripe ids are counted up: neighbours must not be neighbours here.
  static std::uint64_t hash_of(std::uint64_t stripe) {
    stripe ^= stripe >> 31;
    stripe *= 0x9e3779b97f4a7c15u;
    return stripe ^ stripe >> 29;
  }
  static std::size_t home(std::uint64_t hash, std::size_t cells) { return hash / shards & (cells - 1); }
  static std::size_t next(std::size_t at, std::size_t cells) { return (at + 1) & (cells - 1); }
  static std::size_t room(std::size_t cells) { return cells / 10 * 7 + cells % 10 * 7 / 10; }
  static void place(std::vector<std::uint32_t>& cells, std::uint64_t hash, std::uint32_t number) {
    std::size_t at = home(hash, cells.size());
    while (cells[at] != none) at = next(at, cells.size());
    cells[at] = number;
  }

  std::array<Shard, shards> shards_;
  std::size_t count_ = 0;
};

}  // namespace di::store
