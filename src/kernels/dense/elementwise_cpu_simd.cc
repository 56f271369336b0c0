#include "kernels/dense/elementwise_rows.h"

// The same loops, compiled with wider vectors.
namespace lockstep::kernels {

#if defined(__x86_64__)
namespace {

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) bool
add_avx512(const Bf16* x, std::int64_t cols, Bf16* h) {
  return add_row(x, cols, h);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) bool
finite_avx512(const Bf16* x, std::int64_t cols) {
  return row_is_finite(x, cols);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
combine_avx512(const CombineArgs& args, std::int64_t first, std::int64_t end) {
  combine_rows(args, first, end);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
noise_avx512(const DriftNoiseArgs& args, std::int64_t first, std::int64_t end) {
  drift_noise_rows(args, first, end);
}

__attribute__((target("avx2,fma"))) bool add_avx2(const Bf16* x, std::int64_t cols, Bf16* h) {
  return add_row(x, cols, h);
}
__attribute__((target("avx2,fma"))) bool finite_avx2(const Bf16* x, std::int64_t cols) {
  return row_is_finite(x, cols);
}
__attribute__((target("avx2,fma"))) void combine_avx2(const CombineArgs& args, std::int64_t first,
                                                      std::int64_t end) {
  combine_rows(args, first, end);
}
__attribute__((target("avx2,fma"))) void noise_avx2(const DriftNoiseArgs& args, std::int64_t first,
                                                    std::int64_t end) {
  drift_noise_rows(args, first, end);
}

}  // namespace

ElementwiseOps elementwise_avx512() {
  return {add_avx512, finite_avx512, combine_avx512, noise_avx512};
}
ElementwiseOps elementwise_avx2() { return {add_avx2, finite_avx2, combine_avx2, noise_avx2}; }

#else

ElementwiseOps elementwise_avx512() { return elementwise_portable(); }
ElementwiseOps elementwise_avx2() { return elementwise_portable(); }

#endif

}  // namespace lockstep::kernels
