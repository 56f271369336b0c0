/// SwiGLU by each backend: a row on a CPU.
#pragma once

#include <cstdint>

#include "kernels/exact/isa.h"
#include "kernels/exact/swiglu.h"
#include "numerics/formats.h"

namespace lockstep::kernels {

using SwigluRow = void (*)(const float* gate, const float* up, Bf16* out, std::int64_t n);

void swiglu_row_portable(const float* gate, const float* up, Bf16* out, std::int64_t n);
SwigluRow swiglu_row(Isa isa);

/// swiglu() on a CUDA device, of arguments that it has checked; at least one element.
void swiglu_cuda(const SwigluArgs& args, Stream stream);

}  // namespace lockstep::kernels
