#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "numerics/bf16_pair_cuda.h"
#include "ops/rows_cuda.h"

namespace lockstep::ops::cuda {
namespace {

using lockstep::cuda::OnDevice;
using lockstep::cuda::require_launch;
using lockstep::cuda::stream_of;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Pair {
  float low, high;
};

__device__ Pair load(const Bf16* x) {
  const std::uint32_t bits = *reinterpret_cast<const std::uint32_t*>(x);
  return {low_of(bits), high_of(bits)};
}
__device__ Pair load(const float* x) {
  const float2 both = *reinterpret_cast<const float2*>(x);
  return {both.x, both.y};
}
__device__ void store(Bf16* x, float low, float high) {
  *reinterpret_cast<std::uint32_t*>(x) = to_bf16_pair(low, high);
}

/// Of kLanes that lie together.
template <int kLanes = 32>
__device__ float warp_sum(float x) {
  for (int half = kLanes / 2; half > 0; half /= 2) x += __shfl_xor_sync(kAll, x, half);
  return x;
}

/// A block a row at a time; a thread has kPairs pairs of columns, 2 * kThreads apart.
template <int kPairs>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(const __grid_constant__ NormBackward p) {
  __shared__ float squares[kWarps], products[kWarps];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  Pair weight[kPairs], sum[kPairs];
  for (int j = 0; j < kPairs; ++j) {
    const int col = 2 * (thread + j * kThreads);
    weight[j] = col < p.cols ? load(p.weight + col) : Pair{};
    sum[j] = {};
  }
  const auto cols = static_cast<float>(p.cols);
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const std::int64_t at = row * p.cols;
    Pair x[kPairs], dy[kPairs];
    float square = 0.0f, product = 0.0f;
    for (int j = 0; j < kPairs; ++j) {
      const int col = 2 * (thread + j * kThreads);
      x[j] = col < p.cols ? load(p.x + at + col) : Pair{};
      dy[j] = col < p.cols ? load(p.dy + at + col) : Pair{};
      square += x[j].low * x[j].low + x[j].high * x[j].high;
      product += dy[j].low * weight[j].low * x[j].low + dy[j].high * weight[j].high * x[j].high;
    }
    square = warp_sum(square);
    product = warp_sum(product);
    __syncthreads();  // the row before has been read
    if (lane == 0) {
      squares[warp] = square;
      products[warp] = product;
    }
    __syncthreads();
    square = product = 0.0f;
    for (int i = 0; i < kWarps; ++i) {
      square += squares[i];
      product += products[i];
    }
    const float r = rsqrtf(square / cols + p.eps);
    const float mean = product * r * r / cols;
    for (int j = 0; j < kPairs; ++j) {
      const int col = 2 * (thread + j * kThreads);
      if (col >= p.cols) continue;
      sum[j].low += dy[j].low * to_float(to_bf16(x[j].low * r));
      sum[j].high += dy[j].high * to_float(to_bf16(x[j].high * r));
      store(p.dx + at + col, r * (dy[j].low * weight[j].low - x[j].low * mean),
            r * (dy[j].high * weight[j].high - x[j].high * mean));
    }
  }
  float* const part = p.parts + std::int64_t{blockIdx.x} * p.cols;
  for (int j = 0; j < kPairs; ++j) {
    const int col = 2 * (thread + j * kThreads);
    if (col >= p.cols) continue;
    part[col] = sum[j].low;
    part[col + 1] = sum[j].high;
  }
}

/// A warp a row at a time, for narrow ones; a lane has kPairs pairs of columns, 64 apart.
template <int kPairs>
__global__ void __launch_bounds__(kThreads)
    narrow_norm_backward_kernel(const __grid_constant__ NormBackward p) {
  __shared__ float sums[kWarps][64 * kPairs];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Pair weight[kPairs], sum[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int col = 2 * lane + 64 * j;
    weight[j] = col < p.cols ? load(p.weight + col) : Pair{};
    sum[j] = {};
  }
  const auto cols = static_cast<float>(p.cols);
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + warp; row < p.rows;
       row += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t at = row * p.cols;
    Pair x[kPairs], dy[kPairs];
    float square = 0.0f, product = 0.0f;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int col = 2 * lane + 64 * j;
      x[j] = col < p.cols ? load(p.x + at + col) : Pair{};
      dy[j] = col < p.cols ? load(p.dy + at + col) : Pair{};
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      square += x[j].low * x[j].low + x[j].high * x[j].high;
      product += dy[j].low * weight[j].low * x[j].low + dy[j].high * weight[j].high * x[j].high;
    }
    const float r = rsqrtf(warp_sum(square) / cols + p.eps);
    const float mean = warp_sum(product) * r * r / cols;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int col = 2 * lane + 64 * j;
      if (col >= p.cols) continue;
      sum[j].low += dy[j].low * to_float(to_bf16(x[j].low * r));
      sum[j].high += dy[j].high * to_float(to_bf16(x[j].high * r));
      store(p.dx + at + col, r * (dy[j].low * weight[j].low - x[j].low * mean),
            r * (dy[j].high * weight[j].high - x[j].high * mean));
    }
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    sums[warp][2 * lane + 64 * j] = sum[j].low;
    sums[warp][2 * lane + 64 * j + 1] = sum[j].high;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < p.cols; i += kThreads) {
    float all = 0.0f;
    for (int w = 0; w < kWarps; ++w) all += sums[w][i];
    p.parts[std::int64_t{blockIdx.x} * p.cols + i] = all;
  }
}

/// kLanes a head at a time; a thread has the pairs (i, i + dim / 2), i = lane + kLanes j.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    heads_backward_kernel(const __grid_constant__ HeadsBackward p) {
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kPairs = kLanes == 32 ? kMostHeadDim / 64 : 1;
  __shared__ float sums[kGroups][2 * kPairs * kLanes];
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int half = p.dim / 2;
  const auto dim = static_cast<float>(p.dim);
  Pair weight[kPairs], sum[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + kLanes * j;
    sum[j] = {};
    weight[j] = i < half ? Pair{to_float(p.weight[i]), to_float(p.weight[i + half])} : Pair{};
  }
  const std::int64_t heads = p.rows * p.heads;
  // All lanes of a warp go on together: the last heads of some are none.
  for (std::int64_t first = std::int64_t{blockIdx.x} * kGroups; first < heads;
       first += std::int64_t{gridDim.x} * kGroups) {
    const std::int64_t h = min(first + group, heads - 1);
    const bool is_head = first + group < heads;
    const std::int64_t row = h / p.heads;
    const std::int64_t at = row * p.stride + h % p.heads * p.dim;
    const std::int64_t angle = std::int64_t{p.positions[row]} * half;
    Pair x[kPairs], dy[kPairs];
    float square = 0.0f, product = 0.0f;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + kLanes * j;
      x[j] = dy[j] = {};
      if (i >= half || !is_head) continue;
      x[j] = {to_float(p.x[at + i]), to_float(p.x[at + i + half])};
      const float a = to_float(p.dy[h * p.dim + i]), b = to_float(p.dy[h * p.dim + i + half]);
      const float c = p.cos[angle + i], s = p.sin[angle + i];
      dy[j] = {a * c + b * s, b * c - a * s};
      square += x[j].low * x[j].low + x[j].high * x[j].high;
      product += dy[j].low * weight[j].low * x[j].low + dy[j].high * weight[j].high * x[j].high;
    }
    const float r = rsqrtf(warp_sum<kLanes>(square) / dim + p.eps);
    const float mean = warp_sum<kLanes>(product) * r * r / dim;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + kLanes * j;
      if (i >= half || !is_head) continue;
      sum[j].low += dy[j].low * to_float(to_bf16(x[j].low * r));
      sum[j].high += dy[j].high * to_float(to_bf16(x[j].high * r));
      p.dx[at + i] = to_bf16(r * (dy[j].low * weight[j].low - x[j].low * mean));
      p.dx[at + i + half] = to_bf16(r * (dy[j].high * weight[j].high - x[j].high * mean));
    }
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + kLanes * j;
    if (i >= half) continue;
    sums[group][i] = sum[j].low;
    sums[group][i + half] = sum[j].high;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < p.dim; i += kThreads) {
    float all = 0.0f;
    for (int g = 0; g < kGroups; ++g) all += sums[g][i];
    p.parts[std::int64_t{blockIdx.x} * p.dim + i] = all;
  }
}

/// A warp a row.
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const __grid_constant__ SwigluBackward p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const std::int64_t pair = p.pair[row];
  const float gate = p.gates[pair];
  const float* const gate_up = p.gate_up + row * 2 * p.width;
  Bf16* const dgate_up = p.dgate_up + row * 2 * p.width;
  const auto one = [gate](float g, float u, float d) {
    const float s = 1.0f / (1.0f + expf(-g));
    d *= gate;
    return Pair{d * u * s * (1.0f + g * (1.0f - s)), d * g * s};
  };
  float product = 0.0f;
  for (int i = 2 * lane; i < p.width; i += 64) {
    const Pair g = load(gate_up + i), u = load(gate_up + p.width + i);
    const Pair d = load(p.dout + row * p.width + i), a = load(p.down_in + row * p.width + i);
    const Pair low = one(g.low, u.low, d.low), high = one(g.high, u.high, d.high);
    store(dgate_up + i, low.low, high.low);
    store(dgate_up + p.width + i, low.high, high.high);
    store(p.scaled + row * p.width + i, a.low * gate, a.high * gate);
    product += d.low * a.low + d.high * a.high;
  }
  product = warp_sum(product);
  if (lane == 0) p.dgates[pair] = product;
}

}  // namespace

std::int64_t norm_parts(Device device) {
  return std::int64_t{lockstep::cuda::multiprocessors(device.index)} * 4;
}

void norm_backward(const NormBackward& args, Device device, Stream stream) {
  const OnDevice scope(device.index);
  const auto blocks = static_cast<unsigned>(norm_parts(device));
  const int pairs = (args.cols + 2 * kThreads - 1) / (2 * kThreads);
  const auto kernel = args.cols <= 64    ? narrow_norm_backward_kernel<1>
                      : args.cols <= 128 ? narrow_norm_backward_kernel<2>
                      : args.cols <= 256 ? narrow_norm_backward_kernel<4>
                      : args.cols <= 512 ? narrow_norm_backward_kernel<8>
                      : pairs <= 2       ? norm_backward_kernel<2>
                      : pairs <= 4       ? norm_backward_kernel<4>
                      : pairs <= 8       ? norm_backward_kernel<8>
                                         : norm_backward_kernel<16>;
  kernel<<<blocks, kThreads, 0, stream_of(stream)>>>(args);
  require_launch("norm_backward_kernel");
}

void heads_backward(const HeadsBackward& args, Device device, Stream stream) {
  const OnDevice scope(device.index);
  const auto kernel = args.dim <= 32 ? heads_backward_kernel<16> : heads_backward_kernel<32>;
  kernel<<<static_cast<unsigned>(norm_parts(device)), kThreads, 0, stream_of(stream)>>>(args);
  require_launch("heads_backward_kernel");
}

void swiglu_backward(const SwigluBackward& args, Device device, Stream stream) {
  if (args.rows == 0) return;
  const OnDevice scope(device.index);
  swiglu_backward_kernel<<<static_cast<unsigned>((args.rows + kWarps - 1) / kWarps), kThreads, 0,
                           stream_of(stream)>>>(args);
  require_launch("swiglu_backward_kernel");
}

}  // namespace lockstep::ops::cuda
