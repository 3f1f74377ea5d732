// kernels/cpu/vector_kernels.h: the kernels over sixteen lanes, written once for every register width.
// avx2.cpp and avx512.cpp each include it after their lanes_*.h.
//
// Those files are compiled with their own -m flags, so nothing here may call an inline function of another
// header: the linker keeps one copy of such a function for the whole program, and it could be the one with
// instructions that the processor lacks.
//
// matmul: matmul_rows x matmul_columns accumulators stay in registers over the whole k; weights are
// traversed once for each panel of activation rows that fits the L2 cache.
// attention: a tile of 64 cache rows is widened to float32 once for up to attention_rows_max queries of the
// sequence (64 x 576 x 4 = 144 KiB for V3, 20 KiB for the demo model); scores are a matmul with the tile as
// weights; values are summed with values_heads x values_vectors accumulators in registers.

#pragma once

#include "kernels/api.h"

namespace di::kernels {
namespace {

constexpr float infinity = __builtin_inff();

DI_INLINE std::size_t padded(std::size_t count) {
  return (count + lanes - 1) / lanes * lanes;
}
DI_INLINE std::size_t least(std::size_t a, std::size_t b) {
  return a < b ? a : b;
}

DI_INLINE Lanes exp_lanes(Lanes x) {
  const Lanes low = broadcast(-87.33f);
  const Lanes to_integer = broadcast(12582912.0f);
  const Lanes capped = smaller(x, broadcast(88.37f));
  const Lanes n = subtract(fma(capped, broadcast(1.44269504f), to_integer), to_integer);
  Lanes r = fma(n, broadcast(-0.693359375f), capped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Lanes p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  const Lanes y = add(fma(p, multiply(r, r), r), broadcast(1.0f));
  return keep_above(x, low, multiply(y, power_of_two(n)));
}

DI_INLINE float exp_one(float x) {
  float out[lanes];
  store(out, exp_lanes(broadcast(x)));
  return out[0];
}

DI_INLINE float fold(Lanes a) {
  float out[4];
  fold4(a, a, a, a, out);
  return out[0];
}

// R rows of x against C rows of w, each w_stride apart.
template <std::size_t R, std::size_t C, class W>
DI_INLINE void matmul_block(const float* x, std::size_t x_stride, const W* w, std::size_t w_stride,
                            std::size_t k, float* y, std::size_t y_stride) {
  Lanes acc[R * C];
#pragma GCC unroll 32
  for (std::size_t i = 0; i < R * C; ++i) acc[i] = broadcast(0.0f);
  const std::size_t whole = k / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    Lanes wide[C];
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) wide[c] = load(w + c * w_stride + i);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; ++r) {
      const Lanes a = load(x + r * x_stride + i);
#pragma GCC unroll 8
      for (std::size_t c = 0; c < C; ++c) acc[r * C + c] = fma(a, wide[c], acc[r * C + c]);
    }
  }
  if (whole < k) {
    Lanes wide[C];
#pragma GCC unroll 8
    for (std::size_t c = 0; c < C; ++c) wide[c] = load_part(w + c * w_stride + whole, k - whole);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; ++r) {
      const Lanes a = load_part(x + r * x_stride + whole, k - whole);
#pragma GCC unroll 8
      for (std::size_t c = 0; c < C; ++c) acc[r * C + c] = fma(a, wide[c], acc[r * C + c]);
    }
  }
  if constexpr (C % 4 == 0) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < R * C; i += 4) {
      fold4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], y + i / C * y_stride + i % C);
    }
  } else {
    const Lanes none = broadcast(0.0f);
#pragma GCC unroll 8
    for (std::size_t i = 0; i < R * C; i += 4) {
      float sum[4];
      fold4(acc[i], i + 1 < R * C ? acc[i + 1] : none, i + 2 < R * C ? acc[i + 2] : none,
            i + 3 < R * C ? acc[i + 3] : none, sum);
      for (std::size_t j = i; j < i + 4 && j < R * C; ++j) y[j / C * y_stride + j % C] = sum[j - i];
    }
  }
}

// All rows of a panel against C rows of w.
template <std::size_t C, class W>
static void matmul_columns_of(const float* x, std::size_t x_stride, std::size_t rows, const W* w,
                              std::size_t w_stride, std::size_t k, float* y, std::size_t y_stride) {
  std::size_t r = 0;
  for (; r + matmul_rows <= rows; r += matmul_rows) {
    matmul_block<matmul_rows, C>(x + r * x_stride, x_stride, w, w_stride, k, y + r * y_stride, y_stride);
  }
  for (; r + 2 <= rows; r += 2) {
    matmul_block<2, C>(x + r * x_stride, x_stride, w, w_stride, k, y + r * y_stride, y_stride);
  }
  if (r < rows) matmul_block<1, C>(x + r * x_stride, x_stride, w, w_stride, k, y + r * y_stride, y_stride);
}

template <class W>
static void matmul_any(const float* x, std::size_t x_stride, std::size_t rows, const W* w,
                       std::size_t w_stride, std::size_t n, std::size_t k, float* y, std::size_t y_stride) {
  // Half an L2 cache of 1 MiB for the panel's activations.
  constexpr std::size_t panel_values = (std::size_t{512} << 10) / sizeof(float);
  std::size_t panel = panel_values / (k > 0 ? k : 1) / matmul_rows * matmul_rows;
  if (panel < 4 * matmul_rows) panel = 4 * matmul_rows;
  for (std::size_t first = 0; first < rows; first += panel) {
    const std::size_t count = least(panel, rows - first);
    const float* in = x + first * x_stride;
    float* out = y + first * y_stride;
    std::size_t c = 0;
    // One row alone is bound by latency: more columns at once are more chains.
    if (count == 1) {
      for (; c + single_columns <= n; c += single_columns) {
        matmul_block<1, single_columns>(in, x_stride, w + c * w_stride, w_stride, k, out + c, y_stride);
      }
    }
    for (; c + matmul_columns <= n; c += matmul_columns) {
      matmul_columns_of<matmul_columns>(in, x_stride, count, w + c * w_stride, w_stride, k, out + c,
                                        y_stride);
    }
    for (; c < n; ++c)
      matmul_columns_of<1>(in, x_stride, count, w + c * w_stride, w_stride, k, out + c, y_stride);
  }
}

void matmul(const Matmul& m) {
  if (m.format == Format::f32) {
    matmul_any(m.x, m.x_stride, m.rows, static_cast<const float*>(m.w), m.k, m.n, m.k, m.y, m.y_stride);
  } else {
    matmul_any(m.x, m.x_stride, m.rows, static_cast<const std::uint16_t*>(m.w), m.k, m.n, m.k, m.y,
               m.y_stride);
  }
}

// Widens one cache row to `width` floats and zeros up to a whole vector.
template <class T>
DI_INLINE void widen_row(const T* from, std::size_t width, float* to) {
  const std::size_t whole = width / lanes * lanes;
  for (std::size_t i = 0; i < whole; i += lanes) store(to + i, load(from + i));
  if (whole < width) store(to + whole, load_part(from + whole, width - whole));
}

// Values [0, 16 * V) of H heads: sums[h] = sums[h] * shrink[h] + sum over j of p[h][j] * tile[j].
template <std::size_t H, std::size_t V>
DI_INLINE void values_block(const float* p, const float* shrink, const float* tile, std::size_t stride,
                            std::size_t count, float* sums, std::size_t sums_stride) {
  Lanes acc[H * V];
#pragma GCC unroll 8
  for (std::size_t h = 0; h < H; ++h) {
    const Lanes by = broadcast(shrink[h]);
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v)
      acc[h * V + v] = multiply(load(sums + h * sums_stride + v * lanes), by);
  }
  for (std::size_t j = 0; j < count; ++j) {
    Lanes value[V];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v) value[v] = load(tile + j * stride + v * lanes);
#pragma GCC unroll 8
    for (std::size_t h = 0; h < H; ++h) {
      const Lanes weight = broadcast(p[h * attention_tile_tokens + j]);
#pragma GCC unroll 8
      for (std::size_t v = 0; v < V; ++v) acc[h * V + v] = fma(weight, value[v], acc[h * V + v]);
    }
  }
#pragma GCC unroll 8
  for (std::size_t h = 0; h < H; ++h) {
#pragma GCC unroll 8
    for (std::size_t v = 0; v < V; ++v) store(sums + h * sums_stride + v * lanes, acc[h * V + v]);
  }
}

template <std::size_t H>
static void values_of(const float* p, const float* shrink, const float* tile, std::size_t stride,
                      std::size_t count, std::size_t latent, float* sums, std::size_t sums_stride) {
  std::size_t c = 0;
  for (; c + values_vectors * lanes <= latent; c += values_vectors * lanes) {
    values_block<H, values_vectors>(p, shrink, tile + c, stride, count, sums + c, sums_stride);
  }
  for (; c < latent; c += lanes)
    values_block<H, 1>(p, shrink, tile + c, stride, count, sums + c, sums_stride);
}

void attention(const Attention& a) {
  const std::size_t width = a.latent + a.rope;
  const std::size_t stride = padded(width);
  const std::size_t sums_stride = padded(a.latent);
  const std::size_t queries_max = attention_rows_max * a.heads;
  float* tile = a.scratch;                                    // [64, stride]
  float* q = tile + attention_tile_tokens * stride;           // [queries, stride]
  float* score = q + queries_max * stride;                    // [queries, 64]
  float* sums = score + queries_max * attention_tile_tokens;  // [queries, sums_stride]
  float* best = sums + queries_max * sums_stride;             // [queries]
  float* total = best + queries_max;                          // [queries]
  float* shrink = total + queries_max;                        // [queries]

  for (std::size_t row0 = 0; row0 < a.rows; row0 += attention_rows_max) {
    const std::size_t rows = least(attention_rows_max, a.rows - row0);
    const std::size_t queries = rows * a.heads;
    const std::size_t position0 = a.first_position + row0;
    for (std::size_t i = 0; i < queries; ++i) {
      widen_row(a.q + (row0 * a.heads + i) * width, width, q + i * stride);
      for (std::size_t c = 0; c < sums_stride; ++c) sums[i * sums_stride + c] = 0.0f;
      best[i] = -infinity;
      total[i] = 0.0f;
    }

    for (std::size_t first = 0; first < position0 + rows; first += attention_tile_tokens) {
      const std::size_t tile_count = least(attention_tile_tokens, position0 + rows - first);
      for (std::size_t j = 0; j < tile_count; ++j) {
        const std::size_t at = first + j;
        const std::byte* block = a.blocks[at / a.block_tokens];
        const std::size_t value0 = at % a.block_tokens * width;
        if (a.format == Format::f32) {
          widen_row(reinterpret_cast<const float*>(block) + value0, width, tile + j * stride);
        } else {
          widen_row(reinterpret_cast<const std::uint16_t*>(block) + value0, width, tile + j * stride);
        }
      }
      // Scores of positions that a row does not see are computed and not looked at.
      matmul_any(q, stride, queries, tile, stride, tile_count, stride, score, attention_tile_tokens);

      for (std::size_t r = 0; r < rows; ++r) {
        if (position0 + r < first) continue;
        const std::size_t count = least(attention_tile_tokens, position0 + r + 1 - first);
        const std::size_t query0 = r * a.heads;
        for (std::size_t i = query0; i < query0 + a.heads; ++i) {
          float* p = score + i * attention_tile_tokens;
          const Lanes scale = broadcast(a.scale);
          for (std::size_t j = count; j < attention_tile_tokens; ++j) p[j] = -infinity;
          Lanes most = broadcast(best[i]);
          for (std::size_t j = 0; j < attention_tile_tokens; j += lanes) {
            // A score that was not computed is -inf by now, whatever the sign of the scale.
            const Lanes scaled = j + lanes <= count ? multiply(load(p + j), scale) : load(p + j);
            store(p + j, scaled);
          }
          for (std::size_t j = count / lanes * lanes; j < count; ++j) p[j] = p[j] * a.scale;
          for (std::size_t j = 0; j < attention_tile_tokens; j += lanes) most = larger(load(p + j), most);
          float lane[lanes];
          store(lane, most);
          float best_now = lane[0];
          for (std::size_t l = 1; l < lanes; ++l) best_now = lane[l] > best_now ? lane[l] : best_now;

          shrink[i] = exp_one(best[i] - best_now);
          const Lanes base = broadcast(best_now);
          Lanes sum = broadcast(0.0f);
          for (std::size_t j = 0; j < attention_tile_tokens; j += lanes) {
            const Lanes weight = exp_lanes(subtract(load(p + j), base));
            store(p + j, weight);
            sum = add(sum, weight);
          }
          total[i] = __builtin_fmaf(total[i], shrink[i], fold(sum));
          best[i] = best_now;
        }
        std::size_t i = query0;
        for (; i + values_heads <= query0 + a.heads; i += values_heads) {
          values_of<values_heads>(score + i * attention_tile_tokens, shrink + i, tile, stride, count,
                                  a.latent, sums + i * sums_stride, sums_stride);
        }
        for (; i < query0 + a.heads; ++i) {
          values_of<1>(score + i * attention_tile_tokens, shrink + i, tile, stride, count, a.latent,
                       sums + i * sums_stride, sums_stride);
        }
      }
    }

    for (std::size_t i = 0; i < queries; ++i) {
      const Lanes inverse = broadcast(1.0f / total[i]);
      float* out = a.out + (row0 * a.heads + i) * a.latent;
      for (std::size_t c = 0; c < a.latent; c += lanes) {
        const Lanes value = multiply(load(sums + i * sums_stride + c), inverse);
        if (c + lanes <= a.latent) {
          store(out + c, value);
        } else {
          store_part(out + c, value, a.latent - c);
        }
      }
    }
  }
}

void rmsnorm(const float* x, std::size_t x_stride, const float* weight, float eps, float* y,
             std::size_t y_stride, std::size_t rows, std::size_t width) {
  const std::size_t whole = width / lanes * lanes;
  for (std::size_t r = 0; r < rows; ++r) {
    const float* in = x + r * x_stride;
    float* out = y + r * y_stride;
    Lanes acc = broadcast(0.0f);
    for (std::size_t i = 0; i < whole; i += lanes) acc = fma(load(in + i), load(in + i), acc);
    if (whole < width) {
      const Lanes part = load_part(in + whole, width - whole);
      acc = fma(part, part, acc);
    }
    const float mean = fold(acc) / static_cast<float>(width);
    const Lanes s = broadcast(1.0f / square_root(mean + eps));
    for (std::size_t i = 0; i < whole; i += lanes) {
      store(out + i, multiply(multiply(load(in + i), s), load(weight + i)));
    }
    if (whole < width) {
      const std::size_t rest = width - whole;
      store_part(out + whole,
                 multiply(multiply(load_part(in + whole, rest), s), load_part(weight + whole, rest)), rest);
    }
  }
}

DI_INLINE Lanes silu_mul_lanes(Lanes gate, Lanes up) {
  return multiply(divide(gate, add(broadcast(1.0f), exp_lanes(negate(gate)))), up);
}

void silu_mul(const float* gate, const float* up, float* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) store(out + i, silu_mul_lanes(load(gate + i), load(up + i)));
  if (i < count) {
    store_part(out + i, silu_mul_lanes(load_part(gate + i, count - i), load_part(up + i, count - i)),
               count - i);
  }
}

DI_INLINE Lanes sigmoid_lanes(Lanes x) {
  return divide(broadcast(1.0f), add(broadcast(1.0f), exp_lanes(negate(x))));
}

void sigmoid(const float* x, float* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) store(out + i, sigmoid_lanes(load(x + i)));
  if (i < count) store_part(out + i, sigmoid_lanes(load_part(x + i, count - i)), count - i);
}

void exp_all(const float* x, float* out, std::size_t count) {
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) store(out + i, exp_lanes(load(x + i)));
  if (i < count) store_part(out + i, exp_lanes(load_part(x + i, count - i)), count - i);
}

}  // namespace
}  // namespace di::kernels
