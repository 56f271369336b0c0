/// Sixteen BF16 elements in one lane: their amax, their codes under E2M1, bits for a record. For
/// .cu files alone. Every step gives the definition's bits; the comments say why.
#pragma once

#include <cstdint>

#include "numerics/quantizer.h"
#include "numerics/scale.h"

namespace lockstep::kernels {

/// Eight words of two elements, the even one low.
struct Sixteen {
  std::uint32_t words[8];
};

/// Requires x aligned to 16 bytes.
__device__ inline Sixteen load_sixteen(const void* x) {
  const auto* from = static_cast<const uint4*>(x);
  const uint4 a = from[0];
  const uint4 b = from[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ inline std::uint32_t abs_max_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t most;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

/// The smaller magnitude with the sign of a; `limit` has none.
__device__ inline std::uint32_t limit_pair(std::uint32_t a, std::uint32_t limit) {
  std::uint32_t least;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(limit));
  return least;
}

__device__ inline std::uint32_t multiply_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/// The bits of the largest magnitude; above 0x7F80 where there is a NaN.
__device__ inline std::uint32_t abs_max_bits(const Sixteen& x) {
  std::uint32_t most =
      abs_max_pair(abs_max_pair(x.words[0], x.words[1]), abs_max_pair(x.words[2], x.words[3]));
  most = abs_max_pair(most, abs_max_pair(abs_max_pair(x.words[4], x.words[5]),
                                         abs_max_pair(x.words[6], x.words[7])));
  return max(most & 0x7FFFu, most >> 16 & 0x7FFFu);
}

/// How a block's elements become codes: c = min(|x|, limit) * inverse is the code's value * 2^-14.
struct SixteenScale {
  std::uint32_t limit = 0;  // 6 S twice, as BF16
  float inverse = 0.0f;     // 2^-14 / S, to within what tells a tie from its neighbours
};

/// Of S = s8 * 2^n. Requires n in [-116, 100].
///
/// An approximate reciprocal will do. A quotient x / S that is no tie lies at least 2^-8 of itself
/// from every tie, for x and tie * S are BF16 numbers; one that is a tie t comes out as t (1 + d),
/// |d| < 2^-21, and rounding to FP16 makes it t.
__device__ inline SixteenScale nvfp4_sixteen(float s) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(fmaxf(s, 0x1p-125f)));
  const std::uint32_t limit = float_bits(6.0f * s);
  return {__byte_perm(limit, 0, 0x3232), inverse * 0x1p-14f};
}

/// Of S = 2^(byte - 127). Requires byte <= 239.
__device__ inline SixteenScale mx_sixteen(std::uint32_t byte) {
  const std::uint32_t limit = (byte + 2) << 7 | 0x40u;
  return {limit << 16 | limit, float_of((240u - byte) << 23)};
}

/// E4M3's bits as the float of 2^-120 times its value, and that times 2^120.
__device__ inline float e4m3_value(std::uint32_t byte) { return float_of(byte << 20) * 0x1p120f; }

/// to_e4m3() of a number that is not negative.
__device__ inline std::uint32_t e4m3_byte(float x) {
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair;
}

/// Four words of codes in FP16's clothes to eight nibbles. In each half the magnitude stands at
/// bits 9 to 11 and the sign at bit 15.
__device__ inline std::uint32_t pack_eight(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                           std::uint32_t d) {
  const std::uint32_t ab = __byte_perm(a, b, 0x7351);
  const std::uint32_t cd = __byte_perm(c, d, 0x7351);
  const std::uint32_t even = __byte_perm(ab, cd, 0x5410);
  const std::uint32_t odd = __byte_perm(ab, cd, 0x7632);
  const std::uint32_t magnitudes = (even >> 1 & 0x0F0F0F0Fu) | (odd << 3 & 0xF0F0F0F0u);
  const std::uint32_t signs = (even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  // A zero has no sign: only what is at least 1 carries into its bit 3.
  return magnitudes | (signs & (magnitudes + 0x77777777u) & 0x88888888u);
}

/// A word's two codes, at bits 9 to 11 of its halves, signs at bit 15.
///
/// FP16 has its smallest normal number, 2^-14, where E2M1 has 1: times 2^-14 the codes are FP16's
/// upper bits, subnormal ones too, and rounding to them is an addition on the bits.
__device__ inline std::uint32_t code_pair(std::uint32_t x, const SixteenScale& scale) {
  const std::uint32_t limited = limit_pair(x, scale.limit);
  const float low = float_of(limited << 16) * scale.inverse;
  const float high = float_of(limited & 0xFFFF0000u) * scale.inverse;
  std::uint32_t half;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(half) : "f"(high), "f"(low));
  return half + 0x00FF00FFu + (half >> 9 & 0x00010001u);
}

__device__ inline uint2 codes_of(const Sixteen& x, const SixteenScale& scale) {
  std::uint32_t codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = code_pair(x.words[i], scale);
  return {pack_eight(codes[0], codes[1], codes[2], codes[3]),
          pack_eight(codes[4], codes[5], codes[6], codes[7])};
}

/// What the blocks of a row under NVFP4 with a global scale of 2^n have in common.
struct Nvfp4Row {
  float per_scale = 0.0f;  // 2^-n / 6. FP32's nearest to 1/6 serves as the division does: a block's
                           // y / 6 that is a tie of E4M3 comes out exact, and no other comes near
                           // one, for y is a BF16 number.
  float unit = 0.0f;
  bool down = false;  // scales whose reciprocals FP32 has no room for are brought down with their
                      // elements; what is lost at the lower end of BF16 has code 0 at such scales
};

__device__ inline Nvfp4Row nvfp4_row(std::int32_t n) {
  const bool down = n > 100;
  return {power_of_two(-n) * (1.0f / 6.0f), power_of_two(down ? n - 40 : n), down};
}

/// The scale byte of a block of that amax, as BF16's bits. `above`: doubles_above().
template <bool kMx>
__device__ inline std::uint32_t sixteen_byte(std::uint32_t most, const Nvfp4Row& row,
                                             std::uint32_t above) {
  if constexpr (kMx) {
    const auto e = static_cast<std::int32_t>(most >> 7) - 2 +
                   static_cast<std::int32_t>((most & 0x7Fu) > above);
    return static_cast<std::uint32_t>(min(max(e, 0), 252));
  }
  return e4m3_byte(float_of(most << 16) * row.per_scale);
}

/// The codes of finite elements under that byte.
template <bool kMx>
__device__ inline uint2 sixteen_codes(Sixteen x, std::uint32_t byte, const Nvfp4Row& row) {
  constexpr std::uint32_t kDown = 0x2B802B80u;  // 2^-40 twice
  const bool lower = kMx ? byte > 200 : row.down;
  const SixteenScale scale =
      kMx ? mx_sixteen(lower ? byte - 40 : byte) : nvfp4_sixteen(e4m3_value(byte) * row.unit);
  if (lower) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x.words[i] = multiply_pair(x.words[i], kDown);
  }
  return codes_of(x, scale);
}

/// Of MXFP4: the mantissa, of seven bits, from above which the scale is doubled.
inline std::uint32_t doubles_above(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kMxEven: return (mx_e2m1().even >> 16) - 1;
    case ScaleRule::kMxCeil: return 0;
    case ScaleRule::kMxRceil: return mx_e2m1().mantissa >> 16;
    default: return 0x7F;
  }
}

/// Whether sixteens give that rule's codes: those of `lockstep` and MXFP4.
inline bool sixteens_know(const Quantizer& rule) {
  if (rule.element != Element::kE2m1 || rule.code_rule != CodeRule::kExact ||
      rule.tie != Tie::kEven || rule.sign_of_zero != SignOfZero::kDropped ||
      rule.four_over_six != FourOverSix::kOff) {
    return false;
  }
  if (rule.is_mx()) return rule.block == 32;
  return rule.block == 16 && rule.scale_rule == ScaleRule::kExact && rule.global_is_power_of_two &&
         rule.global != GlobalScale::kNone;
}

/// The last bits of sixteen codes, element i's at bit i.
__device__ inline std::uint32_t lsb_plane(uint2 codes) {
  // Pairs of bits at the bottom of each byte; the product draws four of them into the top byte,
  // and none of its other terms meet.
  const auto half = [](std::uint32_t word) {
    const std::uint32_t pairs = (word & 0x01010101u) | (word >> 3 & 0x02020202u);
    return pairs * 0x01041040u;
  };
  return __byte_perm(half(codes.x), half(codes.y), 0x0073);
}

}  // namespace lockstep::kernels
