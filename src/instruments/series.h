/// From runs to what can be drawn: arms with their seeds, curves with bands, figures of a table.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "instruments/run.h"

namespace lockstep::instruments {

/// Runs that differ in nothing but their seeds.
struct ArmRuns {
  std::string name;
  std::vector<const RunData*> runs;
  bool quantized = true;  // false: its rollout is BF16, against which the others are held
};

/// The runs by arm, BF16 first, else in the order in which arms appear. Runs of one arm whose
/// recipes differ in more than seeds and calibration are arms of their own, named by their folders.
std::vector<ArmRuns> arms_of(std::span<const RunData> runs);

/// One place of a curve: the mean over seeds and over the steps that share a place, and their
/// range. NaN where nothing was measured.
struct Point {
  double step, mean, low, high;
};

/// A metric of an arm over its steps, in at most `most` places of equally many steps each.
std::vector<Point> curve(const ArmRuns& arm, const std::string& metric, std::size_t most);

/// A metric layer by layer.
struct Grid {
  std::vector<double> steps;                // of the columns: the first that each stands for
  std::vector<std::vector<double>> layers;  // [L][columns], NaN where nothing was measured
};

/// metric/layer_0 ... over steps, means over seeds; no layers where the runs have none.
Grid grid(const ArmRuns& arm, const std::string& metric, std::size_t most);

/// A figure over seeds.
struct Spread {
  double mean;        // NaN: not measured
  double deviation;   // of a sample; NaN for fewer than two seeds
  std::size_t seeds;  // that have it
};

enum class Over { kFirst, kLast, kAll, kLatest, kMost, kMostOfLast };

/// The mean of a metric's first or last five steps, of all, its latest value, its largest, the
/// largest of the last five.
Spread figure(const ArmRuns& arm, const std::string& metric, Over over);

/// Last five steps over the first five, of each run.
Spread growth(const ArmRuns& arm, const std::string& metric);

/// Tokens over seconds, whole runs.
Spread tokens_per_second(const ArmRuns& arm);

/// The metrics that begin so, in order, each once, without the beginning.
std::vector<std::string> names_under(std::span<const ArmRuns> arms, const std::string& prefix);

/// The first metric with that beginning and end, as val-core/*/reward/mean@1; "" where none is.
std::string find_metric(std::span<const ArmRuns> arms, const std::string& begin,
                        const std::string& end);

}  // namespace lockstep::instruments
