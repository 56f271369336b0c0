#include "kernels/exact/isa.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace lockstep::kernels {

bool has_isa(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kPortable: return true;
    case Isa::kAvx2: return __builtin_cpu_supports("avx2");
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
  }
#endif
  return isa == Isa::kPortable;
}

namespace {

Isa choose() {
  const char* wanted = std::getenv("LOCKSTEP_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    return has_isa(Isa::kAvx512) ? Isa::kAvx512 : has_isa(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
  }
  const std::string name = wanted;
  const Isa isa = name == "avx512" ? Isa::kAvx512 : name == "avx2" ? Isa::kAvx2 : Isa::kPortable;
  if (isa == Isa::kPortable && name != "portable") {
    throw Error("LOCKSTEP_ISA is '" + name + "': say portable, avx2 or avx512, or leave it unset");
  }
  if (!has_isa(isa)) {
    throw Error("LOCKSTEP_ISA is '" + name + "', which this machine does not have: leave it unset");
  }
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace lockstep::kernels
