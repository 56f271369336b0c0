/// BF16 to and from FP32, on the bits.
#pragma once

#include <bit>

#include "numerics/formats.h"

namespace lockstep {

constexpr std::uint32_t float_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
constexpr float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

constexpr std::uint16_t bits_of(Bf16 x) { return static_cast<std::uint16_t>(x); }

constexpr float to_float(Bf16 x) { return float_of(static_cast<std::uint32_t>(bits_of(x)) << 16); }

/// Round to nearest even. What overflows becomes Inf; a NaN stays a (quiet) NaN of its sign.
constexpr Bf16 to_bf16(float x) {
  const std::uint32_t bits = float_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return static_cast<Bf16>(static_cast<std::uint16_t>(bits >> 16 | 0x40u));
  }
  return static_cast<Bf16>(static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16));
}

constexpr bool is_finite(Bf16 x) { return (bits_of(x) & 0x7F80u) != 0x7F80u; }
constexpr bool is_finite(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }

constexpr float magnitude(float x) { return float_of(float_bits(x) & 0x7FFFFFFFu); }

}  // namespace lockstep
