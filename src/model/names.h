/// What the weights are called in a Hugging Face checkpoint, and their shapes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/weights.h"

namespace lockstep {

/// Of which part of a weight a checkpoint's tensor holds the values.
enum class Part : std::uint8_t {
  kWhole,
  kGate,        // the first F rows of kGateUp
  kUp,          // its last F rows
  kAllExperts,  // [E, out, in]: the weight of every expert of the layer, as Transformers 5 fuses
};

struct TensorName {
  WeightId id;  // the first expert's where the part is kAllExperts
  Part part = Part::kWhole;
  friend constexpr bool operator==(const TensorName&, const TensorName&) = default;
};

/// The tensor's name in the plain dialect, which has one tensor per expert and projection:
/// "model.layers.3.mlp.experts.7.gate_proj.weight".
std::string name(const TensorName& tensor);

/// What a name means; nothing where no weight of a Qwen3-MoE has that name.
std::optional<TensorName> parse_name(std::string_view name);

/// The tensors that hold a weight in the plain dialect: gate and up, or the whole.
std::vector<TensorName> plain_tensors(const WeightId& id);

/// For messages: the plain name, where gate and up are one "gate_up_proj".
std::string to_string(const WeightId& id);

/// [out, in]; a vector is [1, in].
std::array<std::int64_t, 2> weight_shape(const ModelConfig& config, WeightId::Role role);

constexpr bool of_layer(WeightId::Role role) { return role >= WeightId::Role::kAttentionNorm; }

/// Whether a checkpoint holds it as [n], not as a matrix: the norms.
constexpr bool is_vector(WeightId::Role role) {
  using Role = WeightId::Role;
  return role == Role::kFinalNorm || role == Role::kAttentionNorm || role == Role::kMlpNorm ||
         role == Role::kQNorm || role == Role::kKNorm;
}

/// Whether the weight belongs to a routed expert. Routers, projections of attention, embeddings,
/// head and norms do not: the default contract leaves those in BF16.
constexpr bool of_expert(WeightId::Role role) { return role >= WeightId::Role::kGateUp; }

}  // namespace lockstep
