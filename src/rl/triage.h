#pragma once

#include "base/metrics.h"
#include "device/comm.h"
#include "record/trajectory.h"
#include "rl/batch.h"
#include "rl/options.h"

namespace lockstep::rl {

/// TRIAGE's early warnings of a mismatch that feeds on itself, d = trainer - rollout: to first
/// order an update of a token widens its gap where A d > 0 and narrows it where A d < 0.
///   triage/rho_asym               sum |A d| over tokens that widen, over that of those that narrow
///   triage/near_frac              tokens with |d| < .05: what the mean still shows as healthy
///   triage/deep_tail_frac[/max]   tokens with d < -triage_tail; the largest share in one segment
///   triage/displacement/...       |mean d| of segments of 64 response tokens: mean, quantiles, max
/// The paper's gate is not public and not built. Collective.
Metrics triage(const Options& options, const Batch& batch, const PerToken& train_logp, Comm& comm);

}  // namespace lockstep::rl
