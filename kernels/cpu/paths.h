// kernels/cpu/paths.h: the vector paths, behind kernels_for().  Calling one on a processor without its
// instructions is a crash, so only dispatch.cpp does.
#pragma once

#include "kernels/api.h"

namespace di::kernels {

[[nodiscard]] const Kernels& kernels_avx2();
[[nodiscard]] const Kernels& kernels_avx512();

}  // namespace di::kernels
