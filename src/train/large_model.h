/// What benchmarks share: a model of weights drawn at random.
#pragma once

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "model/config.h"
#include "model/names.h"
#include "model/weights.h"

namespace lockstep::train {

/// 0.88 billion parameters, all but a tenth of them the experts'.
inline ModelConfig large_model() {
  ModelConfig config;
  config.num_layers = 16;
  config.hidden = 1024;
  config.expert_width = 512;
  config.num_experts = 32;
  config.experts_per_token = 4;
  config.num_heads = 16;
  config.num_kv_heads = 4;
  config.head_dim = 64;
  config.vocabulary = 32000;
  config.max_positions = 2048;
  config.tied_embeddings = true;
  return config;
}

inline void give_random_weights(const ModelConfig& config, WeightSink& sink) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::vector<float> some(1 << 20);  // drawn once: the large model has a thousand times as many
  for (float& x : some) x = normal(random);
  sink.begin(WeightVersion{0}, ContractId{0});
  for (const WeightId& id : weight_ids(config)) {
    const auto [rows, cols] = weight_shape(config, id.role);
    std::vector<float> values(static_cast<std::size_t>(rows * cols), 1.0f);
    std::size_t from = random() % some.size();
    for (std::size_t i = 0; rows > 1 && i < values.size(); from = 0) {
      const std::size_t count = std::min(values.size() - i, some.size() - from);
      std::copy_n(some.data() + from, count, values.data() + i);
      i += count;
    }
    sink.put({id, TensorView<const float, 2>{values.data(), {rows, cols}, {cols, 1}}});
  }
  sink.commit();
}

/// The weights that `from` has.
inline void give_weights(const WeightSource& from, WeightSink& sink) {
  sink.begin(WeightVersion{0}, ContractId{0});
  from.each([&](const Weight& weight) { sink.put(weight); });
  sink.commit();
}

/// A loss: the likelihood of every token.
inline double likelihood(std::size_t, std::span<const float> logp, std::span<float> dlogp) {
  for (float& d : dlogp) d = -1e-4f;
  return logp.empty() ? 0.0 : -logp[0];
}

inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

}  // namespace lockstep::train
