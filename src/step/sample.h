#pragma once

#include <cstdint>
#include <vector>

#include "step/step.h"

namespace lockstep::step {

/// What a step trains on: whole groups, and what their responses earned.
struct Sampled {
  std::vector<Trajectory> trajectories{};
  std::vector<float> scores{};   // as the task judges
  std::vector<float> rewards{};  // with the penalty for length
};

/// This rank's part of the step's prompts, answered and judged. With schedule.max_gen_batches above
/// 1 groups of equal scores are dropped, with their records, and further prompts drawn until
/// prompts_per_step are left over all ranks; round r of step s asks the task for its batch
/// s * max_gen_batches + r, so that a resumed run draws the same. Collective.
/// Throws Error where so many rounds do not fill the step.
Sampled sample(const Loop& loop, std::int64_t step, Metrics& metrics);

}  // namespace lockstep::step
