/// Global scales that are powers of two, 2^n with n an int8.
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

inline constexpr std::int32_t kMinExponent = -116;
inline constexpr std::int32_t kMaxExponent = 116;

/// 2^n for n in [-126, 127].
constexpr float power_of_two(std::int32_t n) {
  return float_of(static_cast<std::uint32_t>(n + 127) << 23);
}

/// The n of a scale 2^n.
constexpr std::int32_t exponent_of(float power) {
  return static_cast<std::int32_t>(float_bits(power) >> 23 & 0xFFu) - 127;
}

/// The smallest n with amax <= 1.3125 * 2^(n + shift), clamped; 0 for amax 0. `most` is the
/// mantissa of another factor than 1.3125. A subnormal amax is far below the clamp. Requires amax
/// finite and not negative.
constexpr std::int32_t clamped_exponent(float amax, std::int32_t shift,
                                        std::uint32_t most = 0x280000u) {
  const std::uint32_t bits = float_bits(amax);
  if (bits == 0) return 0;
  const std::int32_t n = static_cast<std::int32_t>(bits >> 23) - 127 - shift +
                         static_cast<std::int32_t>((bits & 0x7FFFFFu) > most);
  return n < kMinExponent ? kMinExponent : n > kMaxExponent ? kMaxExponent : n;
}

/// The smallest n with amax <= 2688 * 2^n: of a token, a slot or a matrix.
constexpr std::int32_t global_exponent(float amax) { return clamped_exponent(amax, 11); }

/// The smallest n with amax <= 1536 * 2^n: where a block's scale may be half as large again, for
/// four over six.
constexpr std::int32_t global_exponent_of_256(float amax) {
  return clamped_exponent(amax, 10, 0x400000u);
}

/// Of the cache, from a calibration batch's amax: two binades of headroom above it.
constexpr std::int32_t kv_exponent(float amax) { return clamped_exponent(amax, 9); }

/// The same for a cache of E4M3 elements: the smallest n with 4 * amax <= 448 * 2^n.
constexpr std::int32_t kv_exponent_e4m3(float amax) { return clamped_exponent(amax, 6, 0x600000u); }

}  // namespace lockstep
