#pragma once

#include "base/metrics.h"
#include "device/comm.h"
#include "record/trajectory.h"
#include "rl/batch.h"
#include "rl/options.h"

namespace lockstep::rl {

/// How far apart trainer and rollout are, and how rewards and responses lie: docs/metrics.md, under
/// the names that users plot. `train_logp` is the trainer's log-probs before the first update,
/// guided as the loss sees them; trajectories whose row is empty are left out of the gap.
/// d = train - rollout throughout. Collective.
Metrics diagnostics(const Options& options, const Batch& batch, const PerToken& train_logp,
                    Comm& comm);

}  // namespace lockstep::rl
