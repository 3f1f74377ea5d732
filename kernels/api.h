// kernels/api.h: the arithmetic of the engine on CPUs.
//
// Pure functions over memory of the caller: no allocation, no state, nothing to fail.  Sizes are
// element counts, shapes are written slowest first, activations are float32, and weights are float32 or
// BF16 and widened exactly before use.  Outputs may not alias inputs unless said.
//
// There are three paths (scalar, AVX2, AVX-512) and they give the same bits:
//   - A sum over k has 16 lanes.  Lane i starts at +0 and takes the products of k = i, i + 16, ... in that
//     order, each by one fused multiply-add; k is padded to a multiple of 16 with zeros.  The lanes then
//     fold in halves: i + (i + 8), i + (i + 4), i + (i + 2), i + (i + 1).
//   - A sum over the positions of an attention tile has one accumulator per output channel and takes
//     positions in ascending order, so lanes never meet.
//   - exp is ours (below); everything else is a single IEEE operation.
// No element depends on how many rows a call has or which: a row alone gives the bits it gives in a batch.
// Reference: ref/kernels.cpp.  Tolerance against it: none, bits are equal.
#pragma once

#include <cstddef>
#include <cstdint>

namespace di::kernels {

enum class Path : std::uint8_t { scalar, avx2, avx512 };
enum class Format : std::uint8_t { f32, bf16 };

inline constexpr std::size_t lanes = 16;
inline constexpr std::size_t attention_tile_tokens = 64;
// Rows that share one look at a tile; bounds the scratch of attention.
inline constexpr std::size_t attention_rows_max = 8;

// Rows times the transpose of a weight matrix: y[r][n] = sum over k of x[r][k] * w[n][k].
struct Matmul {
  const float* x = nullptr;  // [rows, k], rows x_stride apart
  std::size_t x_stride = 0;
  const void* w = nullptr;  // [n, k], contiguous
  Format format = Format::f32;
  float* y = nullptr;  // [rows, n], rows y_stride apart
  std::size_t y_stride = 0;
  std::size_t rows = 0;
  std::size_t n = 0;
  std::size_t k = 0;
};

// Multi-head latent attention in the absorbed form: all heads share one cache row per position, of which
// the first `latent` values are key and value and the last `rope` are key only.  Row r stands at position
// first_position + r of one sequence and sees positions 0 to its own.  Softmax runs over tiles of 64
// positions that start at multiples of 64, so that a row's result depends only on its query and the cache.
struct Attention {
  const float* q = nullptr;  // [rows, heads, latent + rope]
  float* out = nullptr;      // [rows, heads, latent]
  const std::byte* const* blocks =
      nullptr;  // cache blocks of the sequence: [block_tokens, latent + rope] each
  std::size_t block_tokens = 0;
  Format format = Format::bf16;  // of the cache
  std::size_t rows = 0;
  std::size_t heads = 0;
  std::size_t latent = 0;
  std::size_t rope = 0;
  std::size_t first_position = 0;
  float scale = 0.0f;
  float* scratch = nullptr;  // attention_scratch_count() floats, aligned to 64 bytes
};
[[nodiscard]] std::size_t attention_scratch_count(std::size_t heads, std::size_t latent, std::size_t rope);

// One path.
struct Kernels {
  Path path;
  void (*matmul)(const Matmul&);
  void (*attention)(const Attention&);
  // y[r][i] = (x[r][i] * s) * weight[i], s = 1 / sqrt(sum of squares / width + eps).  x [rows, width] and
  // y [rows, width], each with its own distance between rows; y may be x.
  void (*rmsnorm)(const float* x, std::size_t x_stride, const float* weight, float eps, float* y,
                  std::size_t y_stride, std::size_t rows, std::size_t width);
  // out[i] = gate[i] / (1 + exp(-gate[i])) * up[i].  out may be gate or up.
  void (*silu_mul)(const float* gate, const float* up, float* out, std::size_t count);
  // out[i] = 1 / (1 + exp(-x[i])).  out may be x.
  void (*sigmoid)(const float* x, float* out, std::size_t count);
  // e^x to within 2 ulp.  Below -87.33 and for NaN the result is 0; above 88.37 it is e^88.37, so that it
  // is always finite.  out may be x.
  void (*exp)(const float* x, float* out, std::size_t count);
};

// Null when this processor does not have the path.
[[nodiscard]] const Kernels* kernels_for(Path path);
// The widest path this processor has.
[[nodiscard]] const Kernels& kernels_best();
[[nodiscard]] const char* path_name(Path path);

// ---- too small for a vector path: one implementation -----------------------------------------------

// Turns pairs (x[2i], x[2i + 1]) by angle i in place: x [2 * pairs], cosine and sine [pairs].
void rope(float* x, const float* cosine, const float* sine, std::size_t pairs);

// To the nearest BF16, ties to even; NaN stays NaN.
[[nodiscard]] std::uint16_t bf16_round(float value);
[[nodiscard]] float bf16_widen(std::uint16_t value);
// `count` values from `source`, exact.
void widen(const void* source, Format format, float* out, std::size_t count);
// `count` values to `target`, rounded where its format is narrower.
void narrow(const float* source, Format format, void* target, std::size_t count);

// Chooses experts for one token.  The bias takes part in choosing only.  A group's score is the sum of its
// two best biased scores; experts outside the best groups_kept groups cannot be chosen.  Ties go to the lower
// index.  Weights are the scores of the chosen, divided by their sum when `normalize`, times `scale`.
struct Routing {
  const float* score = nullptr;  // [experts], after the sigmoid
  const float* bias = nullptr;   // [experts]
  std::size_t experts = 0;
  std::size_t groups = 1;  // divides experts
  std::size_t groups_kept = 1;
  std::size_t chosen = 1;  // at most experts / groups * groups_kept
  bool normalize = true;
  float scale = 1.0f;
};
// expert [chosen] in ascending order and weight [chosen] beside it; scratch [experts + groups].
void route(const Routing& routing, std::uint32_t* expert, float* weight, float* scratch);

}  // namespace di::kernels
