/// What the CUDA files of guide() share. For .cu files alone.
#pragma once

#include "kernels/exact/guide_rows.h"

namespace lockstep::kernels {

/// The planes of a record.
struct GuideRecord {
  const std::uint8_t* elements;
  const std::uint8_t* scales;
  const std::uint8_t* maps;
  const std::int8_t* exponents;
};

/// A call's arguments as kernels take them.
struct GuideParams {
  const Bf16* x;
  Bf16* out;
  const std::uint8_t* records;
  const std::uint8_t* present;  // null: all are there
  std::int64_t x_stride, out_stride, record_stride, present_stride;
  unsigned long long* counts;
  std::int64_t count_stride;
  int num_counts;  // 0: none
  Quantizer rule;
  RowLayout layout;
  Guidance guidance;
  GuideShape shape;
  std::int32_t exponent;
  const std::uint32_t* matrix_amax;  // kPerTensor: the bits of its amax
  // The width, and what follows from the layout, in short numbers.
  std::int32_t cols, element_bytes, scale_bytes, map_bytes, exponent_bytes;
  std::uint32_t most_scale;  // a byte above it is damaged

  __device__ bool guided() const { return guidance != Guidance::kOwnScale; }
  __device__ bool is_present(std::int64_t record) const {
    return guided() && (present == nullptr || present[record * present_stride] != 0);
  }
  __device__ GuideRecord record_at(std::int64_t index) const {
    const std::uint8_t* bytes = records + index * record_stride;
    const std::uint8_t* scales = bytes + element_bytes;
    const std::uint8_t* maps = scales + scale_bytes;
    return {bytes, scales, maps, reinterpret_cast<const std::int8_t*>(maps + map_bytes)};
  }
};

/// What a block of threads counts, in shared memory: begin() before and flush() after the work, by
/// all of its threads.
struct GuideTally {
  int sums[kNumGuideCounts];

  __device__ void begin() {
    if (threadIdx.x < kNumGuideCounts) sums[threadIdx.x] = 0;
    __syncthreads();
  }
  __device__ void add(GuideCount what, int number) { atomicAdd(&sums[what], number); }
  /// `moved` are a thread's own.
  __device__ void flush(const GuideParams& p, int moved) {
    moved = __reduce_add_sync(0xFFFFFFFFu, moved);
    if (threadIdx.x % 32 == 0) add(kMoved, moved);
    __syncthreads();
    const auto i = static_cast<int>(threadIdx.x);
    if (i < p.num_counts && i < kNumGuideCounts && sums[i] != 0) {
      atomicAdd(p.counts + i * p.count_stride, static_cast<unsigned long long>(sums[i]));
    }
  }
};

/// The fast rows: NVFP4 and MXFP4 without four over six, whose rows have one n, lie on 16 bytes and
/// are at most 16384 elements wide, of MXFP4 2048. False, and nothing is done, where these are
/// others.
bool guide_narrow_cuda(const GuideParams& params, cudaStream_t stream);

}  // namespace lockstep::kernels
