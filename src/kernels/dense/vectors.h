/// Which instructions the SIMD files of this folder use. Results do not depend on it, but where a
/// header says so.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

enum class Vectors : std::uint8_t {
  kPortable,    // what every x86-64 has, and every other machine
  kAvx2,        // AVX2 and FMA
  kAvx512,      // F, BW, DQ, VL
  kAvx512Bf16,  // with vdpbf16ps
};

/// The best that this machine has, found out once.
Vectors best_vectors();

/// The one in use: best_vectors() unless a test chose another.
Vectors vectors();

/// For tests and benchmarks; not while an op runs. More than the machine has is cut down to it.
void set_vectors(Vectors vectors);

}  // namespace lockstep::kernels
