#include "rl/diagnostics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "rl/distribution.h"

namespace lockstep::rl {
namespace {

Trajectory response(std::vector<float> rollout_logp) {
  Trajectory t;
  rollout_logp.insert(rollout_logp.begin(), 0.0f);  // the prompt's one token
  t.tokens.resize(rollout_logp.size());
  t.response_mask.assign(rollout_logp.size(), 1);
  t.response_mask[0] = 0;
  t.rollout_logp = std::move(rollout_logp);
  t.finish = Finish::kStop;
  return t;
}

Metrics of(const std::vector<Trajectory>& trajectories, const PerToken& train,
           std::vector<float> rewards, const Options& options = {}) {
  const auto comm = Comm::single();
  const Batch batch = {.trajectories = trajectories,
                       .rewards = rewards,
                       .old_logp = train,
                       .group_size = trajectories.size()};
  return diagnostics(options, batch, train, *comm);
}

TEST(Diagnostics, R94_BothDirectionsOfK3) {
  const Metrics m = of({response({-5.0f})}, {{0, -15.0f}}, {1});
  EXPECT_NEAR(m.at("train/gen_kl_error"), 9.000045, 1e-6);
  EXPECT_NEAR(m.at("train/policy_kl_error"), 22015.4658, 1e-3);
  EXPECT_NEAR(m.at("rollout_corr/kl"), 10.0, 1e-6);
}

TEST(Diagnostics, R90_OneOutlierMovesTheMeanAndNotTheMedian) {
  std::vector<float> rollout(1000, -1.0f), train(1001, -1.2f);
  train[500] = -13.0f;
  const Metrics m = of({response(rollout)}, {train}, {1});
  EXPECT_GT(m.at("train/token_mult_prob_error"), 100.0);
  EXPECT_NEAR(m.at("train/token_mult_prob_error/median"), std::exp(0.2), 0.01);
  EXPECT_NEAR(m.at("train/train_rollout_logprob_abs_diff/median"), 0.2, 0.002);
  EXPECT_NEAR(m.at("train/train_rollout_logprob_abs_diff/max"), 12.0, 1e-5);
  EXPECT_EQ(m.at("train/train_rollout_logprob_abs_diff/count"), 1000);
}

TEST(Diagnostics, R91_ConstantOffsetIsALevel) {
  const Metrics m = of({response({-1.0f, -2.0f})}, {{0, -0.75f, -1.75f}}, {1});
  EXPECT_NEAR(m.at("train/train_rollout_logprob_abs_diff"), 0.25, 1e-6);
  EXPECT_NEAR(m.at("rollout_corr/log_ppl_diff"), -0.25, 1e-6);
  EXPECT_NEAR(m.at("rollout_corr/ppl_ratio"), std::exp(-0.25), 1e-6);
  EXPECT_NEAR(m.at("rollout_corr/chi2_token"), std::exp(0.5) - 1, 1e-6);
}

TEST(Diagnostics, EqualPoliciesAreExactlyEqual) {
  const Metrics m =
      of({response({-1.0f, -0.1f}), response({-3.0f})}, {{0, -1.0f, -0.1f}, {0, -3.0f}}, {1, 0});
  for (const char* zero :
       {"train/train_rollout_logprob_abs_diff", "rollout_corr/kl", "rollout_corr/k3_kl",
        "rollout_corr/chi2_token", "train/js_divergence_error", "rollout_corr/log_ppl_abs_diff"}) {
    EXPECT_EQ(m.at(zero), 0.0) << zero;
  }
  EXPECT_EQ(m.at("training/rollout_actor_probs_pearson_corr"), 1.0);
  EXPECT_EQ(m.at("critic/rewards/mean"), 0.5);
  EXPECT_EQ(m.at("response_length/mean"), 1.5);
}

TEST(Diagnostics, LeavesOutWhatWasRewritten) {
  std::vector<Trajectory> t = {response({-1.0f, -1.0f, -1.0f})};
  const PerToken train = {{0, -9.0f, -1.5f, -1.5f}};
  EXPECT_FALSE(of(t, train, {1}).contains("fp4/guide/rewritten_tokens"));
  t[0].rewritten_from = 2;  // a foreign engine computed the prompt and one token again
  const Metrics m = of(t, train, {1});
  EXPECT_EQ(m.at("fp4/guide/rewritten_tokens"), 1);
  EXPECT_EQ(m.at("train/train_rollout_logprob_abs_diff/count"), 2);
  EXPECT_NEAR(m.at("train/train_rollout_logprob_abs_diff/max"), 0.5, 1e-6);
  EXPECT_EQ(m.at("response_length/mean"), 3);
}

TEST(Diagnostics, LeavesOutWhatHasNoNumber) {
  const Metrics m =
      of({response({-1.0f, std::nanf("")}), response({-1.0f})}, {{0, -1.5f, -1.0f}, {}}, {1, 0});
  EXPECT_EQ(m.at("train/train_rollout_logprob_abs_diff/count"), 1);
  EXPECT_NEAR(m.at("train/train_rollout_logprob_abs_diff"), 0.5, 1e-6);
}

TEST(Distribution, QuantilesWithinTheirBins) {
  Distribution d;
  for (int i = 1; i <= 1000; ++i) d.add(i / 1000.0);
  const auto comm = Comm::single();
  d.reduce(*comm);
  EXPECT_NEAR(d.quantile(0.5), 0.5, 0.5 / 128);
  EXPECT_NEAR(d.quantile(0.99), 0.99, 0.99 / 128);
  EXPECT_EQ(d.quantile(1.0), d.largest());
  EXPECT_NEAR(d.mean(), 0.5005, 1e-9);
  EXPECT_EQ(Distribution().quantile(0.5), 0.0);
}

}  // namespace
}  // namespace lockstep::rl
