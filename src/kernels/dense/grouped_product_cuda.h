#pragma once

#include "kernels/dense/grouped_product.h"

namespace lockstep::kernels {

/// The arguments have been checked; there are items and outputs.
void grouped_product_cuda(const GroupedProductArgs& args, Stream stream);
void grouped_sums_cuda(const GroupedSumsArgs& args, Stream stream);

}  // namespace lockstep::kernels
