/// GRPO without torch: a loss is a function of log-probs, and so is its derivative. Whatever must
/// not carry a gradient is computed before the new policy runs.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/metrics.h"
#include "device/comm.h"
#include "rl/batch.h"
#include "rl/options.h"

namespace lockstep::rl {

/// The loss of one update:
///   sum over trajectories i and tokens t of  w_it * max(-r A_i, -clip(r) A_i) + beta * KL_it
/// with r = pi_theta / pi_old, and in w_it the correction, the mask and the denominator.
class Objective {
 public:
  /// Collective: denominators are over all ranks, so no way to split the batch changes the loss.
  Objective(const Options& options, const Batch& batch, Comm& comm);

  /// The trajectories whose loss is not zero whatever the policy does; the others need no pass.
  const std::vector<std::size_t>& live() const { return live_; }

  /// The loss of trajectory i and its derivative: a train::TokenLoss.
  double operator()(std::size_t i, std::span<const float> logp, std::span<float> dlogp);

  /// What the update saw: loss, clip fractions, KL to the old policy, masked tokens. Collective.
  Metrics metrics(Comm& comm) const;

 private:
  struct Seen {
    double loss = 0, tokens = 0, clipped_high = 0, clipped_low = 0, log_ratio = 0, kl = 0;
  };
  void weigh(std::size_t i, double advantage, double denominator);

  Options options_;
  Batch batch_;
  std::vector<std::size_t> live_;
  PerToken weight_;     // advantage * correction * mask / denominator; empty where not live
  PerToken kl_weight_;  // beta * mask / denominator
  double masked_tokens_ = 0, unknown_tokens_ = 0;
  Seen seen_;
};

}  // namespace lockstep::rl
