/// Guided rounding in FP32 and pairs of BF16, for a CUDA device: the arithmetic of
/// guide_narrow_cuda.cu, equal in every bit to numerics/guided.h and scale.h. For .cu files alone.
///
/// The magnitudes of E2M1 are indexed as floats are: m << 22, taken for the bits of a float, is
/// V[m] * 2^-126, subnormals included; so is m << 6 for BF16. With z = |x| / S in FP32,
/// bits(z * 2^-126) is z's place among the indices, 22 bits of it a fraction, and a code is decoded
/// by a product. Two places share a word, cut to 12 bits of fraction.
///
/// z comes from an approximate reciprocal: |x| has 8 significant bits, V[i] * S and the midpoints
/// at most 6, so where they differ they differ by 2^-8 of themselves, and a factor of 1 + 2^-16
/// keeps every z that should be a threshold just above it, by less than what is cut off. E4M3 codes
/// of scales are found alike, as bits(y * 2^-120) >> 20.
#pragma once

#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {

inline constexpr std::uint32_t kOnes = 0x10001000u;     // index 1, twice
inline constexpr std::uint32_t kIndices = 0x70007000u;  // where indices stand in a pair of places
inline constexpr std::uint32_t kSigns = 0x80008000u;

/// A block's scale, twice as BF16, and what |x| is multiplied by to have z / 8. A scale of 0 makes
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
  constexpr float kAbove = (1.0f + 0x1p-16f) * 0.125f;
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

/// The places of two elements, just below 7 at most. The product stops at 1, where z is 8.
__device__ inline std::uint32_t places_of(std::uint32_t x, float inverse) {
  const float low = __saturatef(fabsf(float_of(x << 16)) * inverse) * 0x1p-123f;
  const float high = __saturatef(fabsf(float_of(x & 0xFFFF0000u)) * inverse) * 0x1p-123f;
  return __vminu2(pair_of(float_bits(low) * 64, float_bits(high) * 64), 0x6FFF6FFFu);
}

/// The nearest indices, ties to even, in the bits of kIndices.
__device__ inline std::uint32_t nearest_of(std::uint32_t places) {
  return places + 0x07FF07FFu + (places >> 12 & 0x00010001u);
}

/// Two codes, the lowest byte of `codes`, where indices and signs stand.
__device__ inline std::uint32_t spread_codes(std::uint32_t codes) {
  return (codes << 12 & 0xF000u) | (codes << 24 & 0xF0000000u);
}

/// The indices, of those at the ends of the brackets, that are nearer to `codes`; `x` has the
/// signs.
__device__ inline std::uint32_t toward_codes(std::uint32_t places, std::uint32_t x,
                                             std::uint32_t codes) {
  const std::uint32_t below = places & kIndices;
  const std::uint32_t other_side = (((codes ^ x) & kSigns) >> 15) * 0xFFFFu;
  return __vmaxu2(__vminu2(codes & kIndices & ~other_side, below + kOnes), below);
}

/// Adds the halves that are not 0 to `counts`, in bits 0 and 16. Halves are below 0x8000.
__device__ inline void count_nonzero(std::uint32_t pair, std::uint32_t& counts) {
  counts += (pair + 0x7FFF7FFFu & kSigns) >> 15;
}

/// Two elements: their values over the scale, as BF16. `recorded` are a lane's bits, spread, or its
/// codes, of which these are number w. `moved` counts in bits 12 and 28 where kBit chooses, else in
/// 0 and 16.
template <Choice kChoice, bool kCounted>
__device__ std::uint32_t guide_pair(std::uint32_t x, float inverse, std::uint32_t recorded, int w,
                                    std::uint32_t& moved) {
  const std::uint32_t places = places_of(x, inverse);
  std::uint32_t indices = 0;
  std::uint32_t signs = x & kSigns;
  if constexpr (kChoice == Choice::kNearest) indices = nearest_of(places) & kIndices;
  if constexpr (kChoice == Choice::kBit) {
    const std::uint32_t bits = recorded << (6 - 2 * w) & kOnes;
    if constexpr (kCounted) moved += (nearest_of(places) ^ bits) & kOnes;
    indices = (places + kOnes - bits & kIndices & ~kOnes) | bits;
  }
  if constexpr (kChoice == Choice::kCodeGuided) {
    indices = toward_codes(places, x, spread_codes(recorded >> 8 * w));
    count_nonzero(indices ^ (nearest_of(places) & kIndices), moved);
  }
  if constexpr (kChoice == Choice::kCodeForced) {
    const std::uint32_t codes = spread_codes(recorded >> 8 * w);
    indices = codes & kIndices;
    signs = codes & kSigns;
    // Another sign is another code unless it is zero's.
    const std::uint32_t other_side = (codes ^ x) & (indices + 0x7FFF7FFFu) & kSigns;
    count_nonzero((indices ^ (nearest_of(places) & kIndices)) | other_side >> 6, moved);
  }
  constexpr std::uint32_t kUnit = 0x7E807E80u;  // 2^126
  return product_of(indices >> 6 | signs, kUnit);
}

/// A lane's eight elements; `recorded` are their bits or codes.
template <Choice kChoice, bool kCounted>
__device__ uint4 guide_eight(uint4 x, Scale scale, std::uint32_t recorded, std::uint32_t& moved) {
  std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
  // Element i's bit at 6 + i, and once more at 21 + i: an even and an odd one 16 apart.
  if constexpr (kChoice == Choice::kBit) recorded = recorded << 6 | recorded << 21;
  std::uint32_t moved_here = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const std::uint32_t pair =
        guide_pair<kChoice, kCounted>(words[w], scale.inverse, recorded, w, moved_here);
    words[w] = product_without_negative_zeros(pair, scale.values);
  }
  if constexpr (kChoice == Choice::kBit) moved_here >>= 12;
  if constexpr (kCounted)
    moved += scale.values != 0 ? moved_here : 0;  // at scale 0 all codes are 0
  return {words[0], words[1], words[2], words[3]};
}

/// How many were moved.
__device__ inline int sum_of_moved(std::uint32_t moved) {
  return static_cast<int>((moved & 0xFFFFu) + (moved >> 16));
}

}  // namespace lockstep::kernels
