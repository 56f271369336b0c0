/// For tests of sync/: weights of a small model that follow from their places.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "model/names.h"
#include "model/weights.h"

namespace lockstep::sync::testing {

constexpr ModelConfig small_model(std::int32_t hidden) {
  return {.num_layers = 2,
          .hidden = hidden,
          .expert_width = 16,
          .num_experts = 3,
          .experts_per_token = 2,
          .num_heads = 2,
          .num_kv_heads = 1,
          .head_dim = 16,
          .vocabulary = 24};
}

/// FP32 masters.
class Masters : public WeightSource {
 public:
  Masters(const ModelConfig& model, float scale) : scale(scale), model_(model) {}
  void each(const std::function<void(const Weight&)>& visit) const override {
    float x = 0.25f;
    for (const WeightId& id : weight_ids(model_)) {
      const auto [rows, cols] = weight_shape(model_, id.role);
      std::vector<float> values(static_cast<std::size_t>(rows * cols));
      for (float& value : values) value = scale * std::sin(x += 1.7f);
      if (poison == id) values[7] = std::numeric_limits<float>::quiet_NaN();
      visit({id, TensorView<const float, 2>{values.data(), {rows, cols}, {cols, 1}}});
    }
  }
  float scale;
  std::optional<WeightId> poison{};

 private:
  ModelConfig model_;
};

}  // namespace lockstep::sync::testing
