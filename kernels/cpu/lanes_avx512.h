// kernels/cpu/lanes_avx512.h: sixteen floats in one register.  Included by avx512.cpp alone.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define DI_INLINE static inline __attribute__((always_inline))

namespace di::kernels {
namespace {

struct Lanes {
  __m512 v;
};

DI_INLINE __mmask16 first_lanes(std::size_t count) {
  return static_cast<__mmask16>((1u << count) - 1u);
}

DI_INLINE Lanes broadcast(float x) {
  return {_mm512_set1_ps(x)};
}
DI_INLINE Lanes load(const float* at) {
  return {_mm512_loadu_ps(at)};
}
DI_INLINE Lanes load(const std::uint16_t* at) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// The first `count` (below 16); the rest are zeros and not read.
DI_INLINE Lanes load_part(const float* at, std::size_t count) {
  return {_mm512_maskz_loadu_ps(first_lanes(count), at)};
}
DI_INLINE Lanes load_part(const std::uint16_t* at, std::size_t count) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), at));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
DI_INLINE void store(float* at, Lanes a) {
  _mm512_storeu_ps(at, a.v);
}
DI_INLINE void store_part(float* at, Lanes a, std::size_t count) {
  _mm512_mask_storeu_ps(at, first_lanes(count), a.v);
}

DI_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
DI_INLINE Lanes add(Lanes a, Lanes b) {
  return {_mm512_add_ps(a.v, b.v)};
}
DI_INLINE Lanes subtract(Lanes a, Lanes b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
DI_INLINE Lanes multiply(Lanes a, Lanes b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
DI_INLINE Lanes divide(Lanes a, Lanes b) {
  return {_mm512_div_ps(a.v, b.v)};
}
// The larger; b where a is NaN.
DI_INLINE Lanes larger(Lanes a, Lanes b) {
  return {_mm512_max_ps(a.v, b.v)};
}
DI_INLINE Lanes smaller(Lanes a, Lanes b) {
  return {_mm512_min_ps(a.v, b.v)};
}
DI_INLINE Lanes negate(Lanes a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(INT32_MIN)))};
}
// x where a > b, else 0.
DI_INLINE Lanes keep_above(Lanes a, Lanes b, Lanes x) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), x.v)};
}
// 2^n for whole n in -126 to 127.
DI_INLINE Lanes power_of_two(Lanes n) {
  const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(whole, 23))};
}
DI_INLINE float square_root(float x) {
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}

// Folds each of four in halves, as api.h says.
DI_INLINE void fold4(Lanes a, Lanes b, Lanes c, Lanes d, float* out) {
  // Halves of two side by side, then quarters of four: [a b c d], four lanes each.
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xee));
  const __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  const __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
  const __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
  const __m512i every_fourth = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(every_fourth, one)));
}

// Shapes of the inner loops: 32 registers.
constexpr std::size_t matmul_rows = 6;
constexpr std::size_t matmul_columns = 4;
constexpr std::size_t single_columns = 8;
constexpr std::size_t values_heads = 4;
constexpr std::size_t values_vectors = 4;

}  // namespace
}  // namespace di::kernels
