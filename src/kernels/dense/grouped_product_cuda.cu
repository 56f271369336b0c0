/// Grouped products by wgmma: a persistent block of threads on every multiprocessor, one warp that
/// fetches tiles by TMA, two warpgroups that multiply.
///
/// A tile is 256 items of one group by 192 outputs, for what it reads of the L2 costs power: its
/// items are four blocks of 64, of which a warpgroup has the first and third, or the others. Where
/// a group ends a block reads on into the next one and does not store what it makes of that; blocks
/// without items are neither fetched nor multiplied, and where there is much to do two or three
/// tiles with few items are one work, so that works take alike. Every output is one accumulator to
/// which K is added in ascending steps of 16, so that its bits do not depend on the tile it lies
/// in. Outputs leave by way of shared memory, copied while the next tile is multiplied.
///
/// Turned weights, whose outputs lie side by side, come as three boxes of 64 of them: the tensor
/// cores take operands across K too.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/dense/grouped_product_cuda.h"
#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels {
namespace {

using wgmma::kBoxBytes;
using wgmma::kDepth;
using wgmma::kMostGroups;

constexpr int kBlock = 64;  // items of a product
constexpr int kConsumers = 2;
constexpr int kRows = 2 * kConsumers * kBlock;  // of a tile
constexpr int kCols = 192;                      // outputs of a tile
constexpr int kStages = 3;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kColBytes = kCols * kDepth * 2;
constexpr int kPieceCols = kCols / 2;         // a warp stores 8 items by so many outputs at once
constexpr int kPieceStride = kPieceCols + 8;  // rows start 8 banks apart

struct Params {
  const std::int32_t* offsets;
  const std::int32_t* to;
  float* y;
  std::int64_t y_stride;
  std::int32_t groups;
  std::int32_t out;
  std::int32_t depth;    // K
  std::int32_t steps;    // of K
  std::int32_t columns;  // tiles side by side
  bool bulk;             // rows of y start at multiples of 16 bytes
  bool gathers;          // tiles with few items
};

// Each warp says for itself that it is done with a stage: one that lagged two rounds of the stages
// behind would wait for a parity that has come and gone.
constexpr int kConsumerWarps = 4 * kConsumers;

struct Shared {
  alignas(1024) std::uint8_t x[kStages][kRows * kDepth * 2];
  alignas(1024) std::uint8_t w[kStages][kColBytes];
  alignas(16) float pieces[kConsumerWarps][2][8 * kPieceStride];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  std::int32_t works[kMostGroups + 1];  // before each group
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Tiles side by side that one block of threads multiplies one after the other.
struct Tiles {
  std::int32_t group;
  std::int32_t row;   // the first item
  std::int32_t rows;  // items that are the group's
  std::int32_t column;
  std::int32_t count;
};

/// So many tiles with the `rest` items of a group take about as long as one that is whole.
__device__ int tiles_of_rest(const Params& p, int rest) {
  if (!p.gathers) return 1;
  const int blocks = (rest + kBlock - 1) / kBlock;
  return blocks == 1 ? 3 : blocks == 2 ? 2 : 1;
}

/// Works of a group, each a whole tile or a few of what is left of its items.
__device__ int works_of(const Params& p, int group) {
  const int count = p.offsets[group + 1] - p.offsets[group];
  const int rest = count % kRows, run = tiles_of_rest(p, rest);
  return count / kRows * p.columns + (rest > 0 ? (p.columns + run - 1) / run : 0);
}

/// Works go down a group's items, then to its next outputs, then to the next group.
__device__ Tiles work_of(const Params& p, const std::int32_t* works, int index) {
  int low = 0;
  int high = p.groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (works[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const std::int32_t begin = p.offsets[low];
  const int count = p.offsets[low + 1] - begin;
  const int whole = count / kRows, rest = count % kRows;
  // Whole tiles of `run` columns, and then the rest of them.
  const int run = rest > 0 ? tiles_of_rest(p, rest) : 1;
  const int round = whole * run + (rest > 0 ? 1 : 0);
  const int at = index - works[low];
  const int first = at / round * run, of_round = at % round;
  const int columns = min(run, p.columns - first);
  if (of_round < whole * columns) {
    const int row = of_round % whole * kRows;
    return {low, begin + row, kRows, (first + of_round / whole) * kCols, 1};
  }
  return {low, begin + whole * kRows, rest, first * kCols, columns};
}

/// Counts the works before each group, by the first warp.
__device__ void count_works(const Params& p, std::int32_t* before_group, int lane) {
  std::int32_t before = 0;
  for (int first = 0; first < p.groups; first += 32) {
    const int group = first + lane;
    const std::int32_t works = group < p.groups ? works_of(p, group) : 0;
    std::int32_t sum = works;
    for (int d = 1; d < 32; d *= 2) {
      const std::int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
      if (lane >= d) sum += other;
    }
    if (group < p.groups) before_group[group] = before + sum - works;
    before += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  if (lane == 0) before_group[p.groups] = before;
}

template <bool kTurned>
__device__ void produce(const Params& p, Shared& s, const CUtensorMap& x, const CUtensorMap& w) {
  wgmma::Place at;
  const int all = s.works[p.groups];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tiles tile = work_of(p, s.works, index);
    const int blocks = (tile.rows + kBlock - 1) / kBlock;
    for (int i = 0; i < tile.count * p.steps; ++i) {
      const int step = i % p.steps, column = tile.column + i / p.steps * kCols;
      std::uint64_t* const full = &s.full[at.stage];
      wgmma::wait(&s.empty[at.stage], at.parity ^ 1u);
      wgmma::expect(full, blocks * kBoxBytes + kColBytes);
      if constexpr (kTurned) {
        for (int box = 0; box < kCols / 64; ++box) {
          wgmma::copy_tile(s.w[at.stage] + box * kBoxBytes, &w, column + box * 64,
                           tile.group * p.depth + step * kDepth, full);
        }
      } else {
        wgmma::copy_tile(s.w[at.stage], &w, step * kDepth, tile.group * p.out + column, full);
      }
      for (int block = 0; block < blocks; ++block) {
        wgmma::copy_tile(s.x[at.stage] + block * kBoxBytes, &x, step * kDepth,
                         tile.row + block * kBlock, full);
      }
      at.advance(kStages);
    }
  }
}

/// d = the products of kBlocks of the warpgroup's blocks, which may be none.
template <bool kTurned, int kBlocks>
__device__ void multiply_tile(const Params& p, Shared& s, wgmma::Place& at, int consumer,
                              float (&d)[2][kCols / 2]) {
  const bool speaks = threadIdx.x % 32 == 0;
  int before = -1;
  for (int step = 0; step < p.steps; ++step) {
    wgmma::wait(&s.full[at.stage], at.parity);
    if constexpr (kBlocks > 0) {
      const std::uint64_t a =
          wgmma::descriptor(wgmma::shared_address(s.x[at.stage]) + consumer * kBoxBytes);
      const std::uint64_t b =
          wgmma::descriptor(wgmma::shared_address(s.w[at.stage]), kTurned ? kBoxBytes : 16);
      constexpr int kNext = (kTurned ? 16 * 128 : 32) / 16;  // to the next 16 of K
      wgmma::begin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          wgmma::multiply<false, kTurned>(d[i], a + k * 2 + i * (kConsumers * kBoxBytes / 16),
                                          b + k * kNext, step > 0 || k > 0);
        }
      }
      wgmma::commit();
      wgmma::wait_for<1>();
    } else {
      __syncwarp();
    }
    if (before >= 0 && speaks) wgmma::arrive(&s.empty[before]);
    before = at.stage;
    at.advance(kStages);
  }
  wgmma::wait_for<0>();
  if (speaks) wgmma::arrive(&s.empty[before]);
}

/// The start of an item's row of y.
__device__ float* row_of(const Params& p, int item) {
  return p.y + (p.to == nullptr ? item : p.to[item]) * p.y_stride;
}

/// Rows first_row .. first_row + 63 of a tile, by one warpgroup: lane 4 g + t of warp v holds of
/// rows 16 v + g and 16 v + g + 8 outputs 8 j + 2 t and the next. Four rows at once to the memory.
__device__ void store(const Params& p, Shared& s, const Tiles& tile, const float (&d)[kCols / 2],
                      int first_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const int first = first_row + warp * 16 + piece / 2 * 8;
    const int column = tile.column + piece % 2 * kPieceCols;
    float* const staged = s.pieces[static_cast<int>(threadIdx.x) / 32 - 4][piece % 2];
    // What lay there two pieces ago has been read.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPieceCols / 8; ++j) {
      const int from = 4 * (piece % 2 * kPieceCols / 8 + j) + piece / 2 * 2;
      *reinterpret_cast<float2*>(staged + lane / 4 * kPieceStride + j * 8 + lane % 4 * 2) =
          make_float2(d[from], d[from + 1]);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane < 8 && first + lane < tile.rows && column < p.out) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                       row_of(p, tile.row + first + lane) + column),
                   "r"(wgmma::shared_address(staged + lane * kPieceStride)),
                   "r"(min(kPieceCols, p.out - column) * 4)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

/// The same where a row of y starts anywhere.
__device__ void store_singly(const Params& p, const Tiles& tile, const float (&d)[kCols / 2],
                             int first_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + warp * 16 + half * 8 + lane / 4;
    if (row >= tile.rows) continue;
    float* const y = row_of(p, tile.row + row);
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const int column = tile.column + j * 8 + lane % 4 * 2;
      if (column < p.out) y[column] = d[4 * j + 2 * half];
      if (column + 1 < p.out) y[column + 1] = d[4 * j + 2 * half + 1];
    }
  }
}

/// One tile, the first of `tile`.
template <bool kTurned>
__device__ void make_tile(const Params& p, Shared& s, wgmma::Place& at, int consumer,
                          const Tiles& tile) {
  float d[2][kCols / 2];
  const int blocks = (tile.rows - consumer * kBlock + kRows / 2 - 1) / (kRows / 2);
  if (blocks == 2) {
    multiply_tile<kTurned, 2>(p, s, at, consumer, d);
  } else if (tile.rows > consumer * kBlock) {
    multiply_tile<kTurned, 1>(p, s, at, consumer, d);
  } else {
    return multiply_tile<kTurned, 0>(p, s, at, consumer, d);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i >= blocks) break;
    const int first_row = (consumer + i * kConsumers) * kBlock;
    if (p.bulk) {
      store(p, s, tile, d[i], first_row);
    } else {
      store_singly(p, tile, d[i], first_row);
    }
  }
}

template <bool kTurned>
__device__ void consume(const Params& p, Shared& s, int consumer) {
  wgmma::Place at;
  const int all = s.works[p.groups];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    Tiles tile = work_of(p, s.works, index);
    for (; tile.count > 0; --tile.count, tile.column += kCols) {
      make_tile<kTurned>(p, s, at, consumer, tile);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

template <bool kTurned>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_product_kernel(const __grid_constant__ CUtensorMap x,
                           const __grid_constant__ CUtensorMap w,
                           const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<Shared*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == 0) count_works(p, s.works, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 32) {
    for (int i = 0; i < kStages; ++i) {
      wgmma::init_barrier(&s.full[i], 1);
      wgmma::init_barrier(&s.empty[i], kConsumerWarps);
    }
    wgmma::publish_barriers();
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce<kTurned>(p, s, x, w);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<kTurned>(p, s, warp / 4 - 1);
  }
#endif
}

}  // namespace

void grouped_product_cuda(const GroupedProductArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.x.device.index);
  wgmma::require_hopper(args.x.device.index, "grouped_product");
  const std::int64_t k = args.x.shape[1];
  const std::int64_t groups = args.w.shape[0];
  const std::int64_t out = args.y.shape[1];
  if (groups > kMostGroups) {
    throw Error(cat({"grouped_product: ", groups, " groups, at most ", kMostGroups}));
  }
  const CUtensorMap x =
      wgmma::tensor_map(args.x.data, args.x.shape[0], k, args.x.stride[0], kBlock);
  const CUtensorMap w = args.turned ? wgmma::tensor_map(args.w.data, groups * k, out, out, kDepth)
                                    : wgmma::tensor_map(args.w.data, groups * out, k, k, kCols);
  Params p{};
  p.offsets = args.offsets.data;
  p.to = args.to.data;
  p.y = args.y.data;
  p.y_stride = args.y.stride[0];
  p.groups = static_cast<std::int32_t>(groups);
  p.out = static_cast<std::int32_t>(out);
  p.depth = static_cast<std::int32_t>(k);
  p.steps = static_cast<std::int32_t>((k + kDepth - 1) / kDepth);
  p.columns = static_cast<std::int32_t>((out + kCols - 1) / kCols);
  p.bulk = out % 4 == 0 && p.y_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.y) % 16 == 0;
  const int multiprocessors = cuda::multiprocessors(args.x.device.index);
  p.gathers = args.x.shape[0] / kRows * p.columns >= std::int64_t{24} * multiprocessors;
  constexpr int kBytes = sizeof(Shared);
  static_assert(kBytes <= 232'448);
  const auto kernel = args.turned ? grouped_product_kernel<true> : grouped_product_kernel<false>;
  cuda::require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                "cudaFuncSetAttribute");
  const std::int64_t most = ((args.x.shape[0] + kRows - 1) / kRows + groups) * p.columns;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(most, multiprocessors));
  kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(x, w, p);
  cuda::require_launch("grouped_product_kernel");
}

}  // namespace lockstep::kernels
