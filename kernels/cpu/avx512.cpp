// kernels/cpu/avx512.cpp: the AVX-512 path; compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq.
#include "kernels/cpu/lanes_avx512.h"
// The lanes come first: the kernels are written over them.
#include "kernels/cpu/paths.h"
#include "kernels/cpu/vector_kernels.h"

namespace di::kernels {

const Kernels& kernels_avx512() {
  static constexpr Kernels kernels{Path::avx512, matmul, attention, rmsnorm, silu_mul, sigmoid, exp_all};
  return kernels;
}

}  // namespace di::kernels
