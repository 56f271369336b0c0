/// For .cu files alone: keys and values of a cache row as operands of the tensor cores.
///
/// A product has queries as its rows and keys as its columns; the next has channels as its rows,
/// keys as its inner dimension and queries as its columns, so that probabilities stay where they
/// are. Inner dimensions may stand in any order that both operands share: it is chosen so that a
/// thread reads whole words. NVFP4 and E4M3 run in FP16, where code times scale is exact once 2^n
/// is left to the end; MXFP4 and BF16 run in BF16.
#pragma once

#include <cstdint>

#include "kernels/dense/attention_cuda.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {

template <KvFormat kFormat>
inline constexpr bool kRunsInFp16 = kFormat == KvFormat::kNvfp4 || kFormat == KvFormat::kE4m3;
template <KvFormat kFormat>
inline constexpr bool kIsFp4 = kFormat == KvFormat::kNvfp4 || kFormat == KvFormat::kMxfp4;

/// d += a b; a is 16 x 16, b 16 x 8.
template <bool kFp16>
__device__ inline void multiply_add(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                    std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (kFp16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

/// Two numbers rounded to nearest even, the first in the low half.
template <bool kFp16>
__device__ inline std::uint32_t round_pair(float low, float high) {
  std::uint32_t pair = 0;
  if constexpr (kFp16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <bool kFp16>
__device__ inline void widen_pair(std::uint32_t pair, float& low, float& high) {
  if constexpr (kFp16) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "r"(pair));
  } else {
    low = float_of(pair << 16);
    high = float_of(pair & 0xFFFF0000u);
  }
}

/// Four bytes of E4M3 as two pairs of FP16.
__device__ inline void widen_e4m3(std::uint32_t bytes, std::uint32_t& low, std::uint32_t& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; "
      "}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

__device__ inline std::uint32_t multiply_fp16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/// One of two halves, twice.
__device__ inline std::uint32_t low_twice(std::uint32_t x) { return __byte_perm(x, 0, 0x1010); }
__device__ inline std::uint32_t high_twice(std::uint32_t x) { return __byte_perm(x, 0, 0x3232); }

/// Eight codes as two times four bytes of E4M3, the even and the odd ones: each is its code times
/// 2^-6. Logic runs at half the rate of multiplication here, so the signs are cut out once for
/// both: what else is in them lies where the magnitudes go.
struct Codes {
  std::uint32_t even, odd;
};
/// Bits of `a` where `mask` has a 1, else those of `b`. Written as instructions, here and below: a
/// compiler that sees through them puts a second mask after a shift.
__device__ inline std::uint32_t choose_bits(std::uint32_t mask, std::uint32_t a, std::uint32_t b) {
  std::uint32_t chosen = 0;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(chosen) : "r"(mask), "r"(a), "r"(b));
  return chosen;
}
__device__ inline Codes split_codes(std::uint32_t w) {
  constexpr std::uint32_t kMagnitudes = 0x1C1C1C1Cu;
  std::uint32_t signs = 0;
  asm("and.b32 %0, %1, 0x88888888;" : "=r"(signs) : "r"(w));
  return {choose_bits(kMagnitudes, w << 2, signs << 4), choose_bits(kMagnitudes, w >> 2, signs)};
}

/// Whether codes of NVFP4 become FP16 by conversion from E4M3, or by logic alone.
inline constexpr bool kConverts = true;
/// They are codes times 2^-kCodeShift.
inline constexpr int kCodeShift = kConverts ? 6 : 14;

/// Eight codes as four pairs, codes i and i + 4: each is its code times 2^-14.
__device__ inline void split_pairs_of_codes(std::uint32_t w, std::uint32_t (&pair)[4]) {
  constexpr std::uint32_t kMagnitudes = 0x0E000E00u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t signs = 0;
    asm("and.b32 %0, %1, 0x80008000;" : "=r"(signs) : "r"(w << (12 - 4 * i)));
    pair[i] = choose_bits(kMagnitudes, i == 3 ? w >> 3 : w << (9 - 4 * i), signs);
  }
}

/// 2^(byte - 127), and 64 times a pair of FP16 times a scale each, in BF16: codes that were times
/// 2^-6 become exact values.
__device__ inline float e8m0_value(std::uint32_t byte) {
  return byte == 0 ? 0x1p-127f : float_of(byte << 23);
}
__device__ inline std::uint32_t mx_pair(std::uint32_t codes, float low_scale, float high_scale) {
  float low = 0.0f;
  float high = 0.0f;
  widen_pair<true>(codes, low, high);
  return round_pair<false>(low * 64.0f * low_scale, high * 64.0f * high_scale);
}

/// Which of 8 keys is column n of a product: so spread that the rows which threads read together
/// lie in different banks.
template <KvFormat kFormat>
__device__ constexpr int key_of_column(int n) {
  if constexpr (kIsFp4<kFormat>) {
    const int low = (n & 1) << 1 | (n >> 1 & 1);
    return n < 4 ? low : 4 + (low ^ 2);
  } else {
    return (n & 1) * 4 + (n >> 1);
  }
}

/// The channel of a query that meets, in step `step` of 16 channels, half `half` of register `reg`
/// of thread `t`.
template <KvFormat kFormat, int kDim>
__device__ constexpr int channel_of(int t, int step, int reg, int half) {
  if constexpr (kFormat == KvFormat::kNvfp4) {
    const int code = kConverts ? (step & 1) + 4 * reg + 2 * half : 2 * (step & 1) + reg + 4 * half;
    return t * (kDim / 4) + step / 2 * 8 + code;
  } else {
    return step / 2 * 32 + t * 8 + (step & 1) * 4 + 2 * reg + half;
  }
}

template <int kBytes>
__device__ inline void read_words(const unsigned char* from, std::uint32_t (&w)[(kBytes + 3) / 4]) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      w[4 * i] = four.x;
      w[4 * i + 1] = four.y;
      w[4 * i + 2] = four.z;
      w[4 * i + 3] = four.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    w[0] = two.x;
    w[1] = two.y;
  } else if constexpr (kBytes == 4) {
    w[0] = *reinterpret_cast<const std::uint32_t*>(from);
  } else {
    static_assert(kBytes == 2);
    w[0] = *reinterpret_cast<const std::uint16_t*>(from);
  }
}

/// A key of one head as the second operand of kDim / 16 products, two of them at a time.
template <KvFormat kFormat, int kDim>
class Key {
 public:
  static constexpr int kParts = kDim / 32;

  /// `codes` and `scales` are its own; `t` the thread within those that share it.
  __device__ void read(const unsigned char* codes, const unsigned char* scales, int t) {
    if constexpr (kFormat == KvFormat::kNvfp4) {
      read_words<kDim / 8>(codes + t * (kDim / 8), words_);
      std::uint32_t unused = 0;
      if constexpr (kDim == 128) {
        widen_e4m3(*reinterpret_cast<const std::uint16_t*>(scales + 2 * t), scales_[0], unused);
      } else {
        widen_e4m3(scales[kDim == 64 ? t : t / 2], scales_[0], unused);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        std::uint32_t w[kWords / kParts];
        read_words<4 * kWords / kParts>(codes + kWords / kParts * (16 * j + 4 * t), w);
#pragma unroll
        for (int i = 0; i < kWords / kParts; ++i) words_[kWords / kParts * j + i] = w[i];
        if constexpr (kFormat == KvFormat::kMxfp4) scales_[j] = scales[j];
      }
    }
  }

  /// Of products 2 j and 2 j + 1.
  __device__ void part(int j, std::uint32_t (&b)[2][2]) const {
    if constexpr (kFormat == KvFormat::kNvfp4) {
      const std::uint32_t scale =
          kDim == 128 && j >= 2 ? high_twice(scales_[0]) : low_twice(scales_[0]);
      if constexpr (kConverts) {
        const Codes four = split_codes(words_[j]);
        widen_e4m3(four.even, b[0][0], b[0][1]);
        widen_e4m3(four.odd, b[1][0], b[1][1]);
      } else {
        std::uint32_t pair[4];
        split_pairs_of_codes(words_[j], pair);
        b[0][0] = pair[0];
        b[0][1] = pair[1];
        b[1][0] = pair[2];
        b[1][1] = pair[3];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[i][0] = multiply_fp16(b[i][0], scale);
        b[i][1] = multiply_fp16(b[i][1], scale);
      }
    } else if constexpr (kFormat == KvFormat::kMxfp4) {
      const float scale = e8m0_value(scales_[j]);
      std::uint32_t even[2];
      std::uint32_t odd[2];
      const Codes four = split_codes(words_[j]);
      widen_e4m3(four.even, even[0], even[1]);
      widen_e4m3(four.odd, odd[0], odd[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // channels 4 i .. 4 i + 3
        b[i][0] = mx_pair(__byte_perm(even[i], odd[i], 0x5410), scale, scale);
        b[i][1] = mx_pair(__byte_perm(even[i], odd[i], 0x7632), scale, scale);
      }
    } else if constexpr (kFormat == KvFormat::kE4m3) {
      widen_e4m3(words_[2 * j], b[0][0], b[0][1]);
      widen_e4m3(words_[2 * j + 1], b[1][0], b[1][1]);
    } else {
      b[0][0] = words_[4 * j];
      b[0][1] = words_[4 * j + 1];
      b[1][0] = words_[4 * j + 2];
      b[1][1] = words_[4 * j + 3];
    }
  }

 private:
  static constexpr int kWords = kParts * (kIsFp4<kFormat> ? 1 : kFormat == KvFormat::kE4m3 ? 2 : 4);
  std::uint32_t words_[kWords];
  std::uint32_t scales_[kFormat == KvFormat::kMxfp4 ? kParts : 1];
};

/// kDim / 8 channels of four values as the first operand of kDim / 16 products: those of thread row
/// `g`, channels 2 i and 2 i + 1 of them in product i. Values stand in the order of the inner
/// dimension.
template <KvFormat kFormat, int kDim>
__device__ inline void read_values(const unsigned char* const (&codes)[4],
                                   const unsigned char* const (&scales)[4], int g,
                                   std::uint32_t (&a)[kDim / 16][4]) {
  constexpr int kChannels = kDim / 8;
  constexpr int kBytes = kIsFp4<kFormat>              ? kChannels / 2
                         : kFormat == KvFormat::kE4m3 ? kChannels
                                                      : 2 * kChannels;
  std::uint32_t w[4][(kBytes + 3) / 4];
#pragma unroll
  for (int i = 0; i < 4; ++i) read_words<kBytes>(codes[i] + g * kBytes, w[i]);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {  // of values
    const auto& x = w[2 * pair];
    const auto& y = w[2 * pair + 1];
    if constexpr (kFormat == KvFormat::kBf16) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        a[i][2 * pair] = __byte_perm(x[i], y[i], 0x5410);
        a[i][2 * pair + 1] = __byte_perm(x[i], y[i], 0x7632);
      }
    } else if constexpr (kFormat == KvFormat::kE4m3) {
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        widen_e4m3(__byte_perm(x[i], y[i], 0x5140), a[2 * i][2 * pair], a[2 * i][2 * pair + 1]);
        widen_e4m3(__byte_perm(x[i], y[i], 0x7362), a[2 * i + 1][2 * pair],
                   a[2 * i + 1][2 * pair + 1]);
      }
    } else {
      std::uint32_t scale = 0;
      std::uint32_t unused = 0;
      float x_scale = 0.0f;
      float y_scale = 0.0f;
      if constexpr (kFormat == KvFormat::kNvfp4) {
        const int block = g * kChannels / 16;
        const std::uint32_t bytes = scales[2 * pair][block] | scales[2 * pair + 1][block] << 8;
        widen_e4m3(bytes, scale, unused);
      } else {
        x_scale = e8m0_value(scales[2 * pair][g * kChannels / 32]);
        y_scale = e8m0_value(scales[2 * pair + 1][g * kChannels / 32]);
      }
#pragma unroll
      for (int j = 0; j < (kChannels + 7) / 8; ++j) {
        if constexpr (kFormat == KvFormat::kNvfp4 && !kConverts) {
          std::uint32_t part[2][4];  // channels, rising
          split_pairs_of_codes(__byte_perm(x[j], y[j], 0x5410), part[0]);
          if constexpr (kChannels >= 8) {
            split_pairs_of_codes(__byte_perm(x[j], y[j], 0x7632), part[1]);
          }
#pragma unroll
          for (int i = 0; i < (kChannels < 8 ? 4 : 8); ++i) {
            a[4 * j + i / 2][2 * pair + i % 2] = multiply_fp16(part[i / 4][i % 4], scale);
          }
          continue;
        }
        std::uint32_t part[2][4];  // even and odd channels, rising
        const Codes of_x = split_codes(x[j]);
        const Codes of_y = split_codes(y[j]);
        const std::uint32_t bytes[2][2] = {{of_x.even, of_y.even}, {of_x.odd, of_y.odd}};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          widen_e4m3(__byte_perm(bytes[odd][0], bytes[odd][1], 0x5140), part[odd][0], part[odd][1]);
          if constexpr (kChannels >= 8) {
            widen_e4m3(__byte_perm(bytes[odd][0], bytes[odd][1], 0x7362), part[odd][2],
                       part[odd][3]);
          }
        }
#pragma unroll
        for (int i = 0; i < (kChannels < 8 ? 2 : 4); ++i) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            a[4 * j + i][2 * pair + odd] = kFormat == KvFormat::kNvfp4
                                               ? multiply_fp16(part[odd][i], scale)
                                               : mx_pair(part[odd][i], x_scale, y_scale);
          }
        }
      }
    }
  }
}

}  // namespace lockstep::kernels
