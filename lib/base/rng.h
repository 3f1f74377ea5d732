// base/rng.h: a small seeded generator (xoshiro256**, Blackman and Vigna 2018) for simulation,
// jitter and tests.  Not for secrets and not for token sampling (engine/sample.h is counter-based).
#pragma once

#include <cstdint>

#include "base/assert.h"

namespace di {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) {
    for (auto& word : state_) {  // SplitMix64 spreads the seed
      seed += 0x9e3779b97f4a7c15ULL;
      std::uint64_t z = seed;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
      word = z ^ (z >> 31);
    }
  }

  std::uint64_t next() {
    const std::uint64_t result = rotl(state_[1] * 5, 7) * 9;
    const std::uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = rotl(state_[3], 45);
    return result;
  }
  // Uniform in [0, bound); the bias is below bound / 2^64.
  std::uint64_t below(std::uint64_t bound) {
    DI_ASSERT(bound > 0);
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
  // Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double probability) { return uniform() < probability; }

 private:
  static std::uint64_t rotl(std::uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
  std::uint64_t state_[4];
};

}  // namespace di
