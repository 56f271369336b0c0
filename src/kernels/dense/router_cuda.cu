#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "kernels/dense/lanes.h"
#include "kernels/dense/router_rows.h"
#include "kernels/dense/row_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kWarps = 4;
constexpr std::int64_t kMostExperts = 3072;  // a row's probabilities are kept in shared memory
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const float* logits;
  std::int32_t* experts;
  float* gates;
  std::int64_t logits_stride;
  std::int64_t experts_stride;
  std::int64_t gates_stride;
  std::int64_t rows;
  std::int32_t count;
  std::int32_t chosen;
  bool normalize;
};

/// The likeliest of a lane's experts, the lowest of several. All NaN are equal. Probabilities are
/// not negative, so that their bits are in their order.
struct Best {
  std::uint32_t rank;  // bits + 1; 0: none
  std::int32_t expert;
};

__device__ Best best_of_lane(const float* probability, int count, int lane) {
  Best best{0, 0};
  for (int e = lane; e < count; e += 32) {
    const float p = probability[e];
    if (p < 0.0f) continue;  // taken
    const std::uint32_t rank = (p == p ? float_bits(p) : 0x7FC00000u) + 1;
    if (rank > best.rank) best = {rank, e};
  }
  return best;
}

__device__ float max_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAll, x, step);
    x = other > x ? other : x;
  }
  return x;
}

/// The K best into the row's slots; returns the sum of their probabilities in the order of slots.
/// A chosen one is taken out of p.
__device__ float choose(const Params& p, std::int64_t row, float* probability) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float sum = 0.0f;
  Best own = best_of_lane(probability, p.count, lane);
  for (int slot = 0; slot < p.chosen; ++slot) {
    const std::uint32_t most = __reduce_max_sync(kAll, own.rank);
    const std::int32_t expert = __reduce_min_sync(kAll, own.rank == most ? own.expert : 0x7FFFFFFF);
    const float gate = probability[expert];
    __syncwarp();
    if (own.rank == most && own.expert == expert) {
      p.experts[row * p.experts_stride + slot] = expert;
      p.gates[row * p.gates_stride + slot] = gate;
      probability[expert] = -1.0f;
      own = best_of_lane(probability, p.count, lane);
    }
    sum += gate;
    __syncwarp();
  }
  return sum;
}

/// A warp a row.
__global__ void __launch_bounds__(32 * kWarps) router_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + warp;
  if (row >= p.rows) return;
  const int padded = (p.count + 3) / 4 * 4;
  float* const probability = reinterpret_cast<float*>(shared) + warp * padded;
  const float* const logits = p.logits + row * p.logits_stride;
  float top = logits[0];
  for (int e = lane; e < p.count; e += 32) {
    const float x = logits[e];
    probability[e] = x;
    top = x > top ? x : top;
  }
  top = max_of_warp(top);
  for (int e = lane; e < padded; e += 32) {
    probability[e] = e < p.count ? exp_fp32(probability[e] - top) : 0.0f;
  }
  __syncwarp();
  const float sum = sum_in_order<4>(probability, padded);
  __syncwarp();
  for (int e = lane; e < p.count; e += 32) probability[e] = __fdiv_rn(probability[e], sum);
  __syncwarp();
  const float kept = choose(p, row, probability);
  if (!p.normalize) return;
  for (int slot = lane; slot < p.chosen; slot += 32) {
    float* const gate = p.gates + row * p.gates_stride + slot;
    *gate = __fdiv_rn(*gate, kept);
  }
}

}  // namespace

void router_cuda(const RouterArgs& args, Stream stream) {
  const std::int64_t rows = args.logits.shape[0];
  const std::int64_t count = args.logits.shape[1];
  if (rows == 0) return;
  if (count > kMostExperts) {
    throw Error(cat({"router: ", count, " experts on a CUDA device; at most ", kMostExperts}));
  }
  const cuda::OnDevice scope(args.logits.device.index);
  const Params params{args.logits.data,
                      args.experts.data,
                      args.gates.data,
                      args.logits.stride[0],
                      args.experts.stride[0],
                      args.gates.stride[0],
                      rows,
                      static_cast<std::int32_t>(count),
                      static_cast<std::int32_t>(args.experts.shape[1]),
                      args.normalize};
  const auto bytes = static_cast<std::size_t>(kWarps * ((count + 3) / 4 * 4)) * sizeof(float);
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
  cuda::launch_beside("router_kernel", router_kernel, grid, dim3(32 * kWarps), bytes, stream,
                      params);
}

}  // namespace lockstep::kernels
