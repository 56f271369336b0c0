/// What the tests of the trainer share: a small model, its weights, and how they compare.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "device/testing.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/swiglu.h"
#include "kernels/exact/w4a4.h"
#include "model/names.h"
#include "model/values.h"
#include "ops/device.h"
#include "ops/experts.h"
#include "train/plain_model.h"
#include "train/testing.h"
#include "train/trainer.h"

namespace lockstep::train {

inline ModelConfig small_model(bool tied = false) {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden = 32;
  config.expert_width = 16;
  config.num_experts = 6;
  config.experts_per_token = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.vocabulary = 40;
  config.max_positions = 64;
  config.rope_theta = 1e4;
  config.tied_embeddings = tied;
  return config;
}

inline Weights random_weights(const ModelConfig& config, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Weights weights;
  for (const WeightId& id : weight_ids(config)) {
    const auto shape = weight_shape(config, id.role);
    Tensor w = at::empty({shape[0], shape[1]}, at::kFloat);
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape[1]));
    for (std::int64_t i = 0; i < w.numel(); ++i) {
      // Norms are near one, everything else keeps the size of what it reads.
      const float x = normal(random);
      w.data_ptr<float>()[i] = shape[0] == 1 ? 1.0f + 0.1f * x : scale * x;
    }
    weights[id] = w;
  }
  return weights;
}

inline void give(const Weights& weights, const ModelConfig& config, WeightSink& sink) {
  sink.begin(WeightVersion{0}, ContractId{0});
  for (const WeightId& id : weight_ids(config)) {
    const Tensor& w = weights.at(id);
    sink.put({id, TensorView<const float, 2>{
                      w.data_ptr<float>(), {w.size(0), w.size(1)}, {w.size(1), 1}}});
  }
  sink.commit();
}

inline Weights take(const WeightSource& source) {
  Weights weights;
  source.each([&](const Weight& weight) {
    const std::vector<float> values = f32_of(weight);
    const auto [rows, cols] = std::get<TensorView<const float, 2>>(weight.value).shape;
    weights[weight.id] =
        at::from_blob(const_cast<float*>(values.data()), {rows, cols}, at::kFloat).clone();
  });
  return weights;
}

inline std::vector<Trajectory> random_batch(const ModelConfig& config, std::vector<int> lengths,
                                            float temperature = 0.7f) {
  std::mt19937_64 random(7);
  std::vector<Trajectory> batch;
  for (const int length : lengths) {
    Trajectory t;
    t.prompt = PromptId{static_cast<std::int64_t>(batch.size())};
    t.sampling.temperature = temperature;
    for (int i = 0; i < length; ++i) {
      t.tokens.push_back(static_cast<Token>(random() % static_cast<unsigned>(config.vocabulary)));
      t.response_mask.push_back(i >= length / 3 && i > 0 ? 1 : 0);
    }
    batch.push_back(t);
  }
  return batch;
}

/// An update that takes the gradient itself from the weights: sqrt(g^2) / eps vanishes.
inline Options reveals_gradient() {
  Options options;
  options.bf16 = false;
  options.lr = 1e5;
  options.eps = 1e5;
  options.beta1 = 0.0;
  options.beta2 = 0.0;
  options.max_grad_norm = 0.0;
  return options;
}

inline Weights minus(const Weights& a, const Weights& b) {
  Weights difference;
  for (const auto& [id, value] : a) difference[id] = value - b.at(id);
  return difference;
}

/// A loss with a different, smooth slope at every token.
inline double some_loss(std::size_t i, std::span<const float> logp, std::span<float> dlogp) {
  double loss = 0.0;
  for (std::size_t t = 0; t < logp.size(); ++t) {
    const double c = std::sin(static_cast<double>(i * 31 + t));
    loss += c * logp[t] + 0.1 * logp[t] * logp[t];
    dlogp[t] = static_cast<float>(c + 0.2 * logp[t]);
  }
  return loss;
}

inline double relative_error(const Tensor& a, const Tensor& b) {
  return ((a - b).norm() / (b.norm() + 1e-12)).item<double>();
}

/// Where a trainer can run. Torch is readied for all of them before any test's first backward.
inline std::vector<Device> trainer_devices() {
  const std::vector<Device> all = devices();
  for (const Device& device : all) ops::prepare_torch(device);
  return all;
}

class TrainerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Trainer> make(const Agreement& agreement, const Options& options,
                                const Weights& weights, const Qat& qat = {}) {
    auto trainer = std::make_unique<Trainer>(agreement, qat, options, device_, *comm_);
    give(weights, agreement.model, trainer->initial_weights());
    return trainer;
  }

  Device device_{};
  std::unique_ptr<Comm> comm_ = Comm::single();
};

/// A body for every device.
class TrainerOn : public TrainerTest, public ::testing::WithParamInterface<Device> {
 protected:
  void SetUp() override { device_ = GetParam(); }
};

}  // namespace lockstep::train
