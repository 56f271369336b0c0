/// The gradients of grouped products by wgmma: sums over a group's items, so that K is the items
/// and both operands lie across it. Blocks, stages and warps are those of grouped_product_cuda.cu.
///
/// A tile is 128 rows by 256 columns of one group's matrix. Where a group's items end within 64 of
/// them, what lies behind is the next group's: each warpgroup clears that in its own operand.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/dense/grouped_product_cuda.h"
#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels {
namespace {

using namespace wgmma;

constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRows = 64 * kConsumers;  // of a tile
constexpr int kCols = 256;              // outputs of a tile
constexpr int kRowBytes = kRows * kDepth * 2;
constexpr int kColBytes = kCols * kDepth * 2;

struct SumsParams {
  const std::int32_t* offsets;
  float* sum;
  std::int32_t rows;
  std::int32_t cols;
  std::int32_t down;   // tiles one above the other
  std::int32_t tiles;  // of a group
  std::int32_t all;    // tiles
};

struct SumsShared {
  alignas(1024) std::uint8_t a[kStages][kRowBytes];
  alignas(1024) std::uint8_t b[kStages][kColBytes];
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct SumsTile {
  std::int32_t group, row, col;  // its first row and column
  std::int32_t begin, items;
  __device__ int steps() const { return (items + kDepth - 1) / kDepth; }
};

__device__ SumsTile sums_tile(const SumsParams& p, int index) {
  const int group = index / p.tiles, at = index % p.tiles;
  const std::int32_t begin = p.offsets[group];
  return {group, at % p.down * kRows, at / p.down * kCols, begin, p.offsets[group + 1] - begin};
}

__device__ void produce_sums(const SumsParams& p, SumsShared& s, const CUtensorMap& a,
                             const CUtensorMap& b) {
  Place at;
  for (int index = static_cast<int>(blockIdx.x); index < p.all; index += gridDim.x) {
    const SumsTile tile = sums_tile(p, index);
    for (int step = 0; step < tile.steps(); ++step) {
      const int item = tile.begin + step * kDepth;
      wait(&s.empty[at.stage], at.parity ^ 1u);
      expect(&s.full[at.stage], kRowBytes + kColBytes);
      for (int box = 0; box < kConsumers; ++box) {
        copy_tile(s.a[at.stage] + box * kBoxBytes, &a, tile.row + box * 64, item,
                  &s.full[at.stage]);
      }
      for (int box = 0; box < kCols / 64; ++box) {
        copy_tile(s.b[at.stage] + box * kBoxBytes, &b, tile.col + box * 64, item,
                  &s.full[at.stage]);
      }
      at.advance(kStages);
    }
  }
}

/// Zeros behind the first `items` of a warpgroup's box, for the tensor cores to see.
__device__ void clear_behind(std::uint8_t* box, int items, int consumer) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  for (int at = items * 128 + thread * 16; at < kBoxBytes; at += 128 * 16) {
    *reinterpret_cast<uint4*>(box + at) = uint4{0, 0, 0, 0};
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
}

constexpr int kInFlight = 16;  // pairs that a thread reads before it adds

/// Lane 4 g + t of warp v holds of rows 16 v + g and 16 v + g + 8 columns 8 j + 2 t and the next.
__device__ void add_sums(const SumsParams& p, const SumsTile& tile, const float (&d)[128],
                         int first_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile.row + first_row + warp * 16 + half * 8 + lane / 4;
    if (row >= p.rows) continue;
    float* const sum = p.sum + (std::int64_t{tile.group} * p.rows + row) * p.cols;
#pragma unroll
    for (int first = 0; first < kCols / 8; first += kInFlight) {
      float2 before[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int col = tile.col + (first + i) * 8 + lane % 4 * 2;
        before[i] = col < p.cols ? __ldcs(reinterpret_cast<const float2*>(sum + col)) : float2{};
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int j = first + i, col = tile.col + j * 8 + lane % 4 * 2;
        if (col >= p.cols) continue;
        __stcs(reinterpret_cast<float2*>(sum + col),
               float2{before[i].x + d[4 * j + 2 * half], before[i].y + d[4 * j + 2 * half + 1]});
      }
    }
  }
}

__device__ void consume_sums(const SumsParams& p, SumsShared& s, int consumer) {
  Place at;
  const bool speaks = threadIdx.x % 32 == 0;
  for (int index = static_cast<int>(blockIdx.x); index < p.all; index += gridDim.x) {
    const SumsTile tile = sums_tile(p, index);
    const int steps = tile.steps();
    if (steps == 0) continue;
    const int first_row = consumer * 64;
    if (tile.row + first_row >= p.rows) {  // nothing to do but to keep step
      for (int step = 0; step < steps; ++step) {
        wait(&s.full[at.stage], at.parity);
        __syncwarp();
        if (speaks) arrive(&s.empty[at.stage]);
        at.advance(kStages);
      }
      continue;
    }
    float d[128];
    int before = -1;
    for (int step = 0; step < steps; ++step) {
      wait(&s.full[at.stage], at.parity);
      std::uint8_t* const box = s.a[at.stage] + consumer * kBoxBytes;
      if ((step + 1) * kDepth > tile.items) clear_behind(box, tile.items - step * kDepth, consumer);
      const std::uint64_t a = descriptor(shared_address(box), kBoxBytes);
      const std::uint64_t b = descriptor(shared_address(s.b[at.stage]), kBoxBytes);
      constexpr int kNext = 16 * 128 / 16;  // to the next 16 items
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        multiply<true, true>(d, a + k * kNext, b + k * kNext, step > 0 || k > 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (before >= 0 && speaks) arrive(&s.empty[before]);
      before = at.stage;
      at.advance(kStages);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (speaks) arrive(&s.empty[before]);
    add_sums(p, tile, d, first_row);
  }
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    grouped_sums_kernel(const __grid_constant__ CUtensorMap a,
                        const __grid_constant__ CUtensorMap b,
                        const __grid_constant__ SumsParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ std::uint8_t shared_bytes[];
  const std::uint32_t unaligned = shared_address(shared_bytes);
  auto& s = *reinterpret_cast<SumsShared*>(shared_bytes + ((1024u - unaligned % 1024u) % 1024u));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&s.full[i], 1);
      init_barrier(&s.empty[i], 4 * kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce_sums(p, s, a, b);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume_sums(p, s, warp / 4 - 1);
  }
#endif
}

}  // namespace

void grouped_sums_cuda(const GroupedSumsArgs& args, Stream stream) {
  const std::int8_t index = args.a.device.index;
  const cuda::OnDevice scope(index);
  require_hopper(index, "grouped_sums");
  const auto [groups, rows, cols] = args.sum.shape;
  const std::int64_t items = args.a.shape[0];
  const CUtensorMap a = tensor_map(args.a.data, items, rows, args.a.stride[0], kDepth);
  const CUtensorMap b = tensor_map(args.b.data, items, cols, args.b.stride[0], kDepth);
  const std::int64_t down = (rows + kRows - 1) / kRows;
  const std::int64_t tiles = down * ((cols + kCols - 1) / kCols);
  const SumsParams p = {.offsets = args.offsets.data,
                        .sum = args.sum.data,
                        .rows = static_cast<std::int32_t>(rows),
                        .cols = static_cast<std::int32_t>(cols),
                        .down = static_cast<std::int32_t>(down),
                        .tiles = static_cast<std::int32_t>(tiles),
                        .all = static_cast<std::int32_t>(groups * tiles)};
  constexpr int kBytes = sizeof(SumsShared) + 1024;
  cuda::allow_shared(grouped_sums_kernel, kBytes);
  const auto grid =
      static_cast<unsigned>(std::min<std::int64_t>(groups * tiles, cuda::multiprocessors(index)));
  grouped_sums_kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(a, b, p);
  cuda::require_launch("grouped_sums_kernel");
}

}  // namespace lockstep::kernels
