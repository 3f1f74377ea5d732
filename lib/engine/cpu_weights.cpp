#include "engine/cpu_weights.h"

#include <cstring>
#include <optional>

namespace di::engine {

namespace {

kernels::Format format_of(model::Dtype dtype) {
  return dtype == model::Dtype::f32 ? kernels::Format::f32 : kernels::Format::bf16;
}

// Keeps the first error, so that the reading below is a flat list of names.
class Binder {
 public:
  explicit Binder(const model::Weights& weights) : weights_(weights) {}

  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

  Matrix matrix(const std::string& name, std::size_t n, std::size_t k) {
    const auto tensor = weights_.tensor(name + ".weight", {n, k});
    if (!tensor) return fail(tensor.error()), Matrix{};
    return {tensor->data.data(), format_of(tensor->dtype), n, k};
  }
  std::vector<float> vector(const std::string& name, std::size_t n) {
    const auto tensor = weights_.tensor(name, {n});
    if (!tensor) return fail(tensor.error()), std::vector<float>{};
    std::vector<float> out(n);
    kernels::widen(tensor->data.data(), format_of(tensor->dtype), out.data(), n);
    return out;
  }
  Mlp mlp(const std::string& name, std::size_t hidden, std::size_t width) {
    return {matrix(name + ".gate_proj", width, hidden), matrix(name + ".up_proj", width, hidden),
            matrix(name + ".down_proj", hidden, width)};
  }

 private:
  void fail(const Error& error) {
    if (!error_) error_ = error;
  }

  const model::Weights& weights_;
  std::optional<Error> error_;
};

// Splits kv_b_proj [heads * (qk_nope + v_head), kv_lora] by head: keys transposed, values in place.
void split_kv_b(const Matrix& kv_b, const model::Shape& shape, CpuLayer& layer) {
  const std::size_t element = kv_b.format == kernels::Format::f32 ? 4 : 2;
  const std::size_t row_bytes = shape.kv_lora * element;
  const std::size_t head_bytes = std::size_t{shape.kv_lora} * shape.qk_nope * element;
  layer.key_data = std::make_unique_for_overwrite<std::byte[]>(shape.heads * head_bytes);
  for (std::size_t head = 0; head < shape.heads; ++head) {
    const std::byte* from = kv_b.data + head * (shape.qk_nope + shape.v_head) * row_bytes;
    std::byte* to = layer.key_data.get() + head * head_bytes;
    for (std::size_t c = 0; c < shape.kv_lora; ++c) {
      for (std::size_t d = 0; d < shape.qk_nope; ++d) {
        std::memcpy(to + (c * shape.qk_nope + d) * element, from + d * row_bytes + c * element, element);
      }
    }
    layer.key.push_back({to, kv_b.format, shape.kv_lora, shape.qk_nope});
    layer.value.push_back({from + shape.qk_nope * row_bytes, kv_b.format, shape.v_head, shape.kv_lora});
  }
}

CpuLayer bind_layer(Binder& in, const model::Shape& shape, std::uint32_t index) {
  const std::string name = "model.layers." + std::to_string(index);
  const std::string attention = name + ".self_attn";
  const std::size_t hidden = shape.hidden;
  CpuLayer layer;
  layer.attention_norm = in.vector(name + ".input_layernorm.weight", hidden);
  layer.mlp_norm = in.vector(name + ".post_attention_layernorm.weight", hidden);

  const std::size_t q_width = std::size_t{shape.heads} * (shape.qk_nope + shape.qk_rope);
  if (shape.q_lora == 0) {
    layer.q_b = in.matrix(attention + ".q_proj", q_width, hidden);
  } else {
    layer.q_a = in.matrix(attention + ".q_a_proj", shape.q_lora, hidden);
    layer.q_norm = in.vector(attention + ".q_a_layernorm.weight", shape.q_lora);
    layer.q_b = in.matrix(attention + ".q_b_proj", q_width, shape.q_lora);
  }
  layer.kv_a = in.matrix(attention + ".kv_a_proj_with_mqa", shape.cache_width(), hidden);
  layer.kv_norm = in.vector(attention + ".kv_a_layernorm.weight", shape.kv_lora);
  const Matrix kv_b = in.matrix(attention + ".kv_b_proj",
                                std::size_t{shape.heads} * (shape.qk_nope + shape.v_head), shape.kv_lora);
  layer.output = in.matrix(attention + ".o_proj", hidden, std::size_t{shape.heads} * shape.v_head);
  if (in.error()) return layer;
  split_kv_b(kv_b, shape, layer);

  if (shape.layer_is_dense(index)) {
    layer.mlp = in.mlp(name + ".mlp", hidden, shape.dense_width);
    return layer;
  }
  layer.router = in.matrix(name + ".mlp.gate", shape.experts, hidden);
  layer.router_bias = in.vector(name + ".mlp.gate.e_score_correction_bias", shape.experts);
  if (shape.shared_experts > 0) {
    layer.mlp =
        in.mlp(name + ".mlp.shared_experts", hidden, std::size_t{shape.shared_experts} * shape.expert_width);
  }
  for (std::uint32_t expert = 0; expert < shape.experts; ++expert) {
    layer.experts.push_back(
        in.mlp(name + ".mlp.experts." + std::to_string(expert), hidden, shape.expert_width));
  }
  return layer;
}

}  // namespace

Result<CpuWeights> CpuWeights::bind(const model::Weights& weights, const model::Shape& shape) {
  Binder in(weights);
  CpuWeights out;
  out.embedding = in.matrix("model.embed_tokens", shape.vocab, shape.hidden);
  for (std::uint32_t index = 0; index < shape.layers && !in.error(); ++index) {
    out.layers.push_back(bind_layer(in, shape, index));
  }
  out.norm = in.vector("model.norm.weight", shape.hidden);
  out.head = in.matrix("lm_head", shape.vocab, shape.hidden);
  if (in.error()) return *in.error();
  return out;
}

}  // namespace di::engine
