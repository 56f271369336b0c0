/// One training pass of the size that the demo uses: 10,000 tokens in short sequences.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "model/names.h"
#include "train/testing.h"
#include "train/trainer.h"

namespace lockstep::train {
namespace {

ModelConfig demo_model() {
  ModelConfig config;
  config.num_layers = 7;
  config.hidden = 144;
  config.expert_width = 64;
  config.num_experts = 16;
  config.experts_per_token = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.vocabulary = 512;
  config.max_positions = 256;
  config.tied_embeddings = true;
  return config;
}

void give_random_weights(const ModelConfig& config, WeightSink& sink) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  sink.begin(WeightVersion{0}, ContractId{0});
  for (const WeightId& id : weight_ids(config)) {
    const auto [rows, cols] = weight_shape(config, id.role);
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    for (float& x : values) x = rows == 1 ? 1.0f : normal(random);
    sink.put({id, TensorView<const float, 2>{values.data(), {rows, cols}, {cols, 1}}});
  }
  sink.commit();
}

std::vector<Trajectory> batch_of(const ModelConfig& config, std::size_t tokens) {
  std::mt19937_64 random(2);
  std::vector<Trajectory> batch;
  for (std::size_t total = 0; total < tokens; total += batch.back().tokens.size()) {
    Trajectory& t = batch.emplace_back();
    const std::size_t length = 40 + random() % 60;
    t.path = {{.id = SpanId{batch.size()}, .count = static_cast<std::int32_t>(length) - 1}};
    for (std::size_t i = 0; i < length; ++i) {
      t.tokens.push_back(static_cast<Token>(random() % static_cast<unsigned>(config.vocabulary)));
      t.response_mask.push_back(i >= 20 ? 1 : 0);
    }
  }
  return batch;
}

double likelihood(std::size_t, std::span<const float> logp, std::span<float> dlogp) {
  for (float& d : dlogp) d = -1e-4f;
  return logp.empty() ? 0.0 : -logp[0];
}

void forward_backward(benchmark::State& state) {
  const auto comm = Comm::single();
  Agreement agreement;
  agreement.model = demo_model();
  Options options;
  options.tokens_per_pass = static_cast<std::int32_t>(state.range(0));
  Trainer trainer(agreement, {}, options, Device{}, *comm);
  give_random_weights(agreement.model, trainer.initial_weights());
  const std::vector<Trajectory> batch = batch_of(agreement.model, 10000);
  for (auto _ : state) {
    trainer.accumulate(batch, nullptr, likelihood);
    trainer.update();
  }
}
BENCHMARK(forward_backward)
    ->Arg(1024)
    ->Arg(2048)
    ->Arg(4096)
    ->Arg(8192)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

/// The same with FP4 experts and cache, guided on the latter half of the layers.
void guided_forward_backward(benchmark::State& state) {
  const auto comm = Comm::single();
  Agreement agreement;
  agreement.model = demo_model();
  agreement.contract = contracts::lockstep(agreement.model.num_layers);
  agreement.contract.kv_exponents.assign(2 * 7, -9);
  agreement.guide = {.mode = Guidance::kLsb,
                     .sites = {Site::kW13In, Site::kK, Site::kV},
                     .layers = LayerSet::range(3, 7),
                     .replay_experts = true};
  const Qat qat = {.weights = true, .activations = true, .k = true, .v = true};
  Trainer trainer(agreement, qat, {.tokens_per_pass = 2048}, Device{}, *comm);
  give_random_weights(agreement.model, trainer.initial_weights());
  const std::vector<Trajectory> batch = batch_of(agreement.model, 10000);
  const RandomTrace trace(16);
  for (auto _ : state) {
    trainer.accumulate(batch, &trace, likelihood);
    trainer.update();
  }
}
BENCHMARK(guided_forward_backward)->Unit(benchmark::kMillisecond)->UseRealTime();

void log_probs(benchmark::State& state) {
  const auto comm = Comm::single();
  Agreement agreement;
  agreement.model = demo_model();
  Trainer trainer(agreement, {}, {.tokens_per_pass = 2048}, Device{}, *comm);
  give_random_weights(agreement.model, trainer.initial_weights());
  const std::vector<Trajectory> batch = batch_of(agreement.model, 10000);
  for (auto _ : state) benchmark::DoNotOptimize(trainer.logprobs(batch, nullptr));
}
BENCHMARK(log_probs)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace lockstep::train
