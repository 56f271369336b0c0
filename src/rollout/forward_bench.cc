/// A decoding pass of the model in models/tiny-moe: 512 sequences side by side, 100 tokens each.
#include <benchmark/benchmark.h>

#include "model/testing.h"
#include "rollout/forward_fixture.h"

namespace lockstep::rollout {
namespace {

/// range(0): rows; range(1): 0 BF16, 1 W4A16, 2 W4A4, 3 W4A4 with residuals; range(2): drift.noise.
void decode_pass(benchmark::State& state) {
  const ModelConfig model = testing::tiny_moe();
  Contract contract = state.range(1) == 0 ? contracts::bf16() : fixture::w4a4_contract(model);
  if (state.range(1) == 1) contract.activation = {};
  Options options;
  if (state.range(1) == 3) options.residual = Residual::kChannels;
  if (state.range(2) != 0) options.drift.noise = 1e-3f;
  fixture::Runner runner(contract, options, model);
  const auto sequences = static_cast<std::int32_t>(state.range(0));
  constexpr std::int32_t kTokens = 100;
  fixture::Cache cache(runner.agreement, 16, sequences * 7);
  const auto tokens = fixture::random_tokens(kTokens, model, 1);
  for (std::int32_t s = 0; s < sequences; ++s) {
    cache.hold(static_cast<std::size_t>(s), kTokens);
    Pass prompt;
    fixture::add_rows(prompt, s, tokens, 0, kTokens);
    prompt.wanted.clear();
    runner.run(prompt, cache);
  }
  Pass pass;
  for (std::int32_t s = 0; s < sequences; ++s) {
    fixture::add_rows(pass, s, tokens, kTokens - 1, kTokens);
  }
  for (auto _ : state) benchmark::DoNotOptimize(runner.run(pass, cache));
  state.counters["rows/s"] = benchmark::Counter(
      static_cast<double>(sequences * static_cast<std::int64_t>(state.iterations())),
      benchmark::Counter::kIsRate);
}
BENCHMARK(decode_pass)
    ->ArgNames({"rows", "arm", "noise"})
    ->Args({512, 0, 0})
    ->Args({512, 1, 0})
    ->Args({512, 2, 0})
    ->Args({512, 3, 0})
    ->Args({512, 2, 1})
    ->Args({8, 2, 0})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace lockstep::rollout
