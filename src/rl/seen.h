#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/metrics.h"
#include "device/comm.h"
#include "rl/options.h"

namespace lockstep::rl {

/// What updates saw of their losses and of the weights of their tokens. Adds up: over trajectories
/// in their order, so that no thread's timing shows, and over the updates of a step.
struct Seen {
  enum Sum : std::size_t {
    kLoss,
    kTokens,
    kClippedHigh,
    kClippedLow,
    kLogRatio,
    kKl,
    kDropped,  // responses that OPSM took out
    kSequences,
    kMasked,   // tokens: tainted or cut-off samples, rewritten ones, what the other side ruled out
    kUnknown,  // tokens without a rollout log-prob
    kRejected,
    kRejectedSequences,
    kWeighed,  // tokens that neither mask nor rejection took out
    kHigh,     // of these, with a ratio above rl.correction_cap
    kLow,      // ... below rl.correction_floor, or one over the cap where that does not count
    kCut,      // ... whose ratio the correction cut or zeroed
    kWeight,   // the weights as they are used
    kWeight2,  // their squares
    kNumSums
  };
  std::array<double, kNumSums> sums{};
  double heaviest = -1e300, lightest = 1e300;
  double updates = 0;
  double lambda = 0, norm = 0;  // of kAis; what correction_batch_norm divides by: of all ranks

  Seen& operator+=(const Seen& other) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += other.sums[i];
    heaviest = std::max(heaviest, other.heaviest);
    lightest = std::min(lightest, other.lightest);
    updates += other.updates;
    lambda += other.lambda;
    norm += other.norm;
    return *this;
  }

  /// Fractions of what all ranks saw, the loss an update's mean. Collective.
  Metrics metrics(const Options& options, Comm& comm) const;
};

}  // namespace lockstep::rl
