/// Between route.cc and the CUDA backend.
#pragma once

#include "kernels/dense/route.h"

namespace lockstep::kernels {

/// False where the kernel does not know the shape or the device, and nothing is done.
bool route_cuda(const RouteArgs& args, Stream stream);

}  // namespace lockstep::kernels
