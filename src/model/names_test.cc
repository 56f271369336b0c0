#include "model/names.h"

#include <gtest/gtest.h>

#include <set>

namespace lockstep {
namespace {

using Role = WeightId::Role;

ModelConfig small() {
  return {.num_layers = 2,
          .hidden = 8,
          .expert_width = 4,
          .num_experts = 3,
          .experts_per_token = 2,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 6,
          .vocabulary = 10};
}

TEST(Names, IdsAreUniqueAndInOneOrder) {
  ModelConfig config = small();
  const std::vector<WeightId> ids = weight_ids(config);
  EXPECT_EQ(ids.size(), 1u + 2 * (9 + 2 * 3) + 2);
  EXPECT_EQ(std::set<WeightId>(ids.begin(), ids.end()).size(), ids.size());
  EXPECT_EQ(ids.front().role, Role::kEmbedding);
  EXPECT_EQ(ids.back().role, Role::kHead);
  config.tied_embeddings = true;
  EXPECT_EQ(weight_ids(config).size(), ids.size() - 1);
}

TEST(Names, EveryTensorOfEveryWeightReadsBack) {
  for (const WeightId& id : weight_ids(small())) {
    for (const TensorName& tensor : plain_tensors(id)) {
      const auto parsed = parse_name(name(tensor));
      ASSERT_TRUE(parsed) << name(tensor);
      EXPECT_EQ(*parsed, tensor) << name(tensor);
    }
  }
}

TEST(Names, ShapesOfTheConfig) {
  const ModelConfig config = small();
  EXPECT_EQ(weight_shape(config, Role::kGateUp), (std::array<std::int64_t, 2>{8, 8}));
  EXPECT_EQ(weight_shape(config, Role::kDown), (std::array<std::int64_t, 2>{8, 4}));
  EXPECT_EQ(weight_shape(config, Role::kQ), (std::array<std::int64_t, 2>{24, 8}));
  EXPECT_EQ(weight_shape(config, Role::kO), (std::array<std::int64_t, 2>{8, 24}));
  EXPECT_EQ(weight_shape(config, Role::kKNorm), (std::array<std::int64_t, 2>{1, 6}));
  EXPECT_EQ(weight_shape(config, Role::kRouter), (std::array<std::int64_t, 2>{3, 8}));
}

TEST(Names, R58_FusedExpertsAreExpertsThoughTheirNamesDoNotEndInWeight) {
  const auto gate_up = parse_name("model.layers.5.mlp.experts.gate_up_proj");
  ASSERT_TRUE(gate_up);
  EXPECT_EQ(gate_up->id.role, Role::kGateUp);
  EXPECT_EQ(gate_up->part, Part::kAllExperts);
  EXPECT_EQ(gate_up->id.layer.value, 5);
  const auto down = parse_name("model.layers.5.mlp.experts.down_proj");
  ASSERT_TRUE(down);
  EXPECT_TRUE(of_expert(down->id.role));
  const auto gate = parse_name("model.layers.5.mlp.experts.3.gate_proj.weight");
  ASSERT_TRUE(gate);
  EXPECT_TRUE(of_expert(gate->id.role));
  EXPECT_EQ(gate->id.expert.value, 3);
  EXPECT_FALSE(parse_name("model.layers.5.mlp.experts.3.gate_proj.bias"));
  EXPECT_FALSE(parse_name("model.layers.5.mlp.experts.gate_up_proj_bias"));
}

TEST(Names, R60_TheRouterIsNoExpertAndGateProjIs) {
  const auto router = parse_name("model.layers.0.mlp.gate.weight");
  ASSERT_TRUE(router);
  EXPECT_EQ(router->id.role, Role::kRouter);
  EXPECT_FALSE(of_expert(router->id.role));
  for (const char* other : {"model.layers.0.mlp.router.weight", "model.layers.0.router.weight",
                            "model.layers.0.mlp.gate.e_score_correction_bias",
                            "model.layers.0.block_sparse_moe.gate.weight"}) {
    EXPECT_FALSE(parse_name(other)) << other;
  }
  EXPECT_TRUE(of_expert(parse_name("model.layers.0.mlp.experts.0.gate_proj.weight")->id.role));
}

TEST(Names, WhatIsNoNameIsNone) {
  for (const char* other :
       {"", "model", "model.layers.", "model.layers.x.mlp.gate.weight",
        "model.layers.-1.mlp.gate.weight", "model.layers.01.mlp.gate.weight", "model.layers.1",
        "model.layers.1.", "lm_head.bias", "model.layers.99999999999.mlp.gate.weight",
        "model.layers.1.mlp.experts.1.weight", "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate_proj.weight"}) {
    EXPECT_FALSE(parse_name(other)) << other;
  }
}

}  // namespace
}  // namespace lockstep
