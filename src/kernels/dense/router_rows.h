#pragma once

#include "kernels/dense/router.h"

namespace lockstep::kernels {

void router_portable(const RouterArgs& args, std::int64_t first, std::int64_t end);
void router_cuda(const RouterArgs& args, Stream stream);

}  // namespace lockstep::kernels
