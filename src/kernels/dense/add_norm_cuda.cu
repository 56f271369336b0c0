#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "kernels/dense/add_norm_rows.h"
#include "kernels/dense/elementwise_rows.h"
#include "kernels/dense/row_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostCols = 12 << 10;  // of two rows in shared memory

struct AddNormParams {
  const Bf16* x;
  const float* outputs;  // or null
  const float* gates;
  Bf16* h;
  Bf16* y;
  const Bf16* weight;  // or null
  std::int32_t* bad;
  std::int32_t* bad_y;  // or null
  const std::uint64_t* streams;
  const std::int32_t* positions;
  std::uint64_t seed;
  std::int64_t x_stride;
  std::int64_t outputs_stride;
  std::int64_t gates_stride;
  std::int64_t h_stride;
  std::int64_t y_stride;
  std::int32_t cols;
  std::int32_t slots;
  std::uint32_t site;
  float sigma;
  float eps;
};

__device__ std::uint32_t& pair_at(Bf16* row, int i) {
  return *reinterpret_cast<std::uint32_t*>(row + i);
}
__device__ std::uint32_t pair_at(const Bf16* row, int i) {
  return *reinterpret_cast<const std::uint32_t*>(row + i);
}

/// sum_of_squares() of a row in shared memory, for all threads of the block. Ends with all of them
/// at one place.
__device__ float squares_of(const Bf16* row, int cols, float& shared) {
  if (threadIdx.x < 32) {
    const float squares = warp_sum_of_squares(row, cols);
    if (threadIdx.x == 0) shared = squares;
  }
  __syncthreads();
  return shared;
}

/// What drift_noise() makes of elements i and i + 1.
__device__ std::uint32_t drifted(std::uint32_t pair, int i, float rms, float sigma,
                                 std::uint64_t seed, const PhiloxWords& counter) {
  const PhiloxWords words = philox(
      seed, {counter[0], counter[1], counter[2], counter[3] + static_cast<std::uint32_t>(i / 2)});
  float e1 = 0.0f;
  float e2 = 0.0f;
  gaussians(words[0], words[1], e1, e2);
  const float even = low_of(pair) + sigma * (rms * e1 + low_of(pair) * e2);
  gaussians(words[2], words[3], e1, e2);
  return to_bf16_pair(even, high_of(pair) + sigma * (rms * e1 + high_of(pair) * e2));
}

/// A block a row, a thread a pair of elements.
template <bool kDrifts>
__global__ void __launch_bounds__(kThreads)
    add_norm_kernel(const __grid_constant__ AddNormParams p) {
  cuda::take_turn();
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float squares_of_x, squares_of_h;
  Bf16* const own_h = reinterpret_cast<Bf16*>(shared);
  Bf16* const own_x = own_h + p.cols;
  const Bf16* const x = p.x + blockIdx.x * p.x_stride;
  Bf16* const h = p.h + blockIdx.x * p.h_stride;
  const int first = 2 * static_cast<int>(threadIdx.x);
  const int step = 2 * static_cast<int>(blockDim.x);
  float rms = 0.0f;
  PhiloxWords counter{};
  if constexpr (kDrifts) {
    for (int i = first; i < p.cols; i += step) pair_at(own_x, i) = pair_at(x, i);
    counter = philox_counter(p.streams[blockIdx.x],
                             static_cast<std::uint32_t>(p.positions[blockIdx.x]), p.site << 16);
    __syncthreads();
    rms =
        __fsqrt_rn(__fdiv_rn(squares_of(own_x, p.cols, squares_of_x), static_cast<float>(p.cols)));
  }
  bool bad = false;
  const float sigma = p.sigma * 0.707106781f;
  for (int i = first; i < p.cols; i += step) {
    std::uint32_t pair = kDrifts ? pair_at(own_x, i) : pair_at(x, i);
    if constexpr (kDrifts) pair = drifted(pair, i, rms, sigma, p.seed, counter);
    const std::uint32_t old = pair_at(h, i);
    const std::uint32_t sum =
        to_bf16_pair(__fadd_rn(low_of(old), low_of(pair)), __fadd_rn(high_of(old), high_of(pair)));
    pair_at(h, i) = sum;
    pair_at(own_h, i) = sum;
    bad |= (sum & 0x7F800000u) == 0x7F800000u || (sum & 0x7F80u) == 0x7F80u;
  }
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0) {
    atomicMin(p.bad, static_cast<std::int32_t>(blockIdx.x));
  }
  if (p.weight == nullptr) return;
  const float inverse =
      inverse_rms(squares_of(own_h, p.cols, squares_of_h), static_cast<float>(p.cols), p.eps);
  Bf16* const y = p.y + blockIdx.x * p.y_stride;
  bool bad_y = false;
  for (int i = first; i < p.cols; i += step) {
    const std::uint32_t value = pair_at(own_h, i), weight = pair_at(p.weight, i);
    const std::uint32_t normal =
        to_bf16_pair(__fmul_rn(low_of(value), inverse), __fmul_rn(high_of(value), inverse));
    const std::uint32_t out = to_bf16_pair(__fmul_rn(low_of(normal), low_of(weight)),
                                           __fmul_rn(high_of(normal), high_of(weight)));
    pair_at(y, i) = out;
    bad_y |= (out & 0x7F800000u) == 0x7F800000u || (out & 0x7F80u) == 0x7F80u;
  }
  if (p.bad_y == nullptr) return;
  if (__syncthreads_or(bad_y) != 0 && threadIdx.x == 0) {
    atomicMin(p.bad_y, static_cast<std::int32_t>(blockIdx.x));
  }
}

__device__ std::uint32_t sum_of(std::uint32_t a, std::uint32_t b) {
  return to_bf16_pair(__fadd_rn(low_of(a), low_of(b)), __fadd_rn(high_of(a), high_of(b)));
}
__device__ std::uint32_t norm_of(std::uint32_t value, float inverse, std::uint32_t weight) {
  const std::uint32_t normal =
      to_bf16_pair(__fmul_rn(low_of(value), inverse), __fmul_rn(high_of(value), inverse));
  return to_bf16_pair(__fmul_rn(low_of(normal), low_of(weight)),
                      __fmul_rn(high_of(normal), high_of(weight)));
}
__device__ uint4& eight_at(Bf16* row, int i) { return *reinterpret_cast<uint4*>(row + i); }
__device__ const uint4& eight_at(const Bf16* row, int i) {
  return *reinterpret_cast<const uint4*>(row + i);
}

/// The same without drift, a thread eight elements, so that most rows are one trip to memory. With
/// kSums, x is what a row's slots come to.
template <bool kSums>
__global__ void __launch_bounds__(kThreads)
    add_norm_wide_kernel(const __grid_constant__ AddNormParams p) {
  cuda::take_turn();
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float squares;
  Bf16* const own = reinterpret_cast<Bf16*>(shared);
  const Bf16* const x = p.x + blockIdx.x * p.x_stride;
  Bf16* const h = p.h + blockIdx.x * p.h_stride;
  const int first = 8 * static_cast<int>(threadIdx.x);
  const int step = 8 * static_cast<int>(blockDim.x);
  const std::int64_t row = blockIdx.x;
  uint4 weight{};  // of the thread's last eight
  bool bad = false;
  for (int i = first; i < p.cols; i += step) {
    if (p.weight != nullptr) weight = eight_at(p.weight, i);
    const uint4 a = eight_at(h, i);
    uint4 b{};
    if constexpr (kSums) {
      float slots[8];
      sum_slots(p.outputs + row * p.slots * p.outputs_stride + i, p.outputs_stride,
                p.gates + row * p.gates_stride, p.slots, slots);
      b = {to_bf16_pair(slots[0], slots[1]), to_bf16_pair(slots[2], slots[3]),
           to_bf16_pair(slots[4], slots[5]), to_bf16_pair(slots[6], slots[7])};
    } else {
      b = eight_at(x, i);
    }
    const uint4 sum = {sum_of(a.x, b.x), sum_of(a.y, b.y), sum_of(a.z, b.z), sum_of(a.w, b.w)};
    eight_at(h, i) = sum;
    eight_at(own, i) = sum;
    bad |= !are_finite(sum);
  }
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0) {
    atomicMin(p.bad, static_cast<std::int32_t>(row));
  }
  if (p.weight == nullptr) return;
  const float inverse =
      inverse_rms(squares_of(own, p.cols, squares), static_cast<float>(p.cols), p.eps);
  Bf16* const y = p.y + blockIdx.x * p.y_stride;
  bad = false;
  for (int i = first; i < p.cols; i += step) {
    const uint4 value = eight_at(own, i);
    if (p.cols > step) weight = eight_at(p.weight, i);
    const uint4 out = {norm_of(value.x, inverse, weight.x), norm_of(value.y, inverse, weight.y),
                       norm_of(value.z, inverse, weight.z), norm_of(value.w, inverse, weight.w)};
    eight_at(y, i) = out;
    bad |= !are_finite(out);
  }
  if (p.bad_y == nullptr) return;
  if (__syncthreads_or(bad) != 0 && threadIdx.x == 0) {
    atomicMin(p.bad_y, static_cast<std::int32_t>(row));
  }
}

bool is_wide(const AddNormParams& p) {
  const auto at = reinterpret_cast<std::uintptr_t>(p.x) | reinterpret_cast<std::uintptr_t>(p.h) |
                  reinterpret_cast<std::uintptr_t>(p.y) |
                  reinterpret_cast<std::uintptr_t>(p.weight);
  return at % 16 == 0 && (p.x_stride | p.h_stride | p.y_stride | p.cols) % 8 == 0;
}

bool at_words(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 4 == 0 && stride % 2 == 0;
}

}  // namespace

bool add_norm_cuda(const AddNormArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0], cols = args.x.shape[1];
  const bool drifts = args.sigma != 0.0f, norms = !args.weight.empty();
  if (cols % 2 != 0 || cols > kMostCols || !at_words(args.x.data, args.x.stride[0]) ||
      !at_words(args.h.data, args.h.stride[0]) || args.site >= 1u << 16 ||
      (norms && !(at_words(args.y.data, args.y.stride[0]) && at_words(args.weight.data(), 0)))) {
    return false;
  }
  if (drifts && (std::ssize(args.streams) != rows || std::ssize(args.positions) != rows)) {
    throw Error(cat({"add_norm: ", args.streams.size(), " streams and ", args.positions.size(),
                     " positions for ", rows, " rows"}));
  }
  if (rows == 0 || cols == 0) return true;
  const cuda::OnDevice scope(args.x.device.index);
  const AddNormParams params{.x = args.x.data,
                             .outputs = args.outputs.data,
                             .gates = args.gates.data,
                             .h = args.h.data,
                             .y = args.y.data,
                             .weight = norms ? args.weight.data() : nullptr,
                             .bad = args.bad,
                             .bad_y = args.bad_y,
                             .streams = args.streams.data(),
                             .positions = args.positions.data(),
                             .seed = args.seed,
                             .x_stride = args.x.stride[0],
                             .outputs_stride = args.outputs.stride[0],
                             .gates_stride = args.gates.stride[0],
                             .h_stride = args.h.stride[0],
                             .y_stride = args.y.stride[0],
                             .cols = static_cast<std::int32_t>(cols),
                             .slots = static_cast<std::int32_t>(args.gates.shape[1]),
                             .site = args.site,
                             .sigma = args.sigma,
                             .eps = args.eps};
  const bool wide = !drifts && is_wide(params);
  const bool sums = params.outputs != nullptr && wide && rows > kSlotSumRows &&
                    reinterpret_cast<std::uintptr_t>(params.outputs) % 16 == 0 &&
                    params.outputs_stride % 4 == 0;
  if (params.outputs != nullptr && !sums) {
    combine({.y = args.outputs, .gates = args.gates, .out = args.x}, stream);
  }
  const auto kernel = sums     ? add_norm_wide_kernel<true>
                      : wide   ? add_norm_wide_kernel<false>
                      : drifts ? add_norm_kernel<true>
                               : add_norm_kernel<false>;
  const std::int64_t most = (cols / (wide ? 8 : 2) + 31) / 32 * 32;
  const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>(most, 32, kThreads));
  const auto bytes = static_cast<std::size_t>((drifts ? 2 : 1) * cols) * sizeof(Bf16);
  cuda::allow_shared(kernel, bytes);
  cuda::lay_out_for_shared(kernel);
  cuda::launch_beside("add_norm_kernel", kernel, dim3(static_cast<unsigned>(rows)), dim3(threads),
                      bytes, stream, params);
  return true;
}

}  // namespace lockstep::kernels
