#pragma once

#include "device/view.h"

namespace lockstep::kernels {

struct MxProductArgs {
  PackedView<const std::uint8_t> a{};  // codes [rows, cols / 2], E8M0 scales [rows, cols / 32]
  PackedView<const std::uint8_t> w{};  // [experts * out, ...], the experts' rows one after another
  std::int32_t experts = 1;
  // Items, as in W4a4Args.
  TensorView<const std::int32_t, 1> offsets{};
  TensorView<const std::int32_t, 1> from{};
  TensorView<const std::int32_t, 1> to{};
  TensorView<float, 2> out{};  // [>= items, out]
};

/// MXFP4 times MXFP4. Exponents are spread too far for plain int64, so every pair of a row of `a`
/// and a row of `w` has an anchor, the sum of their largest exponents over blocks that are not all
/// zero. A block's dot product, in quarter units, is shifted by e_a + e_w - anchor + 40, to nearest
/// even where that is negative; the shifted terms are summed in int64, and
/// out = ldexpf(RNE_f32(sum), anchor - 42). Each term is rounded alone, so the order does not
/// matter: any tiling, batch or rank split gives the same bits. A sum of 0 gives +0.
///
/// `global` is not read: MXFP4 has none. Requires cols % 32 == 0 and cols <= 32768, so that no sum
/// overflows. Throws Error naming the argument, and row and block of a scale byte above 252 in what
/// the items name; rows of experts without items are not looked at, and `out` is then in parts. On
/// a CUDA device neither scale bytes nor indices are looked at. The same bytes on every device.
void mx_product(const MxProductArgs& args, Stream stream = {});

}  // namespace lockstep::kernels
