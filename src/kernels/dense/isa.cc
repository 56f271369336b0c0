#include "kernels/dense/isa.h"

#include <algorithm>

namespace lockstep::kernels {
namespace {

Isa detect() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

Isa& chosen() {
  static Isa instance = best_isa();
  return instance;
}

}  // namespace

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa isa() { return chosen(); }

void set_isa(Isa isa) { chosen() = std::min(isa, best_isa()); }

}  // namespace lockstep::kernels
