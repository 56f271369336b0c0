/// The gates of chosen experts, and recorded choices in place of the router's. A warp a row.
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "ops/rows_cuda.h"

namespace lockstep::ops::cuda {
namespace {

using lockstep::cuda::OnDevice;
using lockstep::cuda::require_launch;
using lockstep::cuda::stream_of;

constexpr int kRouteThreads = 128;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr unsigned kEvery = 0xFFFFFFFFu;

/// exp(logit - most) / sum is an expert's probability.
struct Softmax {
  float most, sum;
};

__device__ Softmax softmax_of(const float* logits, int experts, int lane) {
  float most = __int_as_float(0xFF800000);
  for (int e = lane; e < experts; e += 32) most = fmaxf(most, logits[e]);
  for (int half = 16; half > 0; half /= 2) most = fmaxf(most, __shfl_xor_sync(kEvery, most, half));
  float sum = 0.0f;
  for (int e = lane; e < experts; e += 32) sum += expf(logits[e] - most);
  for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kEvery, sum, half);
  return {most, sum};
}

__device__ std::int64_t row_of_warp() {
  return std::int64_t{blockIdx.x} * kRouteWarps + threadIdx.x / 32;
}

__global__ void __launch_bounds__(kRouteThreads) gates_kernel(const __grid_constant__ Gates p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = row_of_warp();
  if (row >= p.rows) return;
  const float* const logits = p.logits + row * p.experts;
  const std::int32_t* const chosen = p.chosen + row * p.slots;
  const Softmax all = softmax_of(logits, p.experts, lane);
  const auto probability = [&](int k) { return expf(logits[chosen[k]] - all.most) / all.sum; };
  float sum = 1.0f;
  if (p.normalize) {
    sum = 0.0f;
    for (int k = 0; k < p.slots; ++k) sum += probability(k);
  }
  for (int k = lane; k < p.slots; k += 32) p.gates[row * p.slots + k] = probability(k) / sum;
}

__global__ void __launch_bounds__(kRouteThreads)
    gates_backward_kernel(const __grid_constant__ GatesBackward p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = row_of_warp();
  if (row >= p.of.rows) return;
  const float* const logits = p.of.logits + row * p.of.experts;
  const std::int32_t* const chosen = p.of.chosen + row * p.of.slots;
  const float* const dgates = p.dgates + row * p.of.slots;
  const float* const gates = p.of.gates + row * p.of.slots;
  float* const dlogits = p.dlogits + row * p.of.experts;
  float sum = 0.0f;
  for (int k = 0; k < p.of.slots; ++k) sum += gates[k] * dgates[k];
  const Softmax all = softmax_of(logits, p.of.experts, lane);
  for (int e = lane; e < p.of.experts; e += 32) {
    dlogits[e] = p.of.normalize ? 0.0f : -expf(logits[e] - all.most) / all.sum * sum;
  }
  __syncwarp();
  for (int k = lane; k < p.of.slots; k += 32) {
    dlogits[chosen[k]] = gates[k] * (dgates[k] - sum);
  }
}

__global__ void __launch_bounds__(kRouteThreads) follow_kernel(const __grid_constant__ Follow p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRouteThreads + threadIdx.x;
  if (row >= p.rows || p.present[row] == 0) return;
  const std::int32_t* const theirs = p.theirs + row * p.slots;
  std::int32_t* const own = p.chosen + row * p.slots;
  bool same = true;
  for (int k = 0; k < p.slots; ++k) {
    bool found = false;
    for (int j = 0; j < p.slots; ++j) found |= own[k] == theirs[j];
    same &= found;
  }
  for (int k = 0; k < p.slots; ++k) own[k] = theirs[k];
  if (!same && p.mismatched != nullptr) atomicAdd(p.mismatched, 1ull);
}

unsigned blocks_of(std::int64_t rows, int rows_a_block) {
  return static_cast<unsigned>((rows + rows_a_block - 1) / rows_a_block);
}

}  // namespace

void gates(const Gates& args, Device device, Stream stream) {
  if (args.rows == 0) return;
  const OnDevice scope(device.index);
  gates_kernel<<<blocks_of(args.rows, kRouteWarps), kRouteThreads, 0, stream_of(stream)>>>(args);
  require_launch("gates_kernel");
}

void gates_backward(const GatesBackward& args, Device device, Stream stream) {
  if (args.of.rows == 0) return;
  const OnDevice scope(device.index);
  gates_backward_kernel<<<blocks_of(args.of.rows, kRouteWarps), kRouteThreads, 0,
                          stream_of(stream)>>>(args);
  require_launch("gates_backward_kernel");
}

void follow(const Follow& args, Device device, Stream stream) {
  if (args.rows == 0) return;
  const OnDevice scope(device.index);
  follow_kernel<<<blocks_of(args.rows, kRouteThreads), kRouteThreads, 0, stream_of(stream)>>>(args);
  require_launch("follow_kernel");
}

}  // namespace lockstep::ops::cuda
