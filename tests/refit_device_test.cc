/// From masters on a device into the engine's memory there: the same weights as from the host.
#include <gtest/gtest.h>

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

INSTANTIATE_TEST_SUITE_P(Devices, RefitInto, testing::ValuesIn(devices()), name_of_device);

}  // namespace
}  // namespace lockstep
