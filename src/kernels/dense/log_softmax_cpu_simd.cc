#include "kernels/dense/log_softmax_rows.h"

// The same rows, compiled with wider vectors.
namespace lockstep::kernels {

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
void log_softmax_avx512(const LogSoftmaxArgs& args, std::int64_t first, std::int64_t end) {
  log_softmax_rows(args, first, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
void log_softmax_avx2(const LogSoftmaxArgs& args, std::int64_t first, std::int64_t end) {
  log_softmax_rows(args, first, end);
}

}  // namespace lockstep::kernels
