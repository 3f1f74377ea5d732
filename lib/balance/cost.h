// balance/cost.h: predicted time of forward work, in microseconds.
//
// One step of `tokens` new tokens whose mean context is `context` costs
//   scale x (base + token x tokens + context x tokens x context / 1024).
// The shape (base, token, context) is a guess that only has to be right in proportion; `scale` is
// fitted to what steps really took by an exponential average of observed / predicted, so that the
// prediction is safe before the first sample and follows the machine after a few dozen.  Pure.
#pragma once

#include <cstdint>

#include "base/time.h"

namespace di::balance {

class StepCost {
 public:
  struct Shape {
    double base_us = 300;      // measured: an empty step of the CPU engine on the demo model
    double token_us = 400;
    double context_us = 20;    // per token and 1,024 tokens of context
  };

  StepCost() = default;
  explicit StepCost(Shape shape) : shape_(shape) {}

  [[nodiscard]] double predict_us(std::uint32_t tokens, double context_mean) const;
  // The whole of a prompt: tokens [cached, total) in chunks of at most `chunk_tokens`.
  [[nodiscard]] double predict_prompt_us(std::uint32_t total, std::uint32_t cached, std::uint32_t chunk_tokens) const;
  void observe(std::uint32_t tokens, double context_mean, double took_us);

  [[nodiscard]] double base_us() const { return scale_ * shape_.base_us; }
  [[nodiscard]] double token_us() const { return scale_ * shape_.token_us; }
  [[nodiscard]] double context_us() const { return scale_ * shape_.context_us; }

 private:
  Shape shape_;
  double scale_ = 1;
};

}  // namespace di::balance
