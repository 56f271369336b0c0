/// E4M3 (the "fn" kind: no Inf, NaN at 0x7F): the scale of an NVFP4 block, and the element of FP8.
/// Codes 0 to 0x7E are the finite magnitudes, 0 to 448; 0x08 is the smallest normal, 2^-6, and the
/// step below it is 2^-9.
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

inline constexpr std::uint8_t kE4m3Max = 0x7E;  // 448; a scale byte above it is damaged data

constexpr std::uint8_t bits_of(E4m3 code) { return static_cast<std::uint8_t>(code); }

/// value * 2^9 of a scale (sign bit 0, not NaN): an integer, at most 229,376.
constexpr std::int32_t e4m3_units(E4m3 code) {
  const std::uint32_t c = bits_of(code);
  const std::uint32_t exponent = c >> 3;
  const std::uint32_t mantissa = c & 7u;
  return static_cast<std::int32_t>(exponent == 0 ? mantissa : (8u + mantissa) << (exponent - 1));
}

/// The value, sign included.
constexpr float to_float(E4m3 code) {
  const std::uint32_t c = bits_of(code) & 0x7Fu;
  if (c == 0x7Fu) return float_of(0x7FC00000u);
  const float magnitude =
      static_cast<float>(e4m3_units(static_cast<E4m3>(static_cast<std::uint8_t>(c)))) * 0x1p-9f;
  return (bits_of(code) & 0x80u) != 0 ? -magnitude : magnitude;
}

/// Round to nearest even, saturating at +-448 (Inf too). NaN gives 0x7F.
constexpr E4m3 to_e4m3(float x) {
  const std::uint32_t sign = float_bits(x) >> 31 << 7;
  const std::uint32_t bits = float_bits(x) & 0x7FFFFFFFu;
  std::uint32_t code = 0;
  if (bits > 0x7F800000u) {
    code = 0x7Fu;
  } else if (bits >= 0x3C800000u) {  // 2^-6: normal
    code = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
    if (code > kE4m3Max) code = kE4m3Max;
  } else {
    // 2^14 in FP32 has an ulp of 2^-9: the sum rounds as the format does.
    code = float_bits(float_of(bits) + 0x1p14f) - float_bits(0x1p14f);
  }
  return static_cast<E4m3>(static_cast<std::uint8_t>(code | sign));
}

/// The element nearest to x * inverse, saturating; a zero has no sign. Exact where `inverse` is a
/// power of two: a product that FP32 cannot hold is far below the smallest element.
constexpr E4m3 to_e4m3_scaled(float x, float inverse) {
  const E4m3 code = to_e4m3(x * inverse);
  return bits_of(code) == 0x80u ? E4m3{0} : code;
}

}  // namespace lockstep
