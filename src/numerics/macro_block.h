/// Macro blocks (MBS): an 8-bit mantissa m for 128 elements stretches them, by 1 + m/256, until the
/// largest of them lies where a power-of-two scale serves it best: x^ = Q((1 + m/256) x) / (1 +
/// m/256).
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

inline constexpr std::int32_t kMacroBlock = 128;  // the paper's

/// The mantissa of a macro block: 1 + m/256 is 2^ceil(log2 A) / A with A = amax / 6, rounded down.
/// 0 for amax 0. Requires amax normal or 0, and finite.
constexpr std::uint8_t macro_mantissa(float amax) {
  const std::uint32_t bits = float_bits(amax);
  if ((bits & 0x7F800000u) == 0) return 0;
  // amax = f * 2^(E - 23) is at most 6 * 2^k; the smallest such 2^k is 1.5 or 3 over f's own
  // binade.
  const std::uint32_t f = (bits & 0x7FFFFFu) | 0x800000u;
  const std::uint64_t top = f <= 0xC00000u ? 0xC00000u : 0x1800000u;
  return static_cast<std::uint8_t>(top * 256 / f - 256);
}

/// (1 + m/256) x. Exact for a BF16 x unless it leaves FP32's range.
constexpr float stretch(float x, std::uint8_t m) {
  return x * (static_cast<float>(256 + m) / 256.0f);
}

/// What a stretched value stands for, rounded to FP32.
constexpr float unstretch(float y, std::uint8_t m) {
  return y / (static_cast<float>(256 + m) / 256.0f);
}

}  // namespace lockstep
