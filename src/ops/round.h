/// Rounding to BF16 inside FP32 tensors.
///
/// BF16 compute here means that every operand and every activation is a BF16 number; it lies in an
/// FP32 tensor, so that products accumulate in FP32 and round once, where the house's rules say so,
/// and not wherever a BF16 product of some backend happens to. On CPUs without AMX the FP32
/// products are also the faster ones.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"

namespace lockstep::ops {

inline constexpr std::int64_t kGrain = 1 << 14;  // elements worth a task

/// The nearest BF16 number, ties to even. Inf stays, NaN stays NaN.
inline float round_bf16(float x) { return to_float(to_bf16(x)); }

template <bool kBf16>
float rounded(float x) {
  if constexpr (kBf16) return round_bf16(x);
  return x;
}

/// Sums over sixteen lanes and then over the lanes: an order that compilers can vectorise and that
/// does not depend on how work is cut.
template <typename Term>
float lane_sum(std::int64_t n, Term&& term) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += term(i + j);
  }
  for (int j = 0; i < n; ++i, ++j) lanes[j] += term(i);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

}  // namespace lockstep::ops
