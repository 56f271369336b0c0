/// What vector registers hold from one kind of code to the next.
#pragma once

namespace lockstep {

/// Libraries may leave the upper halves of vector registers in use; scalar code that touches the
/// lower ones is then slow, exp() by six times. For the beginning of long stretches of it.
inline void clear_upper_halves() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx") != 0)
    asm volatile("vzeroupper" ::
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
#endif
}

}  // namespace lockstep
