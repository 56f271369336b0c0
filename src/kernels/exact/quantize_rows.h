/// What stands behind quantize(): one row on a CPU, all of it on a CUDA device. Inside
/// kernels/exact/ only.
#pragma once

#include <cstdint>

#include "kernels/exact/quantize_block.h"

namespace lockstep::kernels {

template <typename T>
struct EncodeRow {
  const T* x = nullptr;  // [cols], finite
  std::int64_t cols = 0;
  GlobalNumbers global;
  std::uint8_t* codes = nullptr;   // [cols / 2], or [cols] of E4M3
  std::uint8_t* scales = nullptr;  // [cols / block]
};

/// The largest magnitude; Inf where the row holds Inf or NaN.
template <typename T>
float row_amax(const T* x, std::int64_t cols);

/// Codes of E4M3 under a scale that is a power of two, or 0: then they are 0.
template <typename T>
void encode_e4m3(const T* x, std::int64_t count, float scale, std::uint8_t* codes);

/// Codes and scales of a finite row. The definition.
template <typename T>
void encode_row(const EncodeRow<T>& row, const Quantizer& rule, QuantizeCounts& counts);

/// quantize() of blocks that span rows: E4M3 elements under E8M0 scales. A row that is not finite
/// has codes 0 and no part in its blocks' scales.
void quantize_blocks(const QuantizeArgs& args);

/// quantize() of views on a CUDA device, checked.
void quantize_cuda(const QuantizeArgs& args, Stream stream);
void quantize_weight_cuda(TensorView<const float, 2> master, const Quantizer& rule,
                          const PackedView<std::uint8_t>& out, Stream stream);

/// `at` counts elements, row by row.
[[noreturn]] void throw_nonfinite_weight(std::int64_t at, std::int64_t cols);

/// quantize() of rows in macro blocks; the second on a CUDA device, checked.
void quantize_macro(const QuantizeArgs& args, Stream stream);
void quantize_macro_cuda(const QuantizeArgs& args, Stream stream);

/// The same bytes and counts by AVX-512 or AVX2, for BF16 rows under the rules of `lockstep` and of
/// MXFP4. kNone where the rule is another: the definition is all there is.
enum class Simd : std::uint8_t { kNone, kAvx2, kAvx512 };
Simd simd_for(const Quantizer& rule);

/// Writes the BF16 bits of every block's amax; returns the row's, 0x7F80 or more where the row
/// holds Inf or NaN.
std::uint16_t block_amaxes(Simd simd, const Bf16* x, std::int64_t cols, std::int32_t block,
                           std::uint16_t* amaxes);
void encode_row(Simd simd, const EncodeRow<Bf16>& row, const Quantizer& rule,
                const std::uint16_t* amaxes, QuantizeCounts& counts);

}  // namespace lockstep::kernels
