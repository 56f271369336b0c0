/// Grouped products by wgmma: a persistent block of threads on every multiprocessor, one warp that
/// fetches tiles by TMA, two warpgroups that multiply 64 rows of 256 outputs each.
///
/// A tile is 128 items of one group by 256 outputs. Where a group ends the tile reads on into the
/// next one and does not store what it makes of that; a second warpgroup without rows of its own
/// does not multiply. Every output is one accumulator to which K is added in ascending steps of 16,
/// so that its bits do not depend on the tile it lies in.
///
/// Turned weights, whose outputs lie side by side, come as four boxes of 64 of them: the tensor
/// cores take operands across K too.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/dense/grouped_product_cuda.h"
#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels {
namespace {

using namespace wgmma;

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
};

struct Shared {
  alignas(1024) std::uint8_t x[kStages][kRowBytes];
  alignas(1024) std::uint8_t w[kStages][kColBytes];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  std::int32_t tiles[kMostGroups + 1];  // before each group
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
  std::int32_t group;
  std::int32_t row;   // its first item
  std::int32_t rows;  // items that are the group's
  std::int32_t column;
};

/// Tiles go down a group's items, then to its next outputs, then to the next group.
__device__ Tile tile_of(const Params& p, const Shared& s, int index) {
  int low = 0;
  int high = p.groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.tiles[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const std::int32_t begin = p.offsets[low];
  const std::int32_t count = p.offsets[low + 1] - begin;
  const std::int32_t down = (count + kRows - 1) / kRows;
  const std::int32_t at = index - s.tiles[low];
  const std::int32_t row = at % down * kRows;
  return {low, begin + row, min(count - row, kRows), at / down * kCols};
}

/// Counts the tiles before each group, by the first warp.
__device__ void count_tiles(const Params& p, Shared& s, int lane) {
  std::int32_t before = 0;
  for (int first = 0; first < p.groups; first += 32) {
    const int group = first + lane;
    std::int32_t tiles = 0;
    if (group < p.groups) {
      tiles = (p.offsets[group + 1] - p.offsets[group] + kRows - 1) / kRows * p.columns;
    }
    std::int32_t sum = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const std::int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, d);
      if (lane >= d) sum += other;
    }
    if (group < p.groups) s.tiles[group] = before + sum - tiles;
    before += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  if (lane == 0) s.tiles[p.groups] = before;
}

template <bool kTurned>
__device__ void produce(const Params& p, Shared& s, const CUtensorMap& x, const CUtensorMap& w) {
  Place at;
  const int all = s.tiles[p.groups];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile tile = tile_of(p, s, index);
    for (int step = 0; step < p.steps; ++step) {
      wait(&s.empty[at.stage], at.parity ^ 1u);
      expect(&s.full[at.stage], kRowBytes + kColBytes);
      copy_tile(s.x[at.stage], &x, step * kDepth, tile.row, &s.full[at.stage]);
      if constexpr (kTurned) {
        for (int box = 0; box < kCols / 64; ++box) {
          copy_tile(s.w[at.stage] + box * kBoxBytes, &w, tile.column + box * 64,
                    tile.group * p.depth + step * kDepth, &s.full[at.stage]);
        }
      } else {
        copy_tile(s.w[at.stage], &w, step * kDepth, tile.group * p.out + tile.column,
                  &s.full[at.stage]);
      }
      at.advance();
    }
  }
}

/// Lane 4 g + t of warp v holds of rows 16 v + g and 16 v + g + 8 outputs 8 j + 2 t and the next.
__device__ void store(const Params& p, const Tile& tile, const float (&d)[128], int first_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const bool wide =
      p.out % 2 == 0 && p.y_stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(p.y) % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + warp * 16 + half * 8 + lane / 4;
    if (row >= tile.rows) continue;
    const int item = tile.row + row;
    float* const y = p.y + (p.to == nullptr ? item : p.to[item]) * p.y_stride;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const int column = tile.column + j * 8 + lane % 4 * 2;
      const float2 value{d[4 * j + 2 * half], d[4 * j + 2 * half + 1]};
      if (wide && column < p.out) {
        *reinterpret_cast<float2*>(y + column) = value;
      } else {
        if (column < p.out) y[column] = value.x;
        if (column + 1 < p.out) y[column + 1] = value.y;
      }
    }
  }
}

template <bool kTurned>
__device__ void consume(const Params& p, Shared& s, int consumer) {
  Place at;
  const int all = s.tiles[p.groups];
  const bool speaks = threadIdx.x % 32 == 0;
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile tile = tile_of(p, s, index);
    const int first_row = consumer * 64;
    if (first_row >= tile.rows) {  // nothing to do but to keep step
      for (int step = 0; step < p.steps; ++step) {
        wait(&s.full[at.stage], at.parity);
        __syncwarp();
        if (speaks) arrive(&s.empty[at.stage]);
        at.advance();
      }
      continue;
    }
    float d[128];
    int before = -1;
    for (int step = 0; step < p.steps; ++step) {
      wait(&s.full[at.stage], at.parity);
      const std::uint64_t a =
          descriptor(shared_address(s.x[at.stage]) + consumer * 64 * kDepth * 2);
      const std::uint64_t b = descriptor(shared_address(s.w[at.stage]), kTurned ? kBoxBytes : 16);
      constexpr int kNext = (kTurned ? 16 * 128 : 32) / 16;  // to the next 16 of K
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        multiply<false, kTurned>(d, a + k * 2, b + k * kNext, step > 0 || k > 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (before >= 0 && speaks) arrive(&s.empty[before]);
      before = at.stage;
      at.advance();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (speaks) arrive(&s.empty[before]);
    store(p, tile, d, first_row);
  }
}

#endif

template <bool kTurned>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_product_kernel(const __grid_constant__ CUtensorMap x,
                           const __grid_constant__ CUtensorMap w,
                           const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ std::uint8_t shared_bytes[];
  const std::uint32_t unaligned = shared_address(shared_bytes);
  auto& s = *reinterpret_cast<Shared*>(shared_bytes + ((1024u - unaligned % 1024u) % 1024u));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == 0) count_tiles(p, s, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 32) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&s.full[i], 1);
      init_barrier(&s.empty[i], kConsumerWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
  require_hopper(args.x.device.index, "grouped_product");
  const std::int64_t k = args.x.shape[1];
  const std::int64_t groups = args.w.shape[0];
  const std::int64_t out = args.y.shape[1];
  if (groups > kMostGroups) {
    throw Error(cat({"grouped_product: ", groups, " groups, at most ", kMostGroups}));
  }
  const CUtensorMap x = tensor_map(args.x.data, args.x.shape[0], k, args.x.stride[0], kRows);
  const CUtensorMap w = args.turned ? tensor_map(args.w.data, groups * k, out, out, kDepth)
                                    : tensor_map(args.w.data, groups * out, k, k, kCols);
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
  constexpr int kBytes = sizeof(Shared) + 1024;
  const auto kernel = args.turned ? grouped_product_kernel<true> : grouped_product_kernel<false>;
  static const cudaError_t raised = [] {
    for (const auto each : {grouped_product_kernel<true>, grouped_product_kernel<false>}) {
      const cudaError_t status =
          cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }();
  cuda::require(raised, "cudaFuncSetAttribute");
  const std::int64_t most = ((args.x.shape[0] + kRows - 1) / kRows + groups) * p.columns;
  const auto grid = static_cast<unsigned>(
      std::min<std::int64_t>(most, cuda::multiprocessors(args.x.device.index)));
  kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(x, w, p);
  cuda::require_launch("grouped_product_kernel");
}

}  // namespace lockstep::kernels
