#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// How the scale bytes of a matrix lie in memory.
enum class ScaleLayout : std::uint8_t {
  kLinear,  // [rows, blocks]: checkpoints, records, our own kernels
  k128x4,   // tiles of 128 rows by 4 blocks, as the tensor cores of Blackwell read them
  k8x4,     // tiles of 8 rows by 4 blocks, for few rows
};

// On a CUDA device these run in the order of the stream; those that can find an element that
// has no place in E2M1 wait for it there. All views of a call are on one device, spans with them.

/// Bytes that `rows` by `blocks` scales take, padding included.
std::int64_t scale_layout_bytes(ScaleLayout layout, std::int64_t rows, std::int64_t blocks);

/// Where the scale of (row, block) lies. 64-bit throughout; `blocks` is the matrix's width.
std::int64_t scale_offset(ScaleLayout layout, std::int64_t row, std::int64_t block,
                          std::int64_t blocks);

/// Linear scales into a layout; padding is zero, whatever `out` held. Throws Error where sizes
/// disagree.
void swizzle_scales(TensorView<const std::uint8_t, 2> scales, ScaleLayout layout,
                    std::span<std::uint8_t> out, Stream stream = {});

/// And back.
void unswizzle_scales(std::span<const std::uint8_t> from, ScaleLayout layout,
                      TensorView<std::uint8_t, 2> scales, Stream stream = {});

/// Codes one a byte, [rows, cols], to two a byte, the even element low. The upper halves of the
/// bytes must be zero; Error names row and column of one that is not.
void pack_codes(TensorView<const std::uint8_t, 2> codes, TensorView<std::uint8_t, 2> packed,
                Stream stream = {});

/// And back.
void unpack_codes(TensorView<const std::uint8_t, 2> packed, TensorView<std::uint8_t, 2> codes,
                  Stream stream = {});

/// Values that are E2M1 numbers already, to packed codes. Any type goes through FP32, so that the
/// same sixteen values give the same bytes; -0 becomes code 0. Error names row and column of a
/// value that E2M1 does not have.
template <typename T>
void pack_values(TensorView<const T, 2> values, TensorView<std::uint8_t, 2> packed,
                 Stream stream = {});

/// ggml's blocks from linear codes and scales, [rows, bytes]: under MXFP4 32 elements, a scale byte
/// and 16 bytes, element j low and j + 16 high; under NVFP4 64 elements, four scale bytes and 32
/// bytes, in each sixteen element j low and j + 8 high. Throws Error where sizes disagree.
std::int64_t ggml_row_bytes(const Quantizer& rule, std::int64_t cols);
void pack_ggml(const PackedView<const std::uint8_t>& from, const Quantizer& rule,
               TensorView<std::uint8_t, 2> out, Stream stream = {});

/// And back.
void unpack_ggml(TensorView<const std::uint8_t, 2> from, const Quantizer& rule,
                 const PackedView<std::uint8_t>& out, Stream stream = {});

}  // namespace lockstep::kernels
