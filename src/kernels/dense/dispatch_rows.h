#pragma once

#include "kernels/dense/dispatch.h"

namespace lockstep::kernels {

void dispatch_cuda(const DispatchArgs& args, Stream stream);

}  // namespace lockstep::kernels
