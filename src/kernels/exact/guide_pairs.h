/// Guided rounding in FP32 and pairs of BF16, for a CUDA device: the arithmetic of
/// guide_narrow_cuda.cu, equal in every bit to numerics/guided.h and scale.h. For .cu files alone.
///
/// The magnitudes of E2M1 are indexed as floats are: m << 22, taken for the bits of a float, is
/// V[m] * 2^-126, subnormals included; so is m << 6 for BF16. With z = |x| / S in FP32 the lower
/// end of z's bracket is bits(z * 2^-126) >> 22, and a code is decoded by a product.
///
/// z comes from an approximate reciprocal: |x| has 8 significant bits, V[i] * S and the midpoints
/// at most 6, so where they differ they differ by 2^-8 of themselves, and a factor of 1 + 2^-16
/// keeps every z that should be a threshold just above it. What lies within kNoise above a midpoint
/// is the midpoint. E4M3 codes of scales are found alike, as bits(y * 2^-120) >> 20.
#pragma once

#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {

/// Beside its bits a lane's index has room for a fraction: 22 bits in FP32, 6 in half a pair.
inline constexpr std::uint32_t kIndex = 1u << 22;
inline constexpr std::uint32_t kIndices = 0x00400040u;  // of a pair

/// A block's scale, twice as BF16, and what |x| is multiplied by to have z. A scale of 0 makes
/// every z 0.
struct Scale {
  std::uint32_t values;
  float inverse;
};

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline std::uint32_t product_of(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

/// a * b + 0: a product that is -0 becomes 0.
__device__ inline std::uint32_t product_without_negative_zeros(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0u));
  return y;
}

/// The larger of `most` and the magnitudes of `pair`, NaN where there is one.
__device__ inline std::uint32_t most_of_magnitudes(std::uint32_t most, std::uint32_t pair) {
  std::uint32_t y;
  asm("{ .reg .b32 a; abs.bf16x2 a, %2; max.NaN.bf16x2 %0, %1, a; }"
      : "=r"(y)
      : "r"(most), "r"(pair));
  return y;
}

/// The upper halves of two words.
__device__ inline std::uint32_t pair_of(std::uint32_t low, std::uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

template <bool kMx>
__device__ Scale scale_of_byte(std::uint32_t byte, float power) {
  constexpr float kAbove = 1.0f + 0x1p-16f;
  float value = 0.0f;
  float inverse = 0.0f;
  if constexpr (kMx) {
    value = to_float(static_cast<E8m0>(static_cast<std::uint8_t>(byte)));
    inverse = float_of((254u - byte) << 23) * kAbove;
  } else {
    value = float_of(byte << 20) * 0x1p120f * power;
    inverse = byte != 0 ? reciprocal(value) * kAbove : 0.0f;
  }
  return {pair_of(float_bits(value), float_bits(value)), inverse};
}

/// scale_of_residue(), with y kept just below what it should be, so that its code line needs no
/// division.
__device__ inline Scale scale_of_residue(std::uint32_t residue, float amax, std::int32_t n) {
  constexpr auto kSixth = static_cast<float>((1.0 - 0x1p-14) / 6.0);
  const float y = amax * power_of_two(-n) * kSixth;
  const auto ceil = static_cast<std::int32_t>((float_bits(y * 0x1p-120f) + 0xFFFFFu) >> 20);
  const std::int32_t first = min(max(ceil - 2, 0), 123);
  const std::int32_t c = first + ((static_cast<std::int32_t>(residue) - first) & 3);
  return scale_of_byte<false>(static_cast<std::uint32_t>(c), power_of_two(n));
}

/// block_scale() without its division: y is kept just above what it should be.
__device__ inline std::uint32_t block_code(float amax, std::int32_t n) {
  constexpr auto kSixth = static_cast<float>((1.0 + 0x1p-16) / 6.0);
  constexpr std::uint32_t kCode = 1u << 20;
  constexpr std::uint32_t kNoise = 0x200;  // more than 2^-16 adds, less than 2^-8 of a midpoint
  const std::uint32_t bits = float_bits(amax * power_of_two(-n) * kSixth * 0x1p-120f);
  const std::uint32_t code = (bits + (kCode / 2 - kNoise) + (bits >> 11 & kNoise)) >> 20;
  return min(code, std::uint32_t{kE4m3Max});
}

/// index << 22 of |x| / S with its fraction; at most what rounds to 7 and has 6 below.
__device__ inline std::uint32_t place_of(float x, float inverse, bool clamped) {
  constexpr float kBelowSix = 0x1.7ff8p+2f;
  float z = fabsf(x) * inverse;
  if (clamped) z = fminf(z, kBelowSix);
  return float_bits(z * 0x1p-126f);
}

/// The nearest index, ties to even, in the bits from 22 up.
__device__ inline std::uint32_t nearest_of(std::uint32_t place) {
  constexpr std::uint32_t kNoise = 0x800;  // more than 2^-16 adds, less than 2^-8 of a midpoint
  return place + (kIndex / 2 - kNoise) + (place >> 11 & kNoise);
}

/// The indices of the two codes nearer to what the rollout recorded, whose codes are in the lowest
/// byte; `signs` of x.
__device__ inline std::uint32_t toward_codes(std::uint32_t below, std::uint32_t signs,
                                             std::uint32_t codes) {
  const std::uint32_t other = (((codes << 12 & 0x8000u) | (codes << 24)) ^ signs) & 0x80008000u;
  const std::uint32_t same_side = ~((other >> 15) * 0xFFFFu);
  const std::uint32_t code = ((codes << 6 & 0x1C0u) | (codes << 18 & 0x01C00000u)) & same_side;
  return __vmaxu2(__vminu2(code, below + kIndices), below);
}

/// Two elements: the indices of their codes under the signs in bits 15 and 31. `moved` counts at
/// bits 6 and 22 where kBit chooses, else at 0 and 16.
template <Choice kChoice, bool kCounted>
__device__ std::uint32_t choose_pair(std::uint32_t x, float inverse, std::uint32_t recorded, int w,
                                     std::uint32_t& moved) {
  constexpr bool kNeedsNearest = kChoice == Choice::kNearest || kCounted;
  constexpr std::uint32_t kSigns = 0x80008000u;
  constexpr std::uint32_t kMost = 0x01BF01BFu;  // just below index 7
  const std::uint32_t low = place_of(float_of(x << 16), inverse, kNeedsNearest);
  const std::uint32_t high = place_of(float_of(x & 0xFFFF0000u), inverse, kNeedsNearest);
  std::uint32_t nearest = 0;
  if constexpr (kNeedsNearest) nearest = pair_of(nearest_of(low), nearest_of(high));
  if constexpr (kChoice == Choice::kNearest) return (nearest & 0x01C001C0u) | (x & kSigns);
  std::uint32_t places = pair_of(low, high);
  if constexpr (!kNeedsNearest) places = __vminu2(places, kMost);
  if constexpr (kChoice == Choice::kBit) {
    // Spread by the caller: element i's bit at 6 + i and, for odd ones, at 21 + i.
    const std::uint32_t bits = recorded >> 2 * w & kIndices;
    if constexpr (kCounted) moved += (nearest ^ bits) & kIndices;
    return ((places + kIndices - bits) & 0x01800180u) | bits | (x & kSigns);
  }
  const std::uint32_t codes = recorded >> 8 * w;
  std::uint32_t indices = (codes << 6 & 0x1C0u) | (codes << 18 & 0x01C00000u);
  std::uint32_t signs = (codes << 12 & 0x8000u) | (codes << 24 & 0x80000000u);
  std::uint32_t different = 0;
  if constexpr (kChoice == Choice::kCodeGuided) {
    indices = toward_codes(places & 0x01C001C0u, x, codes);
    signs = x & kSigns;
  } else {
    // Another sign counts unless the code is zero: bit 9 of a half, out of the indices' way.
    const std::uint32_t nonzero = (indices + 0x7FFF7FFFu) & kSigns;
    different = ((signs ^ x) & nonzero) >> 6;
  }
  different |= indices ^ (nearest & 0x01C001C0u);
  moved += ((different + 0x7FFF7FFFu) & kSigns) >> 15;
  return indices | signs;
}

/// A lane's eight elements; `recorded` are their bits or codes.
template <Choice kChoice, bool kCounted>
__device__ uint4 guide_eight(uint4 x, Scale scale, std::uint32_t recorded, std::uint32_t& moved) {
  std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
  if constexpr (kChoice == Choice::kBit) recorded = recorded << 6 | recorded << 21;
  std::uint32_t moved_here = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const std::uint32_t indices =
        choose_pair<kChoice, kCounted>(words[w], scale.inverse, recorded, w, moved_here);
    constexpr std::uint32_t kUnit = 0x7E807E80u;  // 2^126
    words[w] = product_without_negative_zeros(product_of(indices, kUnit), scale.values);
  }
  if constexpr (kCounted)
    moved += scale.values != 0 ? moved_here : 0;  // at scale 0 all codes are 0
  return {words[0], words[1], words[2], words[3]};
}

/// How many a row's pairs counted.
template <Choice kChoice>
__device__ int sum_of_moved(std::uint32_t moved) {
  if constexpr (kChoice == Choice::kBit) moved >>= 6;
  return static_cast<int>((moved & 0x3FFu) + (moved >> 16));
}

}  // namespace lockstep::kernels
