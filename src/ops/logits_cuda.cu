/// Rows of logits in one reading: what scoring asks of them, and their gradient.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "numerics/bf16_pair_cuda.h"
#include "ops/rows_cuda.h"

namespace lockstep::ops::cuda {
namespace {

using lockstep::cuda::OnDevice;
using lockstep::cuda::require_launch;
using lockstep::cuda::stream_of;

constexpr int kLogitThreads = 512;
constexpr int kLogitWarps = kLogitThreads / 32;
constexpr int kAtOnce = 4;  // groups of four logits that a thread has on their way
constexpr float kLowest = -3.402823466e38f;

/// Sums of exp(z - most), and of z exp(z - most).
struct Sums {
  float most = kLowest;
  float sum = 0.0f;
  float weighted = 0.0f;
};

__device__ Sums joined(const Sums& a, const Sums& b) {
  const float most = fmaxf(a.most, b.most);
  const float left = expf(a.most - most), right = expf(b.most - most);
  return {most, a.sum * left + b.sum * right, a.weighted * left + b.weighted * right};
}

__device__ void add(Sums& sums, const float (&z)[4 * kAtOnce]) {
  float most = sums.most;
#pragma unroll
  for (const float one : z) most = fmaxf(most, one);
  const float keep = expf(sums.most - most);
  float sum = 0.0f, weighted = 0.0f;
#pragma unroll
  for (const float one : z) {
    const float e = expf(one - most);
    sum += e;
    weighted += one > kLowest ? one * e : 0.0f;
  }
  sums = {most, sums.sum * keep + sum, sums.weighted * keep + weighted};
}

__device__ float scaled(float logit, float temperature) {
  return temperature == 1.0f ? logit : logit / temperature;
}

/// A block a row: each thread its columns in ascending order, then threads in a fixed tree.
__global__ void __launch_bounds__(kLogitThreads) score_kernel(const __grid_constant__ ScoreRows p) {
  __shared__ Sums parts[kLogitWarps];
  const std::int64_t row = blockIdx.x;
  const float* const logits = p.logits + row * p.vocabulary;
  const float temperature = p.temperature[row];
  Sums sums;
  const int thread = static_cast<int>(threadIdx.x);
  for (int first = 0; first < p.vocabulary; first += kLogitThreads * 4 * kAtOnce) {
    float z[4 * kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int col = first + 4 * (thread + j * kLogitThreads);
      const bool in = col < p.vocabulary;  // which is a multiple of four
      const float4 four = in ? *reinterpret_cast<const float4*>(logits + col)
                             : float4{kLowest, kLowest, kLowest, kLowest};
      z[4 * j] = in ? scaled(four.x, temperature) : kLowest;
      z[4 * j + 1] = in ? scaled(four.y, temperature) : kLowest;
      z[4 * j + 2] = in ? scaled(four.z, temperature) : kLowest;
      z[4 * j + 3] = in ? scaled(four.w, temperature) : kLowest;
    }
    add(sums, z);
  }
  const auto fold = [](Sums mine) {
    for (int half = 16; half > 0; half /= 2) {
      const Sums other = {__shfl_xor_sync(0xFFFFFFFFu, mine.most, half),
                          __shfl_xor_sync(0xFFFFFFFFu, mine.sum, half),
                          __shfl_xor_sync(0xFFFFFFFFu, mine.weighted, half)};
      mine = joined(mine, other);
    }
    return mine;
  };
  sums = fold(sums);
  if (thread % 32 == 0) parts[thread / 32] = sums;
  __syncthreads();
  if (thread >= 32) return;
  sums = fold(thread < kLogitWarps ? parts[thread] : Sums{});
  if (thread != 0) return;
  const float log_sum = logf(sums.sum);
  const float own = scaled(logits[p.token[row]], temperature);
  p.logp[row] = own - sums.most - log_sum;
  p.log_sum[row] = sums.most + log_sum;
  p.entropy[row] = sums.most + log_sum - sums.weighted / sums.sum;
}

/// d = (one-hot - softmax) slope / temperature; a block a part of a row.
__global__ void __launch_bounds__(kLogitThreads)
    score_backward_kernel(const __grid_constant__ ScoreRowsBackward p) {
  const std::int64_t row = blockIdx.x;
  const float temperature = p.temperature[row], log_sum = p.log_sum[row], slope = p.slope[row];
  const auto token = static_cast<int>(p.token[row]);
  const float* const logits = p.logits + row * p.vocabulary;
  const auto one = [&](float logit, int col) {
    const float d = (col == token ? 1.0f : 0.0f) - expf(scaled(logit, temperature) - log_sum);
    return scaled(d * slope, temperature);
  };
  const int first = static_cast<int>(blockIdx.y) * kLogitThreads * 4 * kAtOnce;
#pragma unroll
  for (int j = 0; j < kAtOnce; ++j) {
    const int col = first + 4 * (static_cast<int>(threadIdx.x) + j * kLogitThreads);
    if (col >= p.vocabulary) continue;
    const float4 z = *reinterpret_cast<const float4*>(logits + col);
    *reinterpret_cast<uint2*>(p.d + row * p.vocabulary + col) = {
        to_bf16_pair(one(z.x, col), one(z.y, col + 1)),
        to_bf16_pair(one(z.z, col + 2), one(z.w, col + 3))};
  }
}

}  // namespace

void score_rows(const ScoreRows& args, Device device, Stream stream) {
  if (args.rows == 0) return;
  const OnDevice scope(device.index);
  score_kernel<<<static_cast<unsigned>(args.rows), kLogitThreads, 0, stream_of(stream)>>>(args);
  require_launch("score_kernel");
}

void score_rows_backward(const ScoreRowsBackward& args, Device device, Stream stream) {
  if (args.rows == 0) return;
  const OnDevice scope(device.index);
  constexpr int kCols = kLogitThreads * 4 * kAtOnce;
  const dim3 grid(static_cast<unsigned>(args.rows),
                  static_cast<unsigned>((args.vocabulary + kCols - 1) / kCols));
  score_backward_kernel<<<grid, kLogitThreads, 0, stream_of(stream)>>>(args);
  require_launch("score_backward_kernel");
}

}  // namespace lockstep::ops::cuda
