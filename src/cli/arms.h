/// Arms of one recipe that run one behind the other, in folders beside each other.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/figures.h"
#include "cli/training.h"

namespace lockstep::cli {

/// run_training() that shows itself: step 1, every tenth and the last one, each under its verdict.
TrainingResult run_shown(const recipe::Recipe& recipe, const std::filesystem::path& folder,
                         const std::string& name);

/// Has a run done all its steps, and is its last checkpoint there?
bool has_ended(const std::filesystem::path& folder, std::int64_t steps);

/// What the run in a folder showed, its verdict included.
instruments::RunData read_shown(const std::filesystem::path& folder);

/// summary.json of a folder of arms, whole or not at all; `all` as summary_of().
void write_summary(const std::filesystem::path& folder, const std::vector<ArmFigures>& arms,
                   const rollout::Drift& drift, double run_seconds, bool all);

/// Seconds that ./lockstep spent before the program began, by the variable that it left.
double seconds_of(const char* variable);

}  // namespace lockstep::cli
