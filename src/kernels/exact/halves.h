/// A product in two sums, each rounded to BF16: the declared drift of an exact one, for studies.
#pragma once

#include <cstdint>

#include "device/view.h"

namespace lockstep::kernels {

/// `to` becomes `from` with one half of the columns zero, the second with `first`: a product of it
/// is the sum over the other half. Codes of two a byte, an even number of bytes a row; global
/// scales, one a row, are copied. Throws Error unless shapes and devices agree.
void keep_half(const PackedView<const std::uint8_t>& from, bool first,
               const PackedView<std::uint8_t>& to, Stream stream = {});

/// y = bf16(y) + bf16(other) in FP32. Rows without gaps.
void add_halves(const TensorView<const float, 2>& other, const TensorView<float, 2>& y,
                Stream stream = {});

}  // namespace lockstep::kernels
