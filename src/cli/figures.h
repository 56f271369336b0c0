/// What arms showed, as figures: of the demo, of a comparison, in a table and in summary.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "instruments/series.h"
#include "step/watch.h"

namespace lockstep::cli {

/// Shows a watch the run's steps before that one, so that it goes on judging where a run goes on.
/// Returns its verdict on the last of them.
step::Verdict replay(const instruments::RunData& run, double before, step::Watch& watch);

/// As the run itself would have judged its last step.
std::string verdict(const instruments::RunData& run);

/// An arm's figures over its seeds: means, with a sample's deviation from two seeds on. `first` and
/// `last` are means of five steps each. NaN where a figure has no meaning for the arm.
struct ArmFigures {
  using Spread = instruments::Spread;

  std::string arm;
  std::vector<std::int64_t> seeds;
  Spread reward_first, reward_last;
  Spread eval;  // the latest evaluation, in the rollout's own numbers
  Spread gap_first, gap_last;
  Spread gap_median;  // of a step's tokens, last steps
  Spread p99_first, p99_last;
  Spread gap_max;     // the largest of the last steps' tokens
  Spread gap_growth;  // last over first, of each run
  Spread flips, covered;
  Spread bytes;
  double bytes_full;  // full codes at w13_in, k and v of every layer
  Spread tokens_per_s;
  double seconds;                    // of all its steps and their evaluations, all seeds
  std::string verdict;               // the worst of its runs'
  std::vector<std::string> stops{};  // of runs that could not go on: seed, step and why
};

/// Of runs that differ in nothing but their seeds; each with its verdict.
ArmFigures figures_of(const std::string& arm, const std::vector<instruments::RunData>& runs,
                      double bytes_full);

/// The demo's: first -> last of reward, mean and p99, what it cost.
std::string demo_table(const std::vector<ArmFigures>& arms);

/// A comparison's: every figure, +- over seeds.
std::string comparison_table(const std::vector<ArmFigures>& arms);

/// arms.NAME of summary.json: the demo's fields; `all` adds those of a comparison.
nlohmann::json summary_of(const ArmFigures& arm, bool all);

}  // namespace lockstep::cli
