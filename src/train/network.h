/// The trainer's Qwen3-MoE: one layer at a time, on the packed rows of a pass.
#pragma once

#include <vector>

#include "model/config.h"
#include "ops/dense.h"
#include "ops/torch.h"
#include "train/pack.h"
#include "train/parameters.h"
#include "train/sites.h"

namespace lockstep::train {

/// Tensors over the compute weights.
struct LayerWeights {
  at::Tensor attention_norm;  // [D]
  at::Tensor qkv;             // [(H + 2N) C, D]
  at::Tensor o;               // [D, H * C]
  at::Tensor q_norm;          // [C]
  at::Tensor k_norm;          // [C]
  at::Tensor mlp_norm;        // [D]
  at::Tensor router;          // [E, D]
  at::Tensor w13;             // [E, 2F, D]
  at::Tensor w2;              // [E, D, F]
};

/// Log-probs of the scored rows of a pass, and what their gradient needs.
struct Scores {
  std::vector<float> logp;      // [scored]
  std::vector<float> top_logp;  // [scored, k] of the pack's top tokens
  double entropy = 0.0;         // summed
  at::Tensor x;                 // [scored, D] the head's input, a leaf where a gradient is wanted
  at::Tensor normed;            // [scored, D]
  at::Tensor log_sum;           // [scored] of exp(logits / temperature)
};

class Network {
 public:
  /// Gradients add up in `grads`, which lies as the parameters do. All of them outlive the network.
  Network(const ModelConfig& config, const Parameters& parameters, const Floats& grads,
          const ops::RopeTable& rope, bool bf16);

  /// [rows, D]
  at::Tensor embed(const Pack& pack) const;

  /// One layer of the residual stream.   [rows, D] -> [rows, D]
  at::Tensor layer(std::int32_t layer, const at::Tensor& h, const Pack& pack,
                   const Sites& sites) const;

  /// log_softmax(logits / temperature) at the scored rows, in FP32 from the head's operands.
  Scores score(const at::Tensor& h, const Pack& pack, bool with_grad) const;

  /// From d loss / d logp [scored], and by the top tokens' [scored, k], to d loss / d h [rows, D].
  /// Adds to the gradients of head and final norm.
  at::Tensor score_backward(const Scores& scores, const Pack& pack, std::span<const float> dlogp,
                            std::span<const float> dtop) const;

  /// Adds to the embedding's gradient.
  void embed_backward(const at::Tensor& dh, const Pack& pack) const;

 private:
  struct Routing {
    at::Tensor chosen;  // [T, K] experts
    at::Tensor gates;   // [T, K]
  };
  Routing route(Layer layer, const at::Tensor& logits, const Sites& sites) const;
  at::Tensor attention(std::int32_t layer, const at::Tensor& h, const Pack& pack,
                       const Sites& sites) const;
  void add_top(const at::Tensor& d, const Scores& scores, const at::Tensor& temperature,
               const at::Tensor& top_token, std::int64_t first, const at::Tensor& dtop) const;
  at::Device device() const { return embedding_.device(); }
  at::Tensor mlp(std::int32_t layer, const at::Tensor& h, const Sites& sites) const;

  const ModelConfig& config_;
  const Parameters& parameters_;
  bool bf16_;
  std::vector<LayerWeights> layers_;
  at::Tensor embedding_;  // [V, D]
  at::Tensor embedding_grad_;
  at::Tensor final_norm_;  // [D]
  at::Tensor head_;        // [V, D]
  at::Tensor head_grad_;
  const ops::RopeTable& rope_;
};

}  // namespace lockstep::train
