// kernels/ref/elements.cpp: number formats, rotation and routing.  Plain operations without a fused one,
// so that the compiler gives the same bits for every machine and no vector path is needed.
#include <cstring>

#include "kernels/api.h"

namespace di::kernels {

void rope(float* x, const float* cosine, const float* sine, std::size_t pairs) {
  for (std::size_t i = 0; i < pairs; ++i) {
    const float even = x[2 * i];
    const float odd = x[2 * i + 1];
    x[2 * i] = even * cosine[i] - odd * sine[i];
    x[2 * i + 1] = even * sine[i] + odd * cosine[i];
  }
}

std::uint16_t bf16_round(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>(bits >> 16);
}

float bf16_widen(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

void widen(const void* source, Format format, float* out, std::size_t count) {
  if (format == Format::f32) {
    if (count > 0) std::memcpy(out, source, count * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) out[i] = bf16_widen(static_cast<const std::uint16_t*>(source)[i]);
}

void narrow(const float* source, Format format, void* target, std::size_t count) {
  if (format == Format::f32) {
    if (count > 0) std::memcpy(target, source, count * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) static_cast<std::uint16_t*>(target)[i] = bf16_round(source[i]);
}

namespace {

constexpr float taken = -__builtin_inff();

// Index of the largest value, the lowest one of equals.  NaN never wins over a number.
std::size_t largest(const float* value, std::size_t count) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < count; ++i) {
    if (value[i] > value[best]) best = i;
  }
  return best;
}

}  // namespace

void route(const Routing& routing, std::uint32_t* expert, float* weight, float* scratch) {
  float* biased = scratch;
  float* group_score = scratch + routing.experts;
  for (std::size_t e = 0; e < routing.experts; ++e) biased[e] = routing.score[e] + routing.bias[e];

  const std::size_t per_group = routing.experts / routing.groups;
  if (routing.groups > 1) {
    for (std::size_t g = 0; g < routing.groups; ++g) {
      const float* in = biased + g * per_group;
      const std::size_t first = largest(in, per_group);
      float second = taken;
      for (std::size_t i = 0; i < per_group; ++i) {
        if (i != first && in[i] > second) second = in[i];
      }
      group_score[g] = in[first] + second;
    }
    // What is left after the best groups were marked is closed.
    for (std::size_t kept = 0; kept < routing.groups_kept; ++kept) {
      group_score[largest(group_score, routing.groups)] = taken;
    }
    for (std::size_t g = 0; g < routing.groups; ++g) {
      if (group_score[g] == taken) continue;
      for (std::size_t i = 0; i < per_group; ++i) biased[g * per_group + i] = taken;
    }
  }

  for (std::size_t i = 0; i < routing.chosen; ++i) {
    const std::size_t best = largest(biased, routing.experts);
    biased[best] = taken;
    // Kept in ascending order, which is the order in which the experts' outputs are added.
    std::size_t at = i;
    for (; at > 0 && expert[at - 1] > best; --at) expert[at] = expert[at - 1];
    expert[at] = static_cast<std::uint32_t>(best);
  }
  float sum = 0.0f;
  for (std::size_t i = 0; i < routing.chosen; ++i) sum += routing.score[expert[i]];
  for (std::size_t i = 0; i < routing.chosen; ++i) {
    const float score = routing.score[expert[i]];
    weight[i] = (routing.normalize ? score / sum : score) * routing.scale;
  }
}

}  // namespace di::kernels
