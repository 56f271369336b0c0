/// For tests and benchmarks: the shapes that they ask about, each written once.
#pragma once

#include "model/config.h"

namespace lockstep::testing {

inline ModelConfig qwen3_30b_a3b() {
  return {.num_layers = 48,
          .hidden = 2048,
          .expert_width = 768,
          .num_experts = 128,
          .experts_per_token = 8,
          .num_heads = 32,
          .num_kv_heads = 4,
          .head_dim = 128,
          .vocabulary = 151936,
          .max_positions = 1 << 18};
}

/// models/arith-20m.
inline ModelConfig arith_20m() {
  return {.num_layers = 8,
          .hidden = 256,
          .expert_width = 96,
          .num_experts = 32,
          .experts_per_token = 4,
          .num_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 32,
          .vocabulary = 272,
          .max_positions = 1024};
}

/// models/tiny-moe.
inline ModelConfig tiny_moe() {
  return {.num_layers = 6,
          .hidden = 128,
          .expert_width = 64,
          .num_experts = 16,
          .experts_per_token = 2,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 32,
          .vocabulary = 272,
          .max_positions = 512};
}

}  // namespace lockstep::testing
