/// The shape of a model. Letters in shape comments, everywhere in the house:
///   T tokens   L layers   D hidden   F expert width   E experts   K experts per token
///   H query heads   N KV heads   C head dimension   V vocabulary   G samples per prompt
#pragma once

#include <cstdint>
#include <vector>

#include "base/id.h"

namespace lockstep {

/// A Qwen3-MoE: the fields of its config.json that decide what is computed.
struct ModelConfig {
  std::int32_t num_layers = 0;         // L
  std::int32_t hidden = 0;             // D
  std::int32_t expert_width = 0;       // F
  std::int32_t num_experts = 0;        // E
  std::int32_t experts_per_token = 0;  // K
  std::int32_t num_heads = 0;          // H
  std::int32_t num_kv_heads = 0;       // N
  std::int32_t head_dim = 0;           // C
  std::int32_t vocabulary = 0;         // V
  std::int32_t max_positions = 4096;   // longest sequence
  float rms_eps = 1e-6f;
  double rope_theta = 1e6;
  bool normalize_gates = true;  // norm_topk_prob: the chosen experts' gates sum to one
  bool tied_embeddings = false;
  std::vector<Token> stop_tokens{};  // of generation_config.json, else eos_token_id

  constexpr std::int32_t q_width() const { return num_heads * head_dim; }
  constexpr std::int32_t kv_width() const { return num_kv_heads * head_dim; }
  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

}  // namespace lockstep
