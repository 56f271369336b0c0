/// The words and tables of a report.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "instruments/chart.h"
#include "instruments/series.h"

namespace lockstep::instruments {

/// The metric that reports are about.
inline constexpr const char* kGap = "train/train_rollout_logprob_abs_diff";

/// The arm's name and its colour on every chart: BF16 grey, the others in turn.
Label arm_label(const std::vector<ArmRuns>& arms, std::size_t index);

/// A dot in that colour.
std::string swatch(const std::vector<ArmRuns>& arms, std::size_t index);

/// Names beside their colours; buttons that hide an arm where `active`.
std::string legend_of(std::span<const Label> labels, bool active);

/// What the page is about: title, model, steps, seeds.
std::string masthead(const std::vector<ArmRuns>& arms, const std::string& title);

/// One sentence of what was seen.
std::string headline(const std::vector<ArmRuns>& arms);

/// A row an arm: verdict, reward, gap, flips, coverage, bytes, speed.
std::string summary_table(const std::vector<ArmRuns>& arms);

/// The keys in which arms differ, each arm's resolved recipe and contract.
std::string recipe_tables(const std::vector<ArmRuns>& arms);

/// What could not be read.
std::string footer(std::span<const RunData> runs);

}  // namespace lockstep::instruments
