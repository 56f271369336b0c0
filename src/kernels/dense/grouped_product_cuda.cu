/// Grouped products by wgmma: a persistent block of threads on every multiprocessor, one warp that
/// fetches tiles by TMA, two warpgroups that multiply 64 rows of 256 outputs each.
///
/// A tile is 128 items of one group by 256 outputs. Where a group ends the tile reads on into the
/// next one and does not store what it makes of that; a second warpgroup without rows of its own
/// does not multiply. Every output is one accumulator to which K is added in ascending steps of 16,
/// so that its bits do not depend on the tile it lies in.
#include <cuda.h>

#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/dense/grouped_product_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kRows = 128;  // of a tile
constexpr int kCols = 256;  // outputs of a tile
constexpr int kDepth = 64;  // of K at a time: 128 bytes, as wide as the swizzle
constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRowBytes = kRows * kDepth * 2;
constexpr int kColBytes = kCols * kDepth * 2;
constexpr int kMostGroups = 1024;

struct Params {
  const std::int32_t* offsets;
  const std::int32_t* to;
  float* y;
  std::int64_t y_stride;
  std::int32_t groups;
  std::int32_t out;
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma is Hopper's alone; the host asks for it

// Each warp says for itself that it is done with a stage: one that lagged two rounds of the stages
// behind would wait for a parity that has come and gone.
constexpr int kConsumerWarps = 4 * kConsumers;

__device__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ void init_barrier(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ void expect(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ void wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}
__device__ void copy_tile(void* shared, const CUtensorMap* map, int k, int row,
                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

/// Rows of 128 bytes, eight of them a swizzled kilobyte.
__device__ std::uint64_t descriptor(std::uint32_t address) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 / 16} << 32) | (std::uint64_t{1} << 16) |
         ((address & 0x3FFFFu) >> 4);
}

/// d = a b, or d += a b: 64 rows by 256 outputs over 16 of K.
__device__ void multiply(float (&d)[128], std::uint64_t a, std::uint64_t b, bool adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127"
      "}, %128, %129, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(adds)));
}

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

struct Place {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

__device__ void produce(const Params& p, Shared& s, const CUtensorMap& x, const CUtensorMap& w) {
  Place at;
  const int all = s.tiles[p.groups];
  for (int index = static_cast<int>(blockIdx.x); index < all; index += gridDim.x) {
    const Tile tile = tile_of(p, s, index);
    for (int step = 0; step < p.steps; ++step) {
      wait(&s.empty[at.stage], at.parity ^ 1u);
      expect(&s.full[at.stage], kRowBytes + kColBytes);
      copy_tile(s.x[at.stage], &x, step * kDepth, tile.row, &s.full[at.stage]);
      copy_tile(s.w[at.stage], &w, step * kDepth, tile.group * p.out + tile.column,
                &s.full[at.stage]);
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
      const std::uint64_t b = descriptor(shared_address(s.w[at.stage]));
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        multiply(d, a + k * 2, b + k * 2, step > 0 || k > 0);
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
    if (threadIdx.x == 0) produce(p, s, x, w);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(p, s, warp / 4 - 1);
  }
#endif
}

void require_hopper(std::int8_t index) {
  int major = 0;
  cuda::require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
                "cudaDeviceGetAttribute");
  if (major != 9) {
    throw Error(cat({"grouped_product: CUDA device ", static_cast<int>(index),
                     " has compute capability ", major, ".x, wgmma needs 9.0; use w4a4()"}));
  }
}

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, by its name: nothing links to the driver.
Encode encode_function() {
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cuda::require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                   cudaEnableDefault, &result),
                  "cudaGetDriverEntryPointByVersion");
    if (found == nullptr) throw Error("the NVIDIA driver knows no tensor maps; update the driver");
    return reinterpret_cast<Encode>(found);
  }();
  return function;
}

/// A matrix whose tiles are `rows` by kDepth; what lies outside of it reads as zeros.
CUtensorMap tensor_map(const Bf16* data, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                       int tile_rows) {
  CUtensorMap map{};
  const cuuint64_t shape[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * sizeof(Bf16)};
  const cuuint32_t box[2] = {kDepth, static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult status = encode_function()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<Bf16*>(data), shape, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(cat({"cuTensorMapEncodeTiled: CUresult ", static_cast<int>(status), " for [", rows,
                     ", ", cols, "]"}));
  }
  return map;
}

}  // namespace

void grouped_product_cuda(const GroupedProductArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.x.device.index);
  require_hopper(args.x.device.index);
  const std::int64_t k = args.x.shape[1];
  const std::int64_t groups = args.w.shape[0];
  const std::int64_t out = args.w.shape[1];
  if (groups > kMostGroups) {
    throw Error(cat({"grouped_product: ", groups, " groups, at most ", kMostGroups}));
  }
  const CUtensorMap x = tensor_map(args.x.data, args.x.shape[0], k, args.x.stride[0], kRows);
  const CUtensorMap w = tensor_map(args.w.data, groups * out, k, k, kCols);
  Params p{};
  p.offsets = args.offsets.data;
  p.to = args.to.data;
  p.y = args.y.data;
  p.y_stride = args.y.stride[0];
  p.groups = static_cast<std::int32_t>(groups);
  p.out = static_cast<std::int32_t>(out);
  p.steps = static_cast<std::int32_t>((k + kDepth - 1) / kDepth);
  p.columns = static_cast<std::int32_t>((out + kCols - 1) / kCols);
  constexpr int kBytes = sizeof(Shared) + 1024;
  static const cudaError_t raised = cudaFuncSetAttribute(
      grouped_product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cuda::require(raised, "cudaFuncSetAttribute");
  const std::int64_t most = ((args.x.shape[0] + kRows - 1) / kRows + groups) * p.columns;
  const auto grid = static_cast<unsigned>(
      std::min<std::int64_t>(most, cuda::multiprocessors(args.x.device.index)));
  grouped_product_kernel<<<grid, kThreads, kBytes, cuda::stream_of(stream)>>>(x, w, p);
  cuda::require_launch("grouped_product_kernel");
}

}  // namespace lockstep::kernels
