/// Guided rounding: the trainer rounds toward the code that the rollout used.
///
/// a = |x| and the scale S = s8 * 2^n (or 2^e) are FP32 numbers; every threshold V[i] * S is exact,
/// so nothing here divides and nothing is rounded. The grid's magnitudes are named by their index
/// m, 0 to 7; the bracket of x is {m, m + 1}, and its ends have different parity. Table-free and
/// without branches: host loops turn into vectors, and device code compiles it as it is.
#pragma once

#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/scale.h"

namespace lockstep {

/// The lower end of the bracket: the largest m <= 6 with V[m] * scale <= a. For scale 0 it is 6,
/// and every value is 0.
constexpr std::uint32_t bracket(float a, float scale) {
  return static_cast<std::uint32_t>(a >= 0.5f * scale) + static_cast<std::uint32_t>(a >= scale) +
         static_cast<std::uint32_t>(a >= 1.5f * scale) +
         static_cast<std::uint32_t>(a >= 2.0f * scale) +
         static_cast<std::uint32_t>(a >= 3.0f * scale) +
         static_cast<std::uint32_t>(a >= 4.0f * scale);
}

/// Round to nearest even within the bracket {m, m + 1}: what e2m1_quotient gives.
constexpr std::uint32_t nearest_in_bracket(float a, float scale, std::uint32_t m) {
  const float middle =
      0.25f * static_cast<float>(e2m1_half_units(m) + e2m1_half_units(m + 1)) * scale;
  const bool past = a > middle;
  const bool tie = a == middle;
  return m + static_cast<std::uint32_t>(past | (tie & ((m & 1u) != 0)));
}

/// The end whose parity equals the rollout's mantissa bit.
constexpr std::uint32_t guided_by_bit(std::uint32_t m, std::uint32_t bit) {
  return m + ((m ^ bit) & 1u);
}

/// The end nearer to the rollout's code; a code of the other sign, or none, is nearest to the
/// lower.
constexpr std::uint32_t guided_by_code(std::uint32_t m, bool negative, E2m1 rollout) {
  const std::uint32_t magnitude = bits_of(rollout) & 7u;
  const bool other_side = ((bits_of(rollout) & 8u) != 0) != negative;
  const std::uint32_t toward = other_side ? 0u : magnitude;
  return toward <= m ? m : m + 1;
}

// ---- E4M3 elements ----
//
// Their scale is a power of two, so z = |x| / S is exact. Magnitudes are the codes 0 to 126, which
// rise with what they are worth; neighbours differ in their last bit, so a bracket is {m, m + 1}.
// Guidance by that bit is exact while x stays strictly between the neighbours of the rollout's
// code, which holds wherever |x_train - x_roll| < |x_roll| / 31, and < S * 2^-10 for subnormal
// codes: half the distance to the nearer neighbour.

/// The lower end of the bracket: the largest m <= 125 that is worth no more than z. z not negative.
constexpr std::uint32_t e4m3_bracket(float z) {
  const std::uint32_t m =
      z >= 0x1p-6f ? (float_bits(z) >> 20) - (120u << 3) : static_cast<std::uint32_t>(z * 512.0f);
  return m > 125u ? 125u : m;
}

/// As guided_by_code, of E4M3 codes.
constexpr std::uint32_t guided_by_code(std::uint32_t m, bool negative, E4m3 rollout) {
  const bool other_side = (bits_of(rollout) >> 7 != 0) != negative;
  const std::uint32_t toward = other_side ? 0u : bits_of(rollout) & 0x7Fu;
  return toward <= m ? m : m + 1;
}

// ---- The scale from two bits ----

/// Where y = amax_block / (6 * 2^n) lies on the line of E4M3 codes, rounded up: ceil(p(y)), with p
/// linear between codes. y is FP32 and not rounded to E4M3; not negative, not NaN.
constexpr std::int32_t ceil_code_line(float y) {
  const auto bits = static_cast<std::int32_t>(float_bits(y));
  if (y >= 0x1p-6f) return 8 + ((bits - 0x3C800000 + 0xFFFFF) >> 20);
  const float p = y * 512.0f;
  const auto floor = static_cast<std::int32_t>(p);
  return floor + static_cast<std::int32_t>(static_cast<float>(floor) < p);
}

/// The scale code c with c mod 4 == residue that is nearest to y on the code line, the lower on a
/// tie, in [0, 126]. The rollout's own whenever the block's maximum drifted by less than 3/31.
constexpr E4m3 scale_of_residue(std::uint32_t residue, float y) {
  // The nearest is the first code of that residue at or above p - 2.
  std::int32_t first = ceil_code_line(y) - 2;
  first = first < 0 ? 0 : first > 123 ? 123 : first;
  const std::int32_t c = first + ((static_cast<std::int32_t>(residue) - first) & 3);
  return static_cast<E4m3>(static_cast<std::uint8_t>(c));
}

/// y of scale_of_residue.
constexpr float scale_quotient(float amax, std::int32_t n) {
  return amax * power_of_two(-n) / 6.0f;
}

}  // namespace lockstep
