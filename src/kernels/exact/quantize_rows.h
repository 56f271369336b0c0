/// What stands behind quantize(): one row, on a CPU. Inside kernels/exact/ only.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/exact/quantize.h"

namespace lockstep::kernels {

using QuantizeCounts = std::array<std::int64_t, kNumQuantizeCounts>;

/// The global scale that a row is quantized under.
struct RowGlobal {
  std::int32_t exponent = 0;  // where it is a power of two
  float amax = 0.0f;          // where it is not
};

struct EncodeRow {
  const Bf16* x = nullptr;  // [cols], finite
  std::int64_t cols = 0;
  RowGlobal global;
  std::uint8_t* codes = nullptr;   // [cols / 2]
  std::uint8_t* scales = nullptr;  // [cols / block]
};

/// The largest magnitude's BF16 bits; 0x7F80 or more where the row holds Inf or NaN.
std::uint16_t row_amax(const Bf16* x, std::int64_t cols);

/// Codes and scales of a finite row. The definition.
void encode_row(const EncodeRow& row, const Quantizer& rule, QuantizeCounts& counts);

/// The same bytes and counts by AVX-512 or AVX2, whatever this machine has. `lockstep` only; false
/// where the machine or the rule is another, and nothing was done.
bool encode_row_simd(const EncodeRow& row, const Quantizer& rule, QuantizeCounts& counts);
bool row_amax_simd(const Bf16* x, std::int64_t cols, std::uint16_t& amax);

}  // namespace lockstep::kernels
