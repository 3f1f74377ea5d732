// directory/blocks.h: from the key of a block to the places that hold it.
//
// Open addressing over 8 bytes a place: a slot number, the block inside it and 16 bits of the key.  Keys are
// not here but where they are anyway, in the stripe or the arena page, and are compared in full there.  A
// block that several places hold has several entries.  The table is made once for its bound, at 3/4 load,
// from pages that the system gives when they are touched, so it never has to grow.
//
// Pure.  Owner: the directory's thread.  Bound: the `entries_max` of its making.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/assert.h"
#include "wire/ids.h"

namespace di::directory {

// Block `block` of the stripe, or of the arena page, in `slot`.
struct BlockRef {
  std::uint32_t slot = 0;
  std::uint16_t block = 0;
  bool in_arena = false;
  bool operator==(const BlockRef&) const = default;
};

class BlockMap {
 public:
  // Where the keys are.
  class Keys {
   public:
    virtual ~Keys() = default;
    [[nodiscard]] virtual const Key& key_of(BlockRef ref) const = 0;
  };
  static constexpr std::uint32_t slots_max = (std::uint32_t{1} << 31) - 2;

  // `keys` outlives it.
  BlockMap(std::size_t entries_max, const Keys& keys);

  // False when it is full.  The key can be had from `keys` already.
  bool insert(const Key& key, BlockRef ref);
  // False when it is not there.  The keys of all entries, this one's too, can still be had.
  bool erase(const Key& key, BlockRef ref);
  // Calls visit(ref) for each place of the block until it returns false.
  template <class Visit>
  void find(const Key& key, Visit visit) const {
    const std::uint64_t hash = hash_of(key);
    for (std::size_t at = home(hash); cells_[at] != 0; at = next(at)) {
      if (tag(cells_[at]) != tag(hash)) continue;
      const BlockRef ref = unpack(cells_[at]);
      if (keys_.key_of(ref) == key && !visit(ref)) return;
    }
  }
  void prefetch(const Key& key) const { __builtin_prefetch(&cells_[home(hash_of(key))]); }

  // Of a SHA-256: any 8 bytes are a hash.
  static std::uint64_t hash_of(const Key& key) {
    std::uint64_t hash;
    std::memcpy(&hash, key.raw.data(), sizeof hash);
    return hash;
  }

  [[nodiscard]] std::size_t entries() const { return entries_; }
  [[nodiscard]] std::size_t entries_max() const { return entries_max_; }
  [[nodiscard]] std::size_t distinct() const { return distinct_; }  // keys

 private:
  struct Free {
    void operator()(std::uint64_t* cells) const { std::free(cells); }
  };
  static std::uint16_t tag(std::uint64_t value) { return static_cast<std::uint16_t>(value); }
  [[nodiscard]] std::size_t home(std::uint64_t hash) const {
    return static_cast<std::size_t>((static_cast<unsigned __int128>(hash) * count_) >> 64);
  }
  [[nodiscard]] std::size_t next(std::size_t at) const { return at + 1 == count_ ? 0 : at + 1; }
  static std::uint64_t pack(BlockRef ref, std::uint64_t hash) {
    return (std::uint64_t{ref.slot + 1} << 33) | (std::uint64_t{ref.in_arena} << 32) |
           (std::uint64_t{ref.block} << 16) | tag(hash);
  }
  static BlockRef unpack(std::uint64_t cell) {
    return {static_cast<std::uint32_t>(cell >> 33) - 1, static_cast<std::uint16_t>(cell >> 16),
            ((cell >> 32) & 1) != 0};
  }
  [[nodiscard]] bool has(const Key& key) const {
    bool found = false;
    find(key, [&](BlockRef) {
      found = true;
      return false;
    });
    return found;
  }

  const Keys& keys_;
  std::size_t entries_max_;
  std::size_t count_;  // of cells; 0 is an empty cell
  std::unique_ptr<std::uint64_t[], Free> cells_;
  std::size_t entries_ = 0;
  std::size_t distinct_ = 0;
};

}  // namespace di::directory
