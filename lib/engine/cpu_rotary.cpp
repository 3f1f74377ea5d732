#include "engine/cpu_rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/assert.h"

namespace di::engine {

std::vector<double> rotary_frequencies(const model::Shape& shape) {
  const long double dim = shape.qk_rope;
  const long double theta = static_cast<long double>(shape.rope_theta);
  std::vector<double> out(shape.qk_rope / 2);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<double>(std::pow(theta, -2.0L * static_cast<long double>(i) / dim));
  }
  if (!shape.yarn) return out;

  // The pair that makes so many turns over the original length: length * theta^(-2i/dim) = 2 pi turns.
  const model::Yarn& yarn = *shape.yarn;
  const auto pair_with_turns = [&](double turns) {
    const long double length = static_cast<long double>(yarn.original_positions);
    return dim * std::log(length / (2 * std::numbers::pi_v<long double> * static_cast<long double>(turns))) /
           (2 * std::log(theta));
  };
  // Above `last` frequencies are divided by the factor, below `first` they stay, between they are mixed.
  // The clamp to dim - 1, though there are only dim / 2 pairs, is the published behaviour and moves the
  // slope.
  const double first = std::max(static_cast<double>(std::floor(pair_with_turns(yarn.beta_fast))), 0.0);
  const double last =
      std::min(static_cast<double>(std::ceil(pair_with_turns(yarn.beta_slow))), static_cast<double>(dim - 1));
  const double span = last == first ? 0.001 : last - first;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - first) / span, 0.0, 1.0);
    out[i] = out[i] * (1.0 - slow) + out[i] / yarn.factor * slow;
  }
  return out;
}

float softmax_scale(const model::Shape& shape) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(shape.qk_nope + shape.qk_rope));
  if (!shape.yarn) return static_cast<float>(scale);
  const auto log_factor = static_cast<double>(std::log(static_cast<long double>(shape.yarn->factor)));
  const double mscale = 0.1 * shape.yarn->mscale_all_dim * log_factor + 1.0;
  return static_cast<float>(scale * mscale * mscale);
}

Rotary::Rotary(const model::Shape& shape)
    : frequency_(rotary_frequencies(shape)), pairs_(frequency_.size()), positions_max_(shape.positions_max) {}

void Rotary::extend(std::uint32_t positions) {
  DI_ASSERT(positions <= positions_max_);
  for (; positions_ < positions; ++positions_) {
    for (const double frequency : frequency_) {
      const auto angle = static_cast<long double>(static_cast<double>(positions_) * frequency);
      cosine_.push_back(static_cast<float>(std::cos(angle)));
      sine_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

}  // namespace di::engine
