#include "model/config_json.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "model/json.h"
#include "model/testing.h"

namespace lockstep {
namespace {

using nlohmann::json;

json good() {
  return json::parse(R"({"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "norm_topk_prob": true, "tie_word_embeddings": false, "attention_bias": false,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_scaling": null,
    "sliding_window": null, "use_sliding_window": false, "eos_token_id": 151645,
    "hidden_act": "silu"})");
}

Result<ModelConfig> parse(const json& object, std::string_view generation = {}) {
  return parse_config(object.dump(), generation, "config.json");
}

TEST(Config, ReadsQwen3Moe) {
  const auto config = parse(good());
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->num_layers, 48);
  EXPECT_EQ(config->q_width(), 4096);
  EXPECT_EQ(config->num_experts, 128);
  EXPECT_EQ(config->rope_theta, 1e6);
  EXPECT_TRUE(config->normalize_gates);
  EXPECT_EQ(config->stop_tokens, std::vector<Token>{151645});
}

TEST(Config, GenerationConfigDecidesTheStopTokens) {
  const auto config = parse(good(), R"({"eos_token_id": [151645, 151643]})");
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->stop_tokens, (std::vector<Token>{151645, 151643}));
  EXPECT_FALSE(parse(good(), R"({"eos_token_id": 151936})"));
  EXPECT_FALSE(parse(good(), R"({"eos_token_id": -1})"));
}

TEST(Config, ReadsTheKeysOfTransformers5) {
  json object = good();
  object["num_local_experts"] = object["num_experts"];
  object.erase("num_experts");
  object.erase("rope_theta");
  object["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  const auto config = parse(object);
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->num_experts, 128);
  EXPECT_EQ(config->rope_theta, 5e5);
  object["rope_theta"] = 1e4;
  EXPECT_FALSE(parse(object));
}

struct Refusal {
  const char* key;
  json value;
};

TEST(Config, RefusesByKeyWhatItWouldComputeDifferently) {
  const std::vector<Refusal> refusals = {
      {"model_type", "mixtral"},
      {"hidden_act", "gelu"},
      {"attention_bias", true},
      {"use_sliding_window", true},
      {"decoder_sparse_step", 2},
      {"mlp_only_layers", {0}},
      {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}},
      {"rope_parameters", {{"rope_type", "linear"}, {"rope_theta", 1e6}}},
      {"partial_rotary_factor", 0.25},
      {"quantization_config", {{"quant_method", "fp8"}}},
      {"layer_types", {"sliding_attention"}},
      {"num_hidden_layers", 0},
      {"num_hidden_layers", 1.5},
      {"num_hidden_layers", "48"},
      {"hidden_size", 9223372036854775808ull},
      {"num_experts_per_tok", 129},
      {"num_key_value_heads", 5},
      {"head_dim", 127},
      {"rms_norm_eps", 0},
      {"rope_theta", -1},
      {"vocab_size", nullptr},
      {"norm_topk_prob", 1},
  };
  for (const Refusal& refusal : refusals) {
    json object = good();
    object[refusal.key] = refusal.value;
    const auto config = parse(object);
    ASSERT_FALSE(config) << refusal.key << " " << refusal.value;
    EXPECT_NE(config.error().message.find(refusal.key), std::string::npos)
        << config.error().message;
    EXPECT_EQ(config.error().message.find('\n'), std::string::npos);
  }
}

TEST(Config, TextThatIsNoJsonIsRefused) {
  EXPECT_FALSE(parse_config("{", "", "config.json"));
  EXPECT_FALSE(parse_config("[]", "", "config.json"));
  EXPECT_FALSE(parse_config(R"({"model_type": "qwen3_moe", "model_type": "qwen3_moe"})", "", "c"));
  EXPECT_FALSE(parse_config(std::string(100000, '['), "", "config.json"));
  EXPECT_FALSE(parse_config("{\"a\": 1e999}", "", "config.json"));
}

TEST(Config, WritesWhatItReads) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "config_json_test";
  std::filesystem::create_directories(folder);
  ModelConfig config = testing::tiny_moe();
  config.rms_eps = 1e-5f;
  config.rope_theta = 12345.5;
  config.normalize_gates = true;
  config.tied_embeddings = true;
  config.stop_tokens = {256, 257};
  write_config(config, folder);
  const auto read = read_config(folder);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, config);
  std::filesystem::remove_all(folder);
}

TEST(Config, ShapesOfTestsAreThoseOfTheModels) {
  const std::pair<const char*, ModelConfig> models[] = {{"models/tiny-moe", testing::tiny_moe()},
                                                        {"models/arith-20m", testing::arith_20m()}};
  for (auto [folder, shape] : models) {
    const auto read = read_config(folder);
    ASSERT_TRUE(read) << read.error().message;
    shape.rope_theta = read->rope_theta;
    shape.tied_embeddings = read->tied_embeddings;
    shape.stop_tokens = read->stop_tokens;
    EXPECT_EQ(*read, shape) << folder;
  }
}

TEST(Config, AMissingFolderIsNamed) {
  const auto config = read_config("/no/such/folder");
  ASSERT_FALSE(config);
  EXPECT_NE(config.error().message.find("/no/such/folder"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
