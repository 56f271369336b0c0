/// The dense second pass on a CUDA device, an element a thread: its operand, and the sum of both.
#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/exact/code_value_cuda.h"
#include "kernels/exact/residual_row.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

constexpr unsigned int kThreads = 256;

struct RestParams {
  CodeSource q;
  const Bf16* x;
  std::int64_t x_stride;
  float* rest;
  std::int64_t rest_stride;
  std::uint32_t cols;
  std::uint32_t first = 0;  // of blocks along a row: those before it are other launches'
};

/// Blocks: x over rows, y along them.
__global__ void __launch_bounds__(kThreads)
    residual_rest_kernel(const __grid_constant__ RestParams p) {
  const std::uint32_t row = blockIdx.x, col = (p.first + blockIdx.y) * kThreads + threadIdx.x;
  if (col >= p.cols) return;
  p.rest[row * p.rest_stride + col] =
      to_float(p.x[row * p.x_stride + col]) - value_at(p.q, row, col);
}

struct SumParams {
  CodeSource q, rest;
  float alpha;
  Bf16* out;
  std::int64_t out_stride;
  std::uint32_t cols;
  std::uint32_t first = 0;  // of blocks along a row: those before it are other launches'
};

__global__ void __launch_bounds__(kThreads)
    residual_sum_kernel(const __grid_constant__ SumParams p) {
  const std::uint32_t row = blockIdx.x, col = (p.first + blockIdx.y) * kThreads + threadIdx.x;
  if (col >= p.cols) return;
  p.out[row * p.out_stride + col] =
      to_bf16(value_at(p.q, row, col) + p.alpha * value_at(p.rest, row, col));
}

__global__ void __launch_bounds__(kThreads)
    add_product_kernel(const float* x, float alpha, float* y, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) y[i] += alpha * x[i];
}

/// In as many launches as a grid's second dimension makes necessary.
template <typename Params>
void launch(const char* name, void (*kernel)(Params), Params p, std::int64_t rows, Stream stream) {
  constexpr std::uint32_t kMostAcross = 65535;
  const std::uint32_t across = (p.cols + kThreads - 1) / kThreads;
  for (p.first = 0; p.first < across; p.first += kMostAcross) {
    const dim3 grid(static_cast<unsigned int>(rows), std::min(kMostAcross, across - p.first));
    kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(p);
    cuda::require_launch(name);
  }
}

}  // namespace

void residual_rest_cuda(TensorView<const Bf16, 2> x, const Quantizer& rule,
                        const PackedView<const std::uint8_t>& q, TensorView<float, 2> rest,
                        Stream stream) {
  const cuda::OnDevice scope(x.device.index);
  const auto [rows, cols] = x.shape;
  const RestParams p{.q = code_source(q, rule, 0),
                     .x = x.data,
                     .x_stride = x.stride[0],
                     .rest = rest.data,
                     .rest_stride = rest.stride[0],
                     .cols = static_cast<std::uint32_t>(cols)};
  launch("residual_rest_kernel", residual_rest_kernel, p, rows, stream);
}

void add_residual_cuda(const PackedView<const std::uint8_t>& q,
                       const PackedView<const std::uint8_t>& rest, const Quantizer& rule,
                       float alpha, TensorView<Bf16, 2> out, Stream stream) {
  const cuda::OnDevice scope(out.device.index);
  const auto [rows, cols] = out.shape;
  const SumParams p{.q = code_source(q, rule, 0),
                    .rest = code_source(rest, rule, 0),
                    .alpha = alpha,
                    .out = out.data,
                    .out_stride = out.stride[0],
                    .cols = static_cast<std::uint32_t>(cols)};
  launch("residual_sum_kernel", residual_sum_kernel, p, rows, stream);
}

void add_product_cuda(TensorView<const float, 2> x, float alpha, TensorView<float, 2> y,
                      Stream stream) {
  const std::int64_t count = y.shape[0] * y.shape[1];
  if (count == 0) return;
  const cuda::OnDevice scope(y.device.index);
  const auto blocks = static_cast<unsigned int>((count + kThreads - 1) / kThreads);
  add_product_kernel<<<blocks, kThreads, 0, cuda::stream_of(stream)>>>(x.data, alpha, y.data,
                                                                       count);
  cuda::require_launch("add_product_kernel");
}

}  // namespace lockstep::kernels
