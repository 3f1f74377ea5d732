// engine/cpu_weights.h: the tensors of a DeepSeek-V3 checkpoint under the names a forward pass uses.
//
// Immutable after creation.  Matrices are used where they lie in the mapped files; norms and the router's
// bias, which are small, are widened to float32; the key half of kv_b_proj is copied transposed, because
// the absorbed form multiplies from its other side and kernels want k to be the fast dimension.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "kernels/api.h"
#include "model/shape.h"
#include "model/weights.h"

namespace di::engine {

// Row-major [n, k]; a view.
struct Matrix {
  const std::byte* data = nullptr;
  kernels::Format format = kernels::Format::f32;
  std::size_t n = 0;
  std::size_t k = 0;
};

// down(silu(gate x) * up x).
struct Mlp {
  Matrix gate;
  Matrix up;
  Matrix down;
};

struct CpuLayer {
  std::vector<float> attention_norm;  // [hidden]
  std::vector<float> mlp_norm;        // [hidden]

  Matrix q_a;                  // [q_lora, hidden]; without q_lora it has no rows
  std::vector<float> q_norm;   // [q_lora]
  Matrix q_b;                  // [heads * (qk_nope + qk_rope), q_lora, or hidden without it]
  Matrix kv_a;                 // [kv_lora + qk_rope, hidden]
  std::vector<float> kv_norm;  // [kv_lora]
  std::unique_ptr<std::byte[]> key_data;
  std::vector<Matrix> key;    // for each head [kv_lora, qk_nope], in key_data
  std::vector<Matrix> value;  // for each head [v_head, kv_lora]
  Matrix output;              // [hidden, heads * v_head]

  Mlp mlp;                         // of a dense layer, or the shared experts (no rows when there are none)
  Matrix router;                   // [experts, hidden]; a dense layer's has no rows
  std::vector<float> router_bias;  // [experts]
  std::vector<Mlp> experts;
};

struct CpuWeights {
  Matrix embedding;  // [vocab, hidden]
  std::vector<CpuLayer> layers;
  std::vector<float> norm;  // [hidden]
  Matrix head;              // [vocab, hidden]

  // `weights` must outlive the result.  Errors name the file and the tensor.
  [[nodiscard]] static Result<CpuWeights> bind(const model::Weights& weights, const model::Shape& shape);
};

}  // namespace di::engine
