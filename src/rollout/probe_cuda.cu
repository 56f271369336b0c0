#include "device/cuda/check.h"
#include "numerics/bf16.h"
#include "rollout/probe.h"

namespace lockstep::rollout {
namespace {

constexpr int kThreads = 256;

struct Params {
  const Bf16* x;
  const Bf16* worth;
  std::int64_t stride;
  const float* y;
  double* sums;
  std::int64_t out, in, step;
};

/// One block, row after row, so that the sums are the same each time.
__global__ void __launch_bounds__(kThreads) probe_sums_kernel(const __grid_constant__ Params p) {
  __shared__ double part[kThreads / 32];
  double error = 0, norm = 0;
  for (std::int64_t row = 0; row < p.out; row += p.step) {
    double sum = 0;
    for (std::int64_t i = threadIdx.x; i < p.in; i += kThreads) {
      sum += static_cast<double>(to_float(p.x[i])) *
             static_cast<double>(to_float(p.worth[row * p.stride + i]));
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, half);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (const double one : part) sum += one;
    __syncthreads();
    const double difference = static_cast<double>(p.y[row]) - sum;
    error += difference * difference;
    norm += sum * sum;
  }
  if (threadIdx.x == 0) {
    p.sums[0] = error;
    p.sums[1] = norm;
  }
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
