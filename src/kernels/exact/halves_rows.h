/// What the backends of halves.h share.
#pragma once

#include "device/view.h"

namespace lockstep::kernels {

/// The backends for a CUDA device; the arguments have been checked.
void keep_half_cuda(const PackedView<const std::uint8_t>& from, bool first,
                    const PackedView<std::uint8_t>& to, Stream stream);
void add_halves_cuda(const TensorView<const float, 2>& other, const TensorView<float, 2>& y,
                     Stream stream);

}  // namespace lockstep::kernels
