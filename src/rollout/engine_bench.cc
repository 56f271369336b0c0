// End-to-end decoding, capture included: tokens sampled a second, by arm and batch.
#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

#include "base/philox.h"
#include "model/testing.h"
#include "rollout/engine.h"
#include "rollout/forward_fixture.h"
#include "rollout/sampler.h"

namespace lockstep::rollout {
namespace {

Agreement agreement(bool fp4) {
  Agreement a;
  a.model = testing::tiny_moe();
  a.contract = fp4 ? fixture::w4a4_contract(a.model) : contracts::bf16();
  a.guide.replay_experts = true;
  if (!fp4) return a;
  a.guide.mode = Guidance::kLsb;
  a.guide.sites = {Site::kW13In, Site::kK, Site::kV};
  a.guide.layers = LayerSet::range(a.model.num_layers / 2, a.model.num_layers);
  return a;
}

/// range(0): samples side by side, 8 a prompt; range(1): FP4; range(2): captured.
void decode(benchmark::State& state) {
  const Agreement a = agreement(state.range(1) != 0);
  const std::unique_ptr<Comm> comm = Comm::single();
  fixture::Discard sink;
  Engine engine(a, {}, Device{}, state.range(2) != 0 ? &sink : nullptr, *comm);
  fixture::load(engine.weights(), fixture::random_weights(a, 1), a.contract);
  std::int64_t prompt = 0;
  for (auto _ : state) {
    std::vector<Request> requests;
    for (std::int64_t i = 0; i < state.range(0) / 8; ++i, ++prompt) {
      Request r;
      r.prefix.prompt = PromptId{prompt};
      for (Token t = 0; t < 24; ++t) {
        r.prefix.tokens.push_back(static_cast<Token>((prompt * 31 + t * 7) % 256));
      }
      r.prefix.sampling.max_new_tokens = 48;
      r.num_samples = 8;
      requests.push_back(std::move(r));
    }
    benchmark::DoNotOptimize(generate(engine, std::move(requests)));
  }
  Metrics m = engine.metrics();
  state.counters["tokens_per_s"] = m["rollout/tokens_per_s"];
  state.counters["rows_per_pass"] = m["rollout/rows_per_pass"];
  if (state.range(2) != 0) {
    state.counters["record_bytes_per_token"] =
        static_cast<double>(sink.bytes) / m["rollout/tokens"];
  }
}
BENCHMARK(decode)
    ->ArgNames({"samples", "fp4", "captured"})
    ->ArgsProduct({{8, 64, 512}, {0, 1}, {0, 1}})
    ->Unit(benchmark::kMillisecond);

/// A row of logits to a token; range(0): the vocabulary, range(1): temperature 1 or not.
void sample(benchmark::State& state) {
  std::vector<float> logits(static_cast<std::size_t>(state.range(0)));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(philox(1, philox_counter(i, 0, 0))[0] % 4096) / 256.0f;
  }
  std::int32_t position = 0;
  for (auto _ : state) {
    const Distribution distribution(logits, state.range(1) != 0 ? 0.7f : 1.0f);
    benchmark::DoNotOptimize(distribution.sample({}, {1, PromptId{0}, 0, position++}));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(sample)->ArgNames({"vocabulary", "tempered"})->ArgsProduct({{512, 151936}, {0, 1}});

/// Beside that, its range(1) likeliest tokens.
void top(benchmark::State& state) {
  std::vector<float> logits(static_cast<std::size_t>(state.range(0)));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(philox(1, philox_counter(i, 0, 0))[0] % 4096) / 256.0f;
  }
  const Distribution distribution(logits, 1.0f);
  std::vector<Token> tokens(static_cast<std::size_t>(state.range(1)));
  std::vector<float> logps(tokens.size());
  for (auto _ : state) {
    distribution.top(tokens, logps);
    benchmark::DoNotOptimize(logps.data());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(top)->ArgNames({"vocabulary", "k"})->ArgsProduct({{512, 151936}, {8, 128}});

}  // namespace
}  // namespace lockstep::rollout
