#include "kernels/dense/elementwise_rows.h"

#if defined(__x86_64__)
// The headers of GCC 12 start some intrinsics from a register that they leave unset on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

// The same loops, compiled with wider vectors; only the draw is written out, for no compiler here
// makes the widening products of it.
namespace lockstep::kernels {
namespace {

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) bool
add_avx512(const Bf16* x, std::int64_t cols, Bf16* h) {
  return add_row(x, cols, h);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) bool
finite_avx512(const Bf16* x, std::int64_t cols) {
  return row_is_finite(x, cols);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
combine_avx512(const CombineArgs& args, std::int64_t first, std::int64_t end) {
  combine_rows(args, first, end);
}

/// The halves of the products of 16 words with one number.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline void
products_avx512(__m512i x, std::uint32_t by, __m512i& high, __m512i& low) {
  const __m512i factor = _mm512_set1_epi64(static_cast<long long>(by));
  const __m512i even = _mm512_mul_epu32(x, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), factor);
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

/// philox_lanes() of lanes first..first+15.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline void
draw_avx512(std::uint64_t seed, const PhiloxWords& counter, std::uint32_t first, PhiloxLanes& out) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i a = _mm512_set1_epi32(static_cast<int>(counter[0])),
          b = _mm512_set1_epi32(static_cast<int>(counter[1])),
          c = _mm512_set1_epi32(static_cast<int>(counter[2]));
  __m512i d = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(counter[3] + first)), lane);
  auto key0 = static_cast<std::uint32_t>(seed);
  auto key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    __m512i high_a, low_a, high_c, low_c;
    products_avx512(a, 0xD2511F53, high_a, low_a);
    products_avx512(c, 0xCD9E8D57, high_c, low_c);
    a = _mm512_xor_si512(_mm512_xor_si512(high_c, b), _mm512_set1_epi32(static_cast<int>(key0)));
    b = low_c;
    c = _mm512_xor_si512(_mm512_xor_si512(high_a, d), _mm512_set1_epi32(static_cast<int>(key1)));
    d = low_a;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  _mm512_storeu_si512(out.word[0] + first, a);
  _mm512_storeu_si512(out.word[1] + first, b);
  _mm512_storeu_si512(out.word[2] + first, c);
  _mm512_storeu_si512(out.word[3] + first, d);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
lanes_avx512(std::uint64_t seed, const PhiloxWords& counter, PhiloxLanes& out) {
  for (std::uint32_t first = 0; first < kLanes; first += 16) draw_avx512(seed, counter, first, out);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void
noise_avx512(const DriftNoiseArgs& args, std::int64_t row) {
  noise_row<lanes_avx512>(args, row);
}

__attribute__((target("avx2,fma"))) bool add_avx2(const Bf16* x, std::int64_t cols, Bf16* h) {
  return add_row(x, cols, h);
}
__attribute__((target("avx2,fma"))) bool finite_avx2(const Bf16* x, std::int64_t cols) {
  return row_is_finite(x, cols);
}
__attribute__((target("avx2,fma"))) void combine_avx2(const CombineArgs& args, std::int64_t first,
                                                      std::int64_t end) {
  combine_rows(args, first, end);
}

/// The halves of the products of 8 words with one number.
__attribute__((target("avx2,fma"), always_inline)) inline void products_avx2(__m256i x,
                                                                             std::uint32_t by,
                                                                             __m256i& high,
                                                                             __m256i& low) {
  const __m256i factor = _mm256_set1_epi64x(static_cast<long long>(by));
  const __m256i even = _mm256_mul_epu32(x, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

/// philox_lanes() of lanes first..first+7.
__attribute__((target("avx2,fma"), always_inline)) inline void draw_avx2(std::uint64_t seed,
                                                                         const PhiloxWords& counter,
                                                                         std::uint32_t first,
                                                                         PhiloxLanes& out) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i a = _mm256_set1_epi32(static_cast<int>(counter[0])),
          b = _mm256_set1_epi32(static_cast<int>(counter[1])),
          c = _mm256_set1_epi32(static_cast<int>(counter[2]));
  __m256i d = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(counter[3] + first)), lane);
  auto key0 = static_cast<std::uint32_t>(seed);
  auto key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    __m256i high_a, low_a, high_c, low_c;
    products_avx2(a, 0xD2511F53, high_a, low_a);
    products_avx2(c, 0xCD9E8D57, high_c, low_c);
    a = _mm256_xor_si256(_mm256_xor_si256(high_c, b), _mm256_set1_epi32(static_cast<int>(key0)));
    b = low_c;
    c = _mm256_xor_si256(_mm256_xor_si256(high_a, d), _mm256_set1_epi32(static_cast<int>(key1)));
    d = low_a;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.word[0] + first), a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.word[1] + first), b);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.word[2] + first), c);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.word[3] + first), d);
}

__attribute__((target("avx2,fma"))) void lanes_avx2(std::uint64_t seed, const PhiloxWords& counter,
                                                    PhiloxLanes& out) {
  for (std::uint32_t first = 0; first < kLanes; first += 8) draw_avx2(seed, counter, first, out);
}
__attribute__((target("avx2,fma"))) void noise_avx2(const DriftNoiseArgs& args, std::int64_t row) {
  noise_row<lanes_avx2>(args, row);
}

}  // namespace

ElementwiseOps elementwise_avx512() {
  return {add_avx512, finite_avx512, combine_avx512, noise_avx512};
}
ElementwiseOps elementwise_avx2() { return {add_avx2, finite_avx2, combine_avx2, noise_avx2}; }

}  // namespace lockstep::kernels

#else

namespace lockstep::kernels {

ElementwiseOps elementwise_avx512() { return elementwise_portable(); }
ElementwiseOps elementwise_avx2() { return elementwise_portable(); }

}  // namespace lockstep::kernels

#endif
