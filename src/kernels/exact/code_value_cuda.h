/// What a code is worth, read where codes lie on a CUDA device. For .cu files of kernels/exact/.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "kernels/exact/dequantize.h"
#include "numerics/macro_block.h"
#include "numerics/scale.h"

namespace lockstep::kernels {

/// Rows of codes, as kernels get them.
struct CodeSource {
  Quantizer rule;
  const std::uint8_t* codes = nullptr;
  std::int64_t codes_stride = 0;
  const std::uint8_t* scales = nullptr;
  std::int64_t scales_stride = 0;
  const float* global = nullptr;
  std::int64_t global_stride = 0;
  float whole = 1.0f;                       // where there is no view
  const std::uint8_t* mantissas = nullptr;  // of macro blocks
  std::int64_t mantissas_stride = 0;
};

inline CodeSource code_source(const PackedView<const std::uint8_t>& codes, const Quantizer& rule,
                              std::int8_t exponent) {
  return {.rule = rule,
          .codes = codes.codes.data,
          .codes_stride = codes.codes.stride[0],
          .scales = codes.scales.data,
          .scales_stride = codes.scales.stride[0],
          .global = codes.global.data,
          .global_stride = codes.global.shape[0] == 1 ? 0 : codes.global.stride[0],
          .whole = power_of_two(exponent),
          .mantissas = codes.mantissas.data,
          .mantissas_stride = codes.mantissas.stride[0]};
}

/// What the codes of a block are multiplied by; NaN where no quantizer wrote its scale.
__device__ inline float factor_of(const CodeSource& from, std::uint32_t row, std::uint32_t block) {
  const float whole = from.global == nullptr ? from.whole : from.global[row * from.global_stride];
  if (from.rule.scale == ScaleFormat::kNone) return decode_factor(from.rule, 0, whole);
  const std::uint32_t band =
      from.rule.block_rows == 1 ? row : row / static_cast<std::uint32_t>(from.rule.block_rows);
  const std::uint8_t byte = from.scales[band * from.scales_stride + block];
  if (byte > most_scale_byte(from.rule)) return float_of(0x7FC00000u);
  return decode_factor(from.rule, byte, whole);
}

/// The value of one element, of any format.
__device__ inline float value_at(const CodeSource& from, std::uint32_t row, std::uint32_t col) {
  const float factor = factor_of(from, row, col / static_cast<std::uint32_t>(from.rule.block));
  const std::uint8_t* codes = from.codes + row * from.codes_stride;
  const float value = from.rule.is_wide() ? to_float(static_cast<E4m3>(codes[col]))
                                          : to_float(static_cast<E2m1>(static_cast<std::uint8_t>(
                                                codes[col / 2] >> (col % 2 * 4) & 15)));
  if (from.rule.macro_block == 0) return value * factor;
  const std::uint32_t macro = col / static_cast<std::uint32_t>(from.rule.macro_block);
  return unstretch(value * factor, from.mantissas[row * from.mantissas_stride + macro]);
}

}  // namespace lockstep::kernels
