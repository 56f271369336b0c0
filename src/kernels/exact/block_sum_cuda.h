/// Sums over a block of threads, for .cu files.
#pragma once

namespace lockstep::kernels {

struct Pair {
  double error = 0, norm = 0;
};

/// Of all threads of the block, in one order; for thread 0. Once a kernel.
template <int kThreads>
__device__ Pair block_sum(Pair mine) {
  __shared__ Pair parts[kThreads / 32];
  for (int half = 16; half > 0; half /= 2) {
    mine.error += __shfl_down_sync(0xFFFFFFFFu, mine.error, half);
    mine.norm += __shfl_down_sync(0xFFFFFFFFu, mine.norm, half);
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  Pair sum;
  for (const Pair& part : parts) {
    sum.error += part.error;
    sum.norm += part.norm;
  }
  return sum;
}

}  // namespace lockstep::kernels
