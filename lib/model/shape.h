// model/shape.h: the numbers of one model, read from a Hugging Face config.json (DeepSeek-V3 keys).
//
// A plain value, read once at start and never changed.  Every field is validated on the way in: each
// number has the bound named below, and a feature this project does not compute is refused by name
// rather than ignored.  Keys that do not change the result are not looked at.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace di::model {

// Bounds on what a config.json may ask for: about four times the largest published model, so that
// products of any three stay far from 2^64.
inline constexpr std::uint32_t shape_layers_max = 512;
inline constexpr std::uint32_t shape_width_max = 1u << 17;  // any one matrix side but the vocabulary
inline constexpr std::uint32_t shape_heads_max = 1024;
inline constexpr std::uint32_t shape_experts_max = 2048;
inline constexpr std::uint32_t shape_vocab_max = 1u << 20;
inline constexpr std::uint32_t shape_positions_max = 1u << 24;
inline constexpr std::size_t config_json_bytes_max = std::size_t{1} << 20;

// Rotary frequencies stretched over a longer context; present only when it is active, that is when
// max_position_embeddings exceeds original_positions.
struct Yarn {
  double factor = 1.0;
  double original_positions = 0.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale_all_dim = 1.0;  // mscale is required to be equal: the rotation itself is not scaled
};

struct Shape {
  std::uint32_t vocab = 0;
  std::uint32_t hidden = 0;
  std::uint32_t layers = 0;
  std::uint32_t positions_max = 0;  // the longest context, prompt and answer together

  std::uint32_t heads = 0;
  std::uint32_t q_lora = 0;  // 0: queries are projected in one step
  std::uint32_t kv_lora = 0;
  std::uint32_t qk_nope = 0;
  std::uint32_t qk_rope = 0;  // even
  std::uint32_t v_head = 0;

  std::uint32_t dense_width = 0;
  std::uint32_t dense_layers_first = 0;
  std::uint32_t moe_every = 1;  // of the layers after the dense ones, those with index % moe_every == 0

  std::uint32_t experts = 0;
  std::uint32_t experts_per_token = 0;
  std::uint32_t expert_width = 0;
  std::uint32_t shared_experts = 0;  // one block of shared_experts * expert_width; 0: none
  std::uint32_t groups = 1;
  std::uint32_t groups_per_token = 1;
  bool normalize_weights = true;
  double routed_scale = 1.0;

  double rms_eps = 1e-6;
  double rope_theta = 10000.0;
  std::optional<Yarn> yarn;

  std::optional<std::uint32_t> bos_id;
  std::vector<std::uint32_t> eos_ids;

  // One position of one layer in the cache: the latent after its norm, then the rotated key.
  [[nodiscard]] std::uint32_t cache_width() const { return kv_lora + qk_rope; }
  [[nodiscard]] bool layer_is_dense(std::uint32_t layer) const {
    return layer < dense_layers_first || layer % moe_every != 0;
  }
  [[nodiscard]] bool has_moe_layer() const;
};

// Reads the text of a config.json.  `file` is only for messages ("etc/model-demo/config.json: key: ...").
// Errors: invalid (not JSON, a missing key, a wrong type, out of range), unsupported (a feature we do
// not compute).
[[nodiscard]] Result<Shape> shape_parse(std::string_view text, std::string_view file);
// Reads FOLDER/config.json.  Errors: also not_found, denied, io.
[[nodiscard]] Result<Shape> shape_load(const std::string& folder);

}  // namespace di::model
