#include "kernels/dense/rms_norm_rows.h"

// The same rows, compiled with wider vectors.
namespace lockstep::kernels {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
void rms_norm_avx512(const RmsNormArgs& args, std::int64_t first, std::int64_t end) {
  rms_norm_rows(args, first, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
void rms_norm_avx2(const RmsNormArgs& args, std::int64_t first, std::int64_t end) {
  rms_norm_rows(args, first, end);
}

}  // namespace lockstep::kernels
