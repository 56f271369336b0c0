/// Rollouts of a small model on a CUDA device: 512 samples side by side, as recipes/studies/ asks
/// for them, with and without records.
#include <cstdio>
#include <memory>
#include <vector>

#include "device/cuda/bench.h"
#include "model/testing.h"
#include "rollout/engine.h"
#include "rollout/forward_fixture.h"

namespace lockstep::rollout {
namespace {

std::vector<Request> requests(std::int64_t first) {
  std::vector<Request> all;
  for (std::int64_t i = first; i < first + 32; ++i) {
    Request r;
    r.prefix.prompt = PromptId{i};
    for (Token t = 0; t < 16; ++t) {
      r.prefix.tokens.push_back(static_cast<Token>((i * 31 + t * 7) % 250));
    }
    r.prefix.sampling.max_new_tokens = 256;
    r.num_samples = 16;
    all.push_back(std::move(r));
  }
  return all;
}

void rollout_of(cuda::Bench& bench, const char* name, Agreement agreement, bool captured) {
  const std::unique_ptr<Comm> comm = Comm::single();
  fixture::Discard sink;
  Options options;
  options.cache_bytes = 1ll << 31;
  options.tokens_per_pass = 8192;
  Engine engine(agreement, options, bench.device(), captured ? &sink : nullptr, *comm);
  fixture::load(engine.weights(), fixture::random_weights(agreement, 1), agreement.contract);
  generate(engine, requests(0));  // memory finds its size, graphs are noted
  engine.metrics();
  const std::int64_t before = sink.bytes;
  generate(engine, requests(1000));
  Metrics m = engine.metrics();
  std::printf("%-34s %8.0f tokens/s, %.2f ms a pass of %.0f rows, %.0f of %.0f passes replayed, ",
              name, m["rollout/tokens_per_s"], 1e3 * m["rollout/seconds"] / m["rollout/passes"],
              m["rollout/rows_per_pass"], m["rollout/replayed_passes"], m["rollout/passes"]);
  std::printf("%.0f bytes of records a token\n",
              static_cast<double>(sink.bytes - before) / m["rollout/tokens"]);
  std::fflush(stdout);
}

void rollout_entry(cuda::Bench& bench) {
  bench.heading("512 samples of 256 tokens of a model of 20M parameters, tokens a second");
  Agreement a;
  a.model = testing::arith_20m();
  a.contract = contracts::bf16();
  rollout_of(bench, "bf16", a, false);
  a.contract = fixture::w4a4_contract(a.model);
  rollout_of(bench, "w4a4", a, false);
  a.guide = {.mode = Guidance::kLsb,
             .sites = {Site::kW13In, Site::kK, Site::kV},
             .layers = LayerSet::range(0, a.model.num_layers),
             .replay_experts = true};
  rollout_of(bench, "trace: lsb of w13_in, K, V, routes", a, true);
  a.guide.sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV};
  rollout_of(bench, "trace, w2_in too", a, true);
}

const cuda::BenchEntry kRollout("rollout", rollout_entry);

}  // namespace
}  // namespace lockstep::rollout
