#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/exact/swiglu_row.h"
#include "numerics/exp.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;

struct Params {
  const float* gate;
  const float* up;
  Bf16* out;
  std::int64_t gate_stride, up_stride, out_stride;
  std::int64_t rows, cols;
};

__device__ std::uint32_t pair_of(float g0, float g1, float u0, float u1) {
  const std::uint32_t low = bits_of(swiglu_exact(g0, u0));
  return low | static_cast<std::uint32_t>(bits_of(swiglu_exact(g1, u1))) << 16;
}

/// kWidth elements a thread and step: 4, or 1 where rows do not lie on 16 bytes.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ Params p) {
  const std::int64_t steps = p.cols / kWidth;
  const std::int64_t all = p.rows * steps;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += stride) {
    const std::int64_t row = i / steps;
    const std::int64_t col = (i - row * steps) * kWidth;
    const float* gate = p.gate + row * p.gate_stride + col;
    const float* up = p.up + row * p.up_stride + col;
    Bf16* out = p.out + row * p.out_stride + col;
    if constexpr (kWidth == 4) {
      const float4 g = *reinterpret_cast<const float4*>(gate);
      const float4 u = *reinterpret_cast<const float4*>(up);
      *reinterpret_cast<uint2*>(out) = {pair_of(g.x, g.y, u.x, u.y), pair_of(g.z, g.w, u.z, u.w)};
    } else {
      *out = swiglu_exact(*gate, *up);
    }
  }
}

bool is_on(const void* data, std::int64_t stride_bytes, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         stride_bytes % bytes == 0;
}

}  // namespace

void swiglu_cuda(const SwigluArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.gate.device.index);
  const Params p{args.gate.data,    args.up.data,       args.out.data,      args.gate.stride[0],
                 args.up.stride[0], args.out.stride[0], args.gate.shape[0], args.gate.shape[1]};
  const bool wide = p.cols % 4 == 0 && is_on(p.gate, 4 * p.gate_stride, 16) &&
                    is_on(p.up, 4 * p.up_stride, 16) && is_on(p.out, 2 * p.out_stride, 8);
  const std::int64_t steps = p.rows * p.cols / (wide ? 4 : 1);
  const std::int64_t blocks = std::min<std::int64_t>((steps + kThreads - 1) / kThreads, 1 << 20);
  const auto kernel = wide ? swiglu_kernel<4> : swiglu_kernel<1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("swiglu_kernel");
}

}  // namespace lockstep::kernels
