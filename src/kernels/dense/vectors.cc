#include "kernels/dense/vectors.h"

#include <algorithm>

namespace lockstep::kernels {
namespace {

Vectors detect() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? Vectors::kAvx512Bf16 : Vectors::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Vectors::kAvx2;
#endif
  return Vectors::kPortable;
}

Vectors& chosen() {
  static Vectors instance = best_vectors();
  return instance;
}

}  // namespace

Vectors best_vectors() {
  static const Vectors best = detect();
  return best;
}

Vectors vectors() { return chosen(); }

void set_vectors(Vectors vectors) { chosen() = std::min(vectors, best_vectors()); }

}  // namespace lockstep::kernels
