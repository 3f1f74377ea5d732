#include "store/galois.h"

#include <isa-l/erasure_code.h>

#include "base/assert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace di::store {

#if defined(__x86_64__)

namespace {

// The matrix of gf2p8affineqb that multiplies with `factor`: bit j of its byte 7 - i says whether bit j of a
// byte adds to bit i of the product.
std::uint64_t matrix_of(std::uint8_t factor) {
  std::uint64_t matrix = 0;
  for (unsigned j = 0; j < 8; ++j) {
    const std::uint8_t product = gf_mul(factor, static_cast<unsigned char>(1u << j));
    for (unsigned i = 0; i < 8; ++i) {
      if ((product >> i & 1u) != 0) matrix |= std::uint64_t{1} << ((7 - i) * 8 + j);
    }
  }
  return matrix;
}

// Two vectors at a time: what one waits for the other does.
template <std::size_t rows>
__attribute__((target("avx512f,avx512bw,gfni"))) void combine(std::size_t bytes,
                                                              const std::uint64_t* matrices,
                                                              std::size_t sources,
                                                              const unsigned char* const* from,
                                                              unsigned char* const* to) {
  constexpr std::size_t width = sizeof(__m512i);
  std::size_t at = 0;
  for (; at + 2 * width <= bytes; at += 2 * width) {
    __m512i low[rows];
    __m512i high[rows];
    for (std::size_t r = 0; r < rows; ++r) low[r] = high[r] = _mm512_setzero_si512();
    for (std::size_t s = 0; s < sources; ++s) {
      const __m512i a = _mm512_loadu_si512(from[s] + at);
      const __m512i b = _mm512_loadu_si512(from[s] + at + width);
      for (std::size_t r = 0; r < rows; ++r) {
        const __m512i matrix = _mm512_set1_epi64(static_cast<long long>(matrices[r * sources + s]));
        low[r] = _mm512_xor_si512(low[r], _mm512_gf2p8affine_epi64_epi8(a, matrix, 0));
        high[r] = _mm512_xor_si512(high[r], _mm512_gf2p8affine_epi64_epi8(b, matrix, 0));
      }
    }
    for (std::size_t r = 0; r < rows; ++r) {
      _mm512_storeu_si512(to[r] + at, low[r]);
      _mm512_storeu_si512(to[r] + at + width, high[r]);
    }
  }
  while (at < bytes) {
    const std::size_t left = bytes - at < width ? bytes - at : width;
    const __mmask64 mask = left == width ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    __m512i sum[rows];
    for (std::size_t r = 0; r < rows; ++r) sum[r] = _mm512_setzero_si512();
    for (std::size_t s = 0; s < sources; ++s) {
      const __m512i a = _mm512_maskz_loadu_epi8(mask, from[s] + at);
      for (std::size_t r = 0; r < rows; ++r) {
        const __m512i matrix = _mm512_set1_epi64(static_cast<long long>(matrices[r * sources + s]));
        sum[r] = _mm512_xor_si512(sum[r], _mm512_gf2p8affine_epi64_epi8(a, matrix, 0));
      }
    }
    for (std::size_t r = 0; r < rows; ++r) _mm512_mask_storeu_epi8(to[r] + at, mask, sum[r]);
    at += left;
  }
}

}  // namespace

Products::Way Products::best() {
  return __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512f") &&
                 __builtin_cpu_supports("avx512bw")
             ? Way::gfni
             : Way::isal;
}

#else

namespace {

std::uint64_t matrix_of(std::uint8_t) {
  return 0;
}

template <std::size_t rows>
void combine(std::size_t, const std::uint64_t*, std::size_t, const unsigned char* const*,
             unsigned char* const*) {
  DI_PANIC("this processor has no such instructions");
}

}  // namespace

Products::Way Products::best() {
  return Way::isal;
}

#endif

namespace galois {

std::uint8_t multiply(std::uint8_t a, std::uint8_t b) {
  return gf_mul(a, b);
}

void reed_solomon(std::span<std::uint8_t> matrix, std::size_t rows, std::size_t columns) {
  DI_ASSERT(matrix.size() >= rows * columns);
  gf_gen_rs_matrix(matrix.data(), static_cast<int>(rows), static_cast<int>(columns));
}

bool invert(std::span<std::uint8_t> matrix, std::span<std::uint8_t> inverse, std::size_t size) {
  DI_ASSERT(matrix.size() >= size * size && inverse.size() >= size * size);
  return gf_invert_matrix(matrix.data(), inverse.data(), static_cast<int>(size)) == 0;
}

}  // namespace galois

void Products::set(std::span<const std::uint8_t> factors, std::size_t sources, std::size_t rows) {
  DI_ASSERT(sources <= sources_max && rows <= rows_max && factors.size() == sources * rows);
  sources_ = sources;
  rows_ = rows;
  if (sources == 0 || rows == 0) return;
  if (way_ == Way::gfni) {
    for (std::size_t i = 0; i < factors.size(); ++i) matrices_[i] = matrix_of(factors[i]);
    return;
  }
  // ISA-L's parameter is not const; it only reads.
  ec_init_tables(static_cast<int>(sources), static_cast<int>(rows),
                 const_cast<unsigned char*>(factors.data()), tables_.data());
}

void Products::run(std::size_t bytes, std::span<const unsigned char* const> from,
                   std::span<unsigned char* const> to) const {
  DI_ASSERT(from.size() == sources_ && to.size() == rows_ && sources_ > 0);
  if (way_ == Way::gfni) {
    switch (rows_) {
      case 1:
        return combine<1>(bytes, matrices_.data(), sources_, from.data(), to.data());
      case 2:
        return combine<2>(bytes, matrices_.data(), sources_, from.data(), to.data());
      case 3:
        return combine<3>(bytes, matrices_.data(), sources_, from.data(), to.data());
      case 4:
        return combine<4>(bytes, matrices_.data(), sources_, from.data(), to.data());
      default:
        return;
    }
  }
  ec_encode_data(static_cast<int>(bytes), static_cast<int>(sources_), static_cast<int>(rows_),
                 const_cast<unsigned char*>(tables_.data()), const_cast<unsigned char**>(from.data()),
                 const_cast<unsigned char**>(to.data()));
}

}  // namespace di::store
