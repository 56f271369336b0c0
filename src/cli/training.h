/// A whole training run, as `train` and `demo` do it.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "base/metrics.h"
#include "recipe/preflight.h"
#include "recipe/recipe.h"

namespace lockstep::cli {

struct TrainingResult {
  double final_pass_rate = 0;  // NaN where the recipe asks for no evaluation
  std::int64_t record_per_token = 0;
  std::int64_t record_per_token_full = 0;
};

/// Runs the recipe in the folder, or goes on with it, or finds it done. `watch` sees each step;
/// `begin` what it takes, once all that can be refused before weights are read has not been.
TrainingResult run_training(
    recipe::Recipe recipe, const std::filesystem::path& folder,
    const std::function<void(std::int64_t step, const Metrics& metrics)>& watch,
    const std::function<void(const recipe::Budget& budget)>& begin = {});

}  // namespace lockstep::cli
