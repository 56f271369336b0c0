/// Grouped products by wgmma: a persistent block of threads on every multiprocessor, one warp that
/// fetches tiles by TMA, two warpgroups that multiply.
///
/// A tile is 256 outputs by up to 192 items of one group. Outputs are the product's rows, of which
/// an instruction takes 64 and a warpgroup has two times so many, and items its columns, which may
/// be any multiple of 16: a group's items are dealt to as few tiles as will do, alike but for 16,
/// so that hardly anything is multiplied in vain and works take alike. Where a group ends a tile
/// reads on into the next one and does not store what it makes of that. Every output is one
/// accumulator to which K is added in ascending steps of 16, so that its bits do not depend on the
/// tile it lies in. Outputs leave by way of shared memory, copied while more of them are put there.
///
/// Turned weights, whose outputs lie side by side, come as four boxes of 64 of them: the tensor
/// cores take operands across K too.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/dense/grouped_product_cuda.h"
#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels {
namespace {

using wgmma::kBoxBytes;
using wgmma::kDepth;
using wgmma::kMostGroups;

constexpr int kConsumers = 2;
constexpr int kOuts = 256;  // outputs of a tile
constexpr int kOutsEach = kOuts / kConsumers;
constexpr int kItems = 192;  // of a tile, at most
constexpr int kBox = 32;     // are fetched at once
constexpr int kStages = 3;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kWeightBytes = kOuts * kDepth * 2;
constexpr int kPiece = 16;  // a warpgroup stores its outputs of so many items at once
constexpr int kPieces = 3;  // that may be on their way
constexpr int kPieceStride = kOutsEach + 4;  // of two items: 8 banks

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
};

struct Shared {
  alignas(1024) std::uint8_t w[kStages][kWeightBytes];
  alignas(1024) std::uint8_t x[kStages][kItems * kDepth * 2];
  alignas(16) float pieces[kConsumers][kPieces][kPiece * kPieceStride];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  std::int32_t works[kMostGroups + 1];  // before each group
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kUnit = 16;  // items are dealt to tiles by so many
constexpr int kBoxOfItems = kBox * kDepth * 2;

// Each warp says for itself that it is done with a stage: one that lagged two rounds of the stages
// behind would wait for a parity that has come and gone.
constexpr int kConsumerWarps = 4 * kConsumers;

struct Tile {
  std::int32_t group;
  std::int32_t row;   // the first item
  std::int32_t rows;  // items
  std::int32_t column;
};

__device__ int tiles_of(int count) { return (count + kItems - 1) / kItems; }

/// Tiles of a group.
__device__ int works_of(const Params& p, int group) {
  return tiles_of(p.offsets[group + 1] - p.offsets[group]) * p.columns;
}

/// Works go down a group's items, then to its next outputs, then to the next group.
__device__ Tile work_of(const Params& p, const std::int32_t* works, int index) {
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
  const int tiles = tiles_of(count), units = (count + kUnit - 1) / kUnit;
  const int at = index - works[low], tile = at % tiles;
  // The first tiles have a unit more than the others.
  const int each = units / tiles, more = units % tiles;
  const int first = (tile * each + min(tile, more)) * kUnit;
  const int rows = min((each + (tile < more ? 1 : 0)) * kUnit, count - first);
  return {low, begin + first, rows, at / tiles * kOuts};
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
    const Tile tile = work_of(p, s.works, index);
    const int boxes = (tile.rows + kBox - 1) / kBox;
    for (int step = 0; step < p.steps; ++step) {
      std::uint64_t* const full = &s.full[at.stage];
      wgmma::wait(&s.empty[at.stage], at.parity ^ 1u);
      wgmma::expect(full, boxes * kBoxOfItems + kWeightBytes);
      if constexpr (kTurned) {
        for (int box = 0; box < kOuts / 64; ++box) {
          wgmma::copy_tile(s.w[at.stage] + box * kBoxBytes, &w, tile.column + box * 64,
                           tile.group * p.depth + step * kDepth, full);
        }
      } else {
        wgmma::copy_tile(s.w[at.stage], &w, step * kDepth, tile.group * p.out + tile.column, full);
      }
      for (int box = 0; box < boxes; ++box) {
        wgmma::copy_tile(s.x[at.stage] + box * kBoxOfItems, &x, step * kDepth,
                         tile.row + box * kBox, full);
      }
      at.advance(kStages);
    }
  }
}

/// d = the products of the warpgroup's outputs with kN items, none where it has no outputs.
template <bool kTurned, int kN>
__device__ void multiply_tile(const Params& p, Shared& s, wgmma::Place& at, int consumer,
                              float (&d)[2][kItems / 2]) {
  const bool speaks = threadIdx.x % 32 == 0;
  int before = -1;
  for (int step = 0; step < p.steps; ++step) {
    wgmma::wait(&s.full[at.stage], at.parity);
    if constexpr (kN > 0) {
      const std::uint64_t a =
          wgmma::descriptor(wgmma::shared_address(s.w[at.stage]) + consumer * 2 * kBoxBytes);
      const std::uint64_t b = wgmma::descriptor(wgmma::shared_address(s.x[at.stage]));
      constexpr int kNext = (kTurned ? 16 * 128 : 32) / 16;  // to the next 16 of K
      wgmma::begin();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          wgmma::multiply<kTurned, false>(reinterpret_cast<float(&)[kN / 2]>(d[i]),
                                          a + k * kNext + i * (kBoxBytes / 16), b + k * 2,
                                          step > 0 || k > 0);
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

/// All warps of one consumer.
__device__ void meet(int consumer) {
  if (consumer == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

/// A warpgroup's outputs from `column` on. Lane 4 g + t of warp v holds of items 8 j + 2 t and the
/// next outputs 16 v + g and 16 v + g + 8, and those 64 on.
__device__ void store(const Params& p, Shared& s, const Tile& tile, int consumer, int column,
                      int& next_piece, const float (&d)[2][kItems / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int piece = 0; piece < kItems / kPiece; ++piece) {
    if (piece * kPiece >= tile.rows) break;
    float* const staged = s.pieces[consumer][next_piece];
    if (++next_piece == kPieces) next_piece = 0;
    float* const mine = staged + lane % 4 * 2 * kPieceStride + warp * 16 + lane / 4;
#pragma unroll
    for (int k = 0; k < kPiece / 2; ++k) {
      const int j = k / 4, half = k / 2 % 2, item = k % 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mine[(j * 8 + item) * kPieceStride + i * 64 + half * 8] =
            d[i][4 * (piece * (kPiece / 8) + j) + 2 * half + item];
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    // What lies where the next piece comes has been read.
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPieces - 2) : "memory");
    meet(consumer);
    constexpr int kEach = kPiece / 4;  // items a warp stores
    const int item = warp * kEach + lane;
    if (lane < kEach && piece * kPiece + item < tile.rows) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                       row_of(p, tile.row + piece * kPiece + item) + column),
                   "r"(wgmma::shared_address(staged + item * kPieceStride)),
                   "r"(min(kOutsEach, p.out - column) * 4)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

/// The same where a row of y starts anywhere.
__device__ void store_singly(const Params& p, const Tile& tile, int column,
                             const float (&d)[2][kItems / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int j = 0; j < kItems / 8; ++j) {
    if (j * 8 >= tile.rows) break;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int item = j * 8 + lane % 4 * 2 + k % 2;
      const int output = column + k / 4 * 64 + warp * 16 + k / 2 % 2 * 8 + lane / 4;
      if (item < tile.rows && output < p.out) {
        row_of(p, tile.row + item)[output] = d[k / 4][4 * j + k % 4];
      }
    }
  }
}

template <bool kTurned>
__device__ void consume(const Params& p, Shared& s, int consumer) {
  wgmma::Place at;
  int next_piece = 0;
  const int all = s.works[p.groups];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile tile = work_of(p, s.works, index);
    const int column = tile.column + consumer * kOutsEach;
    float d[2][kItems / 2];
    if (column >= p.out) {
      multiply_tile<kTurned, 0>(p, s, at, consumer, d);
      continue;
    }
    // The fewest items that an instruction here takes and that are enough.
    switch ((tile.rows + kUnit - 1) / kUnit) {
      case 1: multiply_tile<kTurned, 16>(p, s, at, consumer, d); break;
      case 2: multiply_tile<kTurned, 32>(p, s, at, consumer, d); break;
      case 3:
      case 4: multiply_tile<kTurned, 64>(p, s, at, consumer, d); break;
      case 5:
      case 6: multiply_tile<kTurned, 96>(p, s, at, consumer, d); break;
      case 7:
      case 8: multiply_tile<kTurned, 128>(p, s, at, consumer, d); break;
      case 9: multiply_tile<kTurned, 144>(p, s, at, consumer, d); break;
      case 10: multiply_tile<kTurned, 160>(p, s, at, consumer, d); break;
      case 11: multiply_tile<kTurned, 176>(p, s, at, consumer, d); break;
      default: multiply_tile<kTurned, 192>(p, s, at, consumer, d);
    }
    if (p.bulk) {
      store(p, s, tile, consumer, column, next_piece, d);
    } else {
      store_singly(p, tile, column, d);
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
  const CUtensorMap x = wgmma::tensor_map(args.x.data, args.x.shape[0], k, args.x.stride[0], kBox);
  const CUtensorMap w = args.turned ? wgmma::tensor_map(args.w.data, groups * k, out, out, kDepth)
                                    : wgmma::tensor_map(args.w.data, groups * out, k, k, kOuts);
  Params p{};
  p.offsets = args.offsets.data;
  p.to = args.to.data;
  p.y = args.y.data;
  p.y_stride = args.y.stride[0];
  p.groups = static_cast<std::int32_t>(groups);
  p.out = static_cast<std::int32_t>(out);
  p.depth = static_cast<std::int32_t>(k);
  p.steps = static_cast<std::int32_t>((k + kDepth - 1) / kDepth);
  p.columns = static_cast<std::int32_t>((out + kOuts - 1) / kOuts);
  p.bulk = out % 4 == 0 && p.y_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.y) % 16 == 0;
  const int multiprocessors = cuda::multiprocessors(args.x.device.index);
  constexpr int kBytes = sizeof(Shared);
  static_assert(kBytes <= 232'448);
  const auto kernel = args.turned ? grouped_product_kernel<true> : grouped_product_kernel<false>;
  cuda::allow_shared(kernel, kBytes);
  const std::int64_t most = ((args.x.shape[0] + kItems - 1) / kItems + groups) * p.columns;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(most, multiprocessors));
  kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(x, w, p);
  cuda::require_launch("grouped_product_kernel");
}

}  // namespace lockstep::kernels
