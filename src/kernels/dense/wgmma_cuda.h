/// What products by wgmma share: barriers, copies of tiles by TMA, the instruction. A block has one
/// warp that fetches and two warpgroups that multiply 64 rows of 256 outputs each. Comes after
/// <cuda.h>.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "base/text.h"
#include "device/cuda/check.h"
#include "numerics/bf16.h"

namespace lockstep::kernels::wgmma {

constexpr int kDepth = 64;  // of K at a time; as outputs too 128 bytes, as wide as the swizzle
constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kRows = 64 * kConsumers;  // of a tile
constexpr int kCols = 256;              // outputs of a tile
constexpr int kRowBytes = kRows * kDepth * 2;
constexpr int kColBytes = kCols * kDepth * 2;
constexpr int kBoxBytes = kDepth * kDepth * 2;  // 64 outputs across K
constexpr int kMostGroups = 1024;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // wgmma is Hopper's alone; the host asks for it

// Each warp says for itself that it is done with a stage: one that lagged two rounds of the stages
// behind would wait for a parity that has come and gone.
constexpr int kConsumerWarps = 4 * kConsumers;

__device__ inline std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ inline void init_barrier(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ inline void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ inline void expect(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void wait(std::uint64_t* barrier, std::uint32_t parity) {
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
__device__ inline void copy_tile(void* shared, const CUtensorMap* map, int k, int row,
                                 std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

/// Rows of 128 bytes, eight of them a swizzled kilobyte. Along K a row has 64 numbers of it; across
/// K it has 64 outputs at one number of K, and 64 further outputs lie `apart` bytes on.
__device__ inline std::uint64_t descriptor(std::uint32_t address, std::uint32_t apart = 16) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 / 16} << 32) |
         (std::uint64_t{apart / 16} << 16) | ((address & 0x3FFFFu) >> 4);
}

/// d = a b, or d += a b: 64 rows by 256 outputs over 16 of K. The operands lie along K, or across.
template <bool kAcrossA, bool kAcrossB>
__device__ inline void multiply(float (&d)[128], std::uint64_t a, std::uint64_t b, bool adds) {
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
      "}, %128, %129, p, 1, 1, %131, %132; }"
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
      : "l"(a), "l"(b), "r"(static_cast<std::int32_t>(adds)), "n"(kAcrossA ? 1 : 0),
        "n"(kAcrossB ? 1 : 0));
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

#endif

inline void require_hopper(std::int8_t index, const char* op) {
  int major = 0;
  lockstep::cuda::require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
                          "cudaDeviceGetAttribute");
  if (major != 9) {
    throw Error(cat({op, ": CUDA device ", static_cast<int>(index), " has compute capability ",
                     major, ".x, wgmma needs 9.0"}));
  }
}

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, by its name: nothing links to the driver.
inline Encode encode_function() {
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    lockstep::cuda::require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result),
                            "cudaGetDriverEntryPointByVersion");
    if (found == nullptr) throw Error("the NVIDIA driver knows no tensor maps; update the driver");
    return reinterpret_cast<Encode>(found);
  }();
  return function;
}

/// A matrix whose tiles are `tile_rows` by kDepth; what lies outside of it reads as zeros.
inline CUtensorMap tensor_map(const Bf16* data, std::int64_t rows, std::int64_t cols,
                              std::int64_t stride, int tile_rows) {
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

}  // namespace lockstep::kernels::wgmma
