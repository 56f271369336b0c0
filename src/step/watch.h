#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/metrics.h"

namespace lockstep::step {

/// How a run goes, from what its steps showed so far: the level of the gap between trainer and
/// rollout, its trend, the trend of the reward, whether there is anything to learn from, and
/// coverage.
struct Verdict {
  enum class Level : std::uint8_t { kOk, kWatch, kBad };
  Level level = Level::kOk;
  std::string why{};
};

class Watch {
 public:
  /// Takes the next step's metrics and judges the run so far.
  Verdict judge(const Metrics& metrics);

  /// One line for people: reward, evaluation where there was one, gap and its trend, flips,
  /// coverage, tokens/s, verdict.
  std::string line(std::int64_t step, std::int64_t steps, const Metrics& metrics);

 private:
  std::vector<double> gaps_;  // mean |log-prob of the trainer - of the rollout|, by step
  std::vector<double> rewards_;
  std::size_t flat_ = 0;  // steps up to the last one in which no group's rewards differed
};

/// "ok", "watch: why", "bad: why".
std::string to_string(const Verdict& verdict);

/// The mean of the first or the last `count` of `values`, fewer where there are fewer; 0 of none.
double mean_of_first(const std::vector<double>& values, std::size_t count);
double mean_of_last(const std::vector<double>& values, std::size_t count);

}  // namespace lockstep::step
