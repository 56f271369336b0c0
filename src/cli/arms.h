/// Arms of one recipe that run one behind the other, in folders beside each other.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cli/figures.h"
#include "cli/training.h"

namespace lockstep::cli {

/// run_training() that shows itself: step 1, every tenth, the last one and those
/// that were evaluated, each under its verdict.
TrainingResult run_shown(const recipe::Recipe& recipe, const std::filesystem::path& folder,
                         const std::string& name);

/// The lines of a run's steps, as people are shown them: a resumed run's go on from what
/// metrics.jsonl says of the steps before.
class ShownSteps {
 public:
  ShownSteps(std::filesystem::path folder, std::int64_t steps)
      : folder_(std::move(folder)), steps_(steps) {}

  std::string line(std::int64_t step, const Metrics& metrics);
  std::int64_t count() const { return count_; }

 private:
  std::filesystem::path folder_;
  std::int64_t steps_;
  std::int64_t count_ = 0;
  step::Watch watch_;
};

/// Has a run done all its steps, and is its last checkpoint there?
bool has_ended(const std::filesystem::path& folder, std::int64_t steps);

/// What the run in a folder showed, its verdict included.
instruments::RunData read_shown(const std::filesystem::path& folder);

/// What all runs took, whichever calls did their steps; `call` is what this one took.
double run_seconds(const std::vector<ArmFigures>& arms, double call);

/// summary.json of a folder of arms, whole or not at all; `all` as summary_of().
void write_summary(const std::filesystem::path& folder, const std::vector<ArmFigures>& arms,
                   const rollout::Drift& drift, double run_seconds, bool all);

/// Seconds that ./lockstep spent before the program began, by the variable that it left.
double seconds_of(const char* variable);

/// The declared drift in words: what it is and who set it.
std::string drift_text(const rollout::Drift& drift);

}  // namespace lockstep::cli
