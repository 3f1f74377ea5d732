#include "engine/sample.h"

#include <algorithm>
#include <cmath>

#include "base/assert.h"
#include "kernels/api.h"

namespace di::engine {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

double sample_uniform(std::uint64_t seed, std::uint32_t choice, std::uint64_t position) {
  const auto out =
      philox({static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), choice, 0},
             {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  const std::uint64_t bits = (std::uint64_t{out[0]} << 32) | out[1];
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

Sampler::Sampler(std::uint32_t vocab, const kernels::Kernels& kernels) : kernels_(kernels), weight_(vocab) {
  kept_.reserve(vocab);
}

std::uint32_t Sampler::choose(std::span<const float> logits, const wire::Sampling& sampling,
                              std::uint32_t index, std::uint64_t position) {
  DI_ASSERT(logits.size() == weight_.size());
  for (std::size_t id = 0; id < logits.size(); ++id)
    weight_[id] = std::isnan(logits[id]) ? -INFINITY : logits[id];
  if (index < sampling.min_tokens) {
    for (const std::uint32_t id : sampling.stop_ids) {
      if (id < weight_.size()) weight_[id] = -INFINITY;
    }
  }

  std::uint32_t best = 0;
  for (std::uint32_t id = 1; id < weight_.size(); ++id) {
    if (weight_[id] > weight_[best]) best = id;
  }
  const float highest = weight_[best];
  if (!(sampling.temperature > 0.0f) || !std::isfinite(highest)) return best;

  // Weights relative to the likeliest, which has 1.
  for (float& value : weight_) value = (value - highest) / sampling.temperature;
  weight_[best] = 0.0f;
  kernels_.exp(weight_.data(), weight_.data(), weight_.size());

  kept_.clear();
  const float least = sampling.min_p > 0.0f ? std::min(sampling.min_p, 1.0f) : 0.0f;
  for (std::uint32_t id = 0; id < weight_.size(); ++id) {
    if (weight_[id] > 0.0f && weight_[id] >= least) kept_.push_back(id);
  }

  const bool top_k = sampling.top_k > 0 && sampling.top_k < kept_.size();
  const bool top_p = sampling.top_p < 1.0f;
  if (top_k || top_p) {
    // The heap's order is total, so what it gives does not depend on how it was built.
    const auto after = [this](std::uint32_t a, std::uint32_t b) {
      return weight_[a] != weight_[b] ? weight_[a] < weight_[b] : a > b;
    };
    const std::size_t count = top_k ? sampling.top_k : kept_.size();
    if (top_k) {
      std::nth_element(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(count - 1), kept_.end(),
                       [&](std::uint32_t a, std::uint32_t b) { return after(b, a); });
      kept_.resize(count);
    }
    if (top_p) {
      std::sort(kept_.begin(), kept_.end());
      double total = 0.0;
      for (const std::uint32_t id : kept_) total += static_cast<double>(weight_[id]);
      const double wanted = static_cast<double>(sampling.top_p) * total;
      std::make_heap(kept_.begin(), kept_.end(), after);
      auto rest = kept_.end();
      double sum = 0.0;
      do {
        std::pop_heap(kept_.begin(), rest, after);
        --rest;
        sum += static_cast<double>(weight_[*rest]);
      } while (rest != kept_.begin() && sum < wanted);
      kept_.erase(kept_.begin(), rest);
    }
    std::sort(kept_.begin(), kept_.end());
  }

  double total = 0.0;
  for (const std::uint32_t id : kept_) total += static_cast<double>(weight_[id]);
  const double target = sample_uniform(sampling.seed, sampling.choice, position) * total;
  double sum = 0.0;
  for (const std::uint32_t id : kept_) {
    sum += static_cast<double>(weight_[id]);
    if (sum > target) return id;
  }
  return kept_.back();  // the last addition rounded down to the target
}

}  // namespace di::engine
