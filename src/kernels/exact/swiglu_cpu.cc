/// The definition of SwiGLU.
#include "kernels/exact/swiglu_row.h"
#include "numerics/exp.h"

namespace lockstep::kernels {

void swiglu_row_portable(const float* gate, const float* up, Bf16* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = swiglu_exact(gate[i], up[i]);
}

}  // namespace lockstep::kernels
