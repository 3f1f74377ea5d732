#include "balance/cost.h"

#include <algorithm>

#include "base/assert.h"

namespace di::balance {

namespace {

// A sample moves the average by a tenth, and never by more than a factor of four: one step that was
// descheduled must not make the rank refuse work.
constexpr double observe_weight = 0.1;
constexpr double observe_ratio_max = 4;
constexpr double scale_min = 1e-4;
constexpr double scale_max = 1e4;

}  // namespace

double StepCost::predict_us(std::uint32_t tokens, double context_mean) const {
  const double n = tokens;
  return scale_ * (shape_.base_us + shape_.token_us * n + shape_.context_us * n * context_mean / 1024);
}

double StepCost::predict_prompt_us(std::uint32_t total, std::uint32_t cached, std::uint32_t chunk_tokens) const {
  DI_ASSERT(cached <= total && chunk_tokens > 0);
  const std::uint32_t fresh = total - cached;
  const std::uint32_t steps = (fresh + chunk_tokens - 1) / chunk_tokens;
  const double mean = (static_cast<double>(total) + cached) / 2;
  return predict_us(fresh, mean) + scale_ * shape_.base_us * (steps > 1 ? steps - 1 : 0);
}

void StepCost::observe(std::uint32_t tokens, double context_mean, double took_us) {
  if (tokens == 0 || took_us <= 0) return;
  const double ratio = std::clamp(took_us / predict_us(tokens, context_mean), 1 / observe_ratio_max, observe_ratio_max);
  scale_ = std::clamp(scale_ * (1 + observe_weight * (ratio - 1)), scale_min, scale_max);
}

}  // namespace di::balance
