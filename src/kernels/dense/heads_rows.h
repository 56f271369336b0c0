/// Between heads.cc and the CUDA backend.
#pragma once

#include "kernels/dense/heads.h"

namespace lockstep::kernels {

/// False where the kernel does not know the caches' rules or the row's place, and nothing is done.
bool place_heads_cuda(const PlaceHeadsArgs& args, Stream stream);

}  // namespace lockstep::kernels
