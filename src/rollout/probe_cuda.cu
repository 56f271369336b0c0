#include "device/cuda/check.h"
#include "numerics/bf16.h"
#include "rollout/probe.h"

namespace lockstep::rollout {
namespace {

constexpr int kThreads = 512;

struct Params {
  const Bf16* x;
  const Bf16* worth;
  std::int64_t stride;
  const float* y;
  double* sums;
  std::int64_t out, in, step;
};

constexpr int kMostRows = 64;  // of which probe_step() leaves less than twice sixteen

/// One block, a warp a row, and the rows in their order at last: the sums are the same each time.
__global__ void __launch_bounds__(kThreads) probe_sums_kernel(const __grid_constant__ Params p) {
  __shared__ double products[kMostRows];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t rows = (p.out + p.step - 1) / p.step;
  for (std::int64_t at = threadIdx.x / 32; at < rows; at += kThreads / 32) {
    const Bf16* const worth = p.worth + at * p.step * p.stride;
    double sum = 0;
#pragma unroll 8
    for (std::int64_t i = lane; i < p.in; i += 32) {
      sum += static_cast<double>(to_float(p.x[i]) * to_float(worth[i]));  // exact
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, half);
    if (lane == 0) products[at] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double error = 0, norm = 0;
  for (std::int64_t at = 0; at < rows; ++at) {
    const double difference = static_cast<double>(p.y[at * p.step]) - products[at];
    error += difference * difference;
    norm += products[at] * products[at];
  }
  p.sums[0] = error;
  p.sums[1] = norm;
}

}  // namespace

void probe_sums_cuda(const ProbeSumsArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.worth.device.index);
  const auto [out, in] = args.worth.shape;
  const Params p = {args.x, args.worth.data, args.worth.stride[0], args.y, args.sums, out,
                    in,     probe_step(out)};
  probe_sums_kernel<<<1, kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("probe_sums_kernel");
}

}  // namespace lockstep::rollout
