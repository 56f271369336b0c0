#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "record/trajectory.h"
#include "rl/options.h"

namespace lockstep::rl {

/// Whole groups, as they were before the first update: G trajectories in a row share a prompt.
struct Batch {
  std::span<const Trajectory> trajectories;
  std::span<const float> rewards;                           // [trajectories]
  std::span<const std::vector<float>> old_logp;             // the trainer's, guided
  std::span<const std::vector<float>> reference_logp = {};  // empty: no KL term
  std::size_t group_size = 1;                               // G
  std::span<const std::uint8_t> tainted = {};  // [trajectories] 1: masked; empty: none is
  std::span<const float> scores = {};  // rewards before shaping; empty: they are the rewards

  std::size_t size() const { return trajectories.size(); }
  bool is_tainted(std::size_t i) const { return !tainted.empty() && tainted[i] != 0; }

  /// Does trajectory i leave the loss as a whole: tainted, or cut off where mask_truncated says so?
  bool leaves(const Options& options, std::size_t i) const {
    return is_tainted(i) || (options.mask_truncated && trajectories[i].finish == Finish::kLength);
  }

  /// The groups of update u of n. Throws Error where there are fewer groups than updates.
  Batch part(std::size_t u, std::size_t n) const;

  /// Throws Error naming what is wrong: lengths that differ, an incomplete group, a trajectory
  /// without a response, a reward that is not finite.
  void check() const;
};

/// (reward - mean) / (std + 1e-6) within each group, or without the division; the unbiased std, 1
/// for a group of one (whose mean is then 0).
std::vector<double> group_advantages(std::span<const float> rewards, std::size_t group_size,
                                     Advantage advantage = Advantage::kGrpo);

/// [groups] 1 where all rewards of a group are equal, so that no advantage is left: such a group
/// moves nothing, and its records can go before they reach the disk.
std::vector<std::uint8_t> flat_groups(std::span<const float> rewards, std::size_t group_size);

/// Rewards with DAPO's soft penalty for length: the score, plus
///   min(0, (expected - length) / overlong_buffer_len) * overlong_penalty_factor
/// with expected = max_new_tokens - overlong_buffer_len and length the response's tokens.
std::vector<float> shaped_rewards(const Options& options, std::span<const Trajectory> trajectories,
                                  std::span<const float> scores);

}  // namespace lockstep::rl
