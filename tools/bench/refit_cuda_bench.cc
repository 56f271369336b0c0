/// A whole refit, masters and engine on one device: quantizing, checksums of both ends, flips and
/// probes, timed by the host as training sees it.
#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/text.h"
#include "contract/contract.h"
#include "device/cuda/bench.h"
#include "model/names.h"
#include "model/testing.h"
#include "rollout/weights.h"
#include "sync/refit.h"

namespace lockstep {
namespace {

/// FP32 masters; experts whose numbers are equal modulo 16 share theirs, as all others do.
class MadeUpMasters final : public WeightSource {
 public:
  MadeUpMasters(const ModelConfig& model, Device device) : model_(model), device_(device) {
    std::int64_t expert = 0, other = 0;
    for (const WeightId& id : weight_ids(model)) {
      const auto [rows, cols] = weight_shape(model, id.role);
      std::int64_t& most = of_expert(id.role) ? expert : other;
      most = std::max(most, rows * cols);
    }
    for (int i = 0; i < 16; ++i) experts_.push_back(to_device(numbers(expert), device));
    others_ = to_device(numbers(other), device);
  }

  void each(const std::function<void(const Weight&)>& visit) const override {
    for (const WeightId& id : weight_ids(model_)) {
      const auto shape = weight_shape(model_, id.role);
      const Buffer& buffer =
          of_expert(id.role) ? experts_[static_cast<std::size_t>(id.expert.value) % 16] : others_;
      visit({id, TensorView<const float, 2>{buffer.as<float>(), shape, {shape[1], 1}, device_}});
    }
  }

 private:
  static std::vector<float> numbers(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::uint32_t state = 1;
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;
      value = (static_cast<float>(state >> 8) / 16777216.0f - 0.5f) * 0.1f;
    }
    return values;
  }

  ModelConfig model_;
  Device device_;
  std::vector<Buffer> experts_;
  Buffer others_;
};

struct Refits {
  double first = 0, median = 0, least = 0, most = 0;  // milliseconds
  double parameters = 0;                              // of experts, which are quantized
};

/// Layers of Qwen3-30B-A3B's shape.
Refits refits(const cuda::Bench& bench, std::int32_t layers) {
  ModelConfig model = testing::qwen3_30b_a3b();
  model.num_layers = layers;
  model.vocabulary = 1024;
  Contract contract = contracts::lockstep(model.num_layers);
  contract.kv_exponents.assign(static_cast<std::size_t>(2 * model.num_layers), 0);
  const Agreement agreement = {.model = model, .contract = contract, .guide = {}};
  rollout::Weights weights(agreement, bench.device());
  const MadeUpMasters masters(model, bench.device());
  const auto milliseconds = [&](std::int64_t version) {
    return 1e3 * sync::refit(masters, weights, contract, {version}).at("fp4/refit/seconds");
  };
  Refits seen = {.first = milliseconds(1), .parameters = layers * 128.0 * 3 * 768 * 2048};
  std::vector<double> times;
  for (std::int64_t version = 2; version <= 10; ++version) times.push_back(milliseconds(version));
  std::ranges::sort(times);
  seen.median = times[times.size() / 2];
  seen.least = times.front();
  seen.most = times.back();
  return seen;
}

void refit_entry(cuda::Bench& bench) {
  bench.heading("whole refits of layers of Qwen3-30B-A3B's shape");
  for (const std::int32_t layers : {2, 48}) {
    const Refits seen = refits(bench, layers);
    // FP32 in; codes and scales out: 4 bits, and 8 for sixteen.
    const double bytes = seen.parameters * (4 + 0.5 + 1.0 / 16);
    const double floor = bytes / bench.ceilings().copy * 1e3;
    std::printf(
        "refit of %2d %8.2f ms (%.2f to %.2f, the first %.2f) %8.0f MB %6.3f TB/s  floor %.3f\n",
        layers, seen.median, seen.least, seen.most, seen.first, bytes / 1e6,
        bytes / seen.median / 1e9, floor / seen.median);
    std::fflush(stdout);
  }
}

void refit_law(cuda::Bench& bench) {
  cuda::Law law = {.cost = "refit, time", .size = "parameters", .slope = 1, .within = 0.1};
  for (const std::int32_t layers : {1, 2, 4, 8}) {
    const Refits seen = refits(bench, layers);
    law.add(seen.parameters, seen.median);
  }
  bench.judge(law);
}

const cuda::BenchEntry kRefitLaw("law_refit", refit_law);
const cuda::BenchEntry kRefit("refit", refit_entry);

}  // namespace
}  // namespace lockstep
