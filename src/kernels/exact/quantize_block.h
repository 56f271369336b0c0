/// The definition of quantize(), a block at a time. Table-free and constexpr, so that the CPU's
/// reference and the CUDA kernels compile the same lines. Inside kernels/ only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/exact/quantize.h"
#include "numerics/four_over_six.h"
#include "numerics/scale.h"

namespace lockstep::kernels {

using QuantizeCounts = std::array<std::int64_t, kNumQuantizeCounts>;

constexpr float value_of(Bf16 x) { return to_float(x); }
constexpr float value_of(float x) { return x; }

/// Magnitudes are ordered as their bits are; NaN lies above Inf, and counts as it.
template <typename T>
constexpr float amax_of(const T* x, std::int64_t count) {
  std::uint32_t bits = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    bits = std::max(bits, float_bits(value_of(x[i])) & 0x7FFFFFFFu);
  }
  return float_of(std::min(bits, 0x7F800000u));
}

/// The scale byte of a block of finite elements: scale_byte(), or the better of two under four over
/// six.
template <typename T>
constexpr std::uint8_t block_byte(const T* x, float amax, const Quantizer& rule,
                                  const GlobalNumbers& global) {
  const std::uint8_t six = scale_byte(rule, amax, global);
  if (rule.four_over_six == FourOverSix::kOff) return six;
  const std::int32_t n = global.exponent;
  const E4m3 four = block_scale_of_four(amax, n);
  if (bits_of(four) == six) return six;
  const bool better = four_loses_less(rule.four_over_six, rule.block,
                                      scale_value(static_cast<E4m3>(six), n), scale_value(four, n),
                                      [x](std::int32_t i) { return magnitude(value_of(x[i])); });
  return better ? bits_of(four) : six;
}

constexpr void count_block(float amax, std::uint8_t byte, const Quantizer& rule,
                           const GlobalNumbers& global, QuantizeCounts& counts) {
  ++counts[kBlocks];
  if (amax == 0.0f) {
    ++counts[kZeroBlocks];
  } else if (byte == 0 && !rule.is_mx()) {
    ++counts[kUnderflowBlocks];
  }
  if (rule.global == GlobalScale::kStatic && rule.global_is_power_of_two &&
      is_saturated(amax, global.exponent)) {
    ++counts[kSaturatedBlocks];
  }
}

/// Codes of a finite block of E2M1; returns its scale byte.
template <typename T>
constexpr std::uint8_t encode_block(const T* x, const Quantizer& rule, const GlobalNumbers& global,
                                    std::uint8_t* codes, QuantizeCounts& counts) {
  const float amax = amax_of(x, rule.block);
  const std::uint8_t byte = block_byte(x, amax, rule, global);
  const BlockCoder coder = block_coder(rule, byte, global);
  for (std::int32_t i = 0; i < rule.block; i += 2) {
    const E2m1 low = code_of(value_of(x[i]), coder);
    const E2m1 high = code_of(value_of(x[i + 1]), coder);
    codes[i / 2] = static_cast<std::uint8_t>(bits_of(low) | bits_of(high) << 4);
  }
  count_block(amax, byte, rule, global, counts);
  return byte;
}

/// What elements of E4M3 are multiplied by under a scale that is a power of two, or 0: then they
/// are 0.
constexpr float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

/// The counts of a block of E4M3.
constexpr void count_wide_block(float amax, const Quantizer& rule, const GlobalNumbers& global,
                                QuantizeCounts& counts) {
  ++counts[kBlocks];
  counts[kZeroBlocks] += amax == 0.0f;
  counts[kSaturatedBlocks] += !rule.is_mx() && amax * power_of_two(-global.exponent) > 464.0f;
}

/// The global scale of a row of that amax, 0 where it is not finite. `whole` is the matrix's, where
/// it has one.
constexpr GlobalNumbers row_global(const Quantizer& rule, float amax, std::int32_t exponent,
                                   float static_amax, const GlobalNumbers& whole) {
  switch (rule.global) {
    case GlobalScale::kPerTensor: return whole;
    case GlobalScale::kStatic:
      return rule.global_is_power_of_two ? global_of_exponent(exponent)
                                         : global_of_amax(rule, static_amax);
    default: return global_of_amax(rule, amax);
  }
}

}  // namespace lockstep::kernels
