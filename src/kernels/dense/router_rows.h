#pragma once

#include "kernels/dense/router.h"

namespace lockstep::kernels {

void router_portable(const RouterArgs& args, std::int64_t first, std::int64_t end);

}  // namespace lockstep::kernels
