/// From masters on a device into the engine's memory there: the same weights as from the host.
#include <gtest/gtest.h>

#include <cstdio>

#include "device/testing.h"
#include "model/names.h"
#include "model/values.h"
#include "rollout/forward_fixture.h"
#include "rollout/weights.h"
#include "sync/refit.h"
#include "sync/testing.h"

namespace lockstep {
namespace {

class Source final : public WeightSource {
 public:
  Source(const ModelConfig& model, float scale, Device device) : model_(model), device_(device) {
    sync::testing::Masters(model, scale).each([&](const Weight& weight) {
      memory_.emplace_back(weight.id, to_device(f32_of(weight), device));
    });
  }
  void each(const std::function<void(const Weight&)>& visit) const override {
    for (const auto& [id, buffer] : memory_) {
      const auto shape = weight_shape(model_, id.role);
      visit({id, TensorView<const float, 2>{buffer.as<float>(), shape, {shape[1], 1}, device_}});
    }
  }

 private:
  ModelConfig model_;
  Device device_;
  std::vector<std::pair<WeightId, Buffer>> memory_;
};

class RefitInto : public testing::TestWithParam<Device> {};

TEST_P(RefitInto, ChecksumsAndFlipsAgreeWhereverTheMastersLie) {
  const ModelConfig model = rollout::fixture::small_model();
  for (const Contract& contract :
       {rollout::fixture::w4a4_contract(model), contracts::preset("mx-rceil", 3),
        contracts::preset("fp8", 3), contracts::bf16()}) {
    SCOPED_TRACE(to_string(contract));
    const Agreement agreement = {.model = model, .contract = contract, .guide = {}, .seed = 0};
    rollout::Weights cpu(agreement), weights(agreement, GetParam());
    for (const std::int64_t version : {1, 2, 3}) {
      const float scale = 0.1f + 0.01f * static_cast<float>(version);
      const Source here(model, scale, {}), there(model, scale, GetParam());
      Metrics expected = sync::refit(here, cpu, contract, {version});
      Metrics got = sync::refit(version == 2 ? here : there, weights, contract, {version});
      for (const char* name : {"fp4/refit/seconds", "fp4/refit/probe_err", "fp4/refit/rel_err"}) {
        EXPECT_EQ(expected.contains(name), got.contains(name)) << name;
        if (std::string_view(name) == "fp4/refit/rel_err") {
          EXPECT_NEAR(expected[name], got[name], 1e-7);
        }
        expected.erase(name);
        got.erase(name);
      }
      EXPECT_EQ(expected, got);
      weights.require_ready();
    }
  }
}

/// Experts of Qwen3-30B-A3B's shape; every sixteenth has masters of its own.
class Large final : public WeightSource {
 public:
  Large(const ModelConfig& model, Device device) : model_(model), device_(device) {
    std::vector<float> values(static_cast<std::size_t>(2 * model.expert_width * model.hidden));
    std::uint32_t state = 1;
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;
      value = (static_cast<float>(state >> 8) / 16777216.0f - 0.5f) * 0.1f;
    }
    for (int i = 0; i < 16; ++i) memory_.push_back(to_device(values, device));
  }
  void each(const std::function<void(const Weight&)>& visit) const override {
    for (const WeightId& id : weight_ids(model_)) {
      const auto shape = weight_shape(model_, id.role);
      const Buffer& buffer = memory_[static_cast<std::size_t>(id.expert.value) % 16];
      visit({id, TensorView<const float, 2>{buffer.as<float>(), shape, {shape[1], 1}, device_}});
    }
  }

 private:
  ModelConfig model_;
  Device device_;
  std::vector<Buffer> memory_;
};

TEST(RefitNightly, TimesItAtTheShapeOfALargeModel) {
  if (devices().size() == 1) GTEST_SKIP() << "there is no CUDA device";
  const Device device = devices()[1];
  const ModelConfig model = {.num_layers = 2,
                             .hidden = 2048,
                             .expert_width = 768,
                             .num_experts = 128,
                             .experts_per_token = 8,
                             .num_heads = 32,
                             .num_kv_heads = 4,
                             .head_dim = 128,
                             .vocabulary = 1024};
  const Contract contract = rollout::fixture::w4a4_contract(model);
  const Agreement agreement = {.model = model, .contract = contract, .guide = {}, .seed = 0};
  rollout::Weights weights(agreement, device);
  const Large masters(model, device);
  const double numbers = 2.0 * 128 * 3 * 768 * 2048;
  for (const std::int64_t version : {1, 2, 3, 4}) {
    const double seconds =
        sync::refit(masters, weights, contract, {version}).at("fp4/refit/seconds");
    std::printf("refit %lld: %.4f s for %.3g numbers of experts, %.0f GB/s of 4.56 bytes each\n",
                static_cast<long long>(version), seconds, numbers,
                numbers * 4.5625 / seconds / 1e9);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, RefitInto, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep
