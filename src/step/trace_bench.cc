/// Whole steps on a CUDA device: rollout, the old policy's log-probs, an update and new weights,
/// with records and guidance and without. They take turns.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "contract/contract.h"
#include "device/memory.h"
#include "rollout/engine.h"
#include "store/store.h"
#include "sync/refit.h"
#include "train/large_model.h"
#include "train/trainer.h"

namespace lockstep::step {
namespace {

constexpr Device kDevice{Device::Kind::kCuda, 0};
constexpr std::int32_t kPrompts = 16, kSamples = 16, kPromptTokens = 64, kNewTokens = 192;

Agreement agreement_of(std::int32_t first_guided) {
  Agreement agreement;
  agreement.model = train::large_model();
  const std::int32_t layers = agreement.model.num_layers;
  agreement.contract = contracts::lockstep(layers);
  agreement.contract.kv_exponents.assign(static_cast<std::size_t>(2 * layers), -9);
  if (first_guided < 0) return agreement;
  agreement.guide = {.mode = Guidance::kLsb,
                     .sites = {Site::kW13In, Site::kK, Site::kV},
                     .layers = LayerSet::range(first_guided, layers),
                     .replay_experts = true};
  return agreement;
}

std::vector<rollout::Request> requests(std::int64_t step) {
  std::vector<rollout::Request> all;
  for (std::int64_t i = 0; i < kPrompts; ++i) {
    rollout::Request& r = all.emplace_back();
    r.prefix.prompt = PromptId{step * kPrompts + i};
    for (Token t = 0; t < kPromptTokens; ++t) {
      r.prefix.tokens.push_back(static_cast<Token>((step * 977 + i * 131 + t * 37) % 31000));
    }
    r.prefix.sampling.max_new_tokens = kNewTokens;
    r.num_samples = kSamples;
  }
  return all;
}

/// Both sides quantize alike; with `traced` the trainer follows the rollout's records and routes.
class Arm {
 public:
  Arm(const char* name, const Agreement& agreement, bool traced, Comm& comm)
      : name_(name),
        agreement_(agreement),
        traced_(traced),
        store_({.ram_bytes = 8ll << 30}),
        trainer_(agreement, {.weights = true, .activations = true, .k = true, .v = true},
                 {.tokens_per_pass = 16384}, kDevice, comm),
        engine_(agreement, {.cache_bytes = 2ll << 30, .tokens_per_pass = 8192}, kDevice,
                traced ? &store_ : nullptr, comm) {}

  const char* name() const { return name_; }
  train::Trainer& trainer() { return trainer_; }
  std::vector<double>& times() { return ms_; }

  void refit() {
    sync::refit(trainer_.weights(), engine_.weights(), agreement_.contract, {++version_});
    store_.retire({version_});
  }

  void step(std::int64_t number) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const std::vector<Trajectory> batch = rollout::generate(engine_, requests(number));
    const auto sampled = Clock::now();
    const TraceSource* records = traced_ ? &store_ : nullptr;
    benchmark::DoNotOptimize(trainer_.logprobs(batch, records));
    const auto scored = Clock::now();
    trainer_.accumulate(batch, records, train::likelihood);
    trainer_.update();
    const auto updated = Clock::now();
    refit();
    const auto end = Clock::now();
    const auto ms = [](auto from, auto to) {
      return std::chrono::duration<double>(to - from).count() * 1e3;
    };
    std::printf("%s: %.1f ms; rollout %.1f, log-probs %.1f, update %.1f, weights %.1f\n", name_,
                ms(start, end), ms(start, sampled), ms(sampled, scored), ms(scored, updated),
                ms(updated, end));
    std::fflush(stdout);
    ms_.push_back(ms(start, end));
  }

 private:
  const char* name_;
  const Agreement& agreement_;
  bool traced_;
  store::Store store_;
  train::Trainer trainer_;
  rollout::Engine engine_;
  std::int64_t version_ = 0;
  std::vector<double> ms_;
};

void whole_steps(benchmark::State& state) {
  if (const std::string why = why_unusable(kDevice); !why.empty()) {
    state.SkipWithError(why.c_str());
    return;
  }
  const auto comm = Comm::single();
  const std::int32_t layers = train::large_model().num_layers;
  const Agreement off = agreement_of(-1), half = agreement_of(layers / 2), all = agreement_of(0);
  std::vector<std::unique_ptr<Arm>> arms;
  arms.push_back(std::make_unique<Arm>("off", off, false, *comm));
  arms.push_back(std::make_unique<Arm>("half", half, true, *comm));
  arms.push_back(std::make_unique<Arm>("all", all, true, *comm));
  for (const auto& arm : arms) {
    WeightSink& sink = arm->trainer().initial_weights();
    if (arm == arms[0]) {
      train::give_random_weights(off.model, sink);
    } else {
      train::give_weights(arms[0]->trainer().weights(), sink);
    }
  }
  for (const auto& arm : arms) arm->refit();
  std::int64_t number = 0;
  for (auto _ : state) {
    for (const auto& arm : arms) arm->step(number);
    ++number;
  }
  for (const auto& arm : arms) {
    arm->times().erase(arm->times().begin());  // memory was still being asked for
    state.counters[arm->name()] = train::median(arm->times());
    state.counters[std::string(arm->name()) + "_ratio"] =
        train::median(arm->times()) / train::median(arms[0]->times());
  }
}
BENCHMARK(whole_steps)->Iterations(4)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace lockstep::step
