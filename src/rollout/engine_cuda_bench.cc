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

std::vector<Request> requests(std::int64_t first, std::int32_t new_tokens = 256) {
  std::vector<Request> all;
  for (std::int64_t i = first; i < first + 32; ++i) {
    Request r;
    r.prefix.prompt = PromptId{i};
    for (Token t = 0; t < 16; ++t) {
      r.prefix.tokens.push_back(static_cast<Token>((i * 31 + t * 7) % 250));
    }
    r.prefix.sampling.max_new_tokens = new_tokens;
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
              m["rollout/rows_per_pass"], m["perf/replayed_passes"], m["rollout/passes"]);
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

struct Recorded {
  double tokens = 0, bytes = 0;
};

/// Of a rollout with records of w13_in, K and V in the last `layers` of the model's, and of routes.
Recorded recorded(cuda::Bench& bench, const ModelConfig& model, std::int32_t layers,
                  std::int32_t new_tokens, bool routes) {
  const std::unique_ptr<Comm> comm = Comm::single();
  Agreement a;
  a.model = model;
  a.contract = fixture::w4a4_contract(model);
  a.guide = {.mode = Guidance::kLsb,
             .sites = {Site::kW13In, Site::kK, Site::kV},
             .layers = LayerSet::range(model.num_layers - layers, model.num_layers),
             .replay_experts = routes};
  fixture::Discard sink;
  Options options;
  options.cache_bytes = 1ll << 30;
  Engine engine(a, options, bench.device(), &sink, *comm);
  fixture::load(engine.weights(), fixture::random_weights(a, 1), a.contract);
  Recorded seen;
  for (const Trajectory& t : generate(engine, requests(0, new_tokens))) {
    seen.tokens += static_cast<double>(t.tokens.size()) - 1;  // the last has no record
  }
  // Of a prompt once for all its samples.
  seen.tokens -= 15.0 * 32 * 16;
  seen.bytes = static_cast<double>(sink.bytes);
  return seen;
}

/// Bytes of records as a sink receives them: by tokens and recorded layers, and by nothing else.
void law_of_records(cuda::Bench& bench) {
  cuda::Law tokens = {.cost = "records, bytes", .size = "tokens", .slope = 1, .within = 0.05};
  cuda::Law layers = {
      .cost = "records, bytes a token", .size = "recorded layers", .slope = 1, .within = 0.05};
  cuda::Law experts = {
      .cost = "records, bytes a token", .size = "experts", .slope = 0, .within = 0.05};
  cuda::Law words = experts;
  words.size = "words of the vocabulary";
  const auto each = [](const Recorded& seen) { return seen.bytes / seen.tokens; };
  const ModelConfig model = {.num_layers = 8,
                             .hidden = 64,
                             .expert_width = 32,
                             .num_experts = 16,
                             .experts_per_token = 4,
                             .num_heads = 4,
                             .num_kv_heads = 2,
                             .head_dim = 32,
                             .vocabulary = 272,
                             .max_positions = 512};
  for (const std::int32_t by : {1, 2, 4, 8}) {
    const Recorded seen = recorded(bench, model, 4, 8 * by, true);
    tokens.add(seen.tokens, seen.bytes);
    layers.add(by, each(recorded(bench, model, by, 8, false)));
    ModelConfig other = model;
    other.num_experts = 16 * by;
    experts.add(other.num_experts, each(recorded(bench, other, 4, 8, true)));
    other = model;
    other.vocabulary = 272 * by;
    words.add(other.vocabulary, each(recorded(bench, other, 4, 8, true)));
  }
  for (const cuda::Law& law : {tokens, layers, experts, words}) bench.judge(law);
}

const cuda::BenchEntry kRecords("law_records", law_of_records);
const cuda::BenchEntry kRollout("rollout", rollout_entry);

}  // namespace
}  // namespace lockstep::rollout
