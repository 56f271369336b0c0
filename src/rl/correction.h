#pragma once

#include <cstddef>
#include <span>

#include "device/comm.h"
#include "rl/batch.h"
#include "rl/options.h"
#include "rl/seen.h"

namespace lockstep::rl {

/// What each response token weighs before its advantage: the correction, and 0 where it is masked.
struct TokenWeights {
  PerToken weight;  // empty where the trajectory has no old log-probs
  PerToken rho;     // pi_old / pi_roll, 1 where the engine gave no number
  Seen seen;        // what was masked, rejected and weighed
};

/// What `correction` and `reject` of docs/methods.md, Losses and corrections, ask. Collective.
TokenWeights token_weights(const Options& options, const Batch& batch, Comm& comm);

/// AIS mixes uncorrected and corrected gradients by three diagnostics of the batch: effective
/// sample size over n, k3 and the weights' variance. The paper's formula could not be had; ours is
///   lambda = clip(ess (1 - ESS/N) + k3 k3/unit + variance var/unit, 0, 1).
double ais_lambda(const Options& options, double ess_over_n, double k3, double variance);

}  // namespace lockstep::rl
