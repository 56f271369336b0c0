/// GRPO and its relatives without torch: a loss is a function of log-probs, and so is its
/// derivative. Whatever must not carry a gradient is computed before the new policy runs.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/comm.h"
#include "rl/batch.h"
#include "rl/correction.h"
#include "rl/options.h"
#include "rl/seen.h"
#include "rl/surrogate.h"

namespace lockstep::rl {

/// The loss of one update: over trajectories i and their tokens t, the sum of
///   surrogate(pi_theta / pi_old, A_i * weight_it / denominator_i) + beta * KL_it / denominator_i.
class Objective {
 public:
  /// Collective: denominators are over all ranks, so no way to split the batch changes the loss.
  /// Throws Error where options contradict each other or the batch.
  Objective(const Options& options, const Batch& batch, Comm& comm);

  /// The trajectories whose loss is not zero whatever the policy does; the others need no pass.
  const std::vector<std::size_t>& live() const { return live_; }

  /// The loss of trajectory i and its derivative: a train::TokenLoss. From one thread at a time, in
  /// any order.
  double operator()(std::size_t i, const LogProbs& logp, const Slopes& dlogp);

  /// What this rank's part of the update saw: losses, clips, KL to the old policy, weights. Of each
  /// trajectory the last call counts.
  Seen seen() const;

 private:
  void set_denominators(Comm& comm);
  Term centered(std::size_t i, std::size_t p, double w, const LogProbs& logp,
                const Slopes& dlogp) const;
  double mean_log_ratio(std::size_t i, std::span<const float> logp) const;

  Options options_;
  Batch batch_;
  std::vector<double> advantage_;
  TokenWeights weights_;
  std::vector<double> denominator_;  // of each trajectory's tokens
  std::vector<std::size_t> live_;
  std::vector<Seen> seen_;  // [trajectories]
};

}  // namespace lockstep::rl
