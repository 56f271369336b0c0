/// wgmma whose first operand lies in registers, as such whose numbers are made on the way to the
/// tensor cores do. Comes after <cuda.h>.
#pragma once

#include <cstddef>

#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels::wgmma {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// clang-format off
#define LOCKSTEP_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LOCKSTEP_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define LOCKSTEP_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define LOCKSTEP_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define LOCKSTEP_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define LOCKSTEP_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define LOCKSTEP_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define LOCKSTEP_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define LOCKSTEP_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define LOCKSTEP_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define LOCKSTEP_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define LOCKSTEP_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define LOCKSTEP_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define LOCKSTEP_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define LOCKSTEP_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define LOCKSTEP_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define LOCKSTEP_EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
// a0 to adds: the operands behind the numbers of d.
#define LOCKSTEP_WGMMA(n, numbers, a0, a1, a2, a3, b, adds, ...)                                  \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " adds ", 0; "                                     \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" numbers "}, {" a0 ", " \
               a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, 0; }"                                       \
               : __VA_ARGS__                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(at), "r"(static_cast<int>(adding)))
// clang-format on

/// The first kN / 2 numbers of d = a b, or d += a b: 64 rows by kN columns over 16 of K. Lane
/// 4 g + t of warp v holds of rows 16 v + g and 16 v + g + 8 numbers 2 t and the next of K, and, in
/// a[2] and a[3], 2 t + 8 and the next; of d as above. b lies along K.
template <int kN, std::size_t kNumbers>
__device__ __forceinline__ void multiply(float (&d)[kNumbers], const std::uint32_t (&a)[4],
                                         std::uint64_t at, bool adding) {
  static_assert(kN / 2 <= kNumbers);
  if constexpr (kN == 8) {
    LOCKSTEP_WGMMA("8", "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", "%9", "+f"(d[0]),
                   "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
  } else if constexpr (kN == 16) {
    LOCKSTEP_WGMMA("16", LOCKSTEP_D0, "%8", "%9", "%10", "%11", "%12", "%13", LOCKSTEP_EIGHT(0));
  } else if constexpr (kN == 32) {
    LOCKSTEP_WGMMA("32", LOCKSTEP_D0 ", " LOCKSTEP_D1, "%16", "%17", "%18", "%19", "%20", "%21",
                   LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8));
  } else if constexpr (kN == 48) {
    LOCKSTEP_WGMMA("48", LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2, "%24", "%25", "%26", "%27",
                   "%28", "%29", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8), LOCKSTEP_EIGHT(16));
  } else if constexpr (kN == 64) {
    LOCKSTEP_WGMMA("64", LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3, "%32",
                   "%33", "%34", "%35", "%36", "%37", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24));
  } else if constexpr (kN == 96) {
    LOCKSTEP_WGMMA("96",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5,
                   "%48", "%49", "%50", "%51", "%52", "%53", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32), LOCKSTEP_EIGHT(40));
  } else if constexpr (kN == 128) {
    LOCKSTEP_WGMMA("128",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7,
                   "%64", "%65", "%66", "%67", "%68", "%69", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32), LOCKSTEP_EIGHT(40),
                   LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56));
  } else if constexpr (kN == 144) {
    LOCKSTEP_WGMMA("144",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8,
                   "%72", "%73", "%74", "%75", "%76", "%77", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32), LOCKSTEP_EIGHT(40),
                   LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64));
  } else if constexpr (kN == 160) {
    LOCKSTEP_WGMMA("160",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9,
                   "%80", "%81", "%82", "%83", "%84", "%85", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32), LOCKSTEP_EIGHT(40),
                   LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64), LOCKSTEP_EIGHT(72));
  } else if constexpr (kN == 176) {
    LOCKSTEP_WGMMA("176",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9 ", " LOCKSTEP_D10,
                   "%88", "%89", "%90", "%91", "%92", "%93", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32), LOCKSTEP_EIGHT(40),
                   LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64), LOCKSTEP_EIGHT(72),
                   LOCKSTEP_EIGHT(80));
  } else if constexpr (kN == 192) {
    LOCKSTEP_WGMMA("192",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9 ", " LOCKSTEP_D10 ", " LOCKSTEP_D11,
                   "%96", "%97", "%98", "%99", "%100", "%101", LOCKSTEP_EIGHT(0), LOCKSTEP_EIGHT(8),
                   LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32), LOCKSTEP_EIGHT(40),
                   LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64), LOCKSTEP_EIGHT(72),
                   LOCKSTEP_EIGHT(80), LOCKSTEP_EIGHT(88));
  } else if constexpr (kN == 208) {
    LOCKSTEP_WGMMA("208",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9 ", " LOCKSTEP_D10 ", " LOCKSTEP_D11
                               ", " LOCKSTEP_D12,
                   "%104", "%105", "%106", "%107", "%108", "%109", LOCKSTEP_EIGHT(0),
                   LOCKSTEP_EIGHT(8), LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32),
                   LOCKSTEP_EIGHT(40), LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64),
                   LOCKSTEP_EIGHT(72), LOCKSTEP_EIGHT(80), LOCKSTEP_EIGHT(88), LOCKSTEP_EIGHT(96));
  } else if constexpr (kN == 224) {
    LOCKSTEP_WGMMA("224",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9 ", " LOCKSTEP_D10 ", " LOCKSTEP_D11
                               ", " LOCKSTEP_D12 ", " LOCKSTEP_D13,
                   "%112", "%113", "%114", "%115", "%116", "%117", LOCKSTEP_EIGHT(0),
                   LOCKSTEP_EIGHT(8), LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32),
                   LOCKSTEP_EIGHT(40), LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64),
                   LOCKSTEP_EIGHT(72), LOCKSTEP_EIGHT(80), LOCKSTEP_EIGHT(88), LOCKSTEP_EIGHT(96),
                   LOCKSTEP_EIGHT(104));
  } else if constexpr (kN == 240) {
    LOCKSTEP_WGMMA("240",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9 ", " LOCKSTEP_D10 ", " LOCKSTEP_D11
                               ", " LOCKSTEP_D12 ", " LOCKSTEP_D13 ", " LOCKSTEP_D14,
                   "%120", "%121", "%122", "%123", "%124", "%125", LOCKSTEP_EIGHT(0),
                   LOCKSTEP_EIGHT(8), LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32),
                   LOCKSTEP_EIGHT(40), LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64),
                   LOCKSTEP_EIGHT(72), LOCKSTEP_EIGHT(80), LOCKSTEP_EIGHT(88), LOCKSTEP_EIGHT(96),
                   LOCKSTEP_EIGHT(104), LOCKSTEP_EIGHT(112));
  } else if constexpr (kN == 256) {
    LOCKSTEP_WGMMA("256",
                   LOCKSTEP_D0 ", " LOCKSTEP_D1 ", " LOCKSTEP_D2 ", " LOCKSTEP_D3 ", " LOCKSTEP_D4
                               ", " LOCKSTEP_D5 ", " LOCKSTEP_D6 ", " LOCKSTEP_D7 ", " LOCKSTEP_D8
                               ", " LOCKSTEP_D9 ", " LOCKSTEP_D10 ", " LOCKSTEP_D11
                               ", " LOCKSTEP_D12 ", " LOCKSTEP_D13 ", " LOCKSTEP_D14
                               ", " LOCKSTEP_D15,
                   "%128", "%129", "%130", "%131", "%132", "%133", LOCKSTEP_EIGHT(0),
                   LOCKSTEP_EIGHT(8), LOCKSTEP_EIGHT(16), LOCKSTEP_EIGHT(24), LOCKSTEP_EIGHT(32),
                   LOCKSTEP_EIGHT(40), LOCKSTEP_EIGHT(48), LOCKSTEP_EIGHT(56), LOCKSTEP_EIGHT(64),
                   LOCKSTEP_EIGHT(72), LOCKSTEP_EIGHT(80), LOCKSTEP_EIGHT(88), LOCKSTEP_EIGHT(96),
                   LOCKSTEP_EIGHT(104), LOCKSTEP_EIGHT(112), LOCKSTEP_EIGHT(120));
  } else {
    static_assert(kN == 0, "no such product");
  }
}

#undef LOCKSTEP_WGMMA
#undef LOCKSTEP_EIGHT
#undef LOCKSTEP_D0
#undef LOCKSTEP_D1
#undef LOCKSTEP_D2
#undef LOCKSTEP_D3
#undef LOCKSTEP_D4
#undef LOCKSTEP_D5
#undef LOCKSTEP_D6
#undef LOCKSTEP_D7
#undef LOCKSTEP_D8
#undef LOCKSTEP_D9
#undef LOCKSTEP_D10
#undef LOCKSTEP_D11
#undef LOCKSTEP_D12
#undef LOCKSTEP_D13
#undef LOCKSTEP_D14
#undef LOCKSTEP_D15

#endif

}  // namespace lockstep::kernels::wgmma
