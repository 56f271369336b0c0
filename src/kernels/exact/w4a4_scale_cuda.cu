/// The exact product under global scales that are no powers of two. The product itself takes their
/// largest powers; what is left of them is multiplied in when it is done, as on a CPU.
#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/exact/factor.h"
#include "kernels/exact/w4a4_tile.h"
#include "numerics/exponent.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr int kScaleThreads = 256;

struct ScaleParams {
  Quantizer rule;
  const float* global;
  std::int64_t global_stride;
  float* powers;
  std::int64_t rows;
  const std::byte* weights;
  std::int64_t expert_bytes;
  std::int32_t experts;
  const std::int32_t* offsets;
  const std::int32_t* from;
  const std::int32_t* to;
  float* out;
  std::int64_t out_stride;
  std::int64_t width;

  /// What stands beside the codes may be the factor itself.
  __device__ Factor of_row(std::int64_t row) const {
    const float stored = global[row * global_stride];
    return as_factor(rule.quantizes() ? global_factor(rule, stored) : stored);
  }
};

/// Those of subnormal scales are subnormal themselves: the product rounds once, by the whole
/// exponent.
__global__ void global_powers_kernel(const __grid_constant__ ScaleParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.rows) return;
  const std::int32_t n = p.of_row(row).exponent;
  p.powers[row] = n >= -126 ? power_of_two(n) : float_of(1u << (n + 149));
}

/// A block of threads an item.
__global__ void scale_items_kernel(const __grid_constant__ ScaleParams p) {
  const std::int64_t item = blockIdx.x;
  std::int32_t expert = 0;
  if (p.offsets != nullptr) {  // the last that begins at it or before
    for (std::int32_t end = p.experts; expert + 1 < end;) {
      const std::int32_t middle = (expert + end) / 2;
      (p.offsets[middle] <= item ? expert : end) = middle;
    }
  }
  const Factor row = p.of_row(p.from != nullptr ? p.from[item] : item);
  const float less_one =
      *reinterpret_cast<const float*>(p.weights + expert * p.expert_bytes + kMantissaAt);
  const float factor = row.mantissa * (less_one + 1.0f);
  if (factor == 1.0f) return;
  float* const out = p.out + (p.to != nullptr ? p.to[item] : item) * p.out_stride;
  for (std::int64_t i = threadIdx.x; i < p.width; i += blockDim.x) out[i] *= factor;
}

ScaleParams scale_params(const W4a4Args& args) {
  ScaleParams p{};
  p.rule = args.rule;
  p.global = args.a.global.data;
  p.global_stride = args.a.global.stride[0];
  p.powers = args.room.data();
  p.rows = args.a.codes.shape[0];
  p.weights = args.w.data;
  p.expert_bytes = W4a4Weights::expert_bytes(args.w.out, args.w.cols);
  p.experts = args.w.experts;
  p.offsets = args.offsets.data;
  p.from = args.from.data;
  p.to = args.to.data;
  p.out = args.out.data;
  p.out_stride = args.out.stride[0];
  p.width = args.w.out;
  return p;
}

}  // namespace

void w4a4_scaled_cuda(const W4a4Args& args, std::int64_t items, Stream stream) {
  const cuda::OnDevice scope(args.w.device.index);
  const ScaleParams p = scale_params(args);
  const auto grid = static_cast<unsigned>((p.rows + kScaleThreads - 1) / kScaleThreads);
  global_powers_kernel<<<grid, kScaleThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("global_powers_kernel");
  W4a4Args powers = args;
  powers.a.global = {p.powers, {p.rows}, {1}, args.w.device};
  w4a4_cuda(powers, items, stream);
  const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>(p.width, 32, kScaleThreads));
  scale_items_kernel<<<static_cast<unsigned>(items), threads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("scale_items_kernel");
}

}  // namespace lockstep::kernels
