/// exp and SwiGLU, bit for bit: between W13 and W2 they decide codes, so that every engine must
/// round alike. Table-free, every step rounded to FP32, no fused operation.
/// docs/formats/swiglu.md gives steps, coefficients and worked values.
#pragma once

#include "numerics/bf16.h"

namespace lockstep {

/// exp(x) within 1 ulp; Inf from 88.722839 on, gradual underflow, 0 from -103.98 down; NaN for NaN.
constexpr float exp_exact(float x) {
  // Beyond these the result is Inf and 0 anyway; a NaN passes both comparisons.
  float c = x > 89.0f ? 89.0f : x;
  c = c < -105.0f ? -105.0f : c;
  // The nearest integer to x / ln 2: at 1.5 * 2^23 the ulp is 1.
  const float shifted = c * 0x1.715476p+0f + 0x1.8p+23f;
  const float k = shifted - 0x1.8p+23f;
  // k * 0x1.62ep-1 and the first difference are exact.
  const float r = (c - k * 0x1.62ep-1f) - k * 0x1.0bfbe8p-15f;
  // exp(r) = 1 + r + r^2 * q(r).
  float q = 0x1.6b6deep-10f;
  q = q * r + 0x1.12300ap-7f;
  q = q * r + 0x1.55568ap-5f;
  q = q * r + 0x1.5554a2p-3f;
  q = q * r + 0.5f;
  const float y = (q * (r * r) + r) + 1.0f;
  // times 2^k in two halves: the first product is exact, the second rounds once.
  const auto n = static_cast<std::int32_t>(float_bits(shifted) - float_bits(0x1.8p+23f));
  const std::int32_t half = n >> 1;
  const float first = float_of((static_cast<std::uint32_t>(half) + 127u) << 23);
  const float second = float_of((static_cast<std::uint32_t>(n - half) + 127u) << 23);
  return (y * first) * second;
}

/// g / (1 + exp(-g)), within 2.5 ulp for g > -87; -0 from -88.722839 down, where exp(-g) is Inf.
constexpr float silu_exact(float g) { return g / (1.0f + exp_exact(-g)); }

/// silu(g) * u as the next product's operand. Every NaN is 0x7FC0.
constexpr Bf16 swiglu_exact(float g, float u) {
  const float y = silu_exact(g) * u;
  const std::uint32_t bits = float_bits(y);
  const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<Bf16>(static_cast<std::uint16_t>(nan ? 0x7FC0u : rounded));
}

}  // namespace lockstep
