/// The scale of a block, and what it is worth together with the global scale.
#pragma once

#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/exponent.h"
#include "numerics/quantizer.h"

namespace lockstep {

/// s8 of an NVFP4 block under the global scale 2^n, nearest even, saturating at 448. amax * 2^-n
/// is exact unless it is far below the smallest scale; an FP32 quotient cannot hide a tie, for a
/// tie times six is an FP32 number itself.
constexpr E4m3 block_scale(float amax, std::int32_t n) {
  return to_e4m3(amax * power_of_two(-n) / 6.0f);
}

/// s8 * 2^n. Exact, and so is every e2m1 * s8 * 2^n in BF16.
constexpr float scale_value(E4m3 s8, std::int32_t n) { return to_float(s8) * power_of_two(n); }

/// A block of the cache, whose exponent does not follow it, is saturated when its s8 would round
/// above 448.
constexpr bool is_saturated(float amax, std::int32_t n) {
  return amax * power_of_two(-n) > 464.0f * 6.0f;
}

constexpr MxRule mx_rule(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kMxEven: return MxRule::kEven;
    case ScaleRule::kMxCeil: return MxRule::kCeil;
    case ScaleRule::kMxRceil: return MxRule::kRceil;
    default: return MxRule::kFloor;
  }
}

}  // namespace lockstep
