/// The routed experts of both engines at equal inputs: the trainer's real product (QaRL) has the
/// rollout's bits, whatever its codes are; its fake-quantization has the rollout's operands.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <tuple>

#include "device/testing.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/router.h"
#include "kernels/exact/guide.h"
#include "model/names.h"
#include "ops/device.h"
#include "ops/experts.h"
#include "rollout/capture.h"
#include "rollout/forward_experts.h"
#include "sync/refit.h"
#include "train/parameters.h"
#include "train/sites.h"

namespace lockstep {
namespace {

using at::Tensor;

constexpr std::int64_t kTokens = 37;
constexpr ModelConfig kModel = {.num_layers = 1,
                                .hidden = 192,
                                .expert_width = 64,
                                .num_experts = 6,
                                .experts_per_token = 2,
                                .num_heads = 2,
                                .num_kv_heads = 1,
                                .head_dim = 32,
                                .vocabulary = 20,
                                .max_positions = 64};

/// Where the test's two engines lie.
Device& here() {
  static Device device;
  return device;
}
bool on_cuda() { return here().kind == Device::Kind::kCuda; }

/// Numbers there, [rows, cols], and what torch sees of them: BF16 on a CUDA device, FP32 else.
struct Numbers {
  Numbers(const std::vector<Bf16>& values, std::int64_t rows, std::int64_t cols)
      : bytes(to_device(values, here())),
        view{bytes.as<Bf16>(), {rows, cols}, {cols, 1}, here()},
        tensor(at::empty({rows, cols}, options())) {
    if (on_cuda()) {
      const auto count = static_cast<std::int64_t>(values.size() * sizeof(Bf16));
      copy_bytes(tensor.data_ptr(), here(), values.data(), {}, count);
      synchronize(here());
    } else {
      ops::load_bf16(values.data(), tensor);
    }
  }
  static at::TensorOptions options() {
    return at::TensorOptions(ops::torch_device(here()))
        .dtype(on_cuda() ? at::kBFloat16 : at::kFloat);
  }

  Buffer bytes;
  TensorView<const Bf16, 2> view;
  Tensor tensor;
};

/// Both sides of one layer under a contract.
class Engines {
 public:
  Engines(const Contract& contract, const train::Qat& qat, const rollout::Options& options = {})
      : agreement_{.model = kModel, .contract = contract, .guide = {}},
        qat_(qat),
        options_(options),
        masters_(kModel, {.contract = contract, .fp4_experts = true, .codes = qat.real_product},
                 here()),
        weights_(agreement_, here()),
        x_(numbers(), kTokens, width()) {
    const auto sink = train::masters_sink(masters_, [this] { masters_.refresh(); });
    std::mt19937 random(7);
    std::normal_distribution<float> gauss;
    sink->begin({}, {});
    for (const WeightId& id : weight_ids(kModel)) {
      const auto [rows, cols] = weight_shape(kModel, id.role);
      std::vector<float> values(static_cast<std::size_t>(rows * cols));
      for (float& value : values) value = gauss(random) / std::sqrt(static_cast<float>(cols));
      sink->put({id, TensorView<const float, 2>{values.data(), {rows, cols}, {cols, 1}}});
    }
    sink->commit();
    sync::refit(*train::masters_source(masters_), weights_, contract, WeightVersion{1});
    synchronize(here());
  }

  std::vector<Bf16> of_rollout() {
    rollout::Workplace at{.device = here()};
    rollout::ForwardExperts experts(agreement_, options_, at);
    rollout::PassChecks checks(kModel.num_layers, at);
    rollout::Capture capture(agreement_, nullptr, false, here());
    rollout::Pass pass;
    pass.tokens.resize(kTokens);
    capture.begin(pass);
    checks.begin(pass);
    const Buffer out(here(), kTokens * width() * std::int64_t{sizeof(Bf16)});
    const TensorView<Bf16, 2> y = {out.as<Bf16>(), {kTokens, width()}, {width(), 1}, here()};
    const rollout::ForwardExperts::Outputs outputs =
        experts.run(pass, Layer{0}, weights_.layer(0), x_.view, capture, checks, y);
    if (!outputs.y.empty())
      kernels::combine({.y = outputs.y, .gates = outputs.gates, .out = y}, {});
    return to_host<Bf16>(out);
  }

  /// With the rollout's own choice of experts and gates.
  std::vector<Bf16> of_trainer() {
    const auto there = at::TensorOptions(ops::torch_device(here()));
    const Tensor logits = at::empty({kTokens, kModel.num_experts}, there.dtype(at::kFloat));
    const Tensor chosen = at::empty({kTokens, kModel.experts_per_token}, there.dtype(at::kInt));
    const Tensor gates = at::empty({kTokens, kModel.experts_per_token}, there.dtype(at::kFloat));
    kernels::linear_bf16(
        {.x = x_.view, .weight = weights_.layer(0).router, .y = ops::view_of<float>(logits)}, {});
    kernels::router({.logits = ops::view_of<const float>(logits),
                     .experts = ops::view_of<std::int32_t>(chosen),
                     .gates = ops::view_of<float>(gates)},
                    {});
    const Tensor experts = on_cuda() ? chosen : chosen.to(at::kLong);

    train::Pack pack;
    pack.token.resize(kTokens);
    const train::Sites sites(agreement_, qat_, pack, nullptr, nullptr);
    const train::ExpertCodes* codes = masters_.codes(Layer{0});
    EXPECT_EQ(codes != nullptr, qat_.real_product);
    ops::Coded coded;
    if (codes != nullptr) {
      coded = {&codes->gate_up, &codes->down, agreement_.contract.activation, x_.tensor};
    }
    const auto matrix = [&](WeightId::Role role) {
      const auto [rows, cols] = weight_shape(kModel, role);
      const std::int64_t offset = masters_.slot({role, {}, {}}).offset;
      void* const data = on_cuda() ? static_cast<void*>(masters_.compute_bf16.as<Bf16>() + offset)
                                   : static_cast<void*>(masters_.compute.data() + offset);
      return at::from_blob(data, {kModel.num_experts, rows, cols}, Numbers::options());
    };
    const Tensor y =
        ops::experts(sites.w13_in(Layer{0}, x_.tensor), gates, matrix(WeightId::Role::kGateUp),
                     matrix(WeightId::Role::kDown), experts, sites.w2_in(Layer{0}), true, coded);
    std::vector<Bf16> out(static_cast<std::size_t>(kTokens * width()));
    if (!on_cuda()) {
      ops::store_bf16(y, out.data());
      return out;
    }
    copy_bytes(out.data(), {}, y.const_data_ptr(), here(), static_cast<std::int64_t>(y.nbytes()));
    synchronize(here());
    return out;
  }

 private:
  static constexpr std::int64_t width() { return kModel.hidden; }
  static std::vector<Bf16> numbers() {
    std::mt19937 random(8);
    std::normal_distribution<float> gauss;
    std::vector<Bf16> x;
    for (std::int64_t i = 0; i < kTokens * kModel.hidden; ++i) {
      x.push_back(to_bf16(gauss(random) * (i % 64 == 0 ? 20.0f : 1.0f)));
    }
    return x;
  }

  Agreement agreement_;
  train::Qat qat_;
  rollout::Options options_;
  train::Parameters masters_;
  rollout::Weights weights_;
  Numbers x_;
};

double relative_distance(const std::vector<Bf16>& a, const std::vector<Bf16>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double p = static_cast<double>(to_float(a[i])), q = static_cast<double>(to_float(b[i]));
    difference += (p - q) * (p - q);
    size += p * p;
  }
  return std::sqrt(difference / size);
}

Contract in_macro_blocks() {
  Contract contract = contracts::preset("mx-rceil", 1);
  contract.weight.macro_block = contract.activation.macro_block = 128;
  return contract;
}

/// A body for every device.
class OnDevice : public testing::TestWithParam<Device> {
 protected:
  OnDevice() { here() = GetParam(); }
};

std::vector<Device> torch_devices() {
  const std::vector<Device> all = devices();
  for (const Device& device : all) ops::prepare_torch(device);
  return all;
}

class RealProduct : public testing::TestWithParam<std::tuple<Device, const char*>> {
 protected:
  RealProduct() { here() = std::get<0>(GetParam()); }
};

TEST_P(RealProduct, TheTrainersExpertsAreTheRolloutsBitForBit) {
  const Contract contract = contracts::preset(std::get<1>(GetParam()), 1);
  ASSERT_NE(expert_product(contract), ExpertProduct::kBf16);
  Engines real(contract, {.weights = true, .activations = true, .real_product = true});
  const std::vector<Bf16> theirs = real.of_rollout();
  EXPECT_EQ(real.of_trainer(), theirs);
  // So has a product of the codes' values where BF16 holds them, as long as FP32 holds the sums.
  // Under an FP32 global scale it does not: operands are rounded, and codes of w2_in flip.
  Engines fake(contract, {.weights = true, .activations = true});
  const double apart = relative_distance(theirs, fake.of_trainer());
  const bool exact = contract.weight.is_guidable();
  EXPECT_LT(apart, exact ? 1e-6 : 0.05);
  EXPECT_GE(apart, exact ? 0 : 0.001);
}

INSTANTIATE_TEST_SUITE_P(Contracts, RealProduct,
                         testing::Combine(testing::ValuesIn(torch_devices()),
                                          testing::Values("lockstep", "te", "mx-rceil", "mx-floor",
                                                          "mx-even")),
                         [](const auto& param) {
                           std::string name = std::get<1>(param.param);
                           std::erase(name, '-');
                           const bool cpu = std::get<0>(param.param) == Device{};
                           return name + (cpu ? "_cpu" : "_cuda");
                         });

/// Macro blocks have no exact product: operands are equal, sums are in another order.
using MacroBlocks = OnDevice;
TEST_P(MacroBlocks, BothEnginesMultiplyTheSameOperands) {
  Engines engines(in_macro_blocks(), {.weights = true, .activations = true});
  Engines without(contracts::preset("mx-rceil", 1), {.weights = true, .activations = true});
  const std::vector<Bf16> rollout = engines.of_rollout();
  EXPECT_LT(relative_distance(rollout, engines.of_trainer()), 0.003);
  EXPECT_GT(relative_distance(rollout, without.of_rollout()), 0.03);
}

/// The dense second pass of MXFP4, alone and in macro blocks: less is lost, alike on both sides.
using Residual = OnDevice;
TEST_P(Residual, HalfOfItGoesBackUnderMxfp4Too) {
  const SiteSet both = {Site::kW13In, Site::kW2In};
  rollout::Options half;
  half.residual = rollout::Residual::kDense;
  half.residual_alpha = 0.5f;
  half.residual_sites = both;
  const train::Qat imitated = {
      .weights = true, .activations = true, .residual_alpha = 0.5f, .residual_sites = both};
  for (const Contract& c : {contracts::preset("mx-rceil", 1), in_macro_blocks()}) {
    Contract reference = c;
    reference.activation = {};
    const std::vector<Bf16> exact = Engines(reference, {.weights = true}).of_rollout();
    Engines engines(c, imitated, half);
    const std::vector<Bf16> rollout = engines.of_rollout();
    EXPECT_LT(relative_distance(rollout, engines.of_trainer()), 0.01);
    const double before = relative_distance(exact, Engines(c, imitated).of_rollout());
    EXPECT_LT(relative_distance(exact, rollout), 0.8 * before);
  }
}

/// Equal inputs, and codes that no order of sums moves: what is left is the gates' last bit.
using Rollout = OnDevice;
TEST_P(Rollout, IsThatOfTheCpu) {
  rollout::Options none, split, half;
  split.drift.split_k = true;
  half.residual = rollout::Residual::kDense;
  half.residual_alpha = 0.5f;
  half.residual_sites = {Site::kW13In, Site::kW2In};
  for (const char* preset : {"lockstep", "te", "modelopt", "mx-rceil", "macro"}) {
    const Contract contract =
        std::string(preset) == "macro" ? in_macro_blocks() : contracts::preset(preset, 1);
    const bool fp32 = expert_product(contract) == ExpertProduct::kNvfp4 &&
                      !contract.activation.global_is_power_of_two;
    for (const rollout::Options& options : {none, split, half}) {
      if (fp32 && options.residual != rollout::Residual::kNone) continue;
      const std::vector<Bf16> there = Engines(contract, {.weights = true}, options).of_rollout();
      here() = {};
      const std::vector<Bf16> cpu = Engines(contract, {.weights = true}, options).of_rollout();
      here() = GetParam();
      EXPECT_LT(relative_distance(there, cpu), 0.003) << preset << ", " << options.drift.split_k;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Rollout, testing::ValuesIn(torch_devices()), name_of_device);
INSTANTIATE_TEST_SUITE_P(Devices, MacroBlocks, testing::ValuesIn(torch_devices()), name_of_device);
INSTANTIATE_TEST_SUITE_P(Devices, Residual, testing::ValuesIn(torch_devices()), name_of_device);

}  // namespace
}  // namespace lockstep
