/// A draw is a cluster's of blocks of threads, which share the vocabulary. The sums of its blocks
/// of 128 tokens are added up by one of them, for their order is the definition's.
#include "base/philox.h"
#include "device/cuda/check.h"
#include "kernels/dense/sample_rows.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWindow = 1024;  // sums that are added up at a time
constexpr int kBlock = static_cast<int>(kSampleBlock);
constexpr int kLanes = 16;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const float* logits;
  const std::int32_t* rows;  // or null
  const float* temperatures;
  const SampleName* names;
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

/// logit / temperature; the commonest one takes no division.
__device__ float cooled(float logit, float temperature) {
  return temperature == 1.0f ? logit : __fdiv_rn(logit, temperature);
}

/// Greater is the greater logit, of equal ones the lower token.
__device__ std::uint64_t key_of(float logit, int token) {
  const std::uint32_t bits = float_bits(logit + 0.0f);  // zeros of both signs are equal
  const std::uint32_t order = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{order} << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(token));
}

struct Shared {
  std::uint64_t best[kThreads / 32];
  std::uint64_t best_here;  // 0: there is a NaN
  std::uint64_t best_of_all;
  double sums[kWindow];
  double total;
  int found;
};

__device__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// What stands at the place of `shared` in another block of the cluster.
__device__ std::uint64_t load_from(unsigned block, const std::uint64_t* shared) {
  std::uint32_t there;
  std::uint64_t value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))), "r"(block));
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(there) : "memory");
  return value;
}

__device__ std::uint64_t warp_max(std::uint64_t key) {
  for (int step = 16; step > 0; step /= 2) {
    const std::uint64_t other = __shfl_xor_sync(kAll, key, step);
    key = other > key ? other : key;
  }
  return key;
}

/// The likeliest token of the row, of which this block, one of kShares, looks at `first` to `end`;
/// -1 where there is a NaN. Another barrier of the cluster must follow.
template <int kShares>
__device__ int likeliest(const float* logits, int first, int end, Shared& shared) {
  const unsigned thread = threadIdx.x;
  std::uint64_t best = 1;  // below every token's
  bool bad = false;
#pragma unroll 8
  for (int i = first + static_cast<int>(thread); i < end; i += kThreads) {
    const float x = logits[i];
    bad |= x != x;
    const std::uint64_t key = key_of(x, i);
    best = key > best ? key : best;
  }
  best = warp_max(best);
  if (thread % 32 == 0) shared.best[thread / 32] = best;
  const bool any = __syncthreads_or(bad) != 0;
  if (thread < 32) {
    best = warp_max(shared.best[thread % (kThreads / 32)]);
    if (thread == 0) shared.best_here = any ? 0 : best;
  }
  sync_cluster();
  if (thread < 32) {
    const std::uint64_t other = load_from(thread % kShares, &shared.best_here);
    best = __any_sync(kAll, other == 0) ? 0 : warp_max(other);
    if (thread == 0) shared.best_of_all = best;
  }
  __syncthreads();
  best = shared.best_of_all;
  return best == 0 ? -1 : static_cast<int>(0xFFFFFFFFu - static_cast<std::uint32_t>(best));
}

/// Sums of blocks first .. end - 1 of 128, 16 threads each: lanes in FP32, then one after another
/// in double.
__device__ void sum_blocks(const Params& p, const float* logits, float temperature, float max,
                           int first, int end, double* sums) {
  constexpr int kAtOnce = kThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int base = first; base < end; base += kAtOnce) {  // as often for all threads of a warp
    const int block = base + static_cast<int>(threadIdx.x) / kLanes;
    float x[kBlock / kLanes];
#pragma unroll
    for (int i = 0; i < kBlock / kLanes; ++i) {
      const int token = block * kBlock + i * kLanes + lane;
      x[i] = block < end && token < p.count ? logits[token] : 0.0f;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlock / kLanes; ++i) {
      const int token = block * kBlock + i * kLanes + lane;
      sum += token < p.count ? exp_of(cooled(x[i], temperature) - max) : 0.0f;
    }
    double total = 0.0;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      total += static_cast<double>(__shfl_sync(kAll, sum, i, kLanes));
    }
    if (lane == 0 && block < end) sums[block] = total;
  }
}

/// The sum of all, one after another; below[i]: of those up to and with i. By all threads, a warp
/// of which adds.
__device__ double add_up(const double* sums, double* below, int blocks, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  double total = 0.0;
  for (int first = 0; first < blocks; first += kWindow) {
    const int count = min(kWindow, blocks - first);
    for (int i = thread; i < kWindow; i += kThreads) {
      shared.sums[i] = i < count ? sums[first + i] : 0.0;
    }
    __syncthreads();
    if (thread == 0) {
      constexpr int kAhead = 16;
      for (int i = 0; i < count; i += kAhead) {
        double own[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) own[j] = shared.sums[i + j];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          total += own[j];  // 0 past the last block
          shared.sums[i + j] = total;
        }
      }
    }
    __syncthreads();
    for (int i = thread; i < count; i += kThreads) below[first + i] = shared.sums[i];
    if (thread == 0) shared.total = total;
    __syncthreads();
  }
  return shared.total;
}

/// The smallest token whose sum exceeds the target; the last that has any probability where none
/// does. By one warp.
__device__ int token_in(const Params& p, const float* logits, float temperature, float max,
                        int block, double below, double target) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float e[kBlock / 32];
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) {
    const int token = block * kBlock + i * 32 + lane;
    e[i] = token < p.count ? exp_of(cooled(logits[token], temperature) - max) : 0.0f;
  }
  int chosen = block * kBlock;
  bool found = false;
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) {
    for (int j = 0; j < 32; ++j) {
      const float own = __shfl_sync(kAll, e[i], j);
      if (found || own == 0.0f) continue;
      chosen = block * kBlock + i * 32 + j;
      below += static_cast<double>(own);
      found = below > target;
    }
  }
  return chosen;
}

/// A draw by kShares blocks of threads.
template <int kShares>
__global__ void __cluster_dims__(kShares, 1, 1) __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const std::int64_t row = blockIdx.x / kShares;
  const int share = static_cast<int>(blockIdx.x % kShares);
  const float* const logits = p.logits + (p.rows == nullptr ? row : p.rows[row]) * p.stride;
  const float temperature = p.temperatures[row];
  double* const sums = p.sums + row * p.blocks;
  double* const below = p.below + row * p.blocks;
  const int first = static_cast<int>(std::int64_t{p.blocks} * share / kShares);
  const int end = static_cast<int>(std::int64_t{p.blocks} * (share + 1) / kShares);
  const int best = likeliest<kShares>(logits, first * kBlock, min(end * kBlock, p.count), shared);
  if (best < 0) {
    if (share == 0 && threadIdx.x == 0) {
      p.tokens[row] = -1;
      p.logps[row] = float_of(0x7FC00000u);
    }
    sync_cluster();
    return;
  }
  const float max = cooled(logits[best], temperature);
  sum_blocks(p, logits, temperature, max, first, end, sums);
  sync_cluster();
  if (share != 0) return;
  if (threadIdx.x == 0) shared.found = p.blocks;
  const double total = add_up(sums, below, p.blocks, shared);
  const std::int32_t given = p.given == nullptr ? -1 : p.given[row];
  int token = given >= 0 ? given : best;
  if (given < 0 && given != kLikeliest) {
    const SampleName name = p.names[row];
    const PhiloxWords words =
        philox(p.seeds == nullptr ? p.seed : p.seeds[row], philox_counter(name.a, name.b, name.c));
    const double target = unit(words[0], words[1]) * total;
    for (int i = static_cast<int>(threadIdx.x); i < p.blocks; i += kThreads) {
      if (below[i] > target) atomicMin(&shared.found, i);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int block = shared.found;
    double before = total;
    if (block == p.blocks) {  // a rounding error short: the last block that has any probability
      block = 0;
      for (int i = 0; i < p.blocks; ++i) block = sums[i] > 0.0 ? i : block;
    } else {
      before = block == 0 ? 0.0 : below[block - 1];
    }
    token = token_in(p, logits, temperature, max, block, before, target);
  }
  if (threadIdx.x != 0) return;
  p.tokens[row] = token;
  const float z = cooled(logits[token], temperature);
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
  const bool few = rows <= 32;
  const auto kernel = few ? sample_kernel<8> : sample_kernel<4>;
  kernel<<<static_cast<unsigned>(rows * (few ? 8 : 4)), kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("sample_kernel");
}

}  // namespace lockstep::kernels
