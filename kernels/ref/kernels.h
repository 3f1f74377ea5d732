// kernels/ref/kernels.h: the scalar path, behind kernels_for().
#pragma once

#include "kernels/api.h"

namespace di::kernels {

[[nodiscard]] const Kernels& kernels_scalar();

}  // namespace di::kernels
