/// GRPO and its relatives, without torch: a loss is a function of log-probs, and so is its
/// derivative. Whatever must not carry a gradient is computed before the new policy runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/metrics.h"
#include "device/comm.h"
#include "record/trajectory.h"

namespace lockstep::rl {

enum class Advantage : std::uint8_t { kGrpo, kDrGrpo };
enum class Surrogate : std::uint8_t { kPpo, kGspo, kCispo, kTbpo };
enum class Correction : std::uint8_t { kNone, kTis, kCis, kMis, kIcePop, kSeqTis, kSeqMis, kGeoRs };
enum class Aggregation : std::uint8_t { kTokenMean, kSeqMeanTokenMean, kSeqMeanTokenSum };

struct Options {
  Advantage advantage = Advantage::kGrpo;
  Surrogate surrogate = Surrogate::kPpo;
  float clip_low = 0.2f;
  float clip_high = 0.27f;
  Correction correction = Correction::kTis;
  float correction_low = 0.0f;
  float correction_high = 5.0f;
  bool bypass = false;  // the rollout's log-probs stand for the old policy's; no correction then
  Aggregation aggregation = Aggregation::kSeqMeanTokenMean;
  float kl_weight = 0.0f;
};

/// Whole groups, as they were before the first update.
struct Batch {
  std::span<const Trajectory> trajectories;
  std::span<const float> rewards;                           // [trajectories]
  std::span<const std::vector<float>> old_logp;             // the trainer's, guided
  std::span<const std::vector<float>> reference_logp = {};  // empty: no KL term
  std::size_t group_size = 1;  // G trajectories in a row share a prompt
  std::span<const std::uint8_t> tainted =
      {};  // [trajectories] 1: masked, for a K or V record is lost

  /// The groups of update u of n.
  Batch part(std::size_t u, std::size_t n) const;
};

/// The loss of one update.
class Objective {
 public:
  /// Collective: denominators are over all ranks, so no way to split the batch changes the loss.
  Objective(const Options& options, const Batch& batch, Comm& comm);

  /// The loss of trajectory i and its derivative: a train::TokenLoss.
  double operator()(std::size_t i, std::span<const float> logp, std::span<float> dlogp) const;

 private:
  Options options_;
  Batch batch_;
  PerToken weight_;  // advantage * correction * mask / denominator
};

/// How far apart the policies are, and how the rewards lie: methods.md 4.6. Collective.
Metrics diagnostics(const Options& options, const Batch& batch, Comm& comm);

}  // namespace lockstep::rl
