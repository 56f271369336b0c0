#pragma once

#include <functional>

#include "device/view.h"
#include "ops/torch.h"

namespace lockstep::ops {

/// What a site does to its BF16 numbers: kernels::guide() with the records of the rows. `to` may be
/// `from`; on a CUDA device in the order of torch's stream.
using Rounding = std::function<void(TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to)>;

/// x, rounded to BF16 and then by `rounding`. The gradient is the identity, everywhere: neither
/// saturation nor a block whose scale is zero stops it.   [rows, cols]
at::Tensor straight_through(const at::Tensor& x, const Rounding& rounding);

/// FP32 numbers of a CPU as BF16, rounded, and back; `to` has as many.
void store_bf16(const at::Tensor& x, Bf16* to);
void load_bf16(const Bf16* x, const at::Tensor& to);

}  // namespace lockstep::ops
