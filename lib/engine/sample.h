// engine/sample.h: choosing a token from logits.
//
// Owner: the engine thread; a Sampler holds scratch for one vocabulary and nothing that lasts from one
// call to the next.  The choice is a pure function of (logits, sampling, index, position): randomness is a
// counter-based generator keyed by (seed, choice, position), so a request that moves to another rank, or
// starts again from its tokens, draws the same numbers.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "wire/messages.h"

namespace di::kernels {
struct Kernels;
}

namespace di::engine {

// Philox 4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, SC 2011).
[[nodiscard]] std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key);

// Uniform in [0, 1), 53 bits, for this choice at this position.
[[nodiscard]] double sample_uniform(std::uint64_t seed, std::uint32_t choice, std::uint64_t position);

class Sampler {
 public:
  Sampler(std::uint32_t vocab, const kernels::Kernels& kernels);

  // The id of the token at absolute position `position` of its sequence (prompt included), which is output
  // token `index` of the request.  In this order: stop ids are masked while index < min_tokens; temperature 0
  // (or below, or NaN) takes the largest logit, the lowest id of equals; otherwise logits are divided by the
  // temperature and min_p (relative to the likeliest), top_k and top_p each narrow what the one before
  // left, of equals keeping the lower id.  One token is always left.  A NaN logit is never chosen
  // over a number.  Everything is summed in order of id.
  [[nodiscard]] std::uint32_t choose(std::span<const float> logits, const wire::Sampling& sampling,
                                     std::uint32_t index, std::uint64_t position);

 private:
  const kernels::Kernels& kernels_;
  std::vector<float> weight_;        // [vocab]
  std::vector<std::uint32_t> kept_;  // at most vocab ids
};

}  // namespace di::engine
