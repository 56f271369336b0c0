#include <algorithm>

#include "kernels/exact/quantize_rows.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

float block_amax(const Bf16* x, std::int32_t block) {
  std::uint16_t bits = 0;
  for (std::int32_t i = 0; i < block; ++i) {
    bits = std::max(bits, static_cast<std::uint16_t>(bits_of(x[i]) & 0x7FFFu));
  }
  return to_float(static_cast<Bf16>(bits));
}

/// The scale byte of a block and its value times the global scale.
struct BlockScale {
  std::uint8_t byte = 0;
  float value = 0.0f;
};

BlockScale scale_of(float amax, const Quantizer& rule, std::int32_t n, QuantizeCounts& counts) {
  ++counts[kBlocks];
  if (rule.is_mx()) {
    const E8m0 e = mx_scale(amax, mx_rule(rule.scale_rule));
    counts[kZeroBlocks] += amax == 0.0f;
    return {bits_of(e), to_float(e)};
  }
  const E4m3 s8 = block_scale(amax, n);
  if (bits_of(s8) == 0) ++counts[amax == 0.0f ? kZeroBlocks : kUnderflowBlocks];
  if (rule.global == GlobalScale::kStatic && is_saturated(amax, n)) ++counts[kSaturatedBlocks];
  return {bits_of(s8), scale_value(s8, n)};
}

}  // namespace

std::uint16_t row_amax(const Bf16* x, std::int64_t cols) {
  std::uint16_t bits = 0;
  for (std::int64_t i = 0; i < cols; ++i) {
    bits = std::max(bits, static_cast<std::uint16_t>(bits_of(x[i]) & 0x7FFFu));
  }
  return bits;
}

void encode_row(const EncodeRow& row, const Quantizer& rule, QuantizeCounts& counts) {
  const std::int32_t block = rule.block;
  for (std::int64_t first = 0; first < row.cols; first += block) {
    const Bf16* x = row.x + first;
    const float amax = block_amax(x, block);
    const BlockScale scale = scale_of(amax, rule, row.global.exponent, counts);
    row.scales[first / block] = scale.byte;
    for (std::int32_t i = 0; i < block; i += 2) {
      const E2m1 low = to_e2m1_scaled(to_float(x[i]), scale.value, rule.tie);
      const E2m1 high = to_e2m1_scaled(to_float(x[i + 1]), scale.value, rule.tie);
      row.codes[(first + i) / 2] = static_cast<std::uint8_t>(bits_of(low) | bits_of(high) << 4);
    }
  }
}

}  // namespace lockstep::kernels
