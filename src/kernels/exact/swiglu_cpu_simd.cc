/// The definition once more, compiled for wider registers: it has no branch, so the compiler turns
/// the loop into vectors. No operation is fused, so the bytes stay the same; swiglu_test.cc checks.
#include "kernels/exact/swiglu_row.h"
#include "numerics/exp.h"

namespace lockstep::kernels {

#if defined(__x86_64__)
namespace {

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void row_avx512(
    const float* __restrict gate, const float* __restrict up, Bf16* __restrict out,
    std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = swiglu_exact(gate[i], up[i]);
}

[[gnu::target("avx2")]] void row_avx2(const float* __restrict gate, const float* __restrict up,
                                      Bf16* __restrict out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = swiglu_exact(gate[i], up[i]);
}

}  // namespace

SwigluRow swiglu_row(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return row_avx512;
    case Isa::kAvx2: return row_avx2;
    case Isa::kPortable: break;
  }
  return swiglu_row_portable;
}

#else

SwigluRow swiglu_row(Isa) { return swiglu_row_portable; }

#endif

}  // namespace lockstep::kernels
