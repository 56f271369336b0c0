#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/block_sum_cuda.h"
#include "kernels/exact/weight_numbers_cuda.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct Params {
  const float* master;
  std::int64_t master_stride;
  T* other;
  std::int64_t other_stride;
  std::int64_t rows, cols;
};

__global__ void __launch_bounds__(kThreads)
    round_rows_kernel(const __grid_constant__ Params<Bf16> p, unsigned long long* bad) {
  for (std::int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    for (std::int64_t col = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; col < p.cols;
         col += std::int64_t{gridDim.x} * kThreads) {
      const Bf16 x = to_bf16(p.master[row * p.master_stride + col]);
      p.other[row * p.other_stride + col] = x;
      if (!is_finite(x)) atomicMin(bad, static_cast<unsigned long long>(row * p.cols + col));
    }
  }
}

/// Of one long row, four numbers at a time.
__global__ void __launch_bounds__(kThreads)
    round_fours_kernel(const float4* from, uint2* to, std::int64_t fours, unsigned long long* bad) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < fours; i += step) {
    const float4 x = from[i];
    const Bf16 rounded[4] = {to_bf16(x.x), to_bf16(x.y), to_bf16(x.z), to_bf16(x.w)};
    for (int k = 3; k >= 0; --k) {
      if (!is_finite(rounded[k])) atomicMin(bad, static_cast<unsigned long long>(4 * i + k));
    }
    const auto word = [](Bf16 low, Bf16 high) {
      return static_cast<std::uint32_t>(bits_of(low)) | static_cast<std::uint32_t>(bits_of(high))
                                                            << 16;
    };
    to[i] = {word(rounded[0], rounded[1]), word(rounded[2], rounded[3])};
  }
}

__global__ void __launch_bounds__(kThreads)
    copy_eights_kernel(const uint4* from, uint4* to, std::int64_t eights, std::int64_t of_row,
                       std::int32_t* bad) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < eights; i += step) {
    const uint4 x = __ldcs(from + i);
    to[i] = x;
    if (!are_finite(x)) {
      atomicMin(bad, static_cast<std::int32_t>(i / of_row));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    error_parts_kernel(const __grid_constant__ Params<const float> p, double* parts) {
  Pair mine;
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    for (std::int64_t col = threadIdx.x; col < p.cols; col += kThreads) {
      const double value = p.master[row * p.master_stride + col];
      const double difference = p.other[row * p.other_stride + col] - value;
      mine.error += difference * difference;
      mine.norm += value * value;
    }
  }
  const Pair sum = block_sum<kThreads>(mine);
  if (threadIdx.x != 0) return;
  parts[2 * blockIdx.x] = sum.error;
  parts[2 * blockIdx.x + 1] = sum.norm;
}

__global__ void __launch_bounds__(kThreads) error_sum_kernel(double* sums, int count) {
  Pair mine;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    mine.error += sums[2 + 2 * i];
    mine.norm += sums[3 + 2 * i];
  }
  const Pair sum = block_sum<kThreads>(mine);
  if (threadIdx.x != 0) return;
  sums[0] += sum.error;
  sums[1] += sum.norm;
}

}  // namespace

void round_weight_cuda(TensorView<const float, 2> master, TensorView<Bf16, 2> rounded,
                       std::uint64_t* bad, Stream stream) {
  const cuda::OnDevice scope(master.device.index);
  const auto [rows, cols] = master.shape;
  if (rows == 0 || cols == 0) return;
  const Params<Bf16> p = {master.data, master.stride[0], rounded.data, rounded.stride[0], rows,
                          cols};
  const auto lies_at = [](const auto* data) { return reinterpret_cast<std::uintptr_t>(data); };
  if (master.stride[0] == cols && rounded.stride[0] == cols && rows * cols % 4 == 0 &&
      lies_at(master.data) % 16 == 0 && lies_at(rounded.data) % 8 == 0) {
    const std::int64_t fours = rows * cols / 4;
    const auto blocks = std::min<std::int64_t>((fours + kThreads - 1) / kThreads,
                                               16ll * cuda::multiprocessors(master.device.index));
    round_fours_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, cuda::stream_of(stream)>>>(
        reinterpret_cast<const float4*>(master.data), reinterpret_cast<uint2*>(rounded.data), fours,
        reinterpret_cast<unsigned long long*>(bad));
    cuda::require_launch("round_fours_kernel");
    return;
  }
  const dim3 grid(static_cast<unsigned int>((cols + kThreads - 1) / kThreads),
                  static_cast<unsigned int>(std::min<std::int64_t>(rows, 32768)));
  round_rows_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(
      p, reinterpret_cast<unsigned long long*>(bad));
  cuda::require_launch("round_rows_kernel");
}

void copy_weight_cuda(TensorView<const Bf16, 2> from, Bf16* to, std::int32_t* bad, Stream stream) {
  const cuda::OnDevice scope(from.device.index);
  const std::int64_t eights = from.shape[0] * from.shape[1] / 8;
  const auto blocks = std::min<std::int64_t>((eights + kThreads - 1) / kThreads,
                                             16ll * cuda::multiprocessors(from.device.index));
  copy_eights_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, cuda::stream_of(stream)>>>(
      reinterpret_cast<const uint4*>(from.data), reinterpret_cast<uint4*>(to), eights,
      from.shape[1] / 8, bad);
  cuda::require_launch("copy_eights_kernel");
}

void weight_error_cuda(TensorView<const float, 2> master, TensorView<const float, 2> back,
                       double* sums, Stream stream) {
  const cuda::OnDevice scope(master.device.index);
  const auto [rows, cols] = master.shape;
  if (rows == 0 || cols == 0) return;
  const Params<const float> p = {master.data, master.stride[0], back.data, back.stride[0], rows,
                                 cols};
  const auto blocks = static_cast<int>(std::min<std::int64_t>(rows, kErrorBlocks));
  error_parts_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, cuda::stream_of(stream)>>>(
      p, sums + 2);
  cuda::require_launch("error_parts_kernel");
  error_sum_kernel<<<1, kThreads, 0, cuda::stream_of(stream)>>>(sums, blocks);
  cuda::require_launch("error_sum_kernel");
}

}  // namespace lockstep::kernels
