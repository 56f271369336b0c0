#include "cli/arms.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cli/log.h"
#include "instruments/run.h"
#include "model/json.h"

namespace lockstep::cli {

std::string ShownSteps::line(std::int64_t step, const Metrics& metrics) {
  if (count_++ == 0 && step > 1) {
    replay(instruments::read_runs(folder_).at(0), static_cast<double>(step), watch_);
  }
  return watch_.line(step, steps_, metrics);
}

TrainingResult run_shown(const recipe::Recipe& recipe, const std::filesystem::path& folder,
                         const std::string& name) {
  const std::int64_t steps = recipe.schedule.steps;
  ShownSteps shown(folder, steps);
  Progress progress(name, steps);
  const std::string judged = "val-core/" + recipe.task.name + "/reward/mean@1";
  return run_training(recipe, folder, [&](std::int64_t step, const Metrics& metrics) {
    const std::string line = shown.line(step, metrics);
    if (step == 1 || step % 10 == 0 || step == steps || metrics.contains(judged)) {
      info("  " + line);
    }
    progress.at(step, line);
  });
}

bool has_ended(const std::filesystem::path& folder, std::int64_t steps) {
  return std::filesystem::exists(folder / "checkpoints" / cat({"step_", steps}));
}

instruments::RunData read_shown(const std::filesystem::path& folder) {
  instruments::RunData run = instruments::read_runs(folder).at(0);
  run.verdict = verdict(run);
  return run;
}

double run_seconds(const std::vector<ArmFigures>& arms, double call) {
  double steps = 0;
  for (const ArmFigures& arm : arms) steps += arm.seconds;
  return std::max(steps, call);
}

void write_summary(const std::filesystem::path& folder, const std::vector<ArmFigures>& arms,
                   const rollout::Drift& drift, double run_seconds, bool all) {
  nlohmann::json summary;
  for (const ArmFigures& arm : arms) summary["arms"][arm.arm] = summary_of(arm, all);
  summary["drift"] = {{"noise", std::stod(cat({drift.noise}))}, {"split_k", drift.split_k}};
  summary["wall_s"] = {{"install", seconds_of("LOCKSTEP_WALL_INSTALL")},
                       {"build", seconds_of("LOCKSTEP_WALL_BUILD")},
                       {"run", run_seconds}};
  write_text(folder / "summary.json", summary.dump(2) + "\n");
}

double seconds_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atof(text);
}

std::string drift_text(const rollout::Drift& drift) {
  std::string text;
  if (drift.noise > 0) {
    text = cat({"noise of relative size ", drift.noise, " on every block output of the rollout"});
  }
  if (drift.split_k) text += cat({text.empty() ? "" : ", ", "products added in two halves"});
  return text.empty() ? "none but what the two engines have by nature"
                      : text + ", set by the recipe";
}

}  // namespace lockstep::cli
