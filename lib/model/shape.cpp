#include "model/shape.h"

#include <cmath>

#include "base/file.h"
#include "base/json.h"

namespace di::model {

namespace {

// Collects the first error, so that the reading below is a flat list of keys.
class Reader {
 public:
  Reader(const Json& root, std::string where) : root_(root), where_(std::move(where)) {}

  [[nodiscard]] bool failed() const { return error_.has_value(); }
  [[nodiscard]] Error error() const { return error_->in(where_); }

  void fail(Code code, std::string_view key, std::string_view what) {
    if (!error_) error_ = Error{code, 0, std::string(key) + ": " + std::string(what)};
  }

  // Null counts as absent, as Hugging Face writes it.
  [[nodiscard]] const Json* find(std::string_view key) const {
    const Json* value = root_.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  std::uint32_t count(std::string_view key, std::uint32_t low, std::uint32_t high) {
    const Json* value = find(key);
    if (value == nullptr) {
      fail(Code::invalid, key, "missing");
      return low;
    }
    return integer(key, *value, low, high);
  }
  std::uint32_t count_or(std::string_view key, std::uint32_t otherwise, std::uint32_t low,
                         std::uint32_t high) {
    const Json* value = find(key);
    return value == nullptr ? otherwise : integer(key, *value, low, high);
  }
  double number_or(std::string_view key, double otherwise, double low, double high) {
    const Json* value = find(key);
    return value == nullptr ? otherwise : real(key, *value, low, high);
  }
  double number(std::string_view key, double low, double high) {
    const Json* value = find(key);
    if (value != nullptr) return real(key, *value, low, high);
    fail(Code::invalid, key, "missing");
    return low;
  }
  bool boolean_or(std::string_view key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (value->is_bool()) return value->as_bool();
    fail(Code::invalid, key, "must be a boolean, is " + std::string(value->type_name()));
    return otherwise;
  }
  // A key that may be absent but, when there, has only one value we compute.
  void only_text(std::string_view key, std::string_view supported) {
    const Json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_string()) {
      fail(Code::invalid, key, "must be a string, is " + std::string(value->type_name()));
    } else if (value->as_string() != supported) {
      fail(Code::unsupported, key, quoted(value->as_string()) + " (only " + quoted(supported) + ")");
    }
  }
  void only_flag(std::string_view key, bool supported) {
    if (boolean_or(key, supported) != supported) {
      fail(Code::unsupported, key, supported ? "false (only true)" : "true (only false)");
    }
  }

  std::uint32_t integer(std::string_view key, const Json& value, std::uint32_t low, std::uint32_t high) {
    if (!value.is_integer()) {
      fail(Code::invalid, key, "must be an integer, is " + std::string(value.type_name()));
      return low;
    }
    const std::int64_t number = value.as_i64();
    if (number < low || number > high) {
      fail(Code::invalid, key,
           std::to_string(number) + " is not in " + std::to_string(low) + " to " + std::to_string(high));
      return low;
    }
    return static_cast<std::uint32_t>(number);
  }

 private:
  static std::string quoted(std::string_view text) { return "\"" + std::string(text.substr(0, 64)) + "\""; }

  double real(std::string_view key, const Json& value, double low, double high) {
    if (!value.is_number()) {
      fail(Code::invalid, key, "must be a number, is " + std::string(value.type_name()));
      return low;
    }
    const double number = value.as_double();
    if (!(number >= low && number <= high)) {
      fail(Code::invalid, key, "is out of range");
      return low;
    }
    return number;
  }

  const Json& root_;
  std::string where_;
  std::optional<Error> error_;
};

void read_yarn(Reader& in, Shape& shape) {
  const Json* scaling = in.find("rope_scaling");
  if (scaling == nullptr) return;
  if (!scaling->is_object()) {
    return in.fail(Code::invalid, "rope_scaling",
                   "must be an object, is " + std::string(scaling->type_name()));
  }
  Reader part(*scaling, "rope_scaling");
  part.only_text(scaling->find("type") != nullptr ? "type" : "rope_type", "yarn");
  if (scaling->find("type") == nullptr && scaling->find("rope_type") == nullptr) {
    part.fail(Code::invalid, "type", "missing");
  }
  Yarn yarn;
  yarn.factor = part.number("factor", 1.0, 1e6);
  yarn.original_positions = part.number("original_max_position_embeddings", 1.0, shape_positions_max);
  yarn.beta_fast = part.number_or("beta_fast", 32.0, 1e-3, 1e6);
  yarn.beta_slow = part.number_or("beta_slow", 1.0, 1e-3, 1e6);
  yarn.mscale_all_dim = part.number_or("mscale_all_dim", 1.0, 0.0, 1e3);
  if (part.number_or("mscale", 1.0, 0.0, 1e3) != yarn.mscale_all_dim) {
    part.fail(Code::unsupported, "mscale", "differs from mscale_all_dim");
  }
  if (part.failed()) {
    const Error error = part.error();
    return in.fail(error.code, "rope_scaling", error.message.substr(error.message.find(": ") + 2));
  }
  if (shape.positions_max > yarn.original_positions) shape.yarn = yarn;
}

void read_token_ids(Reader& in, Shape& shape) {
  constexpr std::size_t eos_ids_max = 16;
  if (in.find("bos_token_id") != nullptr) shape.bos_id = in.count("bos_token_id", 0, shape.vocab - 1);
  const Json* eos = in.find("eos_token_id");
  if (eos == nullptr) return;
  if (!eos->is_array()) {
    shape.eos_ids.push_back(in.integer("eos_token_id", *eos, 0, shape.vocab - 1));
    return;
  }
  if (eos->as_array().size() > eos_ids_max)
    return in.fail(Code::invalid, "eos_token_id", "has more than 16 entries");
  for (const Json& id : eos->as_array()) {
    shape.eos_ids.push_back(in.integer("eos_token_id", id, 0, shape.vocab - 1));
  }
}

}  // namespace

bool Shape::has_moe_layer() const {
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    if (!layer_is_dense(layer)) return true;
  }
  return false;
}

Result<Shape> shape_parse(std::string_view text, std::string_view file) {
  const Result<Json> root = Json::parse(text);
  if (!root) return root.error().in(file);
  if (!root->is_object()) return Error{Code::invalid, 0, "must be a JSON object"}.in(file);

  Reader in(*root, std::string(file));
  in.only_text("model_type", "deepseek_v3");
  in.only_text("scoring_func", "sigmoid");
  in.only_text("topk_method", "noaux_tc");
  in.only_text("hidden_act", "silu");
  in.only_flag("attention_bias", false);
  in.only_flag("tie_word_embeddings", false);
  in.only_flag("rope_interleave", true);
  if (in.find("quantization_config") != nullptr) {
    in.fail(Code::unsupported, "quantization_config", "quantized weights (only F32 and BF16)");
  }

  Shape shape;
  shape.vocab = in.count("vocab_size", 2, shape_vocab_max);
  shape.hidden = in.count("hidden_size", 1, shape_width_max);
  shape.layers = in.count("num_hidden_layers", 1, shape_layers_max);
  shape.positions_max = in.count("max_position_embeddings", 1, shape_positions_max);

  shape.heads = in.count("num_attention_heads", 1, shape_heads_max);
  if (in.count_or("num_key_value_heads", shape.heads, 1, shape_heads_max) != shape.heads) {
    in.fail(Code::unsupported, "num_key_value_heads", "differs from num_attention_heads");
  }
  shape.q_lora = in.count_or("q_lora_rank", 0, 1, shape_width_max);
  shape.kv_lora = in.count("kv_lora_rank", 1, shape_width_max);
  shape.qk_nope = in.count("qk_nope_head_dim", 1, shape_width_max);
  shape.qk_rope = in.count("qk_rope_head_dim", 2, shape_width_max);
  if (shape.qk_rope % 2 != 0) in.fail(Code::invalid, "qk_rope_head_dim", "must be even");
  shape.v_head = in.count("v_head_dim", 1, shape_width_max);

  shape.dense_width = in.count("intermediate_size", 1, shape_width_max);
  shape.dense_layers_first = in.count("first_k_dense_replace", 0, shape_layers_max);
  shape.moe_every = in.count_or("moe_layer_freq", 1, 1, shape_layers_max);

  shape.experts = in.count("n_routed_experts", 1, shape_experts_max);
  shape.experts_per_token = in.count("num_experts_per_tok", 1, shape_experts_max);
  shape.expert_width = in.count("moe_intermediate_size", 1, shape_width_max);
  shape.shared_experts = in.count_or("n_shared_experts", 0, 0, shape_experts_max);
  if (std::uint64_t{shape.shared_experts} * shape.expert_width > shape_width_max) {
    in.fail(Code::invalid, "n_shared_experts", "times moe_intermediate_size is too wide");
  }
  shape.groups = in.count("n_group", 1, shape_experts_max);
  shape.groups_per_token = in.count("topk_group", 1, shape_experts_max);
  shape.normalize_weights = in.boolean_or("norm_topk_prob", true);
  shape.routed_scale = in.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
  if (!in.failed()) {
    // A group's score is the sum of its two best, so with groups each has at least two.
    if (shape.experts % shape.groups != 0 || (shape.groups > 1 && shape.experts / shape.groups < 2)) {
      in.fail(Code::invalid, "n_group", "must divide n_routed_experts into groups of at least two");
    } else if (shape.groups_per_token > shape.groups) {
      in.fail(Code::invalid, "topk_group", "is more than n_group");
    } else if (shape.experts_per_token > shape.experts / shape.groups * shape.groups_per_token) {
      in.fail(Code::invalid, "num_experts_per_tok", "is more than the experts of topk_group groups");
    }
  }

  shape.rms_eps = in.number_or("rms_norm_eps", 1e-6, 0.0, 1.0);
  shape.rope_theta = in.number_or("rope_theta", 10000.0, 1.001, 1e12);
  if (!in.failed()) {
    read_yarn(in, shape);
    read_token_ids(in, shape);
  }
  if (in.failed()) return in.error();
  return shape;
}

Result<Shape> shape_load(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const Result<std::string> text = file_read(path, config_json_bytes_max);
  if (!text) return text.error();
  return shape_parse(*text, path);
}

}  // namespace di::model
