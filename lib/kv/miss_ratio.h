// kv/miss_ratio.h: what share of references would miss in a least-recently-used cache of any size, on line.
//
// SHARDS with a fixed number of samples (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST
// 2015): a key is followed when its hash is below a threshold, which falls as more keys come, so that the
// same keys are followed at every reference and the distances between their uses, divided by the sampling
// rate, are those of all.  Distances are in bytes.  The difference between the references that were and that
// should have been sampled is put where the shortest distances are (SHARDS-adj of that paper).
//
// A chain is told from its deepest item to its root, so that what is above stays longer, as in kv/evict.h;
// misses are told as well.  Old references fade: at each `fade_references` everything counts half.
//
// A key that is not followed costs about a nanosecond.
//
// Pure.  Owner: one thread.  Bounds: samples_max keys; about 220 bytes each, and 4 KiB.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace di::kv {

class MissRatio {
 public:
  struct Options {
    std::size_t samples_max = 8192;  // mean error of a point: 0.01 in that paper; see the test
    std::uint64_t fade_references = std::uint64_t{1} << 22;
  };

  explicit MissRatio(const Options& options);

  // `name`: the item's; eight bytes of its key do.
  void reference(std::uint64_t name, std::uint64_t bytes) {
    const std::uint64_t hash = spread(name);
    ++references_;
    if (++since_fade_ >= options_.fade_references) fade();
    if (value_of(hash) < threshold_) follow(hash, bytes);
  }

  // Of a cache of so many bytes; 1 before the first reference.
  [[nodiscard]] double at(std::uint64_t capacity_bytes) const;
  struct Point {
    std::uint64_t capacity_bytes = 0;
    double miss_ratio = 1;
  };
  // At powers of two from the smallest distance seen to the largest; at most 64.
  [[nodiscard]] std::vector<Point> curve() const;

  [[nodiscard]] std::uint64_t references() const { return references_; }
  [[nodiscard]] std::size_t samples() const { return keys_.size(); }
  [[nodiscard]] double rate() const;

 private:
  struct Key {
    std::uint64_t position = 0;  // of its last use, in slots_
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint64_t values = std::uint64_t{1} << 24;
  static constexpr std::size_t octave_buckets = 8;
  static constexpr std::size_t buckets = 64 * octave_buckets;

  static constexpr std::uint64_t value_of(std::uint64_t hash) { return hash >> 40; }
  // SplitMix64's last steps: one to one, and every bit depends on every other.
  static constexpr std::uint64_t spread(std::uint64_t name) {
    name = (name ^ (name >> 30)) * 0xbf58476d1ce4e5b9ULL;
    name = (name ^ (name >> 27)) * 0x94d049bb133111ebULL;
    return name ^ (name >> 31);
  }
  [[nodiscard]] static std::size_t bucket_of(double bytes);
  // References that were told, faded like the rest.
  [[nodiscard]] double expected() const { return faded_ + static_cast<double>(since_fade_); }
  // Bytes of the keys used at or after `position`.
  [[nodiscard]] std::uint64_t bytes_since(std::uint64_t position) const;
  void slot_add(std::uint64_t position, std::int64_t bytes);
  void renumber();
  void forget_largest();
  void fade();
  void follow(std::uint64_t hash, std::uint64_t bytes);

  Options options_;
  std::uint64_t threshold_;                                     // of the upper 24 bits
  std::unordered_map<std::uint64_t, Key> keys_;                 // by hash; looked up only
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_value_;  // (upper bits, hash): the largest go first
  std::vector<std::uint64_t> sums_;                             // Fenwick tree over positions
  std::vector<std::uint64_t> owners_;                           // position -> hash
  std::uint64_t next_position_ = 0;
  std::uint64_t total_bytes_ = 0;         // of the keys
  std::array<double, buckets> counts_{};  // references by distance, scaled to all
  double cold_ = 0;                       // first references
  double faded_ = 0;                      // of the references before the last fade
  std::uint64_t references_ = 0;
  std::uint64_t since_fade_ = 0;
};

}  // namespace di::kv
