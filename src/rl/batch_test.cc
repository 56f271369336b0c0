#include "rl/batch.h"

#include <gtest/gtest.h>

#include "rl/objective.h"

namespace lockstep::rl {
namespace {

Trajectory response(std::size_t length, Finish finish = Finish::kStop) {
  Trajectory t;
  t.tokens.resize(length + 2);
  t.response_mask.assign(length + 2, 1);
  t.response_mask[0] = t.response_mask[1] = 0;
  t.rollout_logp.assign(length + 2, -1.0f);
  t.sampling.max_new_tokens = 10;
  t.finish = finish;
  return t;
}

TEST(ShapedRewards, FallLinearlyOverTheLastPart) {
  const std::vector<Trajectory> t = {response(5), response(6), response(7), response(10)};
  const std::vector<float> scores = {1, 1, 0, 1};
  EXPECT_EQ(shaped_rewards({}, t, scores), scores);
  EXPECT_EQ(shaped_rewards({.overlong_buffer_len = 4, .overlong_penalty_factor = 0.5f}, t, scores),
            (std::vector<float>{1, 1, -0.125f, 0.5f}));
}

TEST(MaskTruncated, LeavesTheLossAndStaysInTheDenominator) {
  const std::vector<Trajectory> t = {response(3), response(3, Finish::kLength)};
  const std::vector<float> rewards = {1, 0};
  const PerToken old = {std::vector<float>(5, -1.0f), std::vector<float>(5, -1.0f)};
  const auto comm = Comm::single();
  const Batch batch = {.trajectories = t, .rewards = rewards, .old_logp = old, .group_size = 2};
  Objective all({}, batch, *comm), cut({.mask_truncated = true}, batch, *comm);
  EXPECT_EQ(all.live(), (std::vector<std::size_t>{0, 1}));
  EXPECT_EQ(cut.live(), (std::vector<std::size_t>{0}));
  std::vector<float> a(5), b(5);
  EXPECT_EQ(all(0, old[0], a), cut(0, old[0], b));
  EXPECT_EQ(a, b);
  EXPECT_NE(all(1, old[1], a), 0);
  EXPECT_EQ(cut(1, old[1], b), 0);
}

}  // namespace
}  // namespace lockstep::rl
