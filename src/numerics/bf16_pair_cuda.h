/// For .cu files alone: two BF16 numbers in a word, the first in its low half.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"

namespace lockstep {

/// Both rounded to nearest even, as to_bf16() does; a NaN becomes 0x7FFF.
__device__ inline std::uint32_t to_bf16_pair(float low, float high) {
  std::uint32_t pair = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline float low_of(std::uint32_t pair) { return float_of(pair << 16); }
__device__ inline float high_of(std::uint32_t pair) { return float_of(pair & 0xFFFF0000u); }

/// Whether both are.
__device__ inline bool is_finite_pair(std::uint32_t pair) {
  return (pair & 0x7F80u) != 0x7F80u && (pair & 0x7F800000u) != 0x7F800000u;
}
/// Whether all eight are.
__device__ inline bool are_finite(const uint4& pairs) {
  return is_finite_pair(pairs.x) && is_finite_pair(pairs.y) && is_finite_pair(pairs.z) &&
         is_finite_pair(pairs.w);
}

}  // namespace lockstep
