#pragma once

#include <span>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// Neighbours of a block's plain scale that are tried, in steps of the E4M3 code.
inline constexpr int kHScaleUp = 6;
inline constexpr int kHScaleDown = 9;

/// quantize_weight(), then each block's scale is refined: of the sixteen E4M3 codes from nine below
/// the plain one to six above it that are a scale at all, the one that loses least,
///   sum over the block of h[c] * (w - code * s8 * 2^n)^2, w rounded to BF16, in double, in order.
/// Codes are rounded anew under each. The plain scale stays unless another loses less; of equal
/// ones the lower wins. h [cols] says how much a column counts: the sum of squares of its inputs.
/// Where a block's h is all zero its scale stays.
///
/// The rule is NVFP4 under a power-of-two global scale. Throws Error naming what is wrong.
void quantize_weight_h_scale(TensorView<const float, 2> master, std::span<const double> h,
                             const Quantizer& rule, const PackedView<std::uint8_t>& out);

}  // namespace lockstep::kernels
