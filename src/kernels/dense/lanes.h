/// Sums in 16 lanes and functions of FP32 numbers, as plain loops that a compiler turns into
/// vectors: what an x_rows.h holds is compiled for each ISA, and the bits are the same because
/// nothing here is reassociated or fused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numerics/bf16.h"

namespace lockstep::kernels {

inline constexpr std::int64_t kLanes = 16;

/// ((0+8)+(4+12)) + ... : halves are added until one number is left.
[[gnu::always_inline]] inline float sum_of_lanes(float (&lane)[kLanes]) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

/// Sum of squares of n numbers; element i goes to lane i mod 16, in order.
template <typename T>
[[gnu::always_inline]] inline float sum_of_squares(const T* x, std::int64_t n) {
  float lane[kLanes] = {};
  const auto value = [](T v) __attribute__((always_inline)) {
    if constexpr (sizeof(T) == 2) {
      return to_float(v);
    } else {
      return v;
    }
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) {
      const float v = value(x[i + j]);
      lane[j] += v * v;
    }
  }
  for (std::int64_t j = 0; i + j < n; ++j) {
    const float v = value(x[i + j]);
    lane[j] += v * v;
  }
  return sum_of_lanes(lane);
}

/// 32 BF16 numbers: the even ones to out, the odd ones to out + 16.
[[gnu::always_inline]] inline void split_pairs(const Bf16* x, float* out) {
  std::uint32_t words[kLanes];
  std::memcpy(words, x, sizeof words);
  for (std::int64_t j = 0; j < kLanes; ++j) {
    out[j] = float_of(words[j] << 16);
    out[kLanes + j] = float_of(words[j] & 0xFFFF0000u);
  }
}

/// The reverse, rounded.
[[gnu::always_inline]] inline void join_pairs(const float* x, Bf16* out) {
  std::uint32_t words[kLanes];
  for (std::int64_t j = 0; j < kLanes; ++j) {
    const std::uint32_t even = bits_of(to_bf16(x[j])), odd = bits_of(to_bf16(x[kLanes + j]));
    words[j] = even | odd << 16;
  }
  std::memcpy(out, words, sizeof words);
}

/// e^x to 2 ulp for x in [-87, 88]; 0 below. A NaN stays one.
[[gnu::always_inline]] constexpr float exp_fp32(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693145752f;  // 16 bits: n * kLn2High is exact
  constexpr float kLn2Low = 1.42860677e-6f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float bounded = x > 88.0f ? 88.0f : x;
  const float shifted = bounded * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = bounded - n * kLn2High - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float scale = float_of((float_bits(shifted) - float_bits(kRound) + 127u) << 23);
  const float value = p * scale;
  return x < -87.0f ? 0.0f : value;
}

}  // namespace lockstep::kernels
