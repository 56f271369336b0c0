#pragma once

#include <algorithm>
#include <cmath>

namespace lockstep::rl {

inline constexpr double kMaxLogRatio = 20.0;

/// log(p / q), kept where exp of it is a number to work with.
inline double log_ratio(float logp, float logq) {
  return std::clamp(static_cast<double>(logp) - logq, -kMaxLogRatio, kMaxLogRatio);
}

inline double ratio(float logp, float logq) { return std::exp(log_ratio(logp, logq)); }

}  // namespace lockstep::rl
