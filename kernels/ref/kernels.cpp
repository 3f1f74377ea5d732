// kernels/ref/kernels.cpp: the truth.  One value at a time, in the order api.h states; read this to know
// what the vector paths compute.
#include "kernels/ref/kernels.h"

#include <cmath>
#include <cstring>

namespace di::kernels {

namespace {

float value_at(const void* data, Format format, std::size_t index) {
  if (format == Format::f32) return static_cast<const float*>(data)[index];
  return bf16_widen(static_cast<const std::uint16_t*>(data)[index]);
}

std::size_t padded(std::size_t count) {
  return (count + lanes - 1) / lanes * lanes;
}

float fold(const float (&lane)[lanes]) {
  float sum[lanes];
  std::memcpy(sum, lane, sizeof sum);
  for (std::size_t half = lanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
  }
  return sum[0];
}

float dot(const float* x, const void* w, Format format, std::size_t first, std::size_t count) {
  float lane[lanes] = {};
  for (std::size_t k = 0; k < padded(count); ++k) {
    const float a = k < count ? x[k] : 0.0f;
    const float b = k < count ? value_at(w, format, first + k) : 0.0f;
    lane[k % lanes] = std::fma(a, b, lane[k % lanes]);
  }
  return fold(lane);
}

// Range reduction by ln 2 in two parts, then the polynomial of Cephes' expf.
float exp_one(float x) {
  if (!(x > -87.33f)) return 0.0f;
  if (x > 88.37f) x = 88.37f;
  constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float n = std::fma(x, 1.44269504f, to_integer) - to_integer;
  float r = std::fma(n, -0.693359375f, x);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  const float y = std::fma(p, r * r, r) + 1.0f;
  const auto exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return y * scale;
}

float sigmoid_one(float x) {
  return 1.0f / (1.0f + exp_one(-x));
}

void matmul(const Matmul& m) {
  for (std::size_t r = 0; r < m.rows; ++r) {
    for (std::size_t n = 0; n < m.n; ++n) {
      m.y[r * m.y_stride + n] = dot(m.x + r * m.x_stride, m.w, m.format, n * m.k, m.k);
    }
  }
}

// One head of one row.  `out` holds the running sums of values.
void attend(const Attention& a, const float* q, std::size_t position, float* out) {
  const std::size_t width = a.latent + a.rope;
  float best = -INFINITY;
  float total = 0.0f;
  for (std::size_t c = 0; c < a.latent; ++c) out[c] = 0.0f;

  for (std::size_t first = 0; first <= position; first += attention_tile_tokens) {
    std::size_t count = position + 1 - first;
    if (count > attention_tile_tokens) count = attention_tile_tokens;
    float p[attention_tile_tokens];
    float best_now = best;
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t at = first + j;
      p[j] = dot(q, a.blocks[at / a.block_tokens], a.format, at % a.block_tokens * width, width) * a.scale;
      if (p[j] > best_now) best_now = p[j];
    }
    const float shrink = exp_one(best - best_now);
    float lane[lanes] = {};
    for (std::size_t j = 0; j < count; ++j) {
      p[j] = exp_one(p[j] - best_now);
      lane[j % lanes] = lane[j % lanes] + p[j];
    }
    total = std::fma(total, shrink, fold(lane));
    for (std::size_t c = 0; c < a.latent; ++c) {
      float sum = out[c] * shrink;
      for (std::size_t j = 0; j < count; ++j) {
        const std::size_t at = first + j;
        sum = std::fma(
            p[j], value_at(a.blocks[at / a.block_tokens], a.format, at % a.block_tokens * width + c), sum);
      }
      out[c] = sum;
    }
    best = best_now;
  }
  const float inverse = 1.0f / total;
  for (std::size_t c = 0; c < a.latent; ++c) out[c] = out[c] * inverse;
}

void attention(const Attention& a) {
  for (std::size_t r = 0; r < a.rows; ++r) {
    for (std::size_t h = 0; h < a.heads; ++h) {
      const std::size_t at = r * a.heads + h;
      attend(a, a.q + at * (a.latent + a.rope), a.first_position + r, a.out + at * a.latent);
    }
  }
}

void rmsnorm(const float* x, std::size_t x_stride, const float* weight, float eps, float* y,
             std::size_t y_stride, std::size_t rows, std::size_t width) {
  for (std::size_t r = 0; r < rows; ++r) {
    const float* in = x + r * x_stride;
    const float mean = dot(in, in, Format::f32, 0, width) / static_cast<float>(width);
    const float s = 1.0f / std::sqrt(mean + eps);
    for (std::size_t i = 0; i < width; ++i) y[r * y_stride + i] = in[i] * s * weight[i];
  }
}

void silu_mul(const float* gate, const float* up, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = gate[i] / (1.0f + exp_one(-gate[i])) * up[i];
}

void sigmoid(const float* x, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = sigmoid_one(x[i]);
}

void exp_all(const float* x, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = exp_one(x[i]);
}

}  // namespace

const Kernels& kernels_scalar() {
  static constexpr Kernels kernels{Path::scalar, matmul, attention, rmsnorm, silu_mul, sigmoid, exp_all};
  return kernels;
}

}  // namespace di::kernels
