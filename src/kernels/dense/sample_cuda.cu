#include "base/philox.h"
#include "device/cuda/check.h"
#include "kernels/dense/sample_rows.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlock = static_cast<int>(kSampleBlock);
constexpr int kLanes = 16;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const float* logits;
  const std::int32_t* rows;  // or null
  const float* temperatures;
  const SampleName* names;    // or null
  const std::int32_t* given;  // or null
  std::int32_t* tokens;
  float* logps;
  double* sums;   // [rows, blocks]
  double* below;  // [rows, blocks] of all blocks up to and with this
  std::uint64_t seed;
  const std::uint64_t* seeds;  // or null
  std::int64_t stride;
  std::int32_t count;
  std::int32_t blocks;
  bool greedy;
};

/// exp(x) of rollout/softmax.cc: 0 below exp(-87), and not a fused operation in it.
__device__ float exp_of(float x) {
  constexpr float kLowest = -87.0f;
  constexpr float kRounding = 12582912.0f;
  const bool possible = x >= kLowest;
  x = x < kLowest ? kLowest : x;
  const float n = (x * 1.44269504f + kRounding) - kRounding;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  const float scale =
      float_of(static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23);
  return possible ? p * scale : 0.0f;
}

/// Greater is the greater logit, of equal ones the lower token.
__device__ std::uint64_t key_of(float logit, int token) {
  const std::uint32_t bits = float_bits(logit + 0.0f);  // zeros of both signs are equal
  const std::uint32_t order = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{order} << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(token));
}

struct Shared {
  std::uint64_t best[kThreads / 32];
  int found;
};

/// The likeliest token of the row; -1 where there is a NaN.
__device__ int likeliest(const float* logits, int count, Shared& shared) {
  std::uint64_t best = 0;
  bool bad = false;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const float x = logits[i];
    bad |= x != x;
    const std::uint64_t key = key_of(x, i);
    best = key > best ? key : best;
  }
  for (int step = 16; step > 0; step /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kAll, best, step);
    best = other > best ? other : best;
  }
  if (threadIdx.x % 32 == 0) shared.best[threadIdx.x / 32] = best;
  const bool any = __syncthreads_or(bad) != 0;
  best = shared.best[threadIdx.x % 32];
  for (int step = 16; step > 0; step /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kAll, best, step);
    best = other > best ? other : best;
  }
  __syncthreads();
  return any ? -1 : static_cast<int>(0xFFFFFFFFu - static_cast<std::uint32_t>(best));
}

/// Sums of blocks of 128, 16 threads each: lanes in FP32, then one after another in double.
__device__ void sum_blocks(const Params& p, const float* logits, float temperature, float max,
                           double* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rounds = (p.blocks + kThreads / kLanes - 1) / (kThreads / kLanes);
  for (int round = 0; round < rounds; ++round) {
    const int block = round * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlock; i += kLanes) {
      const int token = block * kBlock + i + lane;
      const float e = token < p.count ? exp_of(__fdiv_rn(logits[token], temperature) - max) : 0.0f;
      sum += e;
    }
    double total = 0.0;
    for (int i = 0; i < kLanes; ++i)
      total += static_cast<double>(__shfl_sync(kAll, sum, i, kLanes));
    if (lane == 0 && block < p.blocks) sums[block] = total;
  }
}

/// One after another, from global memory by way of registers: a warp reads ahead.
__device__ double add_up(const double* sums, double* below, int blocks) {
  const int lane = static_cast<int>(threadIdx.x);
  double total = 0.0;
  for (int first = 0; first < blocks; first += 32) {
    const double own = first + lane < blocks ? sums[first + lane] : 0.0;
    double mine = 0.0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      total += __shfl_sync(kAll, own, i);  // 0 past the last block
      mine = i == lane ? total : mine;
    }
    if (first + lane < blocks) below[first + lane] = mine;
  }
  return total;
}

/// The smallest token whose sum exceeds the target. By one thread.
__device__ int token_in(const Params& p, const float* logits, float temperature, float max,
                        int block, double below, double target) {
  int chosen = block * kBlock;
  for (int i = 0; i < kBlock && block * kBlock + i < p.count; ++i) {
    const int token = block * kBlock + i;
    const float e = exp_of(__fdiv_rn(logits[token], temperature) - max);
    if (e == 0.0f) continue;
    chosen = token;
    below += static_cast<double>(e);
    if (below > target) break;
  }
  return chosen;
}

/// A block a draw.
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const std::int64_t row = blockIdx.x;
  const float* const logits = p.logits + (p.rows == nullptr ? row : p.rows[row]) * p.stride;
  const float temperature = p.temperatures[row];
  double* const sums = p.sums + row * p.blocks;
  double* const below = p.below + row * p.blocks;
  const int best = likeliest(logits, p.count, shared);
  if (best < 0) {
    if (threadIdx.x == 0) {
      p.tokens[row] = -1;
      p.logps[row] = float_of(0x7FC00000u);
    }
    return;
  }
  const float max = __fdiv_rn(logits[best], temperature);
  sum_blocks(p, logits, temperature, max, sums);
  if (threadIdx.x == 0) shared.found = p.blocks;
  __syncthreads();
  __shared__ double total;
  if (threadIdx.x < 32) {
    const double all = add_up(sums, below, p.blocks);
    if (threadIdx.x == 0) total = all;
  }
  __syncthreads();
  const std::int32_t given = p.given == nullptr ? -1 : p.given[row];
  int token = given >= 0 ? given : best;
  if (given < 0 && !p.greedy) {
    const SampleName name = p.names[row];
    const PhiloxWords words =
        philox(p.seeds == nullptr ? p.seed : p.seeds[row], philox_counter(name.a, name.b, name.c));
    const double target = unit(words[0], words[1]) * total;
    for (int i = static_cast<int>(threadIdx.x); i < p.blocks; i += kThreads) {
      if (below[i] > target) atomicMin(&shared.found, i);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int block = shared.found;
      if (block == p.blocks) {  // a rounding error short: the last block that has any probability
        block = 0;
        for (int i = 0; i < p.blocks; ++i) block = sums[i] > 0.0 ? i : block;
        token = token_in(p, logits, temperature, max, block, total, target);
      } else {
        token = token_in(p, logits, temperature, max, block, block == 0 ? 0.0 : below[block - 1],
                         target);
      }
    }
  }
  if (threadIdx.x != 0) return;
  p.tokens[row] = token;
  const float z = __fdiv_rn(logits[token], temperature);
  p.logps[row] = static_cast<float>(static_cast<double>(z) - static_cast<double>(max) - log(total));
}

}  // namespace

void sample_cuda(const SampleArgs& args, Stream stream) {
  const std::int64_t rows = std::ssize(args.tokens);
  const std::int64_t count = args.logits.shape[1];
  if (rows == 0) return;
  const cuda::OnDevice scope(args.logits.device.index);
  Params p{};
  p.logits = args.logits.data;
  p.rows = args.rows.empty() ? nullptr : args.rows.data();
  p.seeds = args.seeds.empty() ? nullptr : args.seeds.data();
  p.temperatures = args.temperatures.data();
  p.names = args.names.data();
  p.given = args.given.empty() ? nullptr : args.given.data();
  p.tokens = args.tokens.data();
  p.logps = args.logps.data();
  p.blocks = static_cast<std::int32_t>((count + kSampleBlock - 1) / kSampleBlock);
  p.sums = reinterpret_cast<double*>(args.workspace.data());
  p.below = p.sums + rows * p.blocks;
  p.seed = args.seed;
  p.stride = args.logits.stride[0];
  p.count = static_cast<std::int32_t>(count);
  p.greedy = args.greedy;
  sample_kernel<<<static_cast<unsigned>(rows), kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("sample_kernel");
}

}  // namespace lockstep::kernels
