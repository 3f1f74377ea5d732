// engine/cpu_forward.h: one pass of a DeepSeek-V3 model over rows of many sequences.
//
// Owner: the engine thread.  All scratch is taken at creation for `rows_max` rows; a pass allocates
// nothing that grows with the model.  The caller drives it layer by layer, because cached KV may still be
// arriving:
//   begin(parts); for each range of layers { (keep(...);) layers(first, last); } logits(...);
// Each layer writes the KV of its rows into the pool, rounded to the cache's format, before any row
// attends; what a row reads is therefore the same whether it was computed here, a moment ago or elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/cpu_pool.h"
#include "engine/cpu_rotary.h"
#include "engine/cpu_weights.h"
#include "kernels/api.h"
#include "model/shape.h"

namespace di::engine {

// Consecutive tokens of one sequence.
struct ForwardPart {
  std::span<const std::uint32_t> tokens;  // ids below vocab
  std::uint32_t first_position = 0;       // of tokens[0]
  std::span<const std::uint32_t> blocks;  // pool blocks of the sequence from position 0
};

class CpuForward {
 public:
  // References must outlive the object.
  CpuForward(const model::Shape& shape, const CpuWeights& weights, const kernels::Kernels& kernels,
             CpuPool& pool, kernels::Format cache, std::uint32_t block_tokens, std::uint32_t rows_max);
  ~CpuForward();

  // Starts a pass with the embeddings of all parts; together at most rows_max tokens.  Parts must be of
  // different sequences; what their spans show must stay until the pass ends.
  void begin(std::vector<ForwardPart> parts);
  // Goes on with those parts whose entry is true; the others leave the pass.
  void keep(const std::vector<bool>& parts);
  void layers(std::uint32_t first, std::uint32_t last);
  [[nodiscard]] const std::vector<ForwardPart>& parts() const { return parts_; }

  // After the last layer: calls `done` for each of `rows` in order, with logits [vocab] that are valid
  // during the call.  Rows are taken together, so that the head is traversed once for many.
  struct Row {
    std::size_t part = 0;  // counts those that are left
    std::size_t row = 0;   // inside the part
  };
  void logits(const std::vector<Row>& rows,
              const std::function<void(const Row&, std::span<const float>)>& done);

 private:
  struct Scratch;

  void attention(const CpuLayer& layer, std::uint32_t index);
  void dense(const Mlp& mlp, const float* x, std::size_t rows, float* out);
  void experts(const CpuLayer& layer);
  void multiply(const float* x, std::size_t x_stride, const Matrix& w, float* y, std::size_t y_stride,
                std::size_t rows) const;

  const model::Shape& shape_;
  const CpuWeights& weights_;
  const kernels::Kernels& kernels_;
  CpuPool& pool_;
  const kernels::Format cache_;
  const std::uint32_t block_tokens_;
  const std::uint32_t rows_max_;
  const float scale_;
  const float eps_;
  Rotary rotary_;
  std::vector<ForwardPart> parts_;
  std::size_t rows_ = 0;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace di::engine
