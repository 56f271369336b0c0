#include "device/cuda/check.h"
#include "kernels/exact/halves_rows.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

constexpr int kHalvesThreads = 256;

struct KeepParams {
  PackedView<const std::uint8_t> from;
  PackedView<std::uint8_t> to;
  bool first;
};

/// A block of threads a row.
__global__ void keep_half_kernel(const __grid_constant__ KeepParams p) {
  const std::int64_t row = blockIdx.x, bytes = p.from.codes.shape[1];
  const std::uint8_t* const codes = p.from.codes.data + row * p.from.codes.stride[0];
  std::uint8_t* const to = p.to.codes.data + row * p.to.codes.stride[0];
  for (std::int64_t i = threadIdx.x; i < bytes; i += blockDim.x) {
    to[i] = (i < bytes / 2) == p.first ? codes[i] : std::uint8_t{0};
  }
  for (std::int64_t i = threadIdx.x; i < p.from.scales.shape[1]; i += blockDim.x) {
    p.to.scales.data[row * p.to.scales.stride[0] + i] =
        p.from.scales.data[row * p.from.scales.stride[0] + i];
  }
  if (threadIdx.x > 0) return;
  p.to.global.data[row * p.to.global.stride[0]] = p.from.global.data[row * p.from.global.stride[0]];
}

struct AddParams {
  const float* other;
  float* y;
  std::int64_t count;
};

__global__ void add_halves_kernel(const __grid_constant__ AddParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < p.count) p.y[i] = to_float(to_bf16(p.y[i])) + to_float(to_bf16(p.other[i]));
}

}  // namespace

void keep_half_cuda(const PackedView<const std::uint8_t>& from, bool first,
                    const PackedView<std::uint8_t>& to, Stream stream) {
  if (from.codes.shape[0] == 0) return;
  const cuda::OnDevice scope(from.codes.device.index);
  const KeepParams p = {from, to, first};
  keep_half_kernel<<<static_cast<unsigned>(from.codes.shape[0]), kHalvesThreads, 0,
                     cuda::stream_of(stream)>>>(p);
  cuda::require_launch("keep_half_kernel");
}

void add_halves_cuda(const TensorView<const float, 2>& other, const TensorView<float, 2>& y,
                     Stream stream) {
  const AddParams p = {other.data, y.data, y.shape[0] * y.shape[1]};
  if (p.count == 0) return;
  const cuda::OnDevice scope(y.device.index);
  const auto grid = static_cast<unsigned>((p.count + kHalvesThreads - 1) / kHalvesThreads);
  add_halves_kernel<<<grid, kHalvesThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("add_halves_kernel");
}

}  // namespace lockstep::kernels
