#pragma once

#include <algorithm>
#include <cmath>

namespace lockstep::rl {

inline constexpr double kMaxLogRatio = 20.0;

/// log(p / q), kept where exp of it is a number to work with.
inline double log_ratio(float logp, float logq) {
  return std::clamp(static_cast<double>(logp) - logq, -kMaxLogRatio, kMaxLogRatio);
}

/// The same, 0 where the other side gave no number: its policy is then taken to be this one.
inline double log_ratio_or_zero(float logp, float logq) {
  return std::isnan(logq) ? 0.0 : log_ratio(logp, logq);
}

inline double ratio(float logp, float logq) { return std::exp(log_ratio(logp, logq)); }

}  // namespace lockstep::rl
