#pragma once

#include <span>

#include "rl/options.h"

namespace lockstep::rl {

/// A loss and its derivative by log pi_theta of the token.
struct Term {
  double value = 0;
  double slope = 0;
  bool clipped = false;
};

/// The surrogate of one token. `log_r` is its log-ratio to the old policy, or the response's mean
/// log-ratio where the surrogate is a sequence's; `w` is advantage times whatever weighs the token,
/// so its sign is the advantage's; `rho` is pi_old / pi_roll, which kAcr reads.
Term surrogate(const Options& options, double log_r, double w, float logp, double rho);

/// Log-probs of one position's top tokens H on both sides.
struct TopTokens {
  std::span<const float> trainer;  // log p
  std::span<const float> rollout;  // log q
};

/// Score Centering of one token y, with C = `cap` and p, q the trainer's and the rollout's policy:
///   -w (min(p_y / q_y, C) log p_y - sum over H of c_v log p_v),
///   c_v = min(p_v, C q_v) - alpha p_v,  alpha = min(1, C (1 - sum q) / (1 - sum p)),
/// the factors without gradient; without q_y (a NaN) -w log p_y. Writes the slopes by log p_v to
/// `dtop`: where y is in H both slopes are its.
Term centered_score(double cap, double w, float logp, float rollout_logp, const TopTokens& top,
                    std::span<float> dtop);

/// Whether log_r is the mean over the response: GSPO and TBPO.
constexpr bool is_sequence_level(Surrogate s) {
  return s == Surrogate::kGspo || s == Surrogate::kTbpo;
}

/// The KL penalty of one token at x = log pi_theta - log pi_ref; `log_roll` is
/// log pi_theta - log pi_roll, which kl_off_policy reads.
Term kl_penalty(const Options& options, double x, double log_roll);

}  // namespace lockstep::rl
