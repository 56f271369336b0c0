/// The rollout's weights, in the layouts that its kernels read.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "kernels/dense/linear.h"
#include "model/weights.h"
#include "record/agreement.h"

namespace lockstep::rollout {

/// How the experts of a layer are kept.
enum class ExpertFormat : std::uint8_t {
  kBf16,   // as they arrive
  kCodes,  // arrive as codes, read as BF16: activations are not quantized, or under another rule
};

struct LayerWeights {
  std::vector<Bf16> attention_norm, q_norm, k_norm, mlp_norm;
  kernels::PackedMatrix qkv;     // [q_width + 2 kv_width, D]: Q, K, V
  kernels::PackedMatrix o;       // [D, q_width]
  kernels::PackedMatrix router;  // [E, D]
  ExpertFormat format = ExpertFormat::kBf16;
  kernels::PackedMatrix gate_up;  // of expert 0, [2F, D]; the next ones follow
  kernels::PackedMatrix down;     // of expert 0, [D, F]
};

/// A WeightSink whose memory is taken once: a refit writes where the last one did. Between begin()
/// and commit() nothing may run on it, for it holds a mixture of two models.
class Weights final : public WeightSink {
 public:
  /// Throws Error naming the width that no kernel takes.
  explicit Weights(const Agreement& agreement);

  void begin(WeightVersion version, ContractId contract) override;
  /// BF16 for all but the experts of quantized layers, which arrive as codes. Throws Error naming
  /// the weight: not one of the model, put before, wrong shape or kind, not finite.
  void put(const Weight& weight) override;
  /// Throws Error naming what is missing.
  std::vector<std::uint32_t> commit() override;

  /// Throws Error unless a whole set has been committed and no other has been begun.
  void require_ready() const;
  WeightVersion version() const { return version_; }

  const Bf16* embedding() const { return embedding_.data(); }  // [V, D]
  const kernels::PackedMatrix& head() const { return head_; }  // [V, D]
  std::span<const Bf16> final_norm() const { return final_norm_; }
  const LayerWeights& layer(std::int32_t index) const {
    return layers_[static_cast<std::size_t>(index)];
  }

 private:
  enum class State : std::uint8_t { kEmpty, kOpen, kReady };

  kernels::PackedMatrix matrix(std::int64_t out, std::int64_t in, std::int64_t copies = 1);
  void place(const WeightId& id, TensorView<const Bf16, 2> value);
  void put_codes(const WeightId& id, const PackedView<const std::uint8_t>& value);
  bool arrives_as_codes(const WeightId& id) const;
  void require_kind(const Weight& weight) const;
  std::string first_missing() const;

  ModelConfig model_;
  Contract contract_;
  State state_ = State::kEmpty;
  WeightVersion version_;
  std::vector<WeightId> order_;
  std::map<WeightId, std::size_t> index_;
  std::vector<std::uint8_t> seen_;
  std::vector<std::uint32_t> checksums_;

  std::vector<std::vector<Bf16>> memory_;  // of the packed matrices
  std::vector<Bf16> embedding_, final_norm_;
  kernels::PackedMatrix head_;
  std::vector<LayerWeights> layers_;
  std::vector<Bf16> dequantized_;  // one expert's matrix on its way
};

}  // namespace lockstep::rollout
