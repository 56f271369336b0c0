/// BF16 products by wgmma. Whatever the shape of a tile, an output is summed in one order: its
/// inputs in kSegments parts, each one accumulator to which 16 inputs at a time are added, in
/// rising order; then the parts one after another. So a row's bits do not depend on the others.
///
/// One warp of a block fetches tiles of inputs and weights into a ring by TMA, warpgroups multiply
/// 64 rows by kN outputs each, rows that do not exist among them. Few outputs are a cluster's, each
/// of whose blocks has a segment; of many outputs a block has all segments of its tiles.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/once.h"
#include "device/cuda/shared.h"
#include "kernels/dense/linear_params_cuda.h"
#include "kernels/dense/segments_cuda.h"
#include "kernels/dense/wgmma_cuda.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {
namespace {

using wgmma::kDepth;

constexpr int kLineBytes = 2 * kDepth;
constexpr int kGroupedBox = 16;  // rows of a copy where groups of rows differ in size
constexpr int kMostStages = 16;

struct Params {
  LinearParams p;
  std::int32_t row_tiles;
  std::int32_t tiles;
  std::int32_t stages;
  std::int32_t box_rows;   // of x in a copy
  std::int32_t x_bytes;    // of a stage
  std::int32_t part_rows;  // that a block of a cluster adds up
  std::int32_t part_bytes;
  bool pairs;  // y takes two outputs at once,
  bool fours;  // or four
};

/// kRowGroups by kColGroups warpgroups of 64 rows by kN outputs; kSplit blocks share an output's
/// segments, which are whole numbers of kDepth, or end among zeros.
template <int kNumber, int kRowGroups, int kColGroups, int kBlocks, bool kIsWhole>
struct Shape {
  static constexpr bool kWhole = kIsWhole;
  static constexpr int kZeroBytes = kWhole ? 0 : 64 * kLineBytes;  // rows of a product
  static constexpr int kN = kNumber;
  static constexpr int kSplit = kBlocks;
  static constexpr int kColumns = kColGroups;
  static constexpr int kRows = 64 * kRowGroups;
  static constexpr int kOuts = kN * kColumns;
  static constexpr int kConsumers = 128 * kRowGroups * kColumns;
  static constexpr bool kMoves = kN > 176;  // registers, from those who fetch
  static constexpr int kThreads = kConsumers + (kMoves ? 128 : 32);
  static constexpr int kWeightBytes = kOuts * kLineBytes;  // of a stage
  static constexpr int kPartStride = kN + 8;               // rows start 8 banks apart
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kChunk = 32;     // inputs: segments are whole numbers of them
constexpr int kMostEarly = 4;  // stages of weights before any of x, which they would hold up

struct Barriers {
  std::uint64_t full[kMostStages];
  std::uint64_t empty[kMostStages];
  std::uint64_t received;
};

struct Ring {
  std::uint32_t x;
  std::uint32_t weight;
  std::uint64_t zeros;  // a tile's descriptor, where there are any
  std::uint32_t parts;  // [kSegments, part_rows, kPartStride] sums
  Barriers* barriers;
};

/// The inputs of segments first .. last - 1, kDepth at a time but for what ends a segment.
struct Walk {
  int in, segment, last, k, end;

  __device__ Walk(int inputs, int first, int past) : in(inputs), segment(first - 1), last(past) {
    k = end = 0;
    skip();
  }
  __device__ bool more() const { return segment < last; }
  __device__ void next() {
    k += kDepth;
    skip();
  }

 private:
  __device__ int start(int s) const { return in / kChunk * s / kSegments * kChunk; }
  __device__ void skip() {
    while (k >= end && ++segment < last) {
      k = start(segment);
      end = start(segment + 1);
    }
  }
};

struct Tile {
  Rows rows;
  int out;
};

template <typename S>
__device__ Tile tile_of(const Params& a, int index) {
  return {find_rows(a.p, index % a.row_tiles, S::kRows), index / a.row_tiles * S::kOuts};
}

/// By a whole warp, whose first lane copies.
template <typename S>
__device__ void produce(const Params& a, const Ring& ring, const CUtensorMap& x,
                        const CUtensorMap& weight) {
  const bool leads = threadIdx.x % 32 == 0;
  const int segment = S::kSplit == 1 ? 0 : static_cast<int>(blockIdx.x) % S::kSplit;
  const int last = S::kSplit == 1 ? kSegments : segment + 1;
  const int first_tile = static_cast<int>(blockIdx.x) / S::kSplit;
  const int lines = (a.p.out + 31) / 32 * 32;  // of a group's weight
  const auto copy_weight = [&](int stage, const Tile& tile, int k, int copies) {
    wgmma::expect(&ring.barriers->full[stage], S::kWeightBytes + copies * a.box_rows * kLineBytes);
    wgmma::copy_tile(ring.weight + stage * S::kWeightBytes, &weight, k,
                     tile.rows.group * lines + tile.out, &ring.barriers->full[stage]);
  };
  int ahead = 0;  // stages whose weights are on their way
  const int early = min(a.stages, kMostEarly);
  if (a.p.settled && leads) {
    const Tile tile = tile_of<S>(a, first_tile);
    for (Walk walk(a.p.in, segment, last); walk.more() && ahead < early; walk.next()) {
      copy_weight(ahead++, tile, walk.k, 1);
    }
  }
  cuda::take_turn();
  wgmma::Place at;
  for (int index = first_tile; index < a.tiles; index += static_cast<int>(gridDim.x) / S::kSplit) {
    const Tile tile = tile_of<S>(a, index);
    if (tile.rows.count > 0 && leads) {
      const int copies = (tile.rows.count + a.box_rows - 1) / a.box_rows;
      for (Walk walk(a.p.in, segment, last); walk.more(); walk.next()) {
        if (ahead > 0) {
          --ahead;
        } else {
          wgmma::wait(&ring.barriers->empty[at.stage], at.parity ^ 1u);
          copy_weight(at.stage, tile, walk.k, copies);
        }
        for (int i = 0; i < copies; ++i) {
          wgmma::copy_tile(ring.x + at.stage * a.x_bytes + i * a.box_rows * kLineBytes, &x, walk.k,
                           tile.rows.first + i * a.box_rows, &ring.barriers->full[at.stage]);
        }
        at.advance(a.stages);
      }
    }
    __syncwarp();
  }
}

/// Lets the stages of a tile pass by.
__device__ void skip_tile(const Params& a, const Ring& ring, wgmma::Place& at) {
  for (Walk walk(a.p.in, 0, kSegments); walk.more(); walk.next()) {
    wgmma::wait(&ring.barriers->full[at.stage], at.parity);
    __syncwarp();
    if (threadIdx.x % 32 == 0) wgmma::arrive(&ring.barriers->empty[at.stage]);
    at.advance(a.stages);
  }
}

/// d = the products of a segment, 64 rows by kN outputs.
template <typename S>
__device__ void multiply_segment(const Params& a, const Ring& ring, wgmma::Place& at, int segment,
                                 float (&d)[S::kN / 2]) {
  const int group = static_cast<int>(threadIdx.x) / 128;
  const bool speaks = threadIdx.x % 32 == 0;
  const std::uint32_t x = ring.x + group / S::kColumns * 64 * kLineBytes;
  const std::uint32_t weight = ring.weight + group % S::kColumns * S::kN * kLineBytes;
  Walk walk(a.p.in, segment, segment + 1);
  if (!walk.more()) {
#pragma unroll
    for (float& one : d) one = 0.0f;
  }
  int before = -1;
  for (; walk.more(); walk.next()) {
    wgmma::wait(&ring.barriers->full[at.stage], at.parity);
    const std::uint64_t from = wgmma::descriptor(x + at.stage * a.x_bytes);
    const std::uint64_t by = wgmma::descriptor(weight + at.stage * S::kWeightBytes);
    // What follows the segment is multiplied with zeros.
    const bool whole = S::kWhole || walk.end - walk.k >= kDepth;
    wgmma::begin();
    wgmma::multiply(d, from, by, before >= 0);
    wgmma::multiply(d, from + 2, by + 2, true);
    wgmma::multiply(d, whole ? from + 4 : ring.zeros, by + 4, true);
    wgmma::multiply(d, whole ? from + 6 : ring.zeros, by + 6, true);
    wgmma::commit();
    wgmma::wait_for<1>();
    if (before >= 0 && speaks) wgmma::arrive(&ring.barriers->empty[before]);
    before = at.stage;
    at.advance(a.stages);
  }
  wgmma::wait_for<0>();
  if (before >= 0 && speaks) wgmma::arrive(&ring.barriers->empty[before]);
}

/// Outputs `out` and the next of row `row`.
__device__ void put_pair(const Params& a, int row, int out, float low, float high) {
  if (!a.pairs) {
    if (out < a.p.out) put(a.p, row, out, low);
    if (out + 1 < a.p.out) put(a.p, row, out + 1, high);
  } else if (out < a.p.out) {
    const std::int64_t at = place_of(a.p, row, out);
    if (a.p.y != nullptr) {
      *reinterpret_cast<float2*>(a.p.y + at) = make_float2(low, high);
    } else {
      *reinterpret_cast<std::uint32_t*>(a.p.y_bf16 + at) = to_bf16_pair(low, high);
    }
  }
}

/// A row's share of a thread: outputs out + 8 j and the next, d[4 j + 2 half] and the next. Its
/// three neighbours have what lies between; all of a warp.
template <int kCount>
__device__ void put_row(const Params& a, int row, bool exists, int out, int half,
                        const float (&d)[kCount]) {
  if (a.fours && a.p.y == nullptr) {  // a thread and the next trade, so that each has four together
    const bool odd = threadIdx.x % 2 != 0;
    Bf16* const to = exists ? a.p.y_bf16 + place_of(a.p, row, 0) : nullptr;
    const int first = odd ? out + 6 : out;
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {
      const std::uint32_t low = to_bf16_pair(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
      const std::uint32_t high = to_bf16_pair(d[4 * j + 2 * half + 4], d[4 * j + 2 * half + 5]);
      const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? low : high, 1);
      if (exists && first + 8 * j < a.p.out) {
        *reinterpret_cast<uint2*>(to + first + 8 * j) =
            odd ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
    return;
  }
  if (!exists) return;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    put_pair(a, row, out + 8 * j, d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
  }
}

/// All segments of tile after tile.
template <typename S>
__device__ void consume(const Params& a, const Ring& ring) {
  const int thread = static_cast<int>(threadIdx.x);
  const int first_row = thread / 128 / S::kColumns * 64;
  const int first_out = thread / 128 % S::kColumns * S::kN + thread % 4 * 2;
  wgmma::Place at;
  for (int index = static_cast<int>(blockIdx.x); index < a.tiles;
       index += static_cast<int>(gridDim.x)) {
    const Tile tile = tile_of<S>(a, index);
    if (tile.rows.count <= 0) continue;
    if (first_row >= tile.rows.count) {
      skip_tile(a, ring, at);
      continue;
    }
    float sum[S::kN / 2];
    multiply_segment<S>(a, ring, at, 0, sum);
    for (int segment = 1; segment < kSegments; ++segment) {
      float d[S::kN / 2];
      multiply_segment<S>(a, ring, at, segment, d);
#pragma unroll
      for (int i = 0; i < S::kN / 2; ++i) sum[i] += d[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + thread % 128 / 32 * 16 + half * 8 + thread % 32 / 4;
      put_row(a, tile.rows.first + row, row < tile.rows.count, tile.out + first_out, half, sum);
    }
  }
}

/// Of every eight rows of a tile each block of its cluster adds up two.
__device__ int owner_of(int row) { return row % 8 / 2; }
__device__ int part_row_of(int row) { return row / 8 * 2 + row % 2; }
__device__ int rows_owned(int rows, int block) {
  return rows / 8 * 2 + min(max(rows % 8 - 2 * block, 0), 2);
}

/// A segment of the cluster's only tile. Its sums go to the blocks that add up, of which this is
/// one.
template <typename S>
__device__ void consume_segment(const Params& a, const Ring& ring, const Tile& tile, float* parts) {
  const int thread = static_cast<int>(threadIdx.x);
  const int segment = static_cast<int>(blockIdx.x) % S::kSplit;
  float d[S::kN / 2];
  wgmma::Place at;
  multiply_segment<S>(a, ring, at, segment, d);
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // their barriers are made
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + half * 8 + thread % 32 / 4;
    if (row >= tile.rows.count) continue;
    const int owner = owner_of(row);
    const std::uint32_t barrier =
        wgmma::place_in(owner, wgmma::shared_address(&ring.barriers->received));
    const int line = (segment * a.part_rows + part_row_of(row)) * S::kPartStride;
    const std::uint32_t to = wgmma::place_in(
        owner, ring.parts + (line + thread % 4 * 2) * static_cast<int>(sizeof(float)));
    if (owner == segment) {
      float* const own = parts + line + thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < S::kN / 8; ++j) {
        *reinterpret_cast<float2*>(own + j * 8) =
            make_float2(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < S::kN / 8; ++j) {
      send_pair(to + j * 32, d[4 * j + 2 * half], d[4 * j + 2 * half + 1], barrier);
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");  // all that is here is written
}

/// A block's share of the rows.
template <typename S>
__device__ void add_pairs(const Params& a, const Tile& tile, const float* parts) {
  constexpr int kPairs = S::kN / 2;
  const int block = static_cast<int>(blockIdx.x) % S::kSplit;
  for (int i = static_cast<int>(threadIdx.x); i < rows_owned(tile.rows.count, block) * kPairs;
       i += S::kConsumers) {
    const int row = i / kPairs;
    const int out = i % kPairs * 2;
    float low[kSegments];
    float high[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const float2 both =
          *reinterpret_cast<const float2*>(parts + (s * a.part_rows + row) * S::kPartStride + out);
      low[s] = both.x;
      high[s] = both.y;
    }
    put_pair(a, tile.rows.first + row / 2 * 8 + 2 * block + row % 2, tile.out + out,
             sum_of_segments(low, a.p.split_k), sum_of_segments(high, a.p.split_k));
  }
}

/// The same where y is BF16 and takes fours, whose sums are in the order of segments: without a
/// branch, for as many rows as a warp may have.
template <typename S>
__device__ void add_fours(const Params& a, const Tile& tile, const float* parts) {
  constexpr int kWarps = S::kConsumers / 32;
  constexpr int kRowsOfWarp = S::kRows / kSegments / kWarps;
  const int block = static_cast<int>(blockIdx.x) % S::kSplit;
  const int rows = rows_owned(tile.rows.count, block);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int out = static_cast<int>(threadIdx.x) % 32 * 4;
  const int apart = a.part_rows * S::kPartStride;  // segments
  Bf16* const to = a.p.y_bf16 + tile.out;
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int row = warp + r * kWarps;
    if (row >= rows) return;
    const float* const from = parts + row * S::kPartStride;
    Bf16* const line = to + (tile.rows.first + row / 2 * 8 + 2 * block + row % 2) * a.p.y_stride;
#pragma unroll
    for (int first = 0; first < S::kN; first += 128) {
      const int at = first + out;
      if (at >= S::kN || tile.out + at >= a.p.out) continue;
      const auto part = [&](int s) {
        return *reinterpret_cast<const float4*>(from + s * apart + at);
      };
      float4 sum = part(0);
#pragma unroll
      for (int s = 1; s < kSegments; ++s) {
        const float4 more = part(s);
        sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
      }
      *reinterpret_cast<uint2*>(line + at) =
          make_uint2(to_bf16_pair(sum.x, sum.y), to_bf16_pair(sum.z, sum.w));
    }
  }
}

/// Once all segments of a block's rows are here.
template <typename S>
__device__ void add_segments(const Params& a, const Ring& ring, const Tile& tile,
                             const float* parts) {
  wgmma::wait_for_cluster(&ring.barriers->received, 0);
  if (a.fours && a.p.y == nullptr && a.p.to == nullptr && !a.p.split_k) {
    add_fours<S>(a, tile, parts);
  } else {
    add_pairs<S>(a, tile, parts);
  }
}

#endif

template <typename S>
__global__ void __cluster_dims__(S::kSplit, 1, 1) __launch_bounds__(S::kThreads)
    linear_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
                  const __grid_constant__ Params a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const std::uint32_t base = wgmma::shared_address(shared);
  const int stages = a.stages * (a.x_bytes + S::kWeightBytes);
  const int parts_at = stages + S::kZeroBytes;
  const Ring ring{base, base + a.stages * a.x_bytes, wgmma::descriptor(base + stages),
                  base + parts_at, reinterpret_cast<Barriers*>(shared + parts_at + a.part_bytes)};
  const int thread = static_cast<int>(threadIdx.x);
  Tile tile{};
  if constexpr (S::kSplit > 1) tile = tile_of<S>(a, static_cast<int>(blockIdx.x) / S::kSplit);
  if (thread == S::kConsumers) {
    wgmma::prefetch(&weight);
    wgmma::prefetch(&x);
#pragma unroll 1
    for (int i = 0; i < a.stages; ++i) {
      wgmma::init_barrier(&ring.barriers->full[i], 1);
      wgmma::init_barrier(&ring.barriers->empty[i], S::kConsumers / 32);
    }
    if constexpr (S::kSplit > 1) {
      wgmma::init_barrier(&ring.barriers->received, 1);
      wgmma::publish_barriers();
      const int rows = rows_owned(tile.rows.count, static_cast<int>(blockIdx.x) % S::kSplit);
      wgmma::expect(&ring.barriers->received,
                    rows * (kSegments - 1) * S::kN * static_cast<int>(sizeof(float)));
    } else {
      wgmma::publish_barriers();
    }
  }
  if constexpr (!S::kWhole) {
#pragma unroll 1
    for (int i = thread; i < S::kZeroBytes / 16; i += S::kThreads) {
      reinterpret_cast<uint4*>(shared + stages)[i] = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if constexpr (S::kSplit > 1) {
    if (tile.rows.count <= 0) return;  // nor have the cluster's others any
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  if (thread >= S::kConsumers) {
    if constexpr (S::kMoves) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread < S::kConsumers + 32) produce<S>(a, ring, x, weight);
    if constexpr (S::kSplit > 1) {
      __syncwarp();
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  } else {
    if constexpr (S::kMoves) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    cuda::wait_for_predecessor();
    if constexpr (S::kSplit == 1) {
      consume<S>(a, ring);
    } else {
      auto* const parts = reinterpret_cast<float*>(shared + parts_at);
      consume_segment<S>(a, ring, tile, parts);
      add_segments<S>(a, ring, tile, parts);
    }
  }
#endif
}

int ceil_div(std::int64_t a, int b) { return static_cast<int>((a + b - 1) / b); }

constexpr int kSharedAll = 232'448;   // that a block may have
constexpr int kSharedMost = 212'000;  // leaves room for blocks of a small launch before this one

/// Clusters that have all of their multiprocessors' shared memory and run at once. The device is
/// current.
int most_clusters(std::int8_t device) {
  using S = Shape<176, 1, 1, kSegments, true>;
  return cuda::once_a_device(device, [] {
    return wgmma::most_clusters(linear_kernel<S>, kSegments, S::kThreads, kSharedAll);
  });
}

template <int kN, int kRowGroups, int kColGroups, int kSplit, bool kWhole>
void launch_of(const LinearParams& p, std::int8_t device, Stream stream) {
  using S = Shape<kN, kRowGroups, kColGroups, kSplit, kWhole>;
  const bool grouped = p.offsets != nullptr;
  Params a{};
  a.p = p;
  a.row_tiles = grouped ? most_tiles(p, S::kRows) : ceil_div(p.rows, S::kRows);
  a.tiles = a.row_tiles * ceil_div(p.out, S::kOuts);
  a.box_rows = grouped ? kGroupedBox : std::min(S::kRows, ceil_div(p.rows, 8) * 8);
  a.x_bytes = (grouped ? S::kRows : a.box_rows) * kLineBytes;
  a.part_rows = std::min(S::kRows / 4, ceil_div(p.rows, 8) * 2);
  a.part_bytes =
      kSplit > 1 ? kSegments * a.part_rows * S::kPartStride * static_cast<int>(sizeof(float)) : 0;
  const int stage = a.x_bytes + S::kWeightBytes;
  constexpr int kBarriers = (2 * kMostStages + 1) * 8;
  const int others = S::kZeroBytes + a.part_bytes + kBarriers;
  const int room = kSplit > 1 && kRowGroups == 1 ? kSharedMost : kSharedAll;
  const int steps = kSplit > 1 ? ceil_div(p.in, kSplit * kDepth) + 1 : kMostStages;
  a.stages = std::min({kMostStages, steps, (room - others) / stage});
  const auto takes = [&p](int outs) {
    const std::int64_t bytes = outs * (p.y != nullptr ? sizeof(float) : sizeof(Bf16));
    const auto y =
        reinterpret_cast<std::uintptr_t>(p.y) | reinterpret_cast<std::uintptr_t>(p.y_bf16);
    return p.out % outs == 0 && p.y_stride % outs == 0 &&
           y % static_cast<std::uintptr_t>(bytes) == 0;
  };
  a.pairs = takes(2);
  a.fours = takes(4);
  // A warpgroup reads 64 rows whatever a copy brought: what follows must be there to be read.
  const int bytes = std::max(a.stages * stage + others, S::kRows * kLineBytes * 2);
  const CUtensorMap x = wgmma::tensor_map(p.x, p.rows, p.in, p.x_stride, a.box_rows);
  const CUtensorMap weight =
      wgmma::tensor_map(p.weight, p.group_stride / p.in * p.groups, p.in, p.in, S::kOuts);
  cuda::allow_shared(linear_kernel<S>, kSharedAll);
  const auto blocks = static_cast<unsigned>(
      kSplit > 1 ? a.tiles * kSplit : std::min(a.tiles, cuda::multiprocessors(device)));
  if (grouped) {  // where groups begin is read before it waits
    linear_kernel<S><<<blocks, S::kThreads, bytes, cuda::stream_of(stream)>>>(x, weight, a);
    return cuda::require_launch("linear_kernel");
  }
  cuda::launch_beside("linear_kernel", linear_kernel<S>, dim3(blocks), dim3(S::kThreads),
                      static_cast<std::size_t>(bytes), stream, x, weight, a);
}

template <int kN, int kRowGroups, int kColGroups, int kSplit>
void launch(const LinearParams& p, std::int8_t device, Stream stream) {
  if (p.in % (kSegments * kDepth) == 0) {
    return launch_of<kN, kRowGroups, kColGroups, kSplit, true>(p, device, stream);
  }
  launch_of<kN, kRowGroups, kColGroups, kSplit, false>(p, device, stream);
}

}  // namespace

void linear_hopper(const LinearParams& p, std::int8_t device, Stream stream) {
  const int blocks = cuda::multiprocessors(device);
  const bool grouped = p.offsets != nullptr;
  const int each = ceil_div(p.rows, p.groups);
  if (!p.split_k) {  // the drift rounds half of a sum, which a block's running sum does not have
    if (each > 64 && std::int64_t{most_tiles(p, 128)} * ceil_div(p.out, 192) >= blocks / 3) {
      return launch<192, 2, 1, 1>(p, device, stream);
    }
    // A share of a GPU may have no room for a cluster.
    if (grouped || ceil_div(p.out, 192) >= blocks || most_clusters(device) == 0) {
      return launch<96, 1, 2, 1>(p, device, stream);
    }
  }
  const auto fits = [&](int outs) {  // at once
    return std::int64_t{ceil_div(p.rows, 64)} * ceil_div(p.out, outs) <= most_clusters(device);
  };
  if (fits(16)) return launch<16, 1, 1, kSegments>(p, device, stream);
  if (fits(32)) return launch<32, 1, 1, kSegments>(p, device, stream);
  if (fits(72)) return launch<72, 1, 1, kSegments>(p, device, stream);
  if (each <= 64) return launch<176, 1, 1, kSegments>(p, device, stream);
  launch<176, 2, 1, kSegments>(p, device, stream);
}

}  // namespace lockstep::kernels
