#include "kernels/dense/rope_rows.h"

// The same rows, compiled with wider vectors.
namespace lockstep::kernels {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
void rope_avx512(const RopeArgs& args, std::int64_t first, std::int64_t end) {
  rope_rows(args, first, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
void rope_avx2(const RopeArgs& args, std::int64_t first, std::int64_t end) {
  rope_rows(args, first, end);
}

}  // namespace lockstep::kernels
