#pragma once

#include "kernels/dense/w4a16.h"

namespace lockstep::kernels {

/// The arguments have been checked, `items` is not 0.
void w4a16_cuda(const W4a16Args& args, std::int64_t items, Stream stream);
/// By wgmma, on a device of compute capability 9.0.
void w4a16_hopper_cuda(const W4a16Args& args, std::int64_t items, Stream stream);
bool w4a16_takes_any_cuda(Device device);

}  // namespace lockstep::kernels
