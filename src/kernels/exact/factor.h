/// A global scale that is no power of two, as its parts. Inside kernels/exact/ only.
#pragma once

#include <cstdint>

#include "numerics/bf16.h"

namespace lockstep::kernels {

/// m 2^n, 1 <= m < 2; a scale of 0 is m = 0.
struct Factor {
  std::int32_t exponent = 0;
  float mantissa = 1.0f;
};

/// Of a finite number that is not negative.
constexpr Factor as_factor(float global) {
  std::uint32_t bits = float_bits(global);
  if (bits == 0) return {0, 0.0f};
  std::int32_t exponent = static_cast<std::int32_t>(bits >> 23) - 127;
  if (exponent == -127) {  // a subnormal one
    for (exponent = -126; bits < 0x800000u; --exponent) bits <<= 1;
  }
  return {exponent, float_of((bits & 0x7FFFFFu) | 0x3F800000u)};
}

}  // namespace lockstep::kernels
