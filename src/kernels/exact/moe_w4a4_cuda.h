#pragma once

#include "kernels/exact/moe_w4a4.h"

namespace lockstep::kernels {

/// The arguments have been checked and there are items.
void moe_w4a4_cuda(const MoeW4a4Args& args, Stream stream);

}  // namespace lockstep::kernels
