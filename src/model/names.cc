#include "model/names.h"

#include <charconv>
#include <limits>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {
namespace {

using Role = WeightId::Role;

struct RoleName {
  Role role;
  std::string_view name;
};

constexpr std::array kModelNames = {
    RoleName{Role::kEmbedding, "model.embed_tokens.weight"},
    RoleName{Role::kFinalNorm, "model.norm.weight"},
    RoleName{Role::kHead, "lm_head.weight"},
};

constexpr std::array kLayerNames = {
    RoleName{Role::kAttentionNorm, "input_layernorm.weight"},
    RoleName{Role::kQ, "self_attn.q_proj.weight"},
    RoleName{Role::kK, "self_attn.k_proj.weight"},
    RoleName{Role::kV, "self_attn.v_proj.weight"},
    RoleName{Role::kO, "self_attn.o_proj.weight"},
    RoleName{Role::kQNorm, "self_attn.q_norm.weight"},
    RoleName{Role::kKNorm, "self_attn.k_norm.weight"},
    RoleName{Role::kMlpNorm, "post_attention_layernorm.weight"},
    RoleName{Role::kRouter, "mlp.gate.weight"},
};

constexpr std::string_view kLayers = "model.layers.";
constexpr std::string_view kExperts = "mlp.experts.";
constexpr std::string_view kFusedGateUp = "gate_up_proj";
constexpr std::string_view kFusedDown = "down_proj";

template <std::size_t kCount>
std::string_view find(const std::array<RoleName, kCount>& names, Role role) {
  for (const RoleName& entry : names) {
    if (entry.role == role) return entry.name;
  }
  return {};
}

template <std::size_t kCount>
std::optional<Role> find(const std::array<RoleName, kCount>& names, std::string_view name) {
  for (const RoleName& entry : names) {
    if (entry.name == name) return entry.role;
  }
  return std::nullopt;
}

std::string_view expert_name(Role role, Part part) {
  if (role == Role::kDown) return "down_proj.weight";
  switch (part) {
    case Part::kGate: return "gate_proj.weight";
    case Part::kUp: return "up_proj.weight";
    default: return "gate_up_proj.weight";
  }
}

/// Takes "12." off the front of `text`. The number is written as a number is: no sign, no zeros
/// before it.
std::optional<std::int32_t> take_index(std::string_view& text) {
  std::int32_t index = 0;
  const char* end = text.data() + text.size();
  const auto [stop, failed] = std::from_chars(text.data(), end, index);
  if (failed != std::errc() || index < 0 || stop == end || *stop != '.') return std::nullopt;
  const auto digits = static_cast<std::size_t>(stop - text.data());
  if (text.front() == '-' || (text.front() == '0' && digits > 1)) return std::nullopt;
  text.remove_prefix(digits + 1);
  return index;
}

bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// `rest` follows "model.layers.N.mlp.experts.".
std::optional<TensorName> parse_expert(std::string_view rest, Layer layer) {
  if (rest == kFusedGateUp) return TensorName{{Role::kGateUp, layer, {}}, Part::kAllExperts};
  if (rest == kFusedDown) return TensorName{{Role::kDown, layer, {}}, Part::kAllExperts};
  const auto expert = take_index(rest);
  if (!expert) return std::nullopt;
  if (rest == "gate_proj.weight") return TensorName{{Role::kGateUp, layer, {*expert}}, Part::kGate};
  if (rest == "up_proj.weight") return TensorName{{Role::kGateUp, layer, {*expert}}, Part::kUp};
  if (rest == "down_proj.weight") return TensorName{{Role::kDown, layer, {*expert}}, Part::kWhole};
  return std::nullopt;
}

}  // namespace

std::string name(const TensorName& tensor) {
  const WeightId& id = tensor.id;
  if (!of_layer(id.role)) return std::string(find(kModelNames, id.role));
  const std::string layer = cat({kLayers, id.layer.value, "."});
  if (!of_expert(id.role)) return cat({layer, find(kLayerNames, id.role)});
  if (tensor.part == Part::kAllExperts) {
    return cat({layer, kExperts, id.role == Role::kDown ? kFusedDown : kFusedGateUp});
  }
  return cat({layer, kExperts, id.expert.value, ".", expert_name(id.role, tensor.part)});
}

std::optional<TensorName> parse_name(std::string_view name) {
  if (const auto role = find(kModelNames, name)) return TensorName{{*role, {}, {}}};
  if (!take(name, kLayers)) return std::nullopt;
  const auto layer = take_index(name);
  if (!layer) return std::nullopt;
  if (take(name, kExperts)) return parse_expert(name, {*layer});
  if (const auto role = find(kLayerNames, name)) return TensorName{{*role, {*layer}, {}}};
  return std::nullopt;
}

std::vector<TensorName> plain_tensors(const WeightId& id) {
  if (id.role == Role::kGateUp) return {{id, Part::kGate}, {id, Part::kUp}};
  return {{id, Part::kWhole}};
}

std::string to_string(const WeightId& id) { return name({id, Part::kWhole}); }

std::array<std::int64_t, 2> weight_shape(const ModelConfig& config, Role role) {
  switch (role) {
    case Role::kEmbedding:
    case Role::kHead: return {config.vocabulary, config.hidden};
    case Role::kFinalNorm:
    case Role::kAttentionNorm:
    case Role::kMlpNorm: return {1, config.hidden};
    case Role::kQ: return {config.q_width(), config.hidden};
    case Role::kK:
    case Role::kV: return {config.kv_width(), config.hidden};
    case Role::kO: return {config.hidden, config.q_width()};
    case Role::kQNorm:
    case Role::kKNorm: return {1, config.head_dim};
    case Role::kRouter: return {config.num_experts, config.hidden};
    case Role::kGateUp: return {2 * std::int64_t{config.expert_width}, config.hidden};
    case Role::kDown: return {config.hidden, config.expert_width};
  }
  return {};
}

std::vector<WeightId> weight_ids(const ModelConfig& config) {
  std::vector<WeightId> ids = {{Role::kEmbedding, {}, {}}};
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (const RoleName& entry : kLayerNames) ids.push_back({entry.role, {layer}, {}});
    for (std::int32_t expert = 0; expert < config.num_experts; ++expert) {
      ids.push_back({Role::kGateUp, {layer}, {expert}});
      ids.push_back({Role::kDown, {layer}, {expert}});
    }
  }
  ids.push_back({Role::kFinalNorm, {}, {}});
  if (!config.tied_embeddings) ids.push_back({Role::kHead, {}, {}});
  return ids;
}

}  // namespace lockstep
