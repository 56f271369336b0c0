#pragma once

#include "device/view.h"
#include "kernels/exact/isa.h"

namespace lockstep::kernels {

struct SwigluArgs {
  TensorView<const float, 2> gate;  // [rows, F] columns contiguous; with `up` two halves of W13's
  TensorView<const float, 2> up;    // [rows, F] output, or two tensors
  TensorView<Bf16, 2> out;          // [rows, F]
};

/// out = bf16(silu(gate) * up), each step rounded as numerics/exp.h says. Bit-exact. A NaN is
/// 0x7FC0. Throws Error naming the argument.
void swiglu(const SwigluArgs& args, Stream stream = {});

/// The same by named instructions, for tests and benchmarks.
void swiglu_on(const SwigluArgs& args, Isa isa);

}  // namespace lockstep::kernels
