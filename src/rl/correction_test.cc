#include "rl/correction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace lockstep::rl {
namespace {

/// One response a row of rho = pi_old / pi_roll.
class Corrections : public testing::Test {
 protected:
  TokenWeights weights(const Options& options, const std::vector<std::vector<double>>& rho) {
    trajectories_.clear();
    old_.clear();
    for (const auto& row : rho) {
      Trajectory t;
      t.tokens.resize(row.size());
      t.response_mask.assign(row.size(), 1);
      t.rollout_logp.assign(row.size(), -2.0f);
      old_.emplace_back();
      for (const double r : row) old_.back().push_back(static_cast<float>(-2.0 + std::log(r)));
      trajectories_.push_back(std::move(t));
    }
    rewards_.assign(rho.size(), 0.0f);
    const auto comm = Comm::single();
    return token_weights(
        options, {.trajectories = trajectories_, .rewards = rewards_, .old_logp = old_}, *comm);
  }

  static void expect(const std::vector<float>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4) << i;
  }

  std::vector<Trajectory> trajectories_;
  std::vector<float> rewards_;
  PerToken old_;
};

TEST_F(Corrections, ByToken) {
  const std::vector<std::vector<double>> rho = {{0.1, 0.8, 1.0, 7.0}};
  const auto of = [&](Correction c) {
    return weights({.correction = c, .correction_floor = 0.5f, .correction_cap = 5.0f}, rho)
        .weight[0];
  };
  expect(of(Correction::kNone), {1, 1, 1, 1});
  expect(of(Correction::kTis), {0.1, 0.8, 1, 5});
  expect(of(Correction::kCis), {0.5, 0.8, 1, 5});
  expect(of(Correction::kIcePop), {0, 0.8, 1, 0});
  expect(of(Correction::kSeqTis), {0.56, 0.56, 0.56, 0.56});
}

TEST_F(Corrections, AreToldOfAsTheyAreUsed) {
  const std::vector<std::vector<double>> rho = {{0.1, 0.8, 1.0, 7.0}};
  const auto told = [&](Options options) {
    const auto comm = Comm::single();
    Seen seen = weights(options, rho).seen;
    seen.updates = 1;
    return seen.metrics(options, *comm);
  };
  const std::string name = "rollout_corr/rollout_is_";
  const auto of = [&](Correction c) {
    return told({.correction = c, .correction_floor = 0.5f, .correction_cap = 5.0f});
  };
  const auto expect_weights = [&](const Metrics& m, std::vector<double> w) {
    double sum = 0, square = 0;
    for (const double x : w) sum += x, square += x * x;
    const auto n = static_cast<double>(w.size());
    EXPECT_NEAR(m.at(name + "mean"), sum / n, 1e-5);
    EXPECT_NEAR(m.at(name + "std"), std::sqrt(square / n - sum * sum / n / n), 1e-5);
    EXPECT_NEAR(m.at(name + "max"), *std::max_element(w.begin(), w.end()), 1e-5);
    EXPECT_NEAR(m.at(name + "min"), *std::min_element(w.begin(), w.end()), 1e-5);
    EXPECT_NEAR(m.at(name + "eff_sample_size"), sum * sum / (n * square), 1e-5);
  };
  const Metrics tis = of(Correction::kTis), cis = of(Correction::kCis);
  const Metrics icepop = of(Correction::kIcePop), sequence = of(Correction::kSeqTis);
  expect_weights(tis, {0.1, 0.8, 1, 5});
  expect_weights(cis, {0.5, 0.8, 1, 5});
  expect_weights(icepop, {0, 0.8, 1, 0});
  expect_weights(sequence, {0.56, 0.56, 0.56, 0.56});
  EXPECT_EQ(tis.at(name + "oob_ratio"), 0.25);
  EXPECT_EQ(cis.at(name + "oob_ratio"), 0.5);
  EXPECT_EQ(icepop.at(name + "oob_ratio"), 0.5);
  EXPECT_EQ(sequence.at(name + "oob_ratio"), 0);
  EXPECT_EQ(tis.at(name + "ratio_fraction_high"), 0.25);
  EXPECT_EQ(tis.at(name + "ratio_fraction_low"), 0.25);                // below 1 / 5
  EXPECT_EQ(icepop.at("rollout_corr/rollout_rs_masked_fraction"), 0);  // no rule took them
  EXPECT_FALSE(of(Correction::kNone).contains(name + "mean"));
  const Metrics normed = told({.correction_cap = 5.0f, .correction_batch_norm = true});
  EXPECT_NEAR(normed.at(name + "batch_norm_factor"), 6.9 / 4, 1e-5);
  EXPECT_NEAR(normed.at(name + "mean"), 1, 1e-6);
  const Metrics rejected = told({.correction_cap = 5.0f, .reject = {.token_high = 2}});
  expect_weights(rejected, {0.1, 0.8, 1});
  EXPECT_EQ(rejected.at("rollout_corr/rollout_rs_masked_fraction"), 0.25);
}

TEST_F(Corrections, BatchNormComesAfterTruncation) {
  const auto w = weights({.correction_cap = 2.0f, .correction_batch_norm = true}, {{1, 9}, {1, 2}});
  expect(w.weight[0], {1 / 1.5, 2 / 1.5});
  expect(w.weight[1], {1 / 1.5, 2 / 1.5});
}

TEST_F(Corrections, AisLiesBetweenPlainAndCorrected) {
  Options options = {.correction = Correction::kAis, .correction_cap = 5.0f};
  options.ais_ess = options.ais_k3 = options.ais_variance = 0;
  expect(weights(options, {{0.5, 3}}).weight[0], {1, 1});
  options.ais_ess = 1e6f;
  expect(weights(options, {{0.5, 3}}).weight[0], {0.5, 3});
  options.ais_ess = 1;  // ESS/N = 1.75^2 / 4.625
  const auto w = weights(options, {{0.5, 3}});
  const double lambda = w.seen.lambda;
  EXPECT_NEAR(lambda, 1 - 1.75 * 1.75 / 4.625, 1e-6);
  expect(w.weight[0], {1 - 0.5 * lambda, 1 + 2 * lambda});
}

TEST_F(Corrections, Rejections) {
  const std::vector<std::vector<double>> rho = {{1, 1, 1}, {2.5, 1, 1}, {0.3, 0.9, 1}};
  const auto rejected = [&](Rejection rule) {
    const auto w = weights({.correction = Correction::kNone, .reject = rule}, rho);
    std::string pattern;
    for (const auto& row : w.weight) {
      for (const float v : row) pattern += v == 0 ? '-' : 'x';
      pattern += ' ';
    }
    return pattern;
  };
  EXPECT_EQ(rejected({}), "xxx xxx xxx ");
  EXPECT_EQ(rejected({.token_low = 0.5f, .token_high = 2}), "xxx -xx -xx ");
  EXPECT_EQ(rejected({.seq_high = 2}), "xxx --- xxx ");
  EXPECT_EQ(rejected({.geo_low = 0.9f, .geo_high = 1.5f}), "xxx xxx --- ");
  EXPECT_EQ(rejected({.k3 = 0.18f}), "xxx --- xxx ");  // .195 and .170
  EXPECT_EQ(rejected({.veto = 0.5f}), "xxx xxx --- ");
}

TEST_F(Corrections, ALongResponseDoesNotOverflow) {
  const auto w = weights({.correction = Correction::kSeqTis, .correction_cap = 10},
                         {std::vector<double>(4096, 1.1), std::vector<double>(4096, 0.9)});
  expect({w.weight[0][0]}, {10});
  EXPECT_GT(w.weight[1][0], 0);
  EXPECT_LT(w.weight[1][0], 1e-8);
}

}  // namespace
}  // namespace lockstep::rl
