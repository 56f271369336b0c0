#include "device/cuda/check.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
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

/// The rows in their order: the sums are the same each time.
__device__ void add_probe(const double* products, std::int64_t rows, const float* y,
                          std::int64_t step, double* sums) {
  double error = 0, norm = 0;
  for (std::int64_t at = 0; at < rows; ++at) {
    const double difference = static_cast<double>(y[at * step]) - products[at];
    error += difference * difference;
    norm += products[at] * products[at];
  }
  sums[0] = error;
  sums[1] = norm;
}

/// One block a probe, a warp a row. A lane takes blocks of sixteen.
__global__ void __launch_bounds__(kThreads) placed_probes_kernel(const PlacedProbe* probes) {
  __shared__ double products[kMostRows];
  const PlacedProbe p = probes[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int32_t rows = (p.out + p.step - 1) / p.step, blocks = p.in / 16;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(p.sample) + 16;
  const std::uint8_t* scales = codes + std::int64_t{rows} * blocks * 8;
  const double global = *reinterpret_cast<const float*>(p.sample);
  for (std::int32_t row = static_cast<std::int32_t>(threadIdx.x) / 32; row < rows;
       row += kThreads / 32) {
    double sum = 0;
    for (std::int32_t block = lane; block < blocks; block += 32) {
      const std::int64_t at = std::int64_t{row} * blocks + block;
      float units = 0;  // exact, in halves of halves
      for (int i = 0; i < 16; ++i) {
        const std::uint32_t code = codes[8 * at + i / 2] >> i % 2 * 4 & 15u;
        units += to_float(p.x[16 * block + i]) * to_float(static_cast<E2m1>(code));
      }
      sum += static_cast<double>(units) * to_float(static_cast<E4m3>(scales[at]));
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, half);
    if (lane == 0) products[row] = sum * global;
  }
  __syncthreads();
  if (threadIdx.x == 0) add_probe(products, rows, p.y, p.step, p.sums);
}

/// One block, a warp a row.
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
  if (threadIdx.x == 0) add_probe(products, rows, p.y, p.step, p.sums);
}

}  // namespace

void probe_sums_cuda(const PlacedProbe* probes, std::int64_t count, Device device, Stream stream) {
  if (count == 0) return;
  const cuda::OnDevice scope(device.index);
  placed_probes_kernel<<<static_cast<unsigned int>(count), kThreads, 0, cuda::stream_of(stream)>>>(
      probes);
  cuda::require_launch("placed_probes_kernel");
}

void probe_sums_cuda(const ProbeSumsArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.worth.device.index);
  const auto [out, in] = args.worth.shape;
  const Params p = {args.x, args.worth.data, args.worth.stride[0], args.y, args.sums, out,
                    in,     probe_step(out)};
  probe_sums_kernel<<<1, kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("probe_sums_kernel");
}

}  // namespace lockstep::rollout
