#include "model/shape.h"

#include <gtest/gtest.h>

#include <string>

namespace di::model {
namespace {

// A config.json as a list of lines, so that a test can change one.
std::string config_text(const std::string& key = "", const std::string& value = "") {
  std::vector<std::pair<std::string, std::string>> rows = {{"model_type", "\"deepseek_v3\""},
                                                           {"vocab_size", "61"},
                                                           {"hidden_size", "28"},
                                                           {"num_hidden_layers", "4"},
                                                           {"first_k_dense_replace", "1"},
                                                           {"moe_layer_freq", "1"},
                                                           {"num_attention_heads", "3"},
                                                           {"num_key_value_heads", "3"},
                                                           {"q_lora_rank", "18"},
                                                           {"kv_lora_rank", "20"},
                                                           {"qk_nope_head_dim", "8"},
                                                           {"qk_rope_head_dim", "6"},
                                                           {"v_head_dim", "10"},
                                                           {"intermediate_size", "26"},
                                                           {"moe_intermediate_size", "7"},
                                                           {"n_routed_experts", "8"},
                                                           {"n_shared_experts", "1"},
                                                           {"num_experts_per_tok", "3"},
                                                           {"n_group", "4"},
                                                           {"topk_group", "2"},
                                                           {"topk_method", "\"noaux_tc\""},
                                                           {"scoring_func", "\"sigmoid\""},
                                                           {"norm_topk_prob", "true"},
                                                           {"routed_scaling_factor", "2.5"},
                                                           {"hidden_act", "\"silu\""},
                                                           {"attention_bias", "false"},
                                                           {"rms_norm_eps", "1e-6"},
                                                           {"rope_theta", "10000"},
                                                           {"rope_scaling", "null"},
                                                           {"max_position_embeddings", "256"},
                                                           {"tie_word_embeddings", "false"},
                                                           {"bos_token_id", "0"},
                                                           {"eos_token_id", "1"}};
  bool found = key.empty();
  for (auto& [name, text] : rows) {
    if (name != key) continue;
    text = value;
    found = true;
  }
  if (!found) rows.emplace_back(key, value);
  std::string out = "{";
  for (const auto& [name, text] : rows) {
    if (text.empty()) continue;  // left out
    out += (out.size() > 1 ? ", " : "") + ("\"" + name + "\": ") + text;
  }
  return out + "}";
}

Error refused(const std::string& key, const std::string& value) {
  const Result<Shape> shape = shape_parse(config_text(key, value), "m/config.json");
  EXPECT_FALSE(shape.ok()) << key << " = " << value;
  return shape.ok() ? Error{Code::ok, 0, ""} : shape.error();
}

constexpr const char* yarn_text =
    R"({"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.7, "mscale_all_dim": 0.7})";

TEST(Shape, reads_every_key) {
  const Result<Shape> shape = shape_parse(config_text(), "m/config.json");
  ASSERT_TRUE(shape.ok()) << shape.error().message;
  EXPECT_EQ(shape->vocab, 61u);
  EXPECT_EQ(shape->hidden, 28u);
  EXPECT_EQ(shape->layers, 4u);
  EXPECT_EQ(shape->positions_max, 256u);
  EXPECT_EQ(shape->heads, 3u);
  EXPECT_EQ(shape->q_lora, 18u);
  EXPECT_EQ(shape->cache_width(), 26u);
  EXPECT_EQ(shape->qk_nope, 8u);
  EXPECT_EQ(shape->v_head, 10u);
  EXPECT_EQ(shape->dense_width, 26u);
  EXPECT_EQ(shape->experts, 8u);
  EXPECT_EQ(shape->groups, 4u);
  EXPECT_EQ(shape->groups_per_token, 2u);
  EXPECT_EQ(shape->routed_scale, 2.5);
  EXPECT_TRUE(shape->normalize_weights);
  EXPECT_FALSE(shape->yarn.has_value());
  EXPECT_EQ(shape->eos_ids, std::vector<std::uint32_t>{1});
  EXPECT_TRUE(shape->layer_is_dense(0));
  EXPECT_FALSE(shape->layer_is_dense(1));
}

TEST(Shape, absent_optional_keys_have_their_meaning) {
  EXPECT_EQ(shape_parse(config_text("q_lora_rank", "null"), "")->q_lora, 0u);
  EXPECT_EQ(shape_parse(config_text("q_lora_rank", ""), "")->q_lora, 0u);
  EXPECT_EQ(shape_parse(config_text("routed_scaling_factor", ""), "")->routed_scale, 1.0);
  EXPECT_EQ(shape_parse(config_text("eos_token_id", "[1, 7]"), "")->eos_ids,
            (std::vector<std::uint32_t>{1, 7}));
  const Result<Shape> every_second = shape_parse(config_text("moe_layer_freq", "2"), "");
  EXPECT_FALSE(every_second->layer_is_dense(2));
  EXPECT_TRUE(every_second->layer_is_dense(3));
}

TEST(Shape, yarn_is_active_only_beyond_the_original_positions) {
  const Result<Shape> shape = shape_parse(config_text("rope_scaling", yarn_text), "");
  ASSERT_TRUE(shape.ok()) << shape.error().message;
  ASSERT_TRUE(shape->yarn.has_value());
  EXPECT_EQ(shape->yarn->factor, 40.0);
  EXPECT_EQ(shape->yarn->mscale_all_dim, 0.7);
  std::string same = config_text("rope_scaling", yarn_text);
  same.replace(same.find("\"max_position_embeddings\": 256"), 30, "\"max_position_embeddings\": 64 ");
  EXPECT_FALSE(shape_parse(same, "")->yarn.has_value());
}

TEST(Shape, a_bad_value_names_file_and_key) {
  EXPECT_EQ(refused("hidden_size", "").message, "m/config.json: hidden_size: missing");
  EXPECT_EQ(refused("hidden_size", "\"28\"").message,
            "m/config.json: hidden_size: must be an integer, is string");
  EXPECT_EQ(refused("hidden_size", "0").message, "m/config.json: hidden_size: 0 is not in 1 to 131072");
  EXPECT_EQ(refused("hidden_size", "-3").code, Code::invalid);
  EXPECT_EQ(refused("hidden_size", "18446744073709551615").code, Code::invalid);
  EXPECT_EQ(refused("vocab_size", "2.5").code, Code::invalid);
  EXPECT_EQ(refused("qk_rope_head_dim", "7").message, "m/config.json: qk_rope_head_dim: must be even");
  EXPECT_EQ(refused("n_group", "3").code, Code::invalid);
  EXPECT_EQ(refused("n_group", "8").code, Code::invalid);
  EXPECT_EQ(refused("topk_group", "5").code, Code::invalid);
  EXPECT_EQ(refused("num_experts_per_tok", "5").code, Code::invalid);
  EXPECT_EQ(refused("eos_token_id", "61").code, Code::invalid);
  EXPECT_EQ(refused("norm_topk_prob", "1").message,
            "m/config.json: norm_topk_prob: must be a boolean, is integer");
  EXPECT_EQ(refused("rms_norm_eps", "-1").code, Code::invalid);
  EXPECT_EQ(refused("rope_scaling", R"({"type": "yarn", "original_max_position_embeddings": 64})").message,
            "m/config.json: rope_scaling: factor: missing");
}

TEST(Shape, what_is_not_computed_is_refused_by_name) {
  EXPECT_EQ(refused("model_type", "\"llama\"").message,
            "m/config.json: model_type: \"llama\" (only \"deepseek_v3\")");
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{
           {"scoring_func", "\"softmax\""},
           {"topk_method", "\"greedy\""},
           {"hidden_act", "\"gelu\""},
           {"attention_bias", "true"},
           {"tie_word_embeddings", "true"},
           {"num_key_value_heads", "1"},
           {"quantization_config", "{\"quant_method\": \"fp8\"}"},
           {"rope_scaling", "{\"type\": \"linear\", \"factor\": 2}"},
           {"rope_scaling",
            R"({"type": "yarn", "factor": 2, "original_max_position_embeddings": 64, "mscale": 0.5})"}}) {
    const Error error = refused(key, value);
    EXPECT_EQ(error.code, Code::unsupported) << error.message;
    EXPECT_NE(error.message.find(key), std::string::npos) << error.message;
  }
}

TEST(Shape, text_that_is_no_config_is_an_error) {
  EXPECT_EQ(shape_parse("{", "x").error().code, Code::invalid);
  EXPECT_EQ(shape_parse("[1]", "x").error().message, "x: must be a JSON object");
  EXPECT_EQ(shape_load("/nonexistent").error().code, Code::not_found);
  EXPECT_TRUE(shape_load(DI_SOURCE_DIR "/tests/golden/logits/yarn-v3").ok());
}

}  // namespace
}  // namespace di::model
