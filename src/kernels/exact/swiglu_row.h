/// One row of SwiGLU by each backend.
#pragma once

#include <cstdint>

#include "kernels/exact/isa.h"
#include "numerics/formats.h"

namespace lockstep::kernels {

using SwigluRow = void (*)(const float* gate, const float* up, Bf16* out, std::int64_t n);

void swiglu_row_portable(const float* gate, const float* up, Bf16* out, std::int64_t n);
SwigluRow swiglu_row(Isa isa);

}  // namespace lockstep::kernels
