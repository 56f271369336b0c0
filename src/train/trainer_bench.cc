/// One training pass of the size that the demo uses: 10,000 tokens in short sequences.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "device/memory.h"
#include "train/large_model.h"
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

std::vector<Trajectory> batch_of(const ModelConfig& config, std::size_t tokens,
                                 std::size_t shortest = 40, std::size_t spread = 60) {
  std::mt19937_64 random(2);
  std::vector<Trajectory> batch;
  for (std::size_t total = 0; total < tokens; total += batch.back().tokens.size()) {
    Trajectory& t = batch.emplace_back();
    const std::size_t length = shortest + random() % spread;
    t.path = {{.id = SpanId{batch.size()}, .count = static_cast<std::int32_t>(length) - 1}};
    for (std::size_t i = 0; i < length; ++i) {
      t.tokens.push_back(static_cast<Token>(random() % static_cast<unsigned>(config.vocabulary)));
      t.response_mask.push_back(i >= 20 ? 1 : 0);
    }
  }
  return batch;
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

/// Records that lie in memory, as those of a rollout that has just ended: a token's are some of a
/// few.
class KeptTrace final : public TraceSource {
 public:
  explicit KeptTrace(std::uint32_t num_experts) : random_(num_experts) {}

  std::size_t read(std::span<const TokenKey> tokens, ContractId contract, Rows<std::byte> rows,
                   std::span<std::uint8_t> present) const override {
    const auto width = static_cast<std::size_t>(rows.layout.bytes());
    const std::vector<std::byte>& kept = kept_of(contract, rows.place, rows.layout);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto at = static_cast<std::size_t>(tokens[i].position) % kKept * width;
      std::memcpy(&rows.bytes[i * width], &kept[at], width);
      present[i] = 1;
    }
    return tokens.size();
  }
  void prefetch(std::span<const TokenKey>) const override {}

 private:
  static constexpr std::size_t kKept = 64;

  const std::vector<std::byte>& kept_of(ContractId contract, Place place,
                                        const RowLayout& layout) const {
    const std::lock_guard lock(mutex_);
    std::vector<std::byte>& kept = kept_[{place, layout.encoding}];
    if (kept.empty()) {
      kept.resize(kKept * static_cast<std::size_t>(layout.bytes()));
      std::vector<TokenKey> keys;
      for (std::size_t i = 0; i < kKept; ++i) {
        keys.push_back({SpanId{1}, static_cast<std::int32_t>(i)});
      }
      std::vector<std::uint8_t> present(kKept);
      random_.read(keys, contract, {place, layout, kept}, present);
    }
    return kept;
  }

  RandomTrace random_;
  mutable std::mutex mutex_;
  mutable std::map<std::pair<Place, Encoding>, std::vector<std::byte>> kept_;
};

/// A step of the large model on a CUDA device: two passes of 16,384 tokens and the update. One
/// trainer imitates the rollout's weights alone; the other all of its quantizations, guided in the
/// latter half of the layers and in all of them. They take turns.
void steps_on_device(benchmark::State& state) {
  constexpr Device kDevice{Device::Kind::kCuda, 0};
  if (const std::string why = why_unusable(kDevice); !why.empty()) {
    state.SkipWithError(why.c_str());
    return;
  }
  const auto comm = Comm::single();
  Agreement half;
  half.model = large_model();
  half.contract = contracts::lockstep(half.model.num_layers);
  half.contract.kv_exponents.assign(2 * 16, -9);
  half.guide = {.mode = Guidance::kLsb,
                .sites = {Site::kW13In, Site::kK, Site::kV},
                .layers = LayerSet::range(8, 16),
                .replay_experts = true};
  Agreement whole = half;
  whole.guide.layers = LayerSet::range(0, 16);
  Agreement routes = half;
  routes.guide.sites = {};
  const Options options = {.tokens_per_pass = 16384};
  const Qat all = {.weights = true, .activations = true, .k = true, .v = true};
  struct Arm {
    const char* name;
    const Agreement& agreement;
    Qat qat;
    std::unique_ptr<Trainer> trainer{};
    std::vector<double> ms{};
  };
  Arm arms[] = {{"weights", routes, {.weights = true}}, {"half", half, all}, {"whole", whole, all}};
  const auto start_all = std::chrono::steady_clock::now();
  const auto tell = [&](const char* what) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_all;
    std::printf("%6.1f s: %s\n", since.count(), what);
    std::fflush(stdout);
  };
  for (Arm& arm : arms) {
    arm.trainer = std::make_unique<Trainer>(arm.agreement, arm.qat, options, kDevice, *comm);
    tell("room");
    if (arm.trainer == arms[0].trainer) {
      give_random_weights(half.model, arm.trainer->initial_weights());
    } else {
      give_weights(arms[0].trainer->weights(), arm.trainer->initial_weights());
    }
    tell("weights");
  }
  const std::vector<Trajectory> batch = batch_of(half.model, 32000, 900, 300);
  const KeptTrace trace(32);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  for (auto _ : state) {
    for (Arm& arm : arms) {
      const auto start = now();
      arm.trainer->accumulate(batch, &trace, likelihood);
      const auto middle = now();
      arm.trainer->update();
      const double accumulate = std::chrono::duration<double>(middle - start).count() * 1e3;
      const double ms = std::chrono::duration<double>(now() - start).count() * 1e3;
      arm.ms.push_back(ms);
      std::printf("%s: %.1f ms, of it the passes %.1f\n", arm.name, ms, accumulate);
      std::fflush(stdout);
    }
  }
  for (Arm& arm : arms) {
    arm.ms.erase(arm.ms.begin(), arm.ms.begin() + 2);  // memory was still being asked for
    state.counters[arm.name] = median(arm.ms);
  }
  state.counters["half_ratio"] = median(arms[1].ms) / median(arms[0].ms);
  state.counters["whole_ratio"] = median(arms[2].ms) / median(arms[0].ms);
}
BENCHMARK(steps_on_device)->Iterations(9)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace lockstep::train
