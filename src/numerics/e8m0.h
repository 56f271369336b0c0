/// E8M0: a power of two, 2^(byte - 127); 0xFF is NaN. As a scale the exponent is kept where
/// code * scale is a finite BF16 number: in [-127, 125] for E2M1, in [-124, 119] for E4M3.
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

/// How a block's amax becomes the exponent of its scale, for elements up to 6 = 1.5 * 2^2 (E2M1) or
/// 448 = 1.75 * 2^8 (E4M3).
enum class MxRule : std::uint8_t {
  kFloor,  // floor(log2 amax) - 2, or - 8: what is above the largest element saturates
  kEven,   // the same of amax rounded to an element's significant bits, ties up
  kCeil,   // ceil(log2 amax) - 2, or - 8
  kRceil,  // ceil(log2(amax / 6)), or of 448: the smallest that saturates nothing
};

/// What a rule has to know of the elements under a scale.
struct MxSpan {
  std::int32_t top;        // the largest element's exponent
  std::uint32_t mantissa;  // ... and its mantissa, as FP32 has it
  std::uint32_t even;      // the mantissa from which kEven goes up
  std::int32_t least, most;
};
constexpr MxSpan mx_e2m1() { return {2, 0x400000u, 0x600000u, -127, 125}; }
constexpr MxSpan mx_e4m3() { return {8, 0x600000u, 0x780000u, -124, 119}; }

constexpr std::uint8_t bits_of(E8m0 code) { return static_cast<std::uint8_t>(code); }

constexpr float to_float(E8m0 code) {
  const std::uint32_t b = bits_of(code);
  if (b == 0xFFu) return float_of(0x7FC00000u);
  return float_of(b == 0 ? 0x00400000u : b << 23);
}

/// The scale of a block with this amax, finite and not negative. A zero block has byte 0.
constexpr E8m0 mx_scale(float amax, MxRule rule, MxSpan span = mx_e2m1()) {
  const std::uint32_t bits = float_bits(amax);
  const std::uint32_t mantissa = bits & 0x7FFFFFu;
  if (bits == 0) return E8m0{0};
  std::int32_t exponent = static_cast<std::int32_t>(bits >> 23) - 127 - span.top;
  switch (rule) {
    case MxRule::kFloor: break;
    case MxRule::kEven: exponent += mantissa >= span.even; break;
    case MxRule::kCeil: exponent += mantissa > 0; break;
    case MxRule::kRceil: exponent += mantissa > span.mantissa; break;
  }
  // Subnormal amax lies below every rule's least, where the clamp takes it too.
  if (exponent < span.least || bits < 0x00800000u) exponent = span.least;
  if (exponent > span.most) exponent = span.most;
  return static_cast<E8m0>(static_cast<std::uint8_t>(exponent + 127));
}

}  // namespace lockstep
