#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/fake_quantize.h"
#include "kernels/exact/sixteen_cuda.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;

struct Params {
  uint4* x;               // two a block of sixteen
  std::int64_t sixteens;  // of a weight
  std::uint32_t* amax;
  Quantizer rule;
};

__global__ void __launch_bounds__(kThreads)
    amax_of_weight_kernel(const __grid_constant__ Params p) {
  const uint4* const x = p.x + std::int64_t{blockIdx.y} * p.sixteens * 2;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  std::uint32_t most = 0;
#pragma unroll 4
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.sixteens * 2;
       i += step) {
    const uint4 eight = x[i];
    most = abs_max_pair(
        most, abs_max_pair(abs_max_pair(eight.x, eight.y), abs_max_pair(eight.z, eight.w)));
  }
  const std::uint32_t bits =
      __reduce_max_sync(0xFFFFFFFFu, max(most & 0x7FFFu, most >> 16 & 0x7FFFu));
  if (threadIdx.x % 32 == 0) atomicMax(p.amax + blockIdx.y, bits);
}

/// Sixteen numbers a thread, their codes as quantize_lane_kernel() finds them.
__global__ void __launch_bounds__(kThreads) worth_kernel(const __grid_constant__ Params p) {
  uint4* const x = p.x + std::int64_t{blockIdx.y} * p.sixteens * 2;
  const std::int32_t n = own_exponent(p.rule, float_of(p.amax[blockIdx.y] << 16));
  const float global = power_of_two(n), per_scale = power_of_two(-n) * (1.0f / 6.0f);
  const bool down = n > 100;
  const float unit = power_of_two(down ? n - 40 : n);
  constexpr std::uint32_t kDown = 0x2B802B80u;  // 2^-40 twice
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.sixteens;
       i += std::int64_t{gridDim.x} * kThreads) {
    Sixteen numbers = load_sixteen(x + 2 * i);
    const std::uint32_t byte = e4m3_byte(float_of(abs_max_bits(numbers) << 16) * per_scale);
    const SixteenScale scale = nvfp4_sixteen(e4m3_value(byte) * unit);
    const float factor = e4m3_value(byte) * global;
    std::uint32_t worth[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const std::uint32_t word = down ? multiply_pair(numbers.words[k], kDown) : numbers.words[k];
      // As FP16 the codes are their values times 2^-14.
      float low, high;
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
          "cvt.f32.f16 %1, high;\n}"
          : "=f"(low), "=f"(high)
          : "r"(code_pair(word, scale) & 0x8E008E00u));
      // A zero has no sign.
      low = __fadd_rn(low * 0x1p14f * factor, 0.0f);
      high = __fadd_rn(high * 0x1p14f * factor, 0.0f);
      worth[k] = to_bf16_pair(low, high);
    }
    x[2 * i] = {worth[0], worth[1], worth[2], worth[3]};
    x[2 * i + 1] = {worth[4], worth[5], worth[6], worth[7]};
  }
}

}  // namespace

void fake_quantize_cuda(const FakeQuantizeArgs& args, Stream stream) {
  const Device device = args.x.device;
  const cuda::OnDevice scope(device.index);
  const auto [weights, rows, cols] = args.x.shape;
  const Params p = {reinterpret_cast<uint4*>(args.x.data), rows * cols / 16, args.amax, args.rule};
  const cudaStream_t order = cuda::stream_of(stream);
  cuda::require(cudaMemsetAsync(args.amax, 0, static_cast<std::size_t>(weights) * 4, order),
                "cudaMemsetAsync");
  const std::int64_t most = (p.sixteens + kThreads - 1) / kThreads;
  const std::int64_t share = 8ll * cuda::multiprocessors(device.index) / weights + 1;
  const dim3 grid(static_cast<unsigned>(std::min(most, share)), static_cast<unsigned>(weights));
  amax_of_weight_kernel<<<grid, kThreads, 0, order>>>(p);
  cuda::require_launch("amax_of_weight_kernel");
  worth_kernel<<<grid, kThreads, 0, order>>>(p);
  cuda::require_launch("worth_kernel");
}

}  // namespace lockstep::kernels
