/// For .cu files alone: what products share whose inputs are split over the blocks of a cluster.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"

namespace lockstep::kernels {

/// Parts of a row's inputs, each a sum of its own.
inline constexpr int kSegments = 4;

/// Two floats to another block, whose barrier counts their bytes.
__device__ inline void send_pair(std::uint32_t to, float low, float high, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(low), "f"(high), "r"(barrier)
      : "memory");
}

/// In the order of segments, or each half rounded to BF16 and both together.
__device__ inline float sum_of_segments(const float (&part)[kSegments], bool split_k) {
  const auto rounded = [](float x) { return to_float(to_bf16(x)); };
  if (split_k) return rounded(part[0] + part[1]) + rounded(part[2] + part[3]);
  return part[0] + part[1] + part[2] + part[3];
}

}  // namespace lockstep::kernels
