#pragma once

#include <cstdint>

namespace lockstep::rl {

/// What stands between the rollout's policy and the update (methods.md 4.3). Weights carry no
/// gradient.
enum class Correction : std::uint8_t {
  kNone,
  kTis,  // token-level truncated importance sampling: min(pi_old / pi_roll, cap)
};

enum class Aggregation : std::uint8_t {
  kTokenMean,         // over all response tokens (DAPO)
  kSeqMeanTokenMean,  // over a response's tokens, then over responses (GRPO)
  kSeqMeanTokenSum,   // summed over a response's tokens, over sum_length, then over responses
};

struct Options {
  float clip_low = 0.2f;
  float clip_high = 0.27f;
  Correction correction = Correction::kTis;
  float correction_cap = 5.0f;
  /// The rollout's log-probs stand for the old policy's, so the ratio holds drift and update alike;
  /// a correction would count the drift twice, and is refused.
  bool bypass = false;
  Aggregation aggregation = Aggregation::kSeqMeanTokenMean;
  float sum_length = 1.0f;  // what kSeqMeanTokenSum divides by: 1, or a longest response
  /// Do masked tokens leave the denominator as well? Either way they leave the numerator.
  bool masked_leave_denominator = false;
  float kl_weight = 0.0f;  // value k3, gradient of k2, against reference_logp
};

}  // namespace lockstep::rl
