#include "step/watch.h"

#include <gtest/gtest.h>

namespace lockstep::step {
namespace {

Metrics step_of(double reward, double gap, double covered = 1) {
  return {{"critic/rewards/mean", reward},
          {"train/train_rollout_logprob_abs_diff", gap},
          {"fp4/guide/covered_frac", covered}};
}

/// The verdict after a run that goes from the first pair to the last in equal strides.
Verdict after(double reward0, double reward1, double gap0, double gap1) {
  Watch watch;
  Verdict verdict;
  for (int i = 0; i < 20; ++i) {
    const double at = i / 19.0;
    verdict = watch.judge(step_of(reward0 + (reward1 - reward0) * at, gap0 + (gap1 - gap0) * at));
  }
  return verdict;
}

TEST(Watch, LevelAndTrendAreJudgedApart) {  // R91: a constant offset is not a drift
  EXPECT_EQ(after(.7, .75, .009, .009).level, Verdict::Level::kOk);
  EXPECT_EQ(to_string(after(.7, .75, .05, .05)), "watch: trainer and rollout differ by 0.050");
  EXPECT_EQ(to_string(after(.7, .7, .004, .016)), "watch: the gap grew 2.8x");
  EXPECT_EQ(after(.7, .2, .04, .2).level, Verdict::Level::kBad);
}

TEST(Watch, GrowthOfATinyGapIsNoNews) {
  EXPECT_EQ(after(.7, .7, .0001, .001).level, Verdict::Level::kOk);
}

TEST(Watch, RewardAndCoverage) {
  EXPECT_EQ(to_string(after(.8, .5, .01, .01)), "watch: the reward is 0.24 below its best");
  Watch watch;
  EXPECT_EQ(to_string(watch.judge(step_of(.7, .01, .95))), "watch: records cover 95.0 %");
  EXPECT_EQ(watch.judge(step_of(.7, .01, .5)).level, Verdict::Level::kBad);
}

TEST(Watch, OneLineAStep) {
  Watch watch;
  Metrics metrics = step_of(.743, .0087);
  metrics["perf/throughput"] = 2310;
  EXPECT_EQ(watch.line(12, 100, metrics),
            "step 12/100  reward 0.743  gap 0.0087 p99 nan  covered 100.0 %  2310 tokens/s  ok");
}

TEST(Watch, AnEvaluationIsShownWhereThereWasOne) {
  Watch watch;
  Metrics metrics = step_of(.743, .0087);
  metrics["val-core/arith/reward/mean@1"] = .6875;
  metrics["val-core/arith/response_length/mean"] = 30;
  EXPECT_EQ(watch.line(12, 100, metrics),
            "step 12/100  reward 0.743  eval 0.688  gap 0.0087 p99 nan  covered 100.0 %  "
            "0 tokens/s  ok");
}

TEST(Watch, ATinyGapKeepsItsSizeAndShowsNoRatio) {
  Watch watch;
  const std::string tail = "  covered 100.0 %  0 tokens/s  ok";
  Metrics metrics = step_of(.5, 3.4e-5);
  metrics["train/train_rollout_logprob_abs_diff/p99"] = 2e-4;
  EXPECT_EQ(watch.line(1, 9, metrics), "step 1/9  reward 0.500  gap 3e-05 p99 2e-04" + tail);
  EXPECT_EQ(watch.line(2, 9, metrics), "step 2/9  reward 0.500  gap 3e-05 p99 2e-04" + tail);
  metrics["train/train_rollout_logprob_abs_diff"] = .01;
  EXPECT_EQ(watch.line(3, 9, metrics), "step 3/9  reward 0.500  gap 0.0100 p99 2e-04 x20.0" + tail);
}

TEST(Watch, SaysWhyThereIsNoGap) {
  Watch watch;
  Metrics metrics = step_of(0, 0);
  metrics["train/train_rollout_logprob_abs_diff/count"] = 0;
  EXPECT_EQ(watch.line(1, 9, metrics),
            "step 1/9  reward 0.000  gap - (no group's rewards differ)  covered 100.0 %  "
            "0 tokens/s  ok");
}

TEST(Watch, ARunThatLearnsNothingIsNotWell) {
  Watch watch;
  const auto judged = [&](double reward, double flat) {
    Metrics metrics = step_of(reward, 0);
    metrics["train/train_rollout_logprob_abs_diff/count"] = 0;
    metrics["rollout/zero_std/fraction"] = flat;
    return to_string(watch.judge(metrics));
  };
  for (int i = 1; i < 5; ++i) EXPECT_EQ(judged(0, 1), "ok");
  EXPECT_EQ(judged(0, 1), "watch: nothing is learned: the reward has been 0 for 5 steps");
  for (int i = 6; i < 10; ++i) judged(0, 1);
  EXPECT_EQ(judged(0, 1), "bad: nothing is learned: the reward has been 0 for 10 steps");
  EXPECT_EQ(judged(.1, .9), "ok");  // one group is enough
  for (int i = 1; i < 5; ++i) EXPECT_EQ(judged(.1, 1), "ok");
  EXPECT_EQ(judged(.1, 1),
            "watch: nothing is learned: no group's rewards have differed for 5 steps");
  EXPECT_EQ(judged(1, 1), "watch: nothing is left to learn: every answer is right for 6 steps");
}

}  // namespace
}  // namespace lockstep::step
