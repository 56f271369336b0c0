/// For .cu files alone: keys and values of a cache row as operands of the tensor cores.
///
/// A product has keys as its rows and queries as its columns; the next has channels as its rows,
/// keys as its inner dimension and queries as its columns again. Inner dimensions may stand in any
/// order that both operands share: it is chosen so that a thread reads whole words. NVFP4 and E4M3
/// run in FP16, where code times scale is exact once 2^n is left to the end; MXFP4 and BF16 run in
/// BF16.
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

/// Of 8 x 8 pairs of bytes in a warp, a row in four threads.
__device__ inline std::uint32_t transposed(std::uint32_t pair) {
  std::uint32_t result = 0;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
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

__device__ inline float low_bf16(std::uint32_t pair) { return float_of(pair << 16); }
__device__ inline float high_bf16(std::uint32_t pair) { return float_of(pair & 0xFFFF0000u); }

template <bool kFp16>
__device__ inline void widen_pair(std::uint32_t pair, float& low, float& high) {
  if constexpr (kFp16) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(low), "=f"(high)
        : "r"(pair));
  } else {
    low = low_bf16(pair);
    high = high_bf16(pair);
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

/// Both of `a` times one half of `b`; the instruction itself picks it.
__device__ inline std::uint32_t multiply_by_half(bool high, std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  if (high) {
    asm("{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; "
        "mul.rn.f16x2 %0, %1, s; }"
        : "=r"(product)
        : "r"(a), "r"(b));
  } else {
    asm("{ .reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; "
        "mul.rn.f16x2 %0, %1, s; }"
        : "=r"(product)
        : "r"(a), "r"(b));
  }
  return product;
}

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

inline constexpr int kCodeShift = 6;  // of what split_codes() gives

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

/// A thread's 8 channels of a query for steps 2 j and 2 j + 1 of 16 channels begin here.
template <KvFormat kFormat, int kDim>
__device__ constexpr int first_query_channel(int t, int j) {
  return kFormat == KvFormat::kNvfp4 ? t * (kDim / 4) + 8 * j : 32 * j + 8 * t;
}
/// Which of the 8 meets, in the even or odd one of the steps, half `half` of register `reg`.
template <KvFormat kFormat>
__device__ constexpr int query_channel(int odd, int reg, int half) {
  return kFormat == KvFormat::kNvfp4 ? odd + 4 * reg + 2 * half : 4 * odd + 2 * reg + half;
}

/// Channel c of 8.
__device__ inline float channel_of(const std::uint32_t (&words)[4], int c) {
  return c % 2 == 0 ? low_bf16(words[c / 2]) : high_bf16(words[c / 2]);
}

/// kAnywhere: byte by byte; else at a multiple of as many bytes, of 16 at most.
template <int kBytes, bool kAnywhere = false>
__device__ inline void read_words(const unsigned char* from, std::uint32_t (&w)[(kBytes + 3) / 4]) {
  if constexpr (kAnywhere) {
#pragma unroll
    for (int i = 0; i < (kBytes + 3) / 4; ++i) w[i] = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) w[i / 4] |= std::uint32_t{from[i]} << (i % 4 * 8);
  } else if constexpr (kBytes % 16 == 0) {
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

/// A key of one head as half of the first operand of kDim / 16 products, two of them at a time.
template <KvFormat kFormat, int kDim>
class Key {
 public:
  static constexpr int kParts = kDim / 32;

  /// Where in the key's codes and scales thread `t`, of those that share it, begins to read.
  static __device__ constexpr int codes_of(int t) {
    return kFormat == KvFormat::kNvfp4 ? t * (kDim / 8) : t * kPartBytes;
  }
  static __device__ constexpr int scales_of(int t) {
    if (kFormat != KvFormat::kNvfp4) return 0;
    return kDim == 128 ? 2 * t : kDim == 64 ? t : t / 2;
  }

  /// From there.
  template <bool kAnywhere = false>
  __device__ void read(const unsigned char* codes, const unsigned char* scales) {
    if constexpr (kFormat == KvFormat::kNvfp4) {
      read_words<kDim / 8, kAnywhere>(codes, words_);
      std::uint32_t both[1], unused = 0;
      if constexpr (kDim == 128) {
        read_words<2, kAnywhere>(scales, both);
      } else {
        both[0] = scales[0];
      }
      widen_e4m3(both[0], scales_[0], unused);
    } else {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        std::uint32_t w[kWords / kParts];
        read_words<kPartBytes, kAnywhere>(codes + 4 * j * kPartBytes, w);
#pragma unroll
        for (int i = 0; i < kWords / kParts; ++i) words_[kWords / kParts * j + i] = w[i];
        if constexpr (kFormat == KvFormat::kMxfp4) scales_[j] = scales[j];
      }
    }
  }

  /// Of products 2 j and 2 j + 1.
  __device__ void part(int j, std::uint32_t (&b)[2][2]) const {
    if constexpr (kFormat == KvFormat::kNvfp4) {
      const Codes four = split_codes(words_[j]);
      widen_e4m3(four.even, b[0][0], b[0][1]);
      widen_e4m3(four.odd, b[1][0], b[1][1]);
      const bool high = kDim == 128 && j >= 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[i][0] = multiply_by_half(high, b[i][0], scales_[0]);
        b[i][1] = multiply_by_half(high, b[i][1], scales_[0]);
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
  static constexpr int kPartBytes = 4 * kWords / kParts;
  std::uint32_t words_[kWords];
  std::uint32_t scales_[kFormat == KvFormat::kMxfp4 ? kParts : 1];
};

/// kDim / 8 channels of four values as the first operand of kDim / 16 products, in parts of some
/// products: those of thread row `g`, channels 2 i and 2 i + 1 of them in product i. Values stand
/// in the order of the inner dimension. Holds some of the parts.
template <KvFormat kFormat, int kDim>
struct ValueParts {
  static constexpr int kChannels = kDim / 8;
  static constexpr int kParts = (kChannels + 7) / 8;
  static constexpr int kProducts = kChannels / 2 / kParts;  // of a part
};
template <KvFormat kFormat, int kDim, int kHeld = ValueParts<kFormat, kDim>::kParts>
class Values : public ValueParts<kFormat, kDim> {
 public:
  using ValueParts<kFormat, kDim>::kChannels;
  using ValueParts<kFormat, kDim>::kProducts;

  /// Where in a value's codes and scales thread row `g` begins to read.
  static __device__ constexpr int codes_of(int g, int first_part = 0) {
    return (g * kChannels + 2 * kProducts * first_part) * kBits / 8;
  }
  static __device__ constexpr int scales_of(int g) {
    return kFormat == KvFormat::kNvfp4   ? g * kChannels / 16
           : kFormat == KvFormat::kMxfp4 ? g * kChannels / 32
                                         : 0;
  }

  /// From there.
  template <bool kAnywhere = false>
  __device__ void read(const unsigned char* const (&codes)[4],
                       const unsigned char* const (&scales)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) read_words<kBytes, kAnywhere>(codes[i], words_[i]);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      if constexpr (kFormat == KvFormat::kNvfp4) {
        const std::uint32_t bytes = scales[2 * pair][0] | scales[2 * pair + 1][0] << 8;
        std::uint32_t unused = 0;
        widen_e4m3(bytes, scales_[pair], unused);
      } else if constexpr (kFormat == KvFormat::kMxfp4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mx_scales_[pair][i] = e8m0_value(scales[2 * pair + i][0]);
        }
      }
    }
  }

  /// Of the j-th part that is held.
  __device__ void part(int j, std::uint32_t (&a)[kProducts][4]) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const auto& x = words_[2 * pair];
      const auto& y = words_[2 * pair + 1];
      if constexpr (kFormat == KvFormat::kBf16) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          a[i][2 * pair] = __byte_perm(x[j * kProducts + i], y[j * kProducts + i], 0x5410);
          a[i][2 * pair + 1] = __byte_perm(x[j * kProducts + i], y[j * kProducts + i], 0x7632);
        }
      } else if constexpr (kFormat == KvFormat::kE4m3) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          const std::uint32_t two = __byte_perm(
              x[(j * kProducts + i) / 2], y[(j * kProducts + i) / 2], i % 2 == 0 ? 0x5140 : 0x7362);
          widen_e4m3(two, a[i][2 * pair], a[i][2 * pair + 1]);
        }
      } else {
        // x and y byte by byte, so that a code of x and the same of y come out side by side.
#pragma unroll
        for (int i = 0; i < kProducts; i += 2) {
          const Codes four = split_codes(__byte_perm(x[j], y[j], i == 0 ? 0x5140 : 0x7362));
          std::uint32_t even[2], odd[2];
          widen_e4m3(four.even, even[0], even[1]);
          widen_e4m3(four.odd, odd[0], odd[1]);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            a[i + k][2 * pair] = scaled(even[k], pair);
            a[i + k][2 * pair + 1] = scaled(odd[k], pair);
          }
        }
      }
    }
  }

 private:
  static constexpr int kBits = kIsFp4<kFormat> ? 4 : kFormat == KvFormat::kE4m3 ? 8 : 16;
  static constexpr int kBytes = kHeld * 2 * kProducts * kBits / 8;
  __device__ std::uint32_t scaled(std::uint32_t codes, int pair) const {
    if constexpr (kFormat == KvFormat::kNvfp4) return multiply_fp16(codes, scales_[pair]);
    return mx_pair(codes, mx_scales_[pair][0], mx_scales_[pair][1]);
  }

  std::uint32_t words_[4][(kBytes + 3) / 4];
  std::uint32_t scales_[2];
  float mx_scales_[2][2];
};

}  // namespace lockstep::kernels
