/// What `lockstep verify` checks, on the tiny checkpoint and on what is wrong on purpose.
#include "instruments/verify.h"

#include <gtest/gtest.h>

#include <map>

#include "recipe/arm.h"
#include "rollout/engine.h"
#include "tiny_fixture.h"

namespace lockstep::instruments {
namespace {

/// Changes one weight from the second reading on.
class Unsteady final : public WeightSource {
 public:
  explicit Unsteady(const WeightSource& from) : from_(from) {}
  void each(const std::function<void(const Weight&)>& visit) const override {
    ++readings_;
    from_.each([&](const Weight& weight) {
      const auto* bf16 = std::get_if<TensorView<const Bf16, 2>>(&weight.value);
      const bool here = weight.id.role == WeightId::Role::kDown && weight.id.layer.value == 3 &&
                        weight.id.expert.value == 5;
      if (readings_ == 1 || !here || bf16 == nullptr) return visit(weight);
      std::vector<Bf16> changed;
      for (std::int64_t row = 0; row < bf16->shape[0]; ++row) {
        const Bf16* at = bf16->data + row * bf16->stride[0];
        changed.insert(changed.end(), at, at + bf16->shape[1]);
      }
      changed[7] = static_cast<Bf16>(std::uint16_t{0x4000});
      visit({weight.id, TensorView<const Bf16, 2>{
                            changed.data(), bf16->shape, {bf16->shape[1], 1}, Device{}}});
    });
  }

 private:
  const WeightSource& from_;
  mutable int readings_ = 0;
};

class VerifyTest : public TinyFixture {
 protected:
  VerifyTest() { agreement_.seed = 5; }

  std::map<std::string, Check> run(VerifyArgs args) const {
    args.prompts = 3;
    args.max_new_tokens = 12;
    std::map<std::string, Check> by_name;
    std::size_t told = 0;
    for (const Check& check : verify(args, [&](const Check&) { ++told; })) {
      std::printf("%-4s %-9s %s\n", check.ok ? "ok" : "bad", check.name.c_str(),
                  check.figures.c_str());
      by_name[check.name] = check;
    }
    EXPECT_EQ(told, by_name.size());
    EXPECT_EQ(by_name.size(), 5u);
    return by_name;
  }
};

/// Zero drift, certified: a trainer that takes the rollout's codes has the rollout's operands.
TEST_F(VerifyTest, R96_AllHoldsUnderNvfp4AndBf16) {
  for (const auto& [name, check] : run({.agreement = agreement_, .weights = checkpoint_})) {
    EXPECT_TRUE(check.ok) << name << ": " << check.figures;
  }
  agreement_.contract = contracts::bf16();
  for (const auto& [name, check] : run({.agreement = agreement_, .weights = checkpoint_})) {
    EXPECT_TRUE(check.ok) << name << ": " << check.figures;
  }
}

/// What `lockstep verify` certifies, it certifies as zeros: no operand, no token, no log-prob and
/// no record differs.
TEST_F(VerifyTest, R96_CertifiesExactZeros) {
  auto checks = run({.agreement = agreement_, .weights = checkpoint_});
  const auto says = [&](const char* check, const char* what) {
    EXPECT_NE(checks[check].figures.find(what), std::string::npos) << checks[check].figures;
  };
  says("refit", "; 0 differ");
  says("capture", ": activations that differ: 0; K and V that differ: 0;");
  for (const char* check : {"prefill", "batch"}) {
    says(check, ": 0 tokens and 0 log-probs of ");
    says(check, " differ, 0 of ");
  }
}

TEST_F(VerifyTest, AllHoldsUnderFourOverSix) {
  for (Quantizer* rule : {&agreement_.contract.weight, &agreement_.contract.activation,
                          &agreement_.contract.k, &agreement_.contract.v}) {
    rule->four_over_six = FourOverSix::kMse;
    rule->denominator = 256;
  }
  for (const Guidance mode : {Guidance::kFullForced, Guidance::kLsbScaleMod4}) {
    agreement_.guide = {.mode = mode,
                        .sites = {Site::kW13In, Site::kW2In, Site::kK, Site::kV},
                        .layers = LayerSet::range(0, agreement_.model.num_layers),
                        .replay_experts = true};
    for (const auto& [name, check] : run({.agreement = agreement_, .weights = checkpoint_})) {
      EXPECT_TRUE(check.ok) << name << ": " << check.figures;
    }
  }
}

TEST_F(VerifyTest, AllHoldsUnderFp8AndMxfp4) {
  const std::vector<std::int8_t> nvfp4 = agreement_.contract.kv_exponents;
  for (const char* name : {"fp8", "mxfp4_trace", "mxfp4_w4a8_trace"}) {
    std::printf("%s\n", name);
    ArmSpec spec = arm_spec(name);
    // FP8's exponents are calibrated for its grid: 448 * 2^n, not 2688 * 2^n.
    for (const int n : nvfp4) spec.kv_exponents.push_back(static_cast<std::int8_t>(n + 3));
    agreement_.contract = bind(spec, agreement_.model).contract;
    for (const auto& [check, result] : run({.agreement = agreement_, .weights = checkpoint_})) {
      EXPECT_TRUE(result.ok) << name << ", " << check << ": " << result.figures;
    }
  }
}

/// No record holds what these scales are; the cache's is held, and all else is checked.
TEST_F(VerifyTest, AllHoldsUnderMacroBlocksAndFp32GlobalScales) {
  const std::int32_t layers = agreement_.model.num_layers;
  Contract macro = contracts::preset("mx-rceil", layers);
  macro.weight.macro_block = macro.activation.macro_block = 128;
  Contract te = contracts::preset("te", layers);
  te.kv_exponents = agreement_.contract.kv_exponents;
  for (const Contract& contract : {macro, te}) {
    agreement_.contract = contract;
    for (const auto& [name, check] : run({.agreement = agreement_, .weights = checkpoint_})) {
      EXPECT_TRUE(check.ok) << name << ": " << check.figures;
    }
  }
}

TEST_F(VerifyTest, WeightsThatChangeAndARunOfAnotherContractAreFound) {
  const Unsteady weights(checkpoint_);
  auto checks =
      run({.agreement = agreement_, .weights = weights, .run_contract = "0123456789abcdef"});
  EXPECT_FALSE(checks["contract"].ok);
  EXPECT_NE(checks["contract"].figures.find("the run names 0123456789abcdef"), std::string::npos);
  EXPECT_FALSE(checks["refit"].ok);
  EXPECT_NE(checks["refit"].figures.find("; 1 differ"), std::string::npos);
}

TEST_F(VerifyTest, WhatDependsOnTheBatchIsFound) {
  auto checks = run({.agreement = agreement_,
                     .weights = checkpoint_,
                     .rollout = {.residual = rollout::Residual::kChannels,
                                 .residual_scope = rollout::ResidualScope::kBatch}});
  EXPECT_TRUE(checks["capture"].ok) << checks["capture"].figures;
  EXPECT_FALSE(checks["batch"].ok);
}

TEST_F(VerifyTest, ASecondPassOfATokensOwnOrAFixedChoiceHoldsInAnyBatch) {
  using rollout::Residual, rollout::ResidualScope;
  std::vector<Token> text;
  for (const char c : std::string("12*34=408;77+66=143")) text.push_back(c);
  const std::pair<Residual, ResidualScope> passes[] = {
      {Residual::kTwoOfFour, ResidualScope::kPerToken},
      {Residual::kBlocks, ResidualScope::kPerToken},
      {Residual::kChannels, ResidualScope::kStatic}};
  for (const auto& [kind, scope] : passes) {
    rollout::Options options = {.residual = kind,
                                .residual_scope = scope,
                                .residual_permille = 250,
                                .residual_sites = {Site::kW13In, Site::kW2In},
                                .residual_alpha = 0.5f};
    Agreement agreement = agreement_;
    if (scope == ResidualScope::kStatic) {
      agreement.contract.residual_groups = rollout::calibrate_residual(
          agreement.model, agreement.contract, options, checkpoint_, {&text, 1});
      EXPECT_NE(agreement.contract.id(), agreement_.contract.id());
    }
    for (const auto& [name, check] :
         run({.agreement = agreement, .weights = checkpoint_, .rollout = options})) {
      EXPECT_TRUE(check.ok) << name << ": " << check.figures;
    }
  }
}

TEST_F(VerifyTest, ACacheWithoutExponentsFailsInWords) {
  agreement_.contract.kv_exponents.clear();
  auto checks = run({.agreement = agreement_, .weights = checkpoint_});
  EXPECT_FALSE(checks["contract"].ok);
  EXPECT_FALSE(checks["batch"].ok);
  EXPECT_NE(checks["capture"].figures, "");
}

}  // namespace
}  // namespace lockstep::instruments
