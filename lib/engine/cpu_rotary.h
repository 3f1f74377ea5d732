// engine/cpu_rotary.h: angles of the rotary embedding, plain or stretched by YaRN.
//
// Owner: the engine thread.  Rows are computed when a position is first asked for and kept, up to the
// model's positions_max.  Everything is computed in x87 long double and rounded down: glibc's double
// functions differ in their last bit between processors with and without fused multiply-add, and the
// same bits are wanted on both.
#pragma once

#include <cstdint>
#include <vector>

#include "model/shape.h"

namespace di::engine {

// Radians per position for each of the qk_rope / 2 pairs.
[[nodiscard]] std::vector<double> rotary_frequencies(const model::Shape& shape);
// (qk_nope + qk_rope)^-0.5, times YaRN's correction.
[[nodiscard]] float softmax_scale(const model::Shape& shape);

class Rotary {
 public:
  explicit Rotary(const model::Shape& shape);

  // Makes rows for positions below `positions`.
  void extend(std::uint32_t positions);
  // [qk_rope / 2]; valid until the next extend().
  [[nodiscard]] const float* cosine(std::uint32_t position) const {
    return cosine_.data() + position * pairs_;
  }
  [[nodiscard]] const float* sine(std::uint32_t position) const { return sine_.data() + position * pairs_; }
  [[nodiscard]] std::size_t pairs() const { return pairs_; }

 private:
  std::vector<double> frequency_;
  std::size_t pairs_;
  std::uint32_t positions_max_;
  std::uint32_t positions_ = 0;
  std::vector<float> cosine_;
  std::vector<float> sine_;
};

}  // namespace di::engine
