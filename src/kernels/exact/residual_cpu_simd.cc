/// The definition compiled for wider registers. The sum of a score keeps its order.
#include "kernels/exact/residual_row.h"

namespace lockstep::kernels {

#if defined(__x86_64__)
namespace {

[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] void row_avx512(
    const ResidualRow& row) {
  residual_row_body(row);
}

[[gnu::target("avx2")]] void row_avx2(const ResidualRow& row) { residual_row_body(row); }

}  // namespace

ResidualKernel residual_row(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return row_avx512;
    case Isa::kAvx2: return row_avx2;
    case Isa::kPortable: break;
  }
  return residual_row_portable;
}

#else

ResidualKernel residual_row(Isa) { return residual_row_portable; }

#endif

}  // namespace lockstep::kernels
