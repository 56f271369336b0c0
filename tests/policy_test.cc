// What a method must not change about the policy, seen from both engines.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "cli/random_weights.h"
#include "cli/session.h"
#include "recipe/arm.h"
#include "rollout/engine.h"
#include "rollout/weights.h"
#include "sync/refit.h"
#include "sync/reweigh.h"
#include "train/trainer.h"

namespace lockstep {
namespace {

constexpr ModelConfig kModel = {.num_layers = 3,
                                .hidden = 64,
                                .expert_width = 32,
                                .num_experts = 8,
                                .experts_per_token = 2,
                                .num_heads = 2,
                                .num_kv_heads = 1,
                                .head_dim = 32,
                                .vocabulary = 64,
                                .max_positions = 64};

class PolicyTest : public testing::Test {
 protected:
  /// Responses of the BF16 rollout of given weights.
  std::vector<Trajectory> responses(const WeightSource& weights) const {
    rollout::Engine engine(agreement_, {.cache_bytes = 1 << 22}, Device{}, nullptr, *comm_);
    sync::refit(weights, engine.weights(), agreement_.contract, WeightVersion{0});
    std::vector<rollout::Request> requests;
    for (int i = 0; i < 4; ++i) {
      requests.push_back({.prefix = {.prompt = PromptId{i},
                                     .tokens = {1, 2, i},
                                     .sampling = {.max_new_tokens = 24}},
                          .num_samples = 2,
                          .seed = 3});
    }
    return rollout::generate(engine, std::move(requests));
  }

  PerToken rollout_logp(const WeightSource& weights, const std::vector<Trajectory>& batch) const {
    rollout::Engine engine(agreement_, {.cache_bytes = 1 << 22}, Device{}, nullptr, *comm_);
    sync::refit(weights, engine.weights(), agreement_.contract, WeightVersion{0});
    PerToken logp;
    for (const Trajectory& t : engine.rescore(batch)) logp.push_back(t.rollout_logp);
    return logp;
  }

  PerToken trainer_logp(const WeightSource& weights, const std::vector<Trajectory>& batch,
                        bool bf16) const {
    train::Trainer trainer(agreement_, {}, {.bf16 = bf16}, Device{}, *comm_);
    cli::load(weights, trainer.initial_weights());
    return trainer.logprobs(batch, nullptr);
  }

  /// Mean |a - b| over response tokens.
  static double gap(const std::vector<Trajectory>& batch, const PerToken& a, const PerToken& b) {
    double sum = 0, tokens = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      for (std::size_t t = 0; t < batch[i].tokens.size(); ++t) {
        if (batch[i].response_mask[t] == 0) continue;
        sum += std::abs(static_cast<double>(a[i][t]) - b[i][t]), tokens += 1;
      }
    }
    return sum / tokens;
  }

  const std::unique_ptr<Comm> comm_ = Comm::single();
  const Agreement agreement_ = {kModel, contracts::bf16(), {}, 3};
};

TEST_F(PolicyTest, RescalingLeavesThePolicyAsItIs) {
  const cli::RandomWeights plain(kModel, 0.2f, 7);
  const sync::Rescaled scaled(plain, 1.5);
  const std::vector<Trajectory> batch = responses(plain);
  // In FP32 to FP32's precision; in BF16 as far as BF16 itself is from FP32, for other numbers are
  // rounded.
  EXPECT_LT(gap(batch, trainer_logp(plain, batch, false), trainer_logp(scaled, batch, false)),
            1e-5);
  const double trainers =
      gap(batch, trainer_logp(plain, batch, true), trainer_logp(scaled, batch, true));
  const double rollouts = gap(batch, rollout_logp(plain, batch), rollout_logp(scaled, batch));
  const double of_bf16 =
      gap(batch, trainer_logp(plain, batch, true), trainer_logp(plain, batch, false));
  EXPECT_LT(trainers, 2 * of_bf16);
  EXPECT_LT(rollouts, 2 * of_bf16);
  // A scale that the norm does not take back is another policy.
  class OnlyNorms final : public WeightSource {
   public:
    explicit OnlyNorms(const WeightSource& from, const WeightSource& norms)
        : from_(from), norms_(norms) {}
    void each(const std::function<void(const Weight&)>& visit) const override {
      from_.each([&](const Weight& weight) {
        if (weight.id.role != WeightId::Role::kMlpNorm) return visit(weight);
        norms_.each([&](const Weight& other) {
          if (other.id == weight.id) visit(other);
        });
      });
    }
    const WeightSource &from_, &norms_;
  } half(plain, scaled);
  EXPECT_GT(gap(batch, trainer_logp(plain, batch, true), trainer_logp(half, batch, true)),
            5 * of_bf16);
}

/// Damages what a refit wrote before the receiver is asked for it.
class Damaged final : public WeightSink {
 public:
  Damaged(rollout::Weights& to, std::function<void()> damage)
      : to_(to), damage_(std::move(damage)) {}
  void begin(WeightVersion version, ContractId contract) override { to_.begin(version, contract); }
  void put(const Weight& weight) override { to_.put(weight); }
  std::vector<std::uint32_t> commit() override {
    damage_();
    return to_.commit();
  }

 private:
  rollout::Weights& to_;
  std::function<void()> damage_;
};

TEST(Refit, R61_WhatLiesOtherwiseInTheRolloutIsFound) {
  const Agreement agreement = {
      .model = kModel, .contract = contracts::lockstep(kModel.num_layers), .guide = {}, .seed = 0};
  const cli::RandomWeights weights(kModel, 0.1f, 5);
  rollout::Weights held(agreement);
  const kernels::W4a4Weights& down = held.layer(2).down_codes;
  Damaged whole(held, [] {});
  sync::refit(weights, whole, agreement.contract, WeightVersion{1});
  // Two tiles of 16 outputs change places: the same bytes, of the same shape.
  const std::int64_t tile = kernels::W4a4Weights::tile_bytes(down.cols);
  std::byte* first = down.expert(3) + kernels::W4a4Weights::kHeaderBytes;
  Damaged permuted(held, [&] { std::swap_ranges(first, first + tile, first + tile); });
  try {
    sync::refit(weights, permuted, agreement.contract, WeightVersion{2});
    FAIL() << "a permuted layout was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layers.2.mlp.experts.3.down_proj"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace lockstep
