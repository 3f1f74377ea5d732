// model/tensor.h: a look at one weight where it lies in a mapped file.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/assert.h"
#include "base/bytes.h"

namespace di::model {

inline constexpr std::size_t tensor_rank_max = 8;

// The element types that weights may have; a file may hold others as long as nobody asks for them.
enum class Dtype : std::uint8_t { f32, bf16 };

[[nodiscard]] constexpr std::size_t dtype_bytes(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : 2;
}
[[nodiscard]] constexpr std::string_view dtype_name(Dtype dtype) {
  return dtype == Dtype::f32 ? "F32" : "BF16";
}

// `data` is row-major, slowest dimension first, aligned to its element, and valid as long as the
// Weights it came from.  Elements are little-endian, as is every machine this builds for.
struct Tensor {
  Dtype dtype = Dtype::f32;
  std::vector<std::uint64_t> dims;
  ByteView data;

  [[nodiscard]] std::uint64_t count() const { return data.size() / dtype_bytes(dtype); }
  [[nodiscard]] const float* f32() const {
    DI_ASSERT(dtype == Dtype::f32);
    return reinterpret_cast<const float*>(data.data());
  }
  [[nodiscard]] const std::uint16_t* bf16() const {
    DI_ASSERT(dtype == Dtype::bf16);
    return reinterpret_cast<const std::uint16_t*>(data.data());
  }
};

}  // namespace di::model
