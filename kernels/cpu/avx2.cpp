// kernels/cpu/avx2.cpp: the AVX2 path; compiled with -mavx2 -mfma.
#include "kernels/cpu/lanes_avx2.h"
// The lanes come first: the kernels are written over them.
#include "kernels/cpu/paths.h"
#include "kernels/cpu/vector_kernels.h"

namespace di::kernels {

const Kernels& kernels_avx2() {
  static constexpr Kernels kernels{Path::avx2, matmul, attention, rmsnorm, silu_mul, sigmoid, exp_all};
  return kernels;
}

}  // namespace di::kernels
