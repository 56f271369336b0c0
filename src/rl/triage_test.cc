#include "rl/triage.h"

#include <gtest/gtest.h>

namespace lockstep::rl {
namespace {

/// A response of `d.size()` tokens whose trainer log-prob is the rollout's plus d.
struct Case {
  void add(const std::vector<float>& d) {
    Trajectory t;
    t.tokens.resize(d.size() + 1);
    t.response_mask.assign(d.size() + 1, 1);
    t.response_mask[0] = 0;
    t.rollout_logp.assign(d.size() + 1, -1.0f);
    std::vector<float> row = {0};
    for (const float x : d) row.push_back(-1.0f + x);
    train.push_back(std::move(row));
    trajectories.push_back(std::move(t));
  }
  Metrics metrics(std::vector<float> rewards) const {
    const auto comm = Comm::single();
    return triage({},
                  {.trajectories = trajectories,
                   .rewards = rewards,
                   .old_logp = train,
                   .group_size = trajectories.size()},
                  train, *comm);
  }
  std::vector<Trajectory> trajectories;
  PerToken train;
};

TEST(Triage, AsymmetryOfWhatWidensAndWhatNarrows) {
  Case c;
  c.add({0.5f, -0.25f});          // advantage > 0: .5 widens, .25 narrows
  c.add({-0.5f, 0.125f, 0.01f});  // advantage < 0: .5 widens, .135 narrows
  const Metrics m = c.metrics({1, 0});
  EXPECT_NEAR(m.at("triage/rho_asym"), 1.0 / 0.385, 1e-5);
  EXPECT_NEAR(m.at("triage/near_frac"), 0.2, 1e-9);
  EXPECT_EQ(c.metrics({1, 1}).count("triage/rho_asym"), 0u);  // no advantage, no ratio
}

TEST(Triage, SegmentsOf64Tokens) {
  Case c;
  std::vector<float> d(100, 0.0f);
  std::fill(d.begin(), d.begin() + 64, 0.25f);  // the first segment moves as one
  for (int i = 64; i < 100; i += 4) d[static_cast<std::size_t>(i)] = -0.75f;
  c.add(d);
  c.add(std::vector<float>(64, 0.0f));
  const Metrics m = c.metrics({1, 0});
  EXPECT_EQ(m.at("triage/displacement/count"), 3);
  EXPECT_NEAR(m.at("triage/displacement"), (0.25 + 0.1875 + 0) / 3, 1e-6);
  EXPECT_NEAR(m.at("triage/displacement/max"), 0.25, 1e-6);
  EXPECT_NEAR(m.at("triage/deep_tail_frac"), 9.0 / 164, 1e-9);
  EXPECT_NEAR(m.at("triage/deep_tail_frac/max"), 0.25, 1e-9);
}

}  // namespace
}  // namespace lockstep::rl
