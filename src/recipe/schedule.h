#pragma once

#include <cstddef>
#include <cstdint>

#include "record/trajectory.h"

namespace lockstep {

/// How much is done in which order: what the loop of step/ obeys.
struct Schedule {
  std::int64_t steps = 100;
  std::int32_t prompts_per_step = 32;
  std::int32_t samples_per_prompt = 8;  // G
  std::int32_t updates_per_step = 1;
  /// DAPO's dynamic sampling: prompts are drawn in up to so many rounds until prompts_per_step of
  /// them have samples of different scores; the others are dropped. 1: all count as they come.
  std::int32_t max_gen_batches = 1;
  std::int64_t save_every = 10;
  std::int64_t keep_checkpoints = 2;  // the newest ones; 0: all
  std::int64_t rescore_every = 10;    // 0: never
  std::int32_t rescore_groups = 1;    // prompts whose samples are then read again
  double min_coverage = 0.5;          // of guided rows, below which the run stops
  std::uint64_t seed = 0;
  Sampling sampling;

  constexpr std::size_t group_size() const { return static_cast<std::size_t>(samples_per_prompt); }
};

}  // namespace lockstep
