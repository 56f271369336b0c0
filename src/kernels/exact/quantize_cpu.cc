#include <algorithm>

#include "kernels/exact/quantize_rows.h"
#include "numerics/four_over_six.h"

namespace lockstep::kernels {
namespace {

constexpr float value_of(Bf16 x) { return to_float(x); }
constexpr float value_of(float x) { return x; }

/// Magnitudes are ordered as their bits are; NaN lies above Inf.
template <typename T>
float amax_of(const T* x, std::int64_t count) {
  std::uint32_t bits = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    bits = std::max(bits, float_bits(value_of(x[i])) & 0x7FFFFFFFu);
  }
  return float_of(std::min(bits, 0x7F800000u));
}

void count(float amax, std::uint8_t byte, const Quantizer& rule, const GlobalNumbers& global,
           QuantizeCounts& counts) {
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

}  // namespace

template <typename T>
float row_amax(const T* x, std::int64_t cols) {
  return amax_of(x, cols);
}

namespace {

/// E4M3 elements: blocks at the edge are smaller; without scales the row is one block.
template <typename T>
void encode_wide(const EncodeRow<T>& row, const Quantizer& rule, QuantizeCounts& counts) {
  const std::int64_t block = rule.is_mx() ? rule.block : row.cols;
  for (std::int64_t first = 0; first < row.cols; first += block) {
    const std::int64_t size = std::min(block, row.cols - first);
    const T* x = row.x + first;
    const float amax = amax_of(x, size);
    std::uint8_t byte = 0;
    if (rule.is_mx()) row.scales[first / block] = byte = scale_byte(rule, amax, row.global);
    encode_e4m3(x, size, scale_value(rule, byte, row.global.exponent), row.codes + first);
    ++counts[kBlocks];
    counts[kZeroBlocks] += amax == 0.0f;
    counts[kSaturatedBlocks] += !rule.is_mx() && amax * power_of_two(-row.global.exponent) > 464.0f;
  }
}

}  // namespace

template <typename T>
void encode_e4m3(const T* x, std::int64_t count, float scale, std::uint8_t* codes) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = bits_of(to_e4m3_scaled(value_of(x[i]), inverse));
  }
}

template void encode_e4m3(const Bf16*, std::int64_t, float, std::uint8_t*);
template void encode_e4m3(const float*, std::int64_t, float, std::uint8_t*);

template <typename T>
std::uint8_t block_byte(const T* x, float amax, const Quantizer& rule,
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

template <typename T>
void encode_row(const EncodeRow<T>& row, const Quantizer& rule, QuantizeCounts& counts) {
  if (rule.is_wide()) return encode_wide(row, rule, counts);
  const std::int32_t block = rule.block;
  for (std::int64_t first = 0; first < row.cols; first += block) {
    const T* x = row.x + first;
    const float amax = amax_of(x, block);
    const std::uint8_t byte = block_byte(x, amax, rule, row.global);
    const BlockCoder coder = block_coder(rule, byte, row.global);
    row.scales[first / block] = byte;
    for (std::int32_t i = 0; i < block; i += 2) {
      const E2m1 low = code_of(value_of(x[i]), coder);
      const E2m1 high = code_of(value_of(x[i + 1]), coder);
      row.codes[(first + i) / 2] = static_cast<std::uint8_t>(bits_of(low) | bits_of(high) << 4);
    }
    count(amax, byte, rule, row.global, counts);
  }
}

template std::uint8_t block_byte(const Bf16*, float, const Quantizer&, const GlobalNumbers&);
template std::uint8_t block_byte(const float*, float, const Quantizer&, const GlobalNumbers&);
template float row_amax(const Bf16*, std::int64_t);
template float row_amax(const float*, std::int64_t);
template void encode_row(const EncodeRow<Bf16>&, const Quantizer&, QuantizeCounts&);
template void encode_row(const EncodeRow<float>&, const Quantizer&, QuantizeCounts&);

}  // namespace lockstep::kernels
