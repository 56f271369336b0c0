#include <algorithm>
#include <limits>
#include <vector>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/memory.h"
#include "train/arrays.h"

namespace lockstep::train::cuda {
namespace {

using lockstep::cuda::OnDevice;
using lockstep::cuda::require_launch;
using lockstep::cuda::stream_of;

constexpr int kThreads = 256;
constexpr std::int64_t kChunk = 1 << 14;  // numbers of a block's sum
constexpr unsigned long long kNowhere = std::numeric_limits<unsigned long long>::max();

/// Blocks for a loop with a stride, a number a thread.
unsigned blocks_for(std::int64_t count, Device device) {
  const std::int64_t most = std::int64_t{lockstep::cuda::multiprocessors(device.index)} * 16;
  return static_cast<unsigned>(
      std::clamp<std::int64_t>((count + kThreads - 1) / kThreads, 1, most));
}

__device__ std::int64_t first_of_thread() {
  return std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
}
__device__ std::int64_t step_of_grid() { return std::int64_t{gridDim.x} * kThreads; }

__global__ void __launch_bounds__(kThreads)
    nonfinite_kernel(const float* numbers, std::int64_t count, unsigned long long* first) {
  const auto look = [&](float x, std::int64_t i) {
    if (!is_finite(to_bf16(x))) atomicMin(first, static_cast<unsigned long long>(i));
  };
  const std::int64_t fours = count / 4;
  for (std::int64_t i = first_of_thread(); i < fours; i += step_of_grid()) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(numbers) + i);
    look(x.x, 4 * i);
    look(x.y, 4 * i + 1);
    look(x.z, 4 * i + 2);
    look(x.w, 4 * i + 3);
  }
  for (std::int64_t i = 4 * fours + first_of_thread(); i < count; i += step_of_grid()) {
    look(numbers[i], i);
  }
}

/// A block a chunk: every thread sums in ascending order, then halves are added.
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const float* numbers, std::int64_t count, double* parts) {
  __shared__ double sums[kThreads];
  const std::int64_t begin = blockIdx.x * kChunk;
  const std::int64_t end = min(begin + kChunk, count);
  double sum = 0.0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double x = numbers[i];
    sum += x * x;
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) parts[blockIdx.x] = sums[0];
}

__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* from, Bf16* to, std::int64_t count) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 &&
                       reinterpret_cast<std::uintptr_t>(to) % 8 == 0;
  const std::int64_t fours = aligned ? count / 4 : 0;
  for (std::int64_t i = first_of_thread(); i < fours; i += step_of_grid()) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(from) + i);
    const auto pair = [](float low, float high) {
      return bits_of(to_bf16(low)) | std::uint32_t{bits_of(to_bf16(high))} << 16;
    };
    reinterpret_cast<uint2*>(to)[i] = {pair(x.x, x.y), pair(x.z, x.w)};
  }
  for (std::int64_t i = 4 * fours + first_of_thread(); i < count; i += step_of_grid()) {
    to[i] = to_bf16(from[i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    widen_kernel(const Bf16* from, float* to, std::int64_t count) {
  for (std::int64_t i = first_of_thread(); i < count; i += step_of_grid()) {
    to[i] = to_float(from[i]);
  }
}

__device__ void adamw_step(const AdamW& p, float grad, float& weight, float& m, float& v) {
  const float g = grad * p.clip;
  m = p.beta1 * m + p.rest1 * g;
  v = p.beta2 * v + p.rest2 * g * g;
  weight = weight * p.keep - p.rate * m / (sqrtf(v) * p.root + p.eps);
}

/// Four numbers a thread at a time, which lie together; arrays are aligned to 64 bytes.
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamW p) {
  const auto four = [](auto* x, std::int64_t i) { return reinterpret_cast<float4*>(x) + i; };
  const std::int64_t fours = p.count / 4;
  for (std::int64_t i = first_of_thread(); i < fours; i += step_of_grid()) {
    const float4 g = __ldcs(reinterpret_cast<const float4*>(p.grads) + i);
    float4 w = __ldcs(four(p.weights, i));
    float4 m = __ldcs(four(p.moment1, i));
    float4 v = __ldcs(four(p.moment2, i));
    adamw_step(p, g.x, w.x, m.x, v.x);
    adamw_step(p, g.y, w.y, m.y, v.y);
    adamw_step(p, g.z, w.z, m.z, v.z);
    adamw_step(p, g.w, w.w, m.w, v.w);
    __stcs(four(p.weights, i), w);
    __stcs(four(p.moment1, i), m);
    __stcs(four(p.moment2, i), v);
  }
  for (std::int64_t i = 4 * fours + first_of_thread(); i < p.count; i += step_of_grid()) {
    adamw_step(p, p.grads[i], p.weights[i], p.moment1[i], p.moment2[i]);
  }
}

}  // namespace

std::int64_t first_nonfinite(Device device, const float* numbers, std::int64_t count,
                             Stream stream) {
  const OnDevice scope(device.index);
  const Buffer first(device, sizeof(kNowhere), stream);
  fill_bytes(first.as<void>(), device, 0xFF, first.bytes(), stream);
  nonfinite_kernel<<<blocks_for((count + 3) / 4, device), kThreads, 0, stream_of(stream)>>>(
      numbers, count, first.as<unsigned long long>());
  require_launch("nonfinite_kernel");
  unsigned long long at = kNowhere;
  copy_bytes(&at, {}, first.as<void>(), device, sizeof(at), stream);
  synchronize(device, stream);
  return at == kNowhere ? -1 : static_cast<std::int64_t>(at);
}

double sum_of_squares(Device device, const float* numbers, std::int64_t count, Stream stream) {
  const OnDevice scope(device.index);
  const std::int64_t chunks = (count + kChunk - 1) / kChunk;
  if (chunks == 0) return 0.0;
  const Buffer parts(device, chunks * static_cast<std::int64_t>(sizeof(double)), stream);
  squares_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream_of(stream)>>>(
      numbers, count, parts.as<double>());
  require_launch("squares_kernel");
  std::vector<double> here(static_cast<std::size_t>(chunks));
  copy_bytes(here.data(), {}, parts.as<void>(), device, parts.bytes(), stream);
  synchronize(device, stream);
  double sum = 0.0;
  for (const double part : here) sum += part;
  return sum;
}

void round_to_bf16(Device device, const float* from, Bf16* to, std::int64_t count, Stream stream) {
  const OnDevice scope(device.index);
  round_kernel<<<blocks_for((count + 3) / 4, device), kThreads, 0, stream_of(stream)>>>(from, to,
                                                                                        count);
  require_launch("round_kernel");
}

void widen(Device device, const Bf16* from, float* to, std::int64_t count, Stream stream) {
  const OnDevice scope(device.index);
  widen_kernel<<<blocks_for(count, device), kThreads, 0, stream_of(stream)>>>(from, to, count);
  require_launch("widen_kernel");
}

void adamw(const AdamW& args, Device device, Stream stream) {
  const OnDevice scope(device.index);
  adamw_kernel<<<blocks_for((args.count + 3) / 4, device), kThreads, 0, stream_of(stream)>>>(args);
  require_launch("adamw_kernel");
}

}  // namespace lockstep::train::cuda
