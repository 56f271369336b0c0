/// The two loops over a row of logits, for every instruction set the same bits.
#pragma once

#include <cstdint>
#include <span>

namespace lockstep::rollout {

inline constexpr std::int32_t kSoftmaxBlock = 128;

struct SoftmaxOps {
  const char* name;
  /// The largest of count > 0 numbers.
  float (*max)(const float* logits, std::int64_t count);
  /// out[i] = exp(logits[i] / temperature - max) for i < count <= kSoftmaxBlock, and 0 behind up to
  /// kSoftmaxBlock; 0 below exp(-87). Returns their sum: over 16 lanes in FP32, lanes in double.
  double (*exp)(const float* logits, std::int64_t count, float temperature, float max, float* out);
};

/// What this machine runs best.
const SoftmaxOps& softmax_ops();

/// All that it can run, for the test that compares them.
std::span<const SoftmaxOps> all_softmax_ops();

}  // namespace lockstep::rollout
