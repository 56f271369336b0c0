/// E2M1: a sign in bit 3 and eight magnitudes, 0, .5, 1, 1.5, 2, 3, 4, 6. No Inf, no NaN.
///
/// Table-free, as all of numerics/: a constexpr table that device code indexes at run time
/// compiles without a word to a trap.
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

/// What becomes of a quotient halfway between two magnitudes.
enum class Tie : std::uint8_t { kEven, kTowardZero, kAway };

constexpr std::uint8_t bits_of(E2m1 code) { return static_cast<std::uint8_t>(code); }

/// Twice the magnitude of m in [0, 7]: 0, 1, 2, 3, 4, 6, 8, 12.
constexpr std::int32_t e2m1_half_units(std::uint32_t m) {
  return static_cast<std::int32_t>(m < 2 ? m : (2 + (m & 1u)) << ((m >> 1) - 1));
}

/// The magnitude of m in [0, 7].
constexpr float e2m1_magnitude(std::uint32_t m) {
  return 0.5f * static_cast<float>(e2m1_half_units(m));
}

/// Twice the value, sign included: what integer products are made of.
constexpr std::int32_t half_units(E2m1 code) {
  const std::int32_t magnitude = e2m1_half_units(bits_of(code) & 7u);
  return (bits_of(code) & 8u) != 0 ? -magnitude : magnitude;
}

/// The value. Code 8, which is never emitted unless a dialect keeps the sign of zero, is -0.
constexpr float to_float(E2m1 code) {
  const float magnitude = e2m1_magnitude(bits_of(code) & 7u);
  return (bits_of(code) & 8u) != 0 ? -magnitude : magnitude;
}

/// The magnitude nearest to a / scale, exactly: no quotient is formed, so none is rounded.
/// Requires a >= 0, and scale * 7 exact in FP32, which holds for every s8 * 2^n and 2^e. Saturates
/// at 7 (the value 6). scale 0 gives 0, and so does a NaN.
constexpr std::uint32_t e2m1_quotient(float a, float scale, Tie tie = Tie::kEven) {
  if (!(scale > 0.0f)) return 0;
  // Reaching a threshold is passing it where the tie goes up: to the odd code only under kAway, to
  // the even one unless ties go toward zero.
  const bool to_odd = tie == Tie::kAway;
  const bool to_even = tie != Tie::kTowardZero;
  std::uint32_t m = 0;
  m += to_odd ? a >= 0.25f * scale : a > 0.25f * scale;
  m += to_even ? a >= 0.75f * scale : a > 0.75f * scale;
  m += to_odd ? a >= 1.25f * scale : a > 1.25f * scale;
  m += to_even ? a >= 1.75f * scale : a > 1.75f * scale;
  m += to_odd ? a >= 2.5f * scale : a > 2.5f * scale;
  m += to_even ? a >= 3.5f * scale : a > 3.5f * scale;
  m += to_odd ? a >= 5.0f * scale : a > 5.0f * scale;
  return m;
}

/// Sign and magnitude as a code; a zero has no sign.
constexpr E2m1 e2m1(bool negative, std::uint32_t m) {
  return static_cast<E2m1>(static_cast<std::uint8_t>(m | (negative && m != 0 ? 8u : 0u)));
}

/// The code nearest to z, saturating at +-6; never code 8.
constexpr E2m1 to_e2m1(float z, Tie tie = Tie::kEven) {
  return e2m1((float_bits(z) >> 31) != 0, e2m1_quotient(magnitude(z), 1.0f, tie));
}

/// The code nearest to x / scale. See e2m1_quotient.
constexpr E2m1 to_e2m1_scaled(float x, float scale, Tie tie = Tie::kEven) {
  return e2m1((float_bits(x) >> 31) != 0, e2m1_quotient(magnitude(x), scale, tie));
}

}  // namespace lockstep
