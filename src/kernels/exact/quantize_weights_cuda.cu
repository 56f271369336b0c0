/// Several weights a launch. Masters are read twice, for their amax and for their codes: the second
/// time they are still in the L2.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/block_sum_cuda.h"
#include "kernels/exact/code_flips.h"
#include "kernels/exact/flips_cuda.h"
#include "kernels/exact/quantize_weights_rows.h"
#include "kernels/exact/sixteen_cuda.h"
#include "kernels/exact/tile_words_cuda.h"
#include "kernels/exact/w4a4_cuda.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;

struct One {
  const float4* master;
  std::int64_t sixteens;
  uint2* codes;
  std::uint8_t* scales;
  float* global;
  std::uint32_t* amax;
  unsigned long long* bad;
};

struct Weights {
  One of[kMostWeights];
  Quantizer rule;
  double* parts;
};

__global__ void __launch_bounds__(kThreads) weight_amax_kernel(const __grid_constant__ Weights p) {
  const One& w = p.of[blockIdx.y];
  const std::int64_t count = w.sixteens * 4;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  std::uint32_t most = 0;
  const auto look = [&](std::int64_t i, float4 x) {
    const std::uint32_t low = to_bf16_pair(x.x, x.y), high = to_bf16_pair(x.z, x.w);
    most = abs_max_pair(most, abs_max_pair(low, high));
    if (is_finite_pair(low) && is_finite_pair(high)) return;
    const float values[4] = {x.x, x.y, x.z, x.w};
    for (int k = 3; k >= 0; --k) {
      if (!is_finite(to_bf16(values[k]))) {
        atomicMin(w.bad, static_cast<unsigned long long>(4 * i + k));
      }
    }
  };
  std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    float4 x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = w.master[i + k * step];
#pragma unroll
    for (int k = 0; k < 4; ++k) look(i + k * step, x[k]);
  }
  for (; i < count; i += step) look(i, w.master[i]);
  const std::uint32_t bits =
      __reduce_max_sync(0xFFFFFFFFu, max(most & 0x7FFFu, most >> 16 & 0x7FFFu));
  if (threadIdx.x % 32 == 0) atomicMax(w.amax, bits);
}

/// Sixteen numbers a thread. As quantize_lane_kernel() has it.
__global__ void __launch_bounds__(kThreads) weight_codes_kernel(const __grid_constant__ Weights p) {
  const One& w = p.of[blockIdx.y];
  const std::uint32_t amax = *w.amax;
  const bool finite = amax < 0x7F80u;
  const std::int32_t n = own_exponent(p.rule, finite ? float_of(amax << 16) : 0.0f);
  const float per_unit = power_of_two(-n), per_scale = per_unit * (1.0f / 6.0f);
  const bool down = n > 100;
  const float unit = power_of_two(down ? n - 40 : n);
  constexpr std::uint32_t kDown = 0x2B802B80u;  // 2^-40 twice
  Pair mine;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < w.sixteens;
       i += std::int64_t{gridDim.x} * kThreads) {
    float x[16];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 four = w.master[4 * i + k];
      x[4 * k] = four.x;
      x[4 * k + 1] = four.y;
      x[4 * k + 2] = four.z;
      x[4 * k + 3] = four.w;
    }
    Sixteen numbers;
#pragma unroll
    for (int k = 0; k < 8; ++k) numbers.words[k] = to_bf16_pair(x[2 * k], x[2 * k + 1]);
    const std::uint32_t byte = e4m3_byte(float_of(abs_max_bits(numbers) << 16) * per_scale);
    const SixteenScale scale = nvfp4_sixteen(e4m3_value(byte) * unit);
    if (down) {
#pragma unroll
      for (int k = 0; k < 8; ++k) numbers.words[k] = multiply_pair(numbers.words[k], kDown);
    }
    const float worth = e4m3_value(byte);  // of a code of 1, in units of 2^n
    std::uint32_t codes[8];
    float error = 0, norm = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      codes[k] = code_pair(numbers.words[k], scale);
      // As FP16 the codes are their values times 2^-14.
      float low, high;
      asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
          "cvt.f32.f16 %1, high;\n}"
          : "=f"(low), "=f"(high)
          : "r"(codes[k] & 0x8E008E00u));
      const float x0 = x[2 * k] * per_unit, x1 = x[2 * k + 1] * per_unit;
      const float d0 = low * 0x1p14f * worth - x0;
      const float d1 = high * 0x1p14f * worth - x1;
      error += d0 * d0 + d1 * d1;
      norm += x0 * x0 + x1 * x1;
    }
    mine.error += error;
    mine.norm += norm;
    const uint2 packed = {pack_eight(codes[0], codes[1], codes[2], codes[3]),
                          pack_eight(codes[4], codes[5], codes[6], codes[7])};
    w.codes[i] = finite ? packed : uint2{0, 0};
    w.scales[i] = static_cast<std::uint8_t>(finite ? byte : 0u);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *w.global = power_of_two(n);
  const Pair sum = block_sum<kThreads>(mine);
  if (threadIdx.x != 0) return;
  double* const part = p.parts + 2 * (std::int64_t{blockIdx.y} * kSumBlocks + blockIdx.x);
  const double square = static_cast<double>(power_of_two(n)) * power_of_two(n);
  part[0] = sum.error * square;
  part[1] = sum.norm * square;
}

__global__ void __launch_bounds__(kThreads)
    fold_sums_kernel(double* sums, const double* parts, int count) {
  Pair mine;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    mine.error += parts[2 * i];
    mine.norm += parts[2 * i + 1];
  }
  const Pair sum = block_sum<kThreads>(mine);
  if (threadIdx.x != 0) return;
  sums[0] += sum.error;
  sums[1] += sum.norm;
}

struct Place {
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  const float* global;
  std::byte* expert;
  std::int64_t tile_bytes;
  std::int64_t* flips;
  std::int32_t out, blocks, chunks;
};

struct Places {
  Place of[kMostReplaced];
};

/// A chunk of 64 columns and 16 outputs a warp: lane 4 g + i brings block i of outputs g and g + 8,
/// and takes, as lane 4 g + t, columns 4 t .. 4 t + 3 of all four blocks.
__global__ void __launch_bounds__(kThreads) w4a4_replace_kernel(const __grid_constant__ Places p) {
  using namespace w4a4_device;
  const Place& w = p.of[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane / 4, quad = lane % 4;
  std::uint32_t flips = 0, adjacent = 0, scale_flips = 0;
  const std::int64_t count = std::int64_t{(w.out + 15) / 16} * w.chunks;
  const std::int64_t step = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t u = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; u < count;
       u += step) {
    const std::int64_t tile = u / w.chunks, chunk = u % w.chunks;
    const std::int64_t block = chunk * 4 + quad;
    uint2 halves[2];
    std::uint32_t scales = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t row = tile * 16 + 8 * h + g;
      halves[h] = {0, 0};
      if (row >= w.out || block >= w.blocks) continue;
      const std::int64_t at = row * w.blocks + block;
      halves[h] = *reinterpret_cast<const uint2*>(w.codes + 8 * at);
      scales |= static_cast<std::uint32_t>(w.scales[at]) << 8 * h;
    }
    const uint4 words = tile_words(halves, quad);
    std::byte* const to =
        w.expert + W4a4Weights::kHeaderBytes + tile * w.tile_bytes + chunk * kChunkBytes;
    auto* const codes_at = reinterpret_cast<uint4*>(to) + lane;
    auto* const scales_at = reinterpret_cast<std::uint16_t*>(to + kChunkCodeBytes) + lane;
    if (w.flips != nullptr) {
      const uint4 before = *codes_at;
      const std::uint32_t scales_before = *scales_at;
      compare_word(words.x, before.x, flips, adjacent);
      compare_word(words.y, before.y, flips, adjacent);
      compare_word(words.z, before.z, flips, adjacent);
      compare_word(words.w, before.w, flips, adjacent);
      scale_flips += ((scales ^ scales_before) & 0xFFu) != 0;
      scale_flips += ((scales ^ scales_before) & 0xFF00u) != 0;
    }
    *codes_at = words;
    *scales_at = static_cast<std::uint16_t>(scales);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *reinterpret_cast<std::int32_t*>(w.expert) = exponent_of(*w.global);
  }
  if (w.flips == nullptr) return;
  flips = __reduce_add_sync(0xFFFFFFFFu, flips);
  adjacent = __reduce_add_sync(0xFFFFFFFFu, adjacent);
  scale_flips = __reduce_add_sync(0xFFFFFFFFu, scale_flips);
  if (lane != 0) return;
  auto* const counts = reinterpret_cast<unsigned long long*>(w.flips);
  if (flips != 0) atomicAdd(counts + kCodeFlips, static_cast<unsigned long long>(flips));
  if (adjacent != 0) atomicAdd(counts + kAdjacentFlips, static_cast<unsigned long long>(adjacent));
  if (scale_flips != 0) {
    atomicAdd(counts + kScaleFlips, static_cast<unsigned long long>(scale_flips));
  }
}

}  // namespace

void quantize_weights_cuda(std::span<const WeightOnItsWay> weights, const Quantizer& rule,
                           double* parts, Stream stream) {
  const cuda::OnDevice scope(weights[0].master.device.index);
  Weights p{};
  p.rule = rule;
  p.parts = parts;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const WeightOnItsWay& w = weights[i];
    p.of[i] = {reinterpret_cast<const float4*>(w.master.data),
               w.master.shape[0] * w.master.shape[1] / 16,
               reinterpret_cast<uint2*>(w.out.codes.data),
               w.out.scales.data,
               w.out.global.data,
               w.amax,
               reinterpret_cast<unsigned long long*>(w.bad)};
  }
  const dim3 grid(kSumBlocks, static_cast<unsigned int>(weights.size()));
  weight_amax_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("weight_amax_kernel");
  weight_codes_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("weight_codes_kernel");
}

void fold_sums_cuda(double* sums, const double* parts, int count, Device device, Stream stream) {
  const cuda::OnDevice scope(device.index);
  fold_sums_kernel<<<1, kThreads, 0, cuda::stream_of(stream)>>>(sums, parts, count);
  cuda::require_launch("fold_sums_kernel");
}

void w4a4_replace_cuda(std::span<const Replaced> experts, Stream stream) {
  const std::int8_t device = experts[0].place.device.index;
  const cuda::OnDevice scope(device);
  Places p{};
  std::int64_t most = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const Replaced& one = experts[i];
    const std::int32_t blocks = one.place.cols / 16, chunks = (blocks + 3) / 4;
    p.of[i] = {one.now.codes.data,
               one.now.scales.data,
               one.now.global.data,
               one.place.expert(one.expert),
               W4a4Weights::tile_bytes(one.place.cols),
               one.flips,
               one.place.out,
               blocks,
               chunks};
    most = std::max(most, std::int64_t{(one.place.out + 15) / 16} * chunks);
  }
  const std::int64_t blocks = std::min<std::int64_t>((most + kThreads / 32 - 1) / (kThreads / 32),
                                                     4ll * cuda::multiprocessors(device));
  const dim3 grid(static_cast<unsigned int>(blocks), static_cast<unsigned int>(experts.size()));
  w4a4_replace_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("w4a4_replace_kernel");
}

}  // namespace lockstep::kernels
