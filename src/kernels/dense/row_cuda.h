/// For .cu files alone: a row of lanes.h by the threads of a warp.
#pragma once

#include <cstdint>

#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {

/// combine()'s sum of a row's slots, of kWidth columns that lie together: one, or a multiple of 4
/// at 16 bytes. `y`: of the first slot.
template <int kWidth>
__device__ inline void sum_slots(const float* y, std::int64_t stride, const float* gates, int slots,
                                 float (&sum)[kWidth]) {
#pragma unroll
  for (float& x : sum) x = 0.0f;
#pragma unroll 8
  for (int slot = 0; slot < slots; ++slot, y += stride) {
    const float gate = gates[slot];
    const auto add = [gate](float& to, float x) { to = __fadd_rn(to, __fmul_rn(gate, x)); };
    if constexpr (kWidth % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const float4 four = __ldcs(reinterpret_cast<const float4*>(y + i));
        add(sum[i], four.x);
        add(sum[i + 1], four.y);
        add(sum[i + 2], four.z);
        add(sum[i + 3], four.w);
      }
    } else {
      static_assert(kWidth == 1);
      add(sum[0], *y);
    }
  }
}

/// sum_of_squares() of lanes.h, over n numbers that all threads of a warp see in shared memory:
/// the first 16 threads are the lanes. Every thread is given the sum.
__device__ inline float warp_sum_of_squares(const Bf16* x, int n) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float sum = 0.0f;
  if (lane < 16) {
#pragma unroll 32
    for (int i = lane; i < n; i += 16) {
      const float v = to_float(x[i]);
      sum = __fadd_rn(sum, __fmul_rn(v, v));
    }
  }
  for (int half = 8; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, static_cast<unsigned>(half)));
  }
  return __shfl_sync(0xFFFFFFFFu, sum, 0);
}

/// 1 / sqrt(mean + eps), as rms_norm_row() has it.
__device__ inline float inverse_rms(float squares, float cols, float eps) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, cols), eps)));
}

/// A head that 16 lanes have, numbers 16 apart: inverse_rms() of it. By all lanes of the warp.
template <int kOfLane>
__device__ float inverse_rms_of_head(const float (&v)[kOfLane], float eps) {
  constexpr int kLanes = 16;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) sum = __fadd_rn(sum, __fmul_rn(v[k], v[k]));
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, half, kLanes));
  }
  sum = __shfl_sync(0xFFFFFFFFu, sum, 0, kLanes);
  return inverse_rms(sum, static_cast<float>(kOfLane * kLanes), eps);
}

/// A number of a row whose inverse_rms() that is, times its weight: rounded twice, as
/// rms_norm_row() has it.
__device__ inline float normed(float x, float inverse, Bf16 weight) {
  const Bf16 normal = to_bf16(__fmul_rn(x, inverse));
  return to_float(to_bf16(__fmul_rn(to_float(normal), to_float(weight))));
}

/// Of `count` numbers, a multiple of 4, one after another: every thread that asks adds them all.
template <int kUnrolled>
__device__ float sum_in_order(const float* from, int count) {
  float sum = 0.0f;
#pragma unroll kUnrolled
  for (int i = 0; i < count; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    sum = sum + four.x;
    sum = sum + four.y;
    sum = sum + four.z;
    sum = sum + four.w;
  }
  return sum;
}

}  // namespace lockstep::kernels
