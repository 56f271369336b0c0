/// The routed experts of both engines at equal inputs: the trainer's real product (QaRL) has the
/// rollout's bits, whatever its codes are; its fake-quantization has the rollout's operands.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/dense/router.h"
#include "kernels/exact/guide.h"
#include "model/names.h"
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

/// Both sides of one layer under a contract.
class Engines {
 public:
  Engines(const Contract& contract, const train::Qat& qat, const rollout::Options& options = {})
      : agreement_{.model = kModel, .contract = contract, .guide = {}},
        qat_(qat),
        options_(options),
        masters_(kModel, {.contract = contract, .fp4_experts = true, .codes = qat.real_product}),
        weights_(agreement_) {
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
    for (std::int64_t i = 0; i < kTokens * kModel.hidden; ++i) {
      x_.push_back(to_bf16(gauss(random) * (i % 64 == 0 ? 20.0f : 1.0f)));
    }
  }

  std::vector<Bf16> of_rollout() {
    rollout::Workplace at;
    rollout::ForwardExperts experts(agreement_, options_, at);
    rollout::PassChecks checks(kModel.num_layers, at);
    rollout::Capture capture(agreement_, nullptr);
    rollout::Pass pass;
    pass.tokens.resize(kTokens);
    capture.begin(pass);
    checks.begin(pass);
    std::vector<Bf16> out(x_.size());
    experts.run(pass, Layer{0}, weights_.layer(0), x(), capture, checks,
                {out.data(), {kTokens, width()}, {width(), 1}});
    return out;
  }

  /// With the rollout's own choice of experts and gates.
  std::vector<Bf16> of_trainer() {
    std::vector<float> logits(kTokens * kModel.num_experts);
    std::vector<std::int32_t> chosen(kTokens * kModel.experts_per_token);
    Tensor gates = at::empty({kTokens, kModel.experts_per_token}, at::kFloat);
    const auto view = [](auto* data, std::int64_t cols) {
      return TensorView<std::remove_pointer_t<decltype(data)>, 2>{data, {kTokens, cols}, {cols, 1}};
    };
    kernels::linear_bf16({.x = x(),
                          .weight = weights_.layer(0).router,
                          .y = view(logits.data(), kModel.num_experts)},
                         {});
    kernels::router({.logits = view(logits.data(), kModel.num_experts),
                     .experts = view(chosen.data(), kModel.experts_per_token),
                     .gates = view(gates.data_ptr<float>(), kModel.experts_per_token)},
                    {});
    Tensor experts = at::empty({kTokens, kModel.experts_per_token}, at::kLong);
    std::copy(chosen.begin(), chosen.end(), experts.data_ptr<std::int64_t>());

    train::Pack pack;
    pack.token.resize(kTokens);
    const train::Sites sites(agreement_, qat_, pack, nullptr, nullptr);
    Tensor numbers = at::empty({kTokens, width()}, at::kFloat);
    ops::load_bf16(x_.data(), numbers);
    const train::ExpertCodes* codes = masters_.codes(Layer{0});
    EXPECT_EQ(codes != nullptr, qat_.real_product);
    ops::Coded coded;
    if (codes != nullptr) {
      coded = {&codes->gate_up, &codes->down, agreement_.contract.activation, numbers};
    }
    const auto matrix = [&](WeightId::Role role) {
      const auto [rows, cols] = weight_shape(kModel, role);
      return at::from_blob(masters_.compute.data() + masters_.slot({role, {}, {}}).offset,
                           {kModel.num_experts, rows, cols}, at::kFloat);
    };
    const Tensor y =
        ops::experts(sites.w13_in(Layer{0}, numbers), gates, matrix(WeightId::Role::kGateUp),
                     matrix(WeightId::Role::kDown), experts, sites.w2_in(Layer{0}), true, coded);
    std::vector<Bf16> out(x_.size());
    ops::store_bf16(y, out.data());
    return out;
  }

 private:
  static constexpr std::int64_t width() { return kModel.hidden; }
  TensorView<const Bf16, 2> x() const { return {x_.data(), {kTokens, width()}, {width(), 1}}; }

  Agreement agreement_;
  train::Qat qat_;
  rollout::Options options_;
  train::Parameters masters_;
  rollout::Weights weights_;
  std::vector<Bf16> x_;
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

class RealProduct : public testing::TestWithParam<const char*> {};

TEST_P(RealProduct, TheTrainersExpertsAreTheRolloutsBitForBit) {
  const Contract contract = contracts::preset(GetParam(), 1);
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
                         testing::Values("lockstep", "te", "mx-rceil", "mx-floor", "mx-even"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::erase(name, '-');
                           return name;
                         });

/// Macro blocks have no exact product: operands are equal, sums are in another order.
TEST(MacroBlocks, BothEnginesMultiplyTheSameOperands) {
  Engines engines(in_macro_blocks(), {.weights = true, .activations = true});
  Engines without(contracts::preset("mx-rceil", 1), {.weights = true, .activations = true});
  const std::vector<Bf16> rollout = engines.of_rollout();
  EXPECT_LT(relative_distance(rollout, engines.of_trainer()), 0.003);
  EXPECT_GT(relative_distance(rollout, without.of_rollout()), 0.03);
}

/// The dense second pass of MXFP4, alone and in macro blocks: less is lost, alike on both sides.
TEST(Residual, HalfOfItGoesBackUnderMxfp4Too) {
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

}  // namespace
}  // namespace lockstep
