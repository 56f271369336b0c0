/// E8M0: a power of two, 2^(byte - 127); 0xFF is NaN. As a scale the exponent is kept in
/// [-127, 125], so that code * scale is a finite BF16 number.
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

/// How a block's amax becomes the exponent of its MXFP4 scale.
enum class MxRule : std::uint8_t {
  kFloor,  // floor(log2 amax) - 2: what is above 6 saturates
  kEven,   // the same of amax rounded to two significant bits, ties up: up from M >= 1.75
  kCeil,   // ceil(log2 amax) - 2
  kRceil,  // ceil(log2(amax / 6)): the smallest that saturates nothing
};

constexpr std::uint8_t bits_of(E8m0 code) { return static_cast<std::uint8_t>(code); }

constexpr float to_float(E8m0 code) {
  const std::uint32_t b = bits_of(code);
  if (b == 0xFFu) return float_of(0x7FC00000u);
  return float_of(b == 0 ? 0x00400000u : b << 23);
}

/// The scale of a block with this amax, finite and not negative. A zero block has byte 0.
constexpr E8m0 mx_scale(float amax, MxRule rule) {
  const std::uint32_t bits = float_bits(amax);
  const std::uint32_t mantissa = bits & 0x7FFFFFu;
  std::int32_t exponent = static_cast<std::int32_t>(bits >> 23) - 127 - 2;
  switch (rule) {
    case MxRule::kFloor: break;
    case MxRule::kEven: exponent += mantissa >= 0x600000u; break;
    case MxRule::kCeil: exponent += mantissa > 0; break;
    case MxRule::kRceil: exponent += mantissa > 0x400000u; break;
  }
  // Subnormal amax lies below every rule's 2^-127, where the clamp takes it too.
  if (exponent < -127 || bits < 0x00800000u) exponent = -127;
  if (exponent > 125) exponent = 125;
  return static_cast<E8m0>(static_cast<std::uint8_t>(exponent + 127));
}

}  // namespace lockstep
