// kernels/cpu/lanes_avx2.h: sixteen floats in two registers.  Included by avx2.cpp alone.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define DI_INLINE static inline __attribute__((always_inline))

namespace di::kernels {
namespace {

struct Lanes {
  __m256 lo;
  __m256 hi;
};

DI_INLINE Lanes broadcast(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
DI_INLINE Lanes load(const float* at) {
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
DI_INLINE __m256 load_half(const std::uint16_t* at) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
DI_INLINE Lanes load(const std::uint16_t* at) {
  return {load_half(at), load_half(at + 8)};
}
// The first `count` (below 16); the rest are zeros and not read.
DI_INLINE Lanes load_part(const float* at, std::size_t count) {
  float part[16] = {};
  for (std::size_t i = 0; i < count; ++i) part[i] = at[i];
  return load(part);
}
DI_INLINE Lanes load_part(const std::uint16_t* at, std::size_t count) {
  std::uint16_t part[16] = {};
  for (std::size_t i = 0; i < count; ++i) part[i] = at[i];
  return load(part);
}
DI_INLINE void store(float* at, Lanes a) {
  _mm256_storeu_ps(at, a.lo);
  _mm256_storeu_ps(at + 8, a.hi);
}
DI_INLINE void store_part(float* at, Lanes a, std::size_t count) {
  float part[16];
  store(part, a);
  for (std::size_t i = 0; i < count; ++i) at[i] = part[i];
}

DI_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
DI_INLINE Lanes add(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
DI_INLINE Lanes subtract(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
DI_INLINE Lanes multiply(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
DI_INLINE Lanes divide(Lanes a, Lanes b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// The larger; b where a is NaN.
DI_INLINE Lanes larger(Lanes a, Lanes b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
DI_INLINE Lanes smaller(Lanes a, Lanes b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
DI_INLINE Lanes negate(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
// x where a > b, else 0.
DI_INLINE Lanes keep_above(Lanes a, Lanes b, Lanes x) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), x.lo),
          _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ), x.hi)};
}
DI_INLINE __m256 power_of_two_half(__m256 n) {
  const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(whole, 23));
}
// 2^n for whole n in -126 to 127.
DI_INLINE Lanes power_of_two(Lanes n) {
  return {power_of_two_half(n.lo), power_of_two_half(n.hi)};
}
DI_INLINE float square_root(float x) {
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}

// Folds each of four in halves, as api.h says.
DI_INLINE void fold4(Lanes a, Lanes b, Lanes c, Lanes d, float* out) {
  const __m256 a8 = _mm256_add_ps(a.lo, a.hi);
  const __m256 b8 = _mm256_add_ps(b.lo, b.hi);
  const __m256 c8 = _mm256_add_ps(c.lo, c.hi);
  const __m256 d8 = _mm256_add_ps(d.lo, d.hi);
  // [a b] and [c d], four lanes each, then two lanes of each: [a a c c] [b b d d].
  const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a8, b8, 0x20), _mm256_permute2f128_ps(a8, b8, 0x31));
  const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c8, d8, 0x20), _mm256_permute2f128_ps(c8, d8, 0x31));
  const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
}

// Shapes of the inner loops: 16 registers, two to a Lanes.
constexpr std::size_t matmul_rows = 4;
constexpr std::size_t matmul_columns = 1;
constexpr std::size_t single_columns = 4;
constexpr std::size_t values_heads = 4;
constexpr std::size_t values_vectors = 1;

}  // namespace
}  // namespace di::kernels
