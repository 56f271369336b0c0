// The casts of the CUDA headers run on the host as well: an oracle for ours, where they are there.
#include <gtest/gtest.h>

#if __has_include(<cuda_fp4.h>) && __has_include(<cuda_fp8.h>)
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstring>

#include "base/philox.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"

namespace lockstep {
namespace {

/// All BF16 numbers but NaN, and as many others.
template <typename Visit>
void each_float(Visit&& visit) {
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    const PhiloxWords w = philox(1, philox_counter(high, 0, 0));
    for (const std::uint32_t bits : {high << 16, high << 16 | (w[0] & 0xFFFFu), w[1]}) {
      if ((bits & 0x7FFFFFFFu) <= 0x7F800000u) visit(float_of(bits));
    }
  }
}

TEST(CudaCasts, E2m1) {
  each_float([](float x) {
    const int theirs = __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
    ASSERT_EQ(bits_of(to_e2m1(x)), theirs == 8 ? 0 : theirs) << x;
  });
}

TEST(CudaCasts, E4m3) {
  each_float([](float x) {
    ASSERT_EQ(bits_of(to_e4m3(x)), __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)) << x;
  });
}

TEST(CudaCasts, E8m0RoundedUpIsRceil) {
  each_float([](float x) {
    const float amax = std::fabs(x);
    // Beyond these the clamp to values that BF16 holds decides.
    if (!(amax >= 0x1p-120f && amax <= 0x1p120f)) return;
    const int theirs = __nv_cvt_float_to_e8m0(amax / 6.0f, __NV_SATFINITE, cudaRoundPosInf);
    ASSERT_EQ(bits_of(mx_scale(amax, MxRule::kRceil)), theirs) << amax;
  });
}

}  // namespace
}  // namespace lockstep

#else

TEST(CudaCasts, Headers) { GTEST_SKIP() << "no CUDA headers on this machine"; }

#endif
