/// BF16 products. Whatever the shape of a tile, an output is summed in one order: its inputs in
/// kSegments parts, each a chain of tensor core products of 16 inputs with FP32 sums, in rising
/// order; then the parts one after another. So a row's bits do not depend on the others.
///
/// In a product of 16 inputs the four threads of a row have inputs 8 t .. 8 t + 3 of 32, in the
/// next one 8 t + 4 .. 8 t + 7: each reads 16 bytes.
#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/dense/attention_mma_cuda.h"
#include "kernels/dense/linear_rows.h"

namespace lockstep::kernels {
namespace {

constexpr int kSegments = 8;
constexpr int kChunk = 32;  // inputs of two products
constexpr int kThreads = 256;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const Bf16* x;
  const Bf16* weight;
  float* y;  // or
  Bf16* y_bf16;
  const std::int32_t* offsets;  // [groups + 1], or null: one group of all rows
  const std::int32_t* to;       // or null
  std::int64_t x_stride;
  std::int64_t y_stride;
  std::int64_t group_stride;  // of weights
  std::int32_t rows;
  std::int32_t groups;
  std::int32_t out;
  std::int32_t in;
  bool split_k;
};

/// Chunks of a segment: [chunk_of(s), chunk_of(s + 1)).
__device__ int chunk_of(const Params& p, int segment) {
  return p.in / kChunk * segment / kSegments;
}

/// Rows of one group that a block works on.
struct Rows {
  int first = 0;
  int count = 0;  // <= the tile's; 0: nothing to do
  int group = 0;
};

/// Which rows are tile `index` of tiles of `size`, group after group. All threads of a warp.
__device__ Rows find_rows(const Params& p, int index, int size) {
  if (p.offsets == nullptr) {
    return {index * size, min(size, p.rows - index * size), 0};
  }
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int base = 0; base < p.groups; base += 32) {
    const int group = base + lane;
    const int first = group < p.groups ? p.offsets[group] : 0;
    const int end = group < p.groups ? p.offsets[group + 1] : 0;
    const int tiles = (end - first + size - 1) / size;
    int before = tiles;  // with this group
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, before, static_cast<unsigned>(step));
      if (lane >= step) before += other;
    }
    const unsigned past = __ballot_sync(kAll, before > index);
    if (past != 0) {
      const int found = __ffs(static_cast<int>(past)) - 1;
      const int tile = index - (__shfl_sync(kAll, before, found) - __shfl_sync(kAll, tiles, found));
      const int row = __shfl_sync(kAll, first, found) + tile * size;
      return {row, min(size, __shfl_sync(kAll, end, found) - row), base + found};
    }
    index -= __shfl_sync(kAll, before, 31);
  }
  return {};
}

__device__ void put(const Params& p, int row, int out, float value) {
  const std::int64_t at = (p.to == nullptr ? row : p.to[row]) * p.y_stride + out;
  if (p.y != nullptr) {
    p.y[at] = value;
  } else {
    p.y_bf16[at] = to_bf16(value);
  }
}

__device__ float rounded(float x) { return to_float(to_bf16(x)); }

__device__ uint4 load16(const Bf16* from) { return *reinterpret_cast<const uint4*>(from); }

/// Two products: 16 outputs by 8 rows, 32 inputs.
__device__ void multiply_chunk(float (&d)[4], const uint4& low, const uint4& high, const uint4& x) {
  multiply_add<false>(d, low.x, high.x, low.y, high.y, x.x, x.y);
  multiply_add<false>(d, low.z, high.z, low.w, high.w, x.z, x.w);
}

/// Few rows: a block has 16 outputs and 8 kTiles rows, a warp a segment, and the weight goes from
/// memory straight to the tensor cores.
template <int kTiles>
__global__ void __launch_bounds__(kThreads) narrow_kernel(const __grid_constant__ Params p) {
  __shared__ float parts[kSegments][8 * kTiles][16 + 1];
  constexpr int kAhead = kTiles >= 8 ? 2 : 4;  // chunks on their way
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int segment = static_cast<int>(threadIdx.x) / 32;
  const int g = lane >> 2;
  const int t = lane & 3;
  const Rows rows = find_rows(p, static_cast<int>(blockIdx.y), 8 * kTiles);
  if (rows.count <= 0) return;
  const int out = static_cast<int>(blockIdx.x) * 16;
  const Bf16* const weight = p.weight + rows.group * p.group_stride + 8 * t;
  const Bf16* const low = weight + std::int64_t{min(out + g, p.out - 1)} * p.in;
  const Bf16* const high = weight + std::int64_t{min(out + g + 8, p.out - 1)} * p.in;
  const Bf16* x[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    x[i] = p.x + (rows.first + min(8 * i + g, rows.count - 1)) * p.x_stride + 8 * t;
  }
  float d[kTiles][4] = {};
  const int end = chunk_of(p, segment + 1);
  int chunk = chunk_of(p, segment);
  for (; chunk + kAhead <= end; chunk += kAhead) {
    uint4 a[kAhead][2];
    uint4 b[kAhead][kTiles];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      a[j][0] = load16(low + (chunk + j) * kChunk);
      a[j][1] = load16(high + (chunk + j) * kChunk);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) b[j][i] = load16(x[i] + (chunk + j) * kChunk);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) multiply_chunk(d[i], a[j][0], a[j][1], b[j][i]);
    }
  }
  for (; chunk < end; ++chunk) {
    const uint4 a0 = load16(low + chunk * kChunk);
    const uint4 a1 = load16(high + chunk * kChunk);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) multiply_chunk(d[i], a0, a1, load16(x[i] + chunk * kChunk));
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) parts[segment][8 * i + 2 * t + j % 2][g + j / 2 * 8] = d[i][j];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 16 * rows.count; i += kThreads) {
    const int row = i / 16;
    if (out + i % 16 >= p.out) continue;
    float sum = parts[0][row][i % 16];
    float half = 0.0f;
#pragma unroll
    for (int s = 1; s < kSegments; ++s) {
      if (p.split_k && s == kSegments / 2) {
        half = rounded(sum);
        sum = parts[s][row][i % 16];
      } else {
        sum += parts[s][row][i % 16];
      }
    }
    put(p, rows.first + row, out + i % 16, p.split_k ? half + rounded(sum) : sum);
  }
}

constexpr int kWideOuts = 128;
constexpr int kWideRows = 128;
constexpr int kWideStages = 4;
constexpr int kWideStage = (kWideOuts + kWideRows) * kChunk;  // numbers

__device__ void copy16(Bf16* to, const Bf16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

/// Many rows: a block has 128 outputs and 128 rows, a warp 64 by 32 of them.
template <bool kSplit>
__global__ void __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ Params p) {
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
      for (int i = 0; i < 4; ++i) copy16(to + i * kThreads * 8, from[i] + chunk * kChunk);
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
          value = float_of(k % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u) + rounded(value);
        }
        put(p, rows.first + row, column, value);
      }
    }
  }
}

template <int kTiles>
void launch_narrow(const Params& p, int tiles, Stream stream) {
  const dim3 grid(static_cast<unsigned>((p.out + 15) / 16), static_cast<unsigned>(tiles));
  narrow_kernel<kTiles><<<grid, kThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("narrow_kernel");
}

/// No more tiles than these, whatever the groups are.
int most_tiles(const Params& p, int size) { return p.rows / size + p.groups; }

void launch(const Params& p, Stream stream) {
  const int each = p.offsets == nullptr ? p.rows : (p.rows + p.groups - 1) / p.groups;
  if (each <= 8) return launch_narrow<1>(p, most_tiles(p, 8), stream);
  if (each <= 16) return launch_narrow<2>(p, most_tiles(p, 16), stream);
  if (each <= 32) return launch_narrow<4>(p, most_tiles(p, 32), stream);
  if (each <= 64) return launch_narrow<8>(p, most_tiles(p, 64), stream);
  constexpr int kBytes = kWideStages * kWideStage * static_cast<int>(sizeof(Bf16));
  const auto kernel = p.split_k ? wide_kernel<true> : wide_kernel<false>;
  cuda::require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(most_tiles(p, kWideRows)),
                  static_cast<unsigned>((p.out + kWideOuts - 1) / kWideOuts));
  kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("wide_kernel");
}

}  // namespace

void linear_cuda(const GroupedLinearArgs& args, bool grouped, TensorView<Bf16, 2> y_bf16,
                 Stream stream) {
  const PackedMatrix& weight = args.weights;
  const std::int64_t rows = args.x.shape[0];
  if (rows == 0) return;
  const bool aligned = (reinterpret_cast<std::uintptr_t>(args.x.data) |
                        reinterpret_cast<std::uintptr_t>(weight.data)) %
                           16 ==
                       0;
  const std::int64_t unit = args.split_k ? 2 * kChunk : kChunk;
  if (weight.in % unit != 0 || args.x.stride[0] % 8 != 0 || !aligned) {
    throw Error(cat({"linear_bf16: ", weight.in, " inputs, rows of x ", args.x.stride[0],
                     " apart; a CUDA device wants multiples of ", unit, " and 8, from addresses ",
                     "that are multiples of 16"}));
  }
  const cuda::OnDevice scope(args.x.device.index);
  Params p{};
  p.x = args.x.data;
  p.weight = weight.data;
  p.y = args.y.data;
  p.y_bf16 = y_bf16.data;
  p.offsets = grouped ? args.offsets.data() : nullptr;
  p.to = args.to.empty() ? nullptr : args.to.data();
  p.x_stride = args.x.stride[0];
  p.y_stride = y_bf16.empty() ? args.y.stride[0] : y_bf16.stride[0];
  p.group_stride = packed_elements(weight.out, weight.in);
  p.rows = static_cast<std::int32_t>(rows);
  p.groups = grouped ? static_cast<std::int32_t>(args.offsets.size()) - 1 : 1;
  p.out = static_cast<std::int32_t>(weight.out);
  p.in = static_cast<std::int32_t>(weight.in);
  p.split_k = args.split_k;
  launch(p, stream);
}

}  // namespace lockstep::kernels
