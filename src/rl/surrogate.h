#pragma once

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

/// Whether log_r is the mean over the response: GSPO and TBPO.
constexpr bool is_sequence_level(Surrogate s) {
  return s == Surrogate::kGspo || s == Surrogate::kTbpo;
}

/// The KL penalty of one token at x = log pi_theta - log pi_ref; `log_roll` is
/// log pi_theta - log pi_roll, which kl_off_policy reads.
Term kl_penalty(const Options& options, double x, double log_roll);

}  // namespace lockstep::rl
