/// What stands behind dequantize() on a CUDA device. Inside kernels/exact/ only.
#pragma once

#include "kernels/exact/dequantize.h"

namespace lockstep::kernels {

/// dequantize() of views on a CUDA device, checked.
void dequantize_cuda(const DequantizeArgs& args, Stream stream);

}  // namespace lockstep::kernels
