/// BF16 products by a warp's tensor core products, for devices without Hopper's. An output is
/// summed in one order, whatever the shape of a tile: its inputs in kSegments parts, each a chain
/// of products of 16 inputs with FP32 sums, in rising order; then the parts one after another.
///
/// In a product of 16 inputs the four threads of a row have inputs 8 t .. 8 t + 3 of 32, in the
/// next one 8 t + 4 .. 8 t + 7: each reads 16 bytes.
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "kernels/dense/attention_mma_cuda.h"
#include "kernels/dense/linear_params_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kSegments = 8;
constexpr int kChunk = 32;     // inputs of two products
constexpr int kThreads = 256;  // a warp a segment, or an eighth of a wide tile
constexpr int kNarrowRows = 8;

/// Chunks of a segment: [chunk_of(s), chunk_of(s + 1)).
__device__ int chunk_of(const LinearParams& p, int segment) {
  return p.in / kChunk * segment / kSegments;
}

__device__ uint4 load16(const Bf16* from) { return *reinterpret_cast<const uint4*>(from); }

/// Two products: 16 outputs by 8 rows, 32 inputs.
__device__ void multiply_chunk(float (&d)[4], const uint4& low, const uint4& high, const uint4& x) {
  multiply_add<false>(d, low.x, high.x, low.y, high.y, x.x, x.y);
  multiply_add<false>(d, low.z, high.z, low.w, high.w, x.z, x.w);
}

/// Up to eight rows: a block has 16 outputs, a warp a segment, and the weight goes from memory
/// straight to the tensor cores.
__global__ void __launch_bounds__(kThreads) narrow_kernel(const __grid_constant__ LinearParams p) {
  __shared__ float parts[kSegments][kNarrowRows][16 + 1];
  constexpr int kAhead = 4;  // chunks on their way
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int segment = static_cast<int>(threadIdx.x) / 32;
  const int g = lane >> 2;
  const int t = lane & 3;
  const Rows rows = find_rows(p, static_cast<int>(blockIdx.y), kNarrowRows);
  if (rows.count <= 0) return;
  const int out = static_cast<int>(blockIdx.x) * 16;
  const Bf16* const weight = p.weight + rows.group * p.group_stride + 8 * t;
  const Bf16* const low = weight + std::int64_t{min(out + g, p.out - 1)} * p.in;
  const Bf16* const high = weight + std::int64_t{min(out + g + 8, p.out - 1)} * p.in;
  const Bf16* const x = p.x + (rows.first + min(g, rows.count - 1)) * p.x_stride + 8 * t;
  float d[4] = {};
  const int end = chunk_of(p, segment + 1);
  int chunk = chunk_of(p, segment);
  for (; chunk + kAhead <= end; chunk += kAhead) {
    uint4 a[kAhead][2];
    uint4 b[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      a[j][0] = load16(low + (chunk + j) * kChunk);
      a[j][1] = load16(high + (chunk + j) * kChunk);
      b[j] = load16(x + (chunk + j) * kChunk);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) multiply_chunk(d, a[j][0], a[j][1], b[j]);
  }
  for (; chunk < end; ++chunk) {
    const uint4 a0 = load16(low + chunk * kChunk);
    const uint4 a1 = load16(high + chunk * kChunk);
    multiply_chunk(d, a0, a1, load16(x + chunk * kChunk));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) parts[segment][2 * t + j % 2][g + j / 2 * 8] = d[j];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 16 * rows.count; i += kThreads) {
    const int row = i / 16;
    if (out + i % 16 >= p.out) continue;
    float sum = parts[0][row][i % 16];
    float half = 0.0f;
#pragma unroll
    for (int s = 1; s < kSegments; ++s) {
      if (p.split_k && s == kSegments / 2) {
        half = rounded_to_bf16(sum);
        sum = parts[s][row][i % 16];
      } else {
        sum += parts[s][row][i % 16];
      }
    }
    put(p, rows.first + row, out + i % 16, p.split_k ? half + rounded_to_bf16(sum) : sum);
  }
}

__device__ void copy16(std::uint32_t shared, const Bf16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

constexpr int kWideOuts = 128;
constexpr int kWideRows = 128;
constexpr int kWideStages = 4;
constexpr int kWideStage = (kWideOuts + kWideRows) * kChunk;  // numbers

/// Many rows: a block has 128 outputs and 128 rows, a warp 64 by 32 of them.
template <bool kSplit>
__global__ void __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Bf16* const stages = reinterpret_cast<Bf16*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread / 32;
  const int g = lane >> 2;
  const int t = lane & 3;
  const Rows rows = find_rows(p, static_cast<int>(blockIdx.x), kWideRows);
  if (rows.count <= 0) return;
  const int out = static_cast<int>(blockIdx.y) * kWideOuts;

  // Of each stage a thread copies the same 16 bytes of two outputs and of two rows.
  const Bf16* from[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int line = thread / 4 + 64 * i;
    from[i] = p.weight + rows.group * p.group_stride +
              std::int64_t{min(out + line, p.out - 1)} * p.in + thread % 4 * 8;
    from[2 + i] = p.x + (rows.first + min(line, rows.count - 1)) * p.x_stride + thread % 4 * 8;
  }
  const int chunks = p.in / kChunk;
  const auto start = [&](int chunk) {
    if (chunk < chunks) {
      Bf16* const to = stages + chunk % kWideStages * kWideStage + thread * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy16(shared_address(to + i * kThreads * 8), from[i] + chunk * kChunk);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sum[4][4][4];
  std::uint32_t half[4][4][kSplit ? 2 : 1];  // the first half's sums as pairs of BF16
  float d[4][4][4] = {};
  for (int i = 0; i < kWideStages - 1; ++i) start(i);
  const int first_out = warp % 2 * 64;
  const int first_row = warp / 2 * 32;
  int chunk = 0;
  for (int segment = 0; segment < kSegments; ++segment) {
    for (const int end = chunk_of(p, segment + 1); chunk < end; ++chunk) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kWideStages - 2) : "memory");
      __syncthreads();
      start(chunk + kWideStages - 1);
      const Bf16* const stage = stages + chunk % kWideStages * kWideStage;
      uint4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b[j] = load16(stage + (kWideOuts + first_row + 8 * j + g) * kChunk + 8 * t);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Bf16* const line = stage + (first_out + 16 * i + g) * kChunk + 8 * t;
        const uint4 low = load16(line);
        const uint4 high = load16(line + 8 * kChunk);
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply_chunk(d[i][j], low, high, b[j]);
      }
    }
    const bool middle = kSplit && segment == kSegments / 2;
    const bool begins = segment == 0 || middle;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kSplit) {
          if (middle) {
            half[i][j][0] = round_pair<false>(sum[i][j][0], sum[i][j][1]);
            half[i][j][1] = round_pair<false>(sum[i][j][2], sum[i][j][3]);
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum[i][j][k] = begins ? d[i][j][k] : sum[i][j][k] + d[i][j][k];
          d[i][j][k] = 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = first_row + 8 * j + 2 * t + k % 2;
        const int column = out + first_out + 16 * i + g + k / 2 * 8;
        if (row >= rows.count || column >= p.out) continue;
        float value = sum[i][j][k];
        if constexpr (kSplit) {
          const std::uint32_t pair = half[i][j][k / 2];
          value = float_of(k % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u) + rounded_to_bf16(value);
        }
        put(p, rows.first + row, column, value);
      }
    }
  }
}

}  // namespace

void linear_of_warps(const LinearParams& p, Stream stream) {
  const int each = (p.rows + p.groups - 1) / p.groups;
  if (each <= kNarrowRows) {
    const dim3 grid(static_cast<unsigned>((p.out + 15) / 16),
                    static_cast<unsigned>(most_tiles(p, kNarrowRows)));
    narrow_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(p);
    return cuda::require_launch("narrow_kernel");
  }
  constexpr int kBytes = kWideStages * kWideStage * static_cast<int>(sizeof(Bf16));
  const auto kernel = p.split_k ? wide_kernel<true> : wide_kernel<false>;
  cuda::allow_shared(kernel, kBytes);
  const dim3 grid(static_cast<unsigned>(most_tiles(p, kWideRows)),
                  static_cast<unsigned>((p.out + kWideOuts - 1) / kWideOuts));
  kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("wide_kernel");
}

}  // namespace lockstep::kernels
