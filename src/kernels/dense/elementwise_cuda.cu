#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/dense/elementwise_rows.h"
#include "kernels/dense/row_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostCols = 1 << 15;  // where a row is kept in shared memory

/// Rows of one or two matrices, seen as words of 1 or 16 bytes' worth of elements.
struct RowParams {
  const Bf16* x;
  Bf16* h;  // of residual_add, or null
  std::int32_t* bad;
  std::int64_t x_stride;
  std::int64_t h_stride;
  std::int32_t cols;
};

__device__ std::uint32_t sum_of_pairs(std::uint32_t a, std::uint32_t b) {
  return to_bf16_pair(__fadd_rn(low_of(a), low_of(b)), __fadd_rn(high_of(a), high_of(b)));
}

/// A block a row: is it finite, after x is added to h where there is an h?
template <bool kWide>
__global__ void __launch_bounds__(kThreads) add_rows_kernel(const __grid_constant__ RowParams p) {
  cuda::take_turn();
  const std::int64_t row = blockIdx.x;
  const Bf16* const x = p.x + row * p.x_stride;
  Bf16* const h = p.h == nullptr ? nullptr : p.h + row * p.h_stride;
  constexpr int kWidth = kWide ? 8 : 1;
  bool bad = false;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < p.cols; i += kThreads * kWidth) {
    if constexpr (kWide) {
      uint4 value = *reinterpret_cast<const uint4*>(x + i);
      if (h != nullptr) {
        const uint4 old = *reinterpret_cast<const uint4*>(h + i);
        value = make_uint4(sum_of_pairs(old.x, value.x), sum_of_pairs(old.y, value.y),
                           sum_of_pairs(old.z, value.z), sum_of_pairs(old.w, value.w));
        *reinterpret_cast<uint4*>(h + i) = value;
      }
      bad |= !are_finite(value);
    } else {
      Bf16 value = x[i];
      if (h != nullptr) {
        value = to_bf16(__fadd_rn(to_float(h[i]), to_float(value)));
        h[i] = value;
      }
      bad |= !is_finite(value);
    }
  }
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0) {
    atomicMin(p.bad, static_cast<std::int32_t>(row));
  }
}

bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

void launch_rows(const RowParams& params, std::int64_t rows, Device device, Stream stream) {
  if (rows == 0) return;
  const cuda::OnDevice scope(device.index);
  const bool wide = params.cols % 8 == 0 && params.x_stride % 8 == 0 && params.h_stride % 8 == 0 &&
                    aligned(params.x) && aligned(params.h);
  const auto kernel = wide ? add_rows_kernel<true> : add_rows_kernel<false>;
  cuda::launch_beside("add_rows_kernel", kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads),
                      0, stream, params);
}

struct CombineParams {
  const float* y;
  const float* gates;
  Bf16* out;
  std::int64_t y_stride;
  std::int64_t gates_stride;
  std::int64_t out_stride;
  std::int32_t slots;
  std::int32_t cols;
};

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CombineParams p) {
  cuda::take_turn();
  const std::int64_t row = blockIdx.y;
  const int column = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (column >= p.cols) return;
  const float* const gates = p.gates + row * p.gates_stride;
  const float* const y = p.y + row * p.slots * p.y_stride + column;
  float sum[1];
  sum_slots(y, p.y_stride, gates, p.slots, sum);
  p.out[row * p.out_stride + column] = to_bf16(sum[0]);
}

/// The same of many rows: a thread has four columns, its slots' numbers on their way together.
__global__ void __launch_bounds__(kThreads)
    combine_fours_kernel(const __grid_constant__ CombineParams p, std::uint32_t count) {
  cuda::take_turn();
  const auto fours = static_cast<std::uint32_t>(p.cols) / 4;
  for (std::uint32_t at = blockIdx.x * kThreads + threadIdx.x; at < count;
       at += gridDim.x * kThreads) {
    const std::int64_t row = at / fours;
    const auto column = 4 * static_cast<std::int64_t>(at % fours);
    const float* const gates = p.gates + row * p.gates_stride;
    const float* const y = p.y + row * p.slots * p.y_stride + column;
    float sum[4];
    sum_slots(y, p.y_stride, gates, p.slots, sum);
    const auto pair = [](float low, float high) {
      return static_cast<std::uint32_t>(bits_of(to_bf16(low))) |
             static_cast<std::uint32_t>(bits_of(to_bf16(high))) << 16;
    };
    *reinterpret_cast<uint2*>(p.out + row * p.out_stride + column) = {pair(sum[0], sum[1]),
                                                                      pair(sum[2], sum[3])};
  }
}

struct GatherParams {
  const std::uint8_t* from;
  const std::int32_t* index;
  std::uint8_t* to;
  std::int64_t from_stride;
  std::int64_t to_stride;
  std::int64_t rows;
  std::int32_t cols;
};

template <typename Word>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
  constexpr int kWidth = sizeof(Word);
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const std::uint8_t* const from = p.from + p.index[row] * p.from_stride;
  std::uint8_t* const to = p.to + row * p.to_stride;
  const int step = static_cast<int>(blockDim.x) * kWidth;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < p.cols; i += step) {
    *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
  }
}

constexpr int kGathered = 4;  // rows of a thread

/// The same of many rows that one pass of the threads covers.
__global__ void __launch_bounds__(kThreads)
    gather_fours_kernel(const __grid_constant__ GatherParams p) {
  const int i = 16 * static_cast<int>(threadIdx.x);
  const std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y * kGathered + threadIdx.y;
  if (i >= p.cols) return;
  std::int32_t index[kGathered];
#pragma unroll
  for (int k = 0; k < kGathered; ++k) {
    const std::int64_t row = first + k * static_cast<int>(blockDim.y);
    index[k] = row < p.rows ? p.index[row] : -1;
  }
  uint4 words[kGathered];
#pragma unroll
  for (int k = 0; k < kGathered; ++k) {
    if (index[k] < 0) continue;
    words[k] = *reinterpret_cast<const uint4*>(p.from + index[k] * p.from_stride + i);
  }
#pragma unroll
  for (int k = 0; k < kGathered; ++k) {
    if (index[k] < 0) continue;
    const std::int64_t row = first + k * static_cast<int>(blockDim.y);
    *reinterpret_cast<uint4*>(p.to + row * p.to_stride + i) = words[k];
  }
}

struct Gather {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::int64_t from_stride;
  std::int64_t to_stride;
  std::int32_t cols;
};

struct GatherAllParams {
  Gather all[kMostGathers];
  const std::int32_t* index;
  std::int64_t rows;
};

/// Blocks of one y have one gather. Words that the rows of all of them consist of.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    gather_all_kernel(const __grid_constant__ GatherAllParams p) {
  constexpr int kWidth = sizeof(Word);
  cuda::take_turn();
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const Gather& g = p.all[blockIdx.y];
  const std::uint8_t* const from = g.from + p.index[row] * g.from_stride;
  std::uint8_t* const to = g.to + row * g.to_stride;
  const int step = static_cast<int>(blockDim.x) * kWidth;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < g.cols; i += step) {
    *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
  }
}

struct FloatParams {
  const float* x;
  std::int32_t* bad;
  std::int64_t stride;
  std::int32_t cols;
};

/// Blocks of a row that follow each other in y look at parts of it.
__global__ void __launch_bounds__(kThreads) look_kernel(const __grid_constant__ FloatParams p) {
  cuda::take_turn();
  const float* const x = p.x + std::int64_t{blockIdx.x} * p.stride;
  bool bad = false;
  for (int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x); i < p.cols;
       i += static_cast<int>(gridDim.y) * kThreads) {
    bad |= (float_bits(x[i]) & 0x7F800000u) == 0x7F800000u;
  }
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0) {
    atomicMin(p.bad, static_cast<std::int32_t>(blockIdx.x));
  }
}

struct NoiseParams {
  Bf16* x;
  const std::uint64_t* streams;
  const std::int32_t* positions;
  std::uint64_t seed;
  std::int64_t stride;
  std::int32_t cols;
  std::uint32_t site;
  float sigma;
};

/// A block a row, a thread a pair of elements and the words of one counter.
__global__ void __launch_bounds__(kThreads) noise_kernel(const __grid_constant__ NoiseParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  Bf16* const row = reinterpret_cast<Bf16*>(shared);
  __shared__ float rms;
  Bf16* const x = p.x + blockIdx.x * p.stride;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.cols; i += kThreads) row[i] = x[i];
  __syncthreads();
  if (thread < 32) {
    const float squares = warp_sum_of_squares(row, p.cols);
    if (thread == 0) rms = __fsqrt_rn(__fdiv_rn(squares, static_cast<float>(p.cols)));
  }
  __syncthreads();
  const float sigma = p.sigma * 0.707106781f;
  const PhiloxWords counter = philox_counter(
      p.streams[blockIdx.x], static_cast<std::uint32_t>(p.positions[blockIdx.x]), p.site << 16);
  for (int i = 2 * thread; i < p.cols; i += 2 * kThreads) {
    const PhiloxWords words = philox(p.seed, {counter[0], counter[1], counter[2],
                                              counter[3] + static_cast<std::uint32_t>(i / 2)});
    float e1 = 0.0f;
    float e2 = 0.0f;
    gaussians(words[0], words[1], e1, e2);
    const float even = to_float(row[i]);
    x[i] = to_bf16(even + sigma * (rms * e1 + even * e2));
    if (i + 1 == p.cols) break;
    gaussians(words[2], words[3], e1, e2);
    const float odd = to_float(row[i + 1]);
    x[i + 1] = to_bf16(odd + sigma * (rms * e1 + odd * e2));
  }
}

}  // namespace

void residual_add_cuda(TensorView<const Bf16, 2> x, TensorView<Bf16, 2> h, std::int32_t* bad,
                       Stream stream) {
  launch_rows(
      {x.data, h.data, bad, x.stride[0], h.stride[0], static_cast<std::int32_t>(x.shape[1])},
      x.shape[0], x.device, stream);
}

void first_nonfinite_cuda(TensorView<const Bf16, 2> x, std::int32_t* bad, Stream stream) {
  launch_rows({x.data, nullptr, bad, x.stride[0], 0, static_cast<std::int32_t>(x.shape[1])},
              x.shape[0], x.device, stream);
}

void first_nonfinite_cuda(TensorView<const float, 2> x, std::int32_t* bad, Stream stream) {
  if (x.shape[0] == 0 || x.shape[1] == 0) return;
  const cuda::OnDevice scope(x.device.index);
  const FloatParams params{x.data, bad, x.stride[0], static_cast<std::int32_t>(x.shape[1])};
  const auto parts =
      static_cast<unsigned>(std::min<std::int64_t>((x.shape[1] + 16383) / 16384, 64));
  cuda::launch_beside("look_kernel", look_kernel, dim3(static_cast<unsigned>(x.shape[0]), parts),
                      dim3(kThreads), 0, stream, params);
}

void combine_cuda(const CombineArgs& args, Stream stream) {
  const std::int64_t rows = args.gates.shape[0];
  const std::int64_t cols = args.out.shape[1];
  const cuda::OnDevice scope(args.out.device.index);
  CombineParams params{args.y.data,
                       args.gates.data,
                       args.out.data,
                       args.y.stride[0],
                       args.gates.stride[0],
                       args.out.stride[0],
                       static_cast<std::int32_t>(args.gates.shape[1]),
                       static_cast<std::int32_t>(cols)};
  const auto lies_at = [](const auto* data) { return reinterpret_cast<std::uintptr_t>(data); };
  const auto all_blocks = 16ll * cuda::multiprocessors(args.out.device.index);
  if (rows * cols / 4 >= all_blocks * kThreads && rows * cols < 1ll << 32 && cols % 4 == 0 &&
      params.y_stride % 4 == 0 && params.out_stride % 4 == 0 && lies_at(params.y) % 16 == 0 &&
      lies_at(params.out) % 8 == 0) {
    cuda::launch_beside("combine_fours_kernel", combine_fours_kernel,
                        dim3(static_cast<unsigned>(all_blocks)), dim3(kThreads), 0, stream, params,
                        static_cast<std::uint32_t>(rows * cols / 4));
    return;
  }
  constexpr std::int64_t kMostRows = 65535;  // of a grid's second dimension
  for (std::int64_t first = 0; cols > 0 && first < rows; first += kMostRows) {
    const std::int64_t count = std::min(kMostRows, rows - first);
    const dim3 grid(static_cast<unsigned>((cols + kThreads - 1) / kThreads),
                    static_cast<unsigned>(count));
    cuda::launch_beside("combine_kernel", combine_kernel, grid, dim3(kThreads), 0, stream, params);
    params.y += count * params.slots * params.y_stride;
    params.gates += count * params.gates_stride;
    params.out += count * params.out_stride;
  }
}

void gather_rows_cuda(TensorView<const std::uint8_t, 2> from, std::span<const std::int32_t> index,
                      TensorView<std::uint8_t, 2> to, Stream stream) {
  if (index.empty() || from.shape[1] == 0) return;
  const cuda::OnDevice scope(from.device.index);
  const GatherParams params{from.data,
                            index.data(),
                            to.data,
                            from.stride[0],
                            to.stride[0],
                            std::ssize(index),
                            static_cast<std::int32_t>(from.shape[1])};
  const std::uintptr_t at =
      reinterpret_cast<std::uintptr_t>(from.data) | reinterpret_cast<std::uintptr_t>(to.data) |
      static_cast<std::uintptr_t>(from.stride[0] | to.stride[0] | params.cols);
  const auto kernel = at % 16 == 0  ? gather_kernel<uint4>
                      : at % 2 == 0 ? gather_kernel<std::uint16_t>
                                    : gather_kernel<std::uint8_t>;
  const int words = params.cols / (at % 16 == 0 ? 16 : at % 2 == 0 ? 2 : 1);
  unsigned across = kThreads;  // threads of a row; the others have further rows
  while (across > 8 && static_cast<int>(across) / 2 >= words) across /= 2;
  const unsigned down = kThreads / across;
  if (at % 16 == 0 && static_cast<unsigned>(words) <= across &&
      std::ssize(index) >= 64ll * cuda::multiprocessors(from.device.index)) {
    const std::size_t of_block = down * kGathered;
    gather_fours_kernel<<<static_cast<unsigned>((index.size() + of_block - 1) / of_block),
                          dim3(across, down), 0, cuda::stream_of(stream)>>>(params);
    cuda::require_launch("gather_fours_kernel");
    return;
  }
  const auto blocks = static_cast<unsigned>((index.size() + down - 1) / down);
  kernel<<<blocks, dim3(across, down), 0, cuda::stream_of(stream)>>>(params);
  cuda::require_launch("gather_kernel");
}

void gather_all_cuda(std::span<const GatherArgs> all, std::span<const std::int32_t> index,
                     Stream stream) {
  GatherAllParams params{};
  params.index = index.data();
  params.rows = std::ssize(index);
  std::uintptr_t at = 0;
  std::int32_t most = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& [from, to] = all[i];
    const auto cols = static_cast<std::int32_t>(from.shape[1]);
    params.all[i] = {from.data, to.data, from.stride[0], to.stride[0], cols};
    at |= reinterpret_cast<std::uintptr_t>(from.data) | reinterpret_cast<std::uintptr_t>(to.data) |
          static_cast<std::uintptr_t>(from.stride[0] | to.stride[0] | cols);
    most = std::max(most, cols);
  }
  if (params.rows == 0 || most == 0) return;
  const cuda::OnDevice scope(all[0].from.device.index);
  const auto kernel = at % 16 == 0  ? gather_all_kernel<uint4>
                      : at % 4 == 0 ? gather_all_kernel<std::uint32_t>
                      : at % 2 == 0 ? gather_all_kernel<std::uint16_t>
                                    : gather_all_kernel<std::uint8_t>;
  const int words = most / (at % 16 == 0 ? 16 : at % 4 == 0 ? 4 : at % 2 == 0 ? 2 : 1);
  unsigned across = kThreads;  // threads of a row; the others have further rows
  while (across > 8 && static_cast<int>(across) / 2 >= words) across /= 2;
  const unsigned down = kThreads / across;
  const dim3 grid(static_cast<unsigned>((index.size() + down - 1) / down),
                  static_cast<unsigned>(all.size()));
  cuda::launch_beside("gather_all_kernel", kernel, grid, dim3(across, down), 0, stream, params);
}

void drift_noise_cuda(const DriftNoiseArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  if (rows == 0 || cols == 0) return;
  if (cols > kMostCols) {
    throw Error(
        cat({"drift_noise: rows of ", cols, " elements on a CUDA device; at most ", kMostCols}));
  }
  const cuda::OnDevice scope(args.x.device.index);
  const NoiseParams params{args.x.data, args.streams.data(), args.positions.data(),
                           args.seed,   args.x.stride[0],    static_cast<std::int32_t>(cols),
                           args.site,   args.sigma};
  const auto bytes = static_cast<std::size_t>(cols) * sizeof(Bf16);
  cuda::allow_shared(noise_kernel, bytes);
  noise_kernel<<<static_cast<unsigned>(rows), kThreads, bytes, cuda::stream_of(stream)>>>(params);
  cuda::require_launch("noise_kernel");
}

}  // namespace lockstep::kernels
