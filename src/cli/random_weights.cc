#include "cli/random_weights.h"

#include <cmath>
#include <numbers>
#include <vector>

#include "base/philox.h"
#include "model/names.h"

namespace lockstep::cli {
namespace {

using Role = WeightId::Role;

bool is_norm(Role role) {
  return role == Role::kFinalNorm || role == Role::kAttentionNorm || role == Role::kQNorm ||
         role == Role::kKNorm || role == Role::kMlpNorm;
}

/// A standard normal number by Box and Muller.
double normal(std::uint64_t seed, std::uint64_t weight, std::uint32_t element) {
  const PhiloxWords words = philox(seed, philox_counter(weight, element, 0x1e57));
  const double radius = std::sqrt(-2 * std::log1p(-unit(words[0], words[1])));
  return radius * std::cos(2 * std::numbers::pi * unit(words[2], words[3]));
}

}  // namespace

void RandomWeights::each(const std::function<void(const Weight&)>& visit) const {
  std::vector<float> values;
  for (const WeightId& id : weight_ids(model_)) {
    const auto [out, in] = weight_shape(model_, id.role);
    const double blocks = 2.0 * model_.num_layers;
    const bool ends_block = id.role == Role::kO || id.role == Role::kDown;
    const double std = ends_block ? std_ / std::sqrt(blocks) : std_;
    const std::uint64_t name = static_cast<std::uint64_t>(id.role) << 56 |
                               static_cast<std::uint64_t>(id.layer.value) << 28 |
                               static_cast<std::uint64_t>(id.expert.value);
    values.assign(static_cast<std::size_t>(out * in), 1.0f);
    for (std::size_t i = 0; i < values.size() && !is_norm(id.role); ++i) {
      values[i] = static_cast<float>(std * normal(seed_, name, static_cast<std::uint32_t>(i)));
    }
    visit({.id = id, .value = TensorView<const float, 2>{values.data(), {out, in}, {in, 1}}});
  }
}

}  // namespace lockstep::cli
