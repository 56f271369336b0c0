/// Between add_norm.cc and the CUDA backend.
#pragma once

#include "kernels/dense/add_norm.h"

namespace lockstep::kernels {

/// False where rows do not lie as the kernel wants them, and nothing is done.
bool add_norm_cuda(const AddNormArgs& args, Stream stream);

}  // namespace lockstep::kernels
