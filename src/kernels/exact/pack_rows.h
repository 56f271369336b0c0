/// What stands behind pack.h on a CUDA device. Inside kernels/exact/ only. Views are checked.
#pragma once

#include "device/memory.h"
#include "kernels/exact/pack.h"

namespace lockstep::kernels {

/// Elements of a ggml block that share a scale byte, and how many such lie in a block.
struct GgmlBlock {
  std::int64_t group;
  std::int64_t groups;
  constexpr std::int64_t bytes() const { return groups + group * groups / 2; }
  constexpr std::int64_t elements() const { return group * groups; }
};

constexpr std::int64_t scale_tile_rows(ScaleLayout layout) {
  return layout == ScaleLayout::k128x4 ? 128 : 8;
}

/// scale_offset().
constexpr std::int64_t scale_place(ScaleLayout layout, std::int64_t row, std::int64_t block,
                                   std::int64_t blocks) {
  if (layout == ScaleLayout::kLinear) return row * blocks + block;
  const std::int64_t tile = row / scale_tile_rows(layout) * ((blocks + 3) / 4) + block / 4;
  if (layout == ScaleLayout::k8x4) return tile * 32 + row % 8 * 4 + block % 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

void swizzle_scales_cuda(TensorView<const std::uint8_t, 2> scales, ScaleLayout layout,
                         std::uint8_t* out, Stream stream);
void unswizzle_scales_cuda(const std::uint8_t* from, ScaleLayout layout,
                           TensorView<std::uint8_t, 2> scales, Stream stream);
void unpack_codes_cuda(TensorView<const std::uint8_t, 2> packed, TensorView<std::uint8_t, 2> codes,
                       Stream stream);

/// These two wait and return which element, counted row by row, cannot be packed; negative: none.
std::int64_t pack_codes_cuda(TensorView<const std::uint8_t, 2> codes,
                             TensorView<std::uint8_t, 2> packed, Stream stream);
template <typename T>
std::int64_t pack_values_cuda(TensorView<const T, 2> values, TensorView<std::uint8_t, 2> packed,
                              Stream stream);

/// pack_ggml(), or unpack_ggml(): what is read is not written.
void ggml_cuda(const PackedView<std::uint8_t>& linear, GgmlBlock block,
               TensorView<std::uint8_t, 2> ggml, bool back, Stream stream);

}  // namespace lockstep::kernels
