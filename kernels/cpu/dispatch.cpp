// kernels/cpu/dispatch.cpp: which path this processor can take.
#include <initializer_list>

#include "kernels/cpu/paths.h"
#include "kernels/ref/kernels.h"

namespace di::kernels {

namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace

const Kernels* kernels_for(Path path) {
  switch (path) {
    case Path::scalar:
      return &kernels_scalar();
    case Path::avx2:
      return has_avx2() ? &kernels_avx2() : nullptr;
    case Path::avx512:
      return has_avx512() ? &kernels_avx512() : nullptr;
  }
  return nullptr;
}

const Kernels& kernels_best() {
  for (const Path path : {Path::avx512, Path::avx2}) {
    if (const Kernels* kernels = kernels_for(path)) return *kernels;
  }
  return kernels_scalar();
}

const char* path_name(Path path) {
  switch (path) {
    case Path::scalar:
      return "scalar";
    case Path::avx2:
      return "avx2";
    case Path::avx512:
      return "avx512";
  }
  return "";
}

std::size_t attention_scratch_count(std::size_t heads, std::size_t latent, std::size_t rope) {
  const auto padded = [](std::size_t count) { return (count + lanes - 1) / lanes * lanes; };
  const std::size_t queries = attention_rows_max * heads;
  const std::size_t row = padded(latent + rope);
  return attention_tile_tokens * row + queries * (row + attention_tile_tokens + padded(latent) + 3);
}

}  // namespace di::kernels
