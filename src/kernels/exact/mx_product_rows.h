/// What stands behind mx_product() on a CUDA device. Inside kernels/exact/ only.
#pragma once

#include "kernels/exact/mx_product.h"

namespace lockstep::kernels {

/// Of arguments that have been checked; at least one item.
void mx_product_cuda(const MxProductArgs& args, std::int64_t items, Stream stream);

}  // namespace lockstep::kernels
