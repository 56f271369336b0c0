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

/// Up to eight rows: a block has 16 outputs, a warp a segment, and the weight goes from memory
/// straight to the tensor cores.
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

__device__ void copy16(std::uint32_t shared, const Bf16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// A float of another block's shared memory, at the place of `shared` here.
__device__ float load_from(int block, std::uint32_t shared) {
  std::uint32_t there;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there));
  return value;
}

constexpr int kMiddleThreads = 128;
constexpr int kMiddleOuts = 128;
constexpr int kMiddleStages = 6;
constexpr int kPartStride = kMiddleOuts + 4;  // rows 2 t start 8 banks apart
constexpr int kOutsEach = kMiddleOuts / kSegments;
constexpr int kManyTiles = 400;  // that keep all multiprocessors busy, a block each

/// Tiles of 128 outputs and up to 8 kTiles rows, a warp 32 outputs of them; chunks of inputs come
/// through a ring in shared memory.
template <int kTiles>
class Middle {
 public:
  static constexpr int kStage = (kMiddleOuts + 8 * kTiles) * kChunk * 2;  // bytes
  static constexpr int kBytes =
      std::max(kMiddleStages * kStage, 8 * kTiles * kPartStride * static_cast<int>(sizeof(float)));

  /// Chunks first .. end - 1 are on their way.
  __device__ Middle(const Params& p, const Rows& rows, int first_out, unsigned char* shared,
                    int first, int end)
      : shared_(shared), coming_(first), end_(end) {
    // A thread copies sixteens of bytes of the lines thread / 4, + 32, + 64 ..: outputs, then rows.
    // Distances are counted in them, so that 32 bits are enough.
    const int thread = static_cast<int>(threadIdx.x);
    weight_ =
        p.weight + rows.group * p.group_stride + std::int64_t{first_out} * p.in + thread % 4 * 8;
    x_ = p.x + rows.first * p.x_stride + thread % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      outs_at_[i] =
          static_cast<std::uint32_t>(min(thread / 4 + 32 * i, p.out - 1 - first_out) * (p.in / 8));
    }
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      rows_at_[i] =
          static_cast<std::uint32_t>(min(thread / 4 + 32 * i, rows.count - 1) * (p.x_stride / 8));
    }
    for (int i = 0; i < kMiddleStages - 1; ++i) start();
  }

  /// The next chunk.
  __device__ void multiply(float (&d)[2][kTiles][4]) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kMiddleStages - 2) : "memory");
    __syncthreads();
    start();
    // Lane 4 g + t reads inputs 8 t .. 8 t + 7 of line g.
    const int thread = static_cast<int>(threadIdx.x);
    const unsigned char* const stage = shared_ + slot_ * kStage + thread % 32 * 16;
    slot_ = slot_ + 1 == kMiddleStages ? 0 : slot_ + 1;
    uint4 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = *reinterpret_cast<const uint4*>(stage + thread / 32 * 2048 + i * 512);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint4 b = *reinterpret_cast<const uint4*>(stage + 8192 + i * 512);
      multiply_chunk(d[0][i], a[0], a[1], b);
      multiply_chunk(d[1][i], a[2], a[3], b);
    }
  }

  /// Sums go to shared memory, [8 * kTiles, kPartStride], when all chunks have been multiplied.
  __device__ void store(const float (&d)[2][kTiles][4]) const {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x);
    float* const to = reinterpret_cast<float*>(shared_) + thread % 4 * 2 * kPartStride +
                      thread / 32 * 32 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to[(8 * i + j % 2) * kPartStride + j / 2 * 8] = d[0][i][j];
        to[(8 * i + j % 2) * kPartStride + j / 2 * 8 + 16] = d[1][i][j];
      }
    }
  }

 private:
  static constexpr int kRowCopies = (8 * kTiles + 31) / 32;

  __device__ void start() {
    if (coming_ < end_) {
      const int thread = static_cast<int>(threadIdx.x);
      const std::uint32_t to = shared_address(shared_) + thread * 16 + slot_coming_ * kStage;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy16(to + i * 2048, weight_ + coming_ * kChunk + std::int64_t{outs_at_[i]} * 8);
      }
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        if (thread / 4 + 32 * i < 8 * kTiles) {
          copy16(to + 8192 + i * 2048, x_ + coming_ * kChunk + std::int64_t{rows_at_[i]} * 8);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    ++coming_;
    slot_coming_ = slot_coming_ + 1 == kMiddleStages ? 0 : slot_coming_ + 1;
  }

  unsigned char* shared_;
  const Bf16* weight_;
  const Bf16* x_;
  std::uint32_t outs_at_[4];
  std::uint32_t rows_at_[kRowCopies];
  int coming_;
  int end_;
  int slot_coming_ = 0;
  int slot_ = 0;
};

/// Up to 64 rows: a cluster has a tile, each of its blocks a segment.
template <int kTiles>
__global__ void __cluster_dims__(kSegments, 1, 1) __launch_bounds__(kMiddleThreads, 3)
    middle_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const int segment = static_cast<int>(blockIdx.x) % kSegments;
  const Rows rows = find_rows(p, static_cast<int>(blockIdx.y), 8 * kTiles);
  if (rows.count <= 0) return;
  const int first_out = static_cast<int>(blockIdx.x) / kSegments * kMiddleOuts;
  float d[2][kTiles][4] = {};
  const int end = chunk_of(p, segment + 1);
  int chunk = chunk_of(p, segment);
  Middle<kTiles> middle(p, rows, first_out, shared, chunk, end);
  for (; chunk < end; ++chunk) middle.multiply(d);
  middle.store(d);
  sync_cluster();
  const int column = segment * kOutsEach + thread % kOutsEach;  // each block adds up its share
  if (first_out + column < p.out) {
    const float* const part = reinterpret_cast<const float*>(shared) + column;
#pragma unroll 4
    for (int row = thread / kOutsEach; row < rows.count; row += kMiddleThreads / kOutsEach) {
      const std::uint32_t at = shared_address(part + row * kPartStride);
      float own[kSegments];
#pragma unroll
      for (int s = 0; s < kSegments; ++s) own[s] = load_from(s, at);
      float sum = own[0];
      float half = 0.0f;
#pragma unroll
      for (int s = 1; s < kSegments; ++s) {
        const bool middle_one = p.split_k && s == kSegments / 2;
        if (middle_one) half = rounded(sum);
        sum = middle_one ? own[s] : sum + own[s];
      }
      put(p, rows.first + row, first_out + column, p.split_k ? half + rounded(sum) : sum);
    }
  }
  sync_cluster();  // none leaves while others read what it has
}

/// Up to 64 rows and so many outputs that a block has all segments of a tile.
template <int kTiles>
__global__ void __launch_bounds__(kMiddleThreads, 2) long_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const Rows rows = find_rows(p, static_cast<int>(blockIdx.y), 8 * kTiles);
  if (rows.count <= 0) return;
  const int first_out = static_cast<int>(blockIdx.x) * kMiddleOuts;
  float sum[2][kTiles][4] = {};
  float d[2][kTiles][4] = {};
  int chunk = 0;
  Middle<kTiles> middle(p, rows, first_out, shared, chunk, chunk_of(p, kSegments));
  for (int segment = 0; segment < kSegments; ++segment) {
    for (const int end = chunk_of(p, segment + 1); chunk < end; ++chunk) middle.multiply(d);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[m][i][j] = segment == 0 ? d[m][i][j] : sum[m][i][j] + d[m][i][j];
          d[m][i][j] = 0.0f;
        }
      }
    }
  }
  middle.store(sum);
  __syncthreads();
  if (first_out + thread >= p.out) return;
  const float* const total = reinterpret_cast<const float*>(shared) + thread;
  for (int row = 0; row < rows.count; ++row) {
    put(p, rows.first + row, first_out + thread, total[row * kPartStride]);
  }
}

constexpr int kWideOuts = 128;
constexpr int kWideRows = 128;
constexpr int kWideStages = 4;
constexpr int kWideStage = (kWideOuts + kWideRows) * kChunk;  // numbers

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

template <int kTiles>
void launch_middle(const Params& p, int tiles, Stream stream) {
  constexpr int kBytes = Middle<kTiles>::kBytes;
  const int outs = (p.out + kMiddleOuts - 1) / kMiddleOuts;
  // The drift rounds half of a sum, which a block's running sum does not have.
  const bool is_long = outs >= kManyTiles && !p.split_k;
  const auto kernel = is_long ? long_kernel<kTiles> : middle_kernel<kTiles>;
  cuda::require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(is_long ? outs : outs * kSegments),
                  static_cast<unsigned>(tiles));
  kernel<<<grid, kMiddleThreads, kBytes, cuda::stream_of(stream)>>>(p);
  cuda::require_launch(is_long ? "long_kernel" : "middle_kernel");
}

/// No more tiles than these, whatever the groups are.
int most_tiles(const Params& p, int size) { return p.rows / size + p.groups; }

void launch(const Params& p, Stream stream) {
  const int each = p.offsets == nullptr ? p.rows : (p.rows + p.groups - 1) / p.groups;
  if (each <= 8) return launch_narrow<1>(p, most_tiles(p, 8), stream);
  if (each <= 16) return launch_middle<2>(p, most_tiles(p, 16), stream);
  if (each <= 32) return launch_middle<4>(p, most_tiles(p, 32), stream);
  if (each <= 64) return launch_middle<8>(p, most_tiles(p, 64), stream);
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
