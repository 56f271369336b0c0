/// quantize() of BF16 rows under the rules of `lockstep` and MXFP4 at the speed of memory: a lane
/// holds blocks of sixteen in registers, a warp or a part of it a row, a block of threads a long
/// row. One pass over x: the row's amax comes from the registers that are then coded.
#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/exact/quantize_params.h"
#include "kernels/exact/sixteen_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostWarps = 16;  // of a long row

/// Numbers of the rule that are the same for all rows.
struct Lane {
  QuantizeParams p;
  std::uint32_t above;  // MXFP4: the mantissa, of seven bits, from above which the scale is doubled
  std::int32_t blocks;  // of sixteen elements, in a row
  std::int32_t fill;    // MXFP4: lanes that share a scale
};

/// The n of a row's global scale.
__device__ inline std::int32_t exponent_of_row(const QuantizeParams& p, std::uint32_t amax_bits) {
  switch (p.rule.global) {
    case GlobalScale::kStatic: return p.exponent;
    case GlobalScale::kPerTensor: return own_exponent(p.rule, *p.global);
    default: return own_exponent(p.rule, float_of(amax_bits << 16));
  }
}

struct Counts {
  std::uint32_t zero = 0;
  std::uint32_t without_scale = 0;
  std::uint32_t saturated = 0;
  std::uint32_t blocks = 0;
  std::uint32_t nonfinite = 0;
};

__device__ inline void add_to(const QuantizeParams& p, QuantizeCount which, std::uint32_t count) {
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (count == 0 || threadIdx.x % 32 != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + which * p.counts_stride),
            static_cast<unsigned long long>(count));
}

template <bool kMx>
__device__ inline void add_counts(const QuantizeParams& p, const Counts& counts) {
  add_to(p, kBlocks, counts.blocks);
  add_to(p, kZeroBlocks, counts.zero);
  if constexpr (!kMx) {
    add_to(p, kUnderflowBlocks, counts.without_scale - counts.zero);
    add_to(p, kSaturatedBlocks, counts.saturated);
  }
  add_to(p, kNonfiniteRows, counts.nonfinite);
}

/// Where a row's record begins, and which of its slots the row is.
struct Place {
  std::uint8_t* record = nullptr;
  std::int32_t slot = 0;
};

__device__ inline Place place_of(const QuantizeParams& p, std::uint32_t row) {
  if (p.slots == 1) return {p.records + row * p.records_stride, 0};
  const std::uint32_t group = row / static_cast<std::uint32_t>(p.slots);
  return {p.records + group * p.records_stride,
          static_cast<std::int32_t>(row - group * static_cast<std::uint32_t>(p.slots))};
}

/// The part of a record that one block of sixteen gives. All lanes of the warp call it; `first`:
/// the lane's block is the first of those that share its scale.
template <bool kMx>
__device__ inline void record_sixteen(const Lane& lane, const Place& place, std::int32_t block,
                                      bool there, bool first, uint2 codes, std::uint32_t byte) {
  const QuantizeParams& p = lane.p;
  const RowLayout& layout = p.layout;
  const std::int32_t at = place.slot * lane.blocks + block;  // sixteens of the record
  if (there && layout.encoding == Encoding::kCodes) {
    std::uint8_t* to = place.record + at * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = static_cast<std::uint8_t>(codes.x >> (8 * i));
      to[i + 4] = static_cast<std::uint8_t>(codes.y >> (8 * i));
    }
  } else if (there && layout.encoding != Encoding::kScale) {
    const std::uint32_t plane = lsb_plane(codes);
    place.record[at * 2] = static_cast<std::uint8_t>(plane);
    place.record[at * 2 + 1] = static_cast<std::uint8_t>(plane >> 8);
  }
  std::uint8_t* scales = place.record + layout.element_bytes();
  const std::int32_t scale_at = kMx ? at / lane.fill : at;
  if (layout.encoding != Encoding::kLsbScaleMod4) {
    if (there && first) scales[scale_at] = static_cast<std::uint8_t>(byte);
    return;
  }
  // Four residues a byte: those of four scales that follow each other in lanes, since rows hold
  // whole fours.
  std::uint32_t residues = (byte & 3u) << (2 * (scale_at & 3));
  for (std::int32_t step = lane.fill; step < 4 * lane.fill; step *= 2) {
    residues |= __shfl_xor_sync(0xFFFFFFFFu, residues, step);
  }
  if (there && first && (scale_at & 3) == 0) {
    scales[scale_at / 4] = static_cast<std::uint8_t>(residues);
  }
}

/// A row of kLanes lanes with kChunks sixteens each; with kWide the row of a block of threads.
template <bool kMx, bool kRecord, int kLanes, int kChunks, bool kWide>
__global__ void __launch_bounds__(kWide ? kMostWarps * 32 : kThreads)
    quantize_lane_kernel(const __grid_constant__ Lane lane) {
  const QuantizeParams& p = lane.p;
  const std::uint32_t thread = threadIdx.x;
  const std::uint32_t width = kWide ? blockDim.x : kLanes;
  const std::uint32_t row = kWide ? blockIdx.x : (blockIdx.x * kThreads + thread) / kLanes;
  const std::uint32_t within = kWide ? thread : thread % kLanes;
  const bool row_there = row < p.rows;
  const auto* x = static_cast<const Bf16*>(p.x) + row * p.x_stride;

  Sixteen chunks[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const auto block = static_cast<std::int32_t>(c * width + within);
    chunks[c] = Sixteen{};
    if (row_there && block < lane.blocks) chunks[c] = load_sixteen(x + block * 16);
  }

  std::uint32_t most[kChunks];
  std::uint32_t amax = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    most[c] = abs_max_bits(chunks[c]);
    amax = max(amax, most[c]);
  }
  if constexpr (kLanes == 32) {
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
  } else {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    }
  }
  if constexpr (kWide) {
    __shared__ std::uint32_t shared[32];
    if (thread < 32) shared[thread] = 0;
    __syncthreads();
    if (thread % 32 == 0) shared[thread / 32] = amax;
    __syncthreads();
    amax = __reduce_max_sync(0xFFFFFFFFu, shared[thread % 32]);
  }
  const bool finite = amax < 0x7F80u;

  const std::int32_t n = kMx ? 0 : exponent_of_row(p, finite ? amax : 0u);
  // 2^-n / 6. FP32's nearest to 1/6 serves as the division does: a block's y / 6 that is a tie of
  // E4M3 comes out exact, and no other comes near one, for y is a BF16 number.
  const float per_scale = kMx ? 0.0f : power_of_two(-n) * (1.0f / 6.0f);
  // Scales whose reciprocals FP32 has no room for are brought down with their elements; what is
  // lost at the lower end of BF16 has code 0 at such scales.
  const bool down = !kMx && n > 100;
  const float unit = kMx ? 0.0f : power_of_two(down ? n - 40 : n);
  constexpr std::uint32_t kDown = 0x2B802B80u;  // 2^-40 twice

  Place place;
  if constexpr (kRecord) place = place_of(p, row);
  Counts counts;
  std::uint8_t* codes_row = p.codes + row * p.codes_stride;
  std::uint8_t* scales_row = p.scales + row * p.scales_stride;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const auto block = static_cast<std::int32_t>(c * width + within);
    const bool there = row_there && block < lane.blocks;
    std::uint32_t byte;
    SixteenScale scale;
    bool lower = down;
    if constexpr (kMx) {
      for (std::int32_t step = 1; step < lane.fill; step *= 2) {
        most[c] = max(most[c], __shfl_xor_sync(0xFFFFFFFFu, most[c], step));
      }
      const auto e = static_cast<std::int32_t>(most[c] >> 7) - 2 +
                     static_cast<std::int32_t>((most[c] & 0x7Fu) > lane.above);
      byte = static_cast<std::uint32_t>(min(max(e, 0), 252));
      lower = byte > 200;
      scale = mx_sixteen(lower ? byte - 40 : byte);
    } else {
      byte = e4m3_byte(float_of(most[c] << 16) * per_scale);
      scale = nvfp4_sixteen(e4m3_value(byte) * unit);
    }
    if (lower) {
#pragma unroll
      for (int i = 0; i < 8; ++i) chunks[c].words[i] = multiply_pair(chunks[c].words[i], kDown);
    }
    uint2 codes = codes_of(chunks[c], scale);
    if (!finite) {
      codes = {0, 0};
      byte = 0;
    }
    const bool first = !kMx || block % lane.fill == 0;
    if (there) {
      *reinterpret_cast<uint2*>(codes_row + block * 8) = codes;
      if (first) scales_row[kMx ? block / lane.fill : block] = static_cast<std::uint8_t>(byte);
    }
    if constexpr (kRecord) {
      record_sixteen<kMx>(lane, place, block, there, first, codes, byte);
    }
    if (p.counts != nullptr && there && first && finite) {
      ++counts.blocks;
      counts.zero += most[c] == 0;
      counts.without_scale += byte == 0;
      if constexpr (!kMx) {
        counts.saturated +=
            p.rule.global == GlobalScale::kStatic && is_saturated(float_of(most[c] << 16), n);
      }
    }
  }
  if (within == 0 && row_there) {
    counts.nonfinite = finite ? 0 : 1;
    if (p.nonfinite != nullptr) p.nonfinite[row * p.nonfinite_stride] = finite ? 0 : 1;
    if (p.global != nullptr && p.rule.global != GlobalScale::kPerTensor) {
      p.global[row * p.global_stride] = kMx ? 1.0f : power_of_two(n);
    }
    if (kRecord && p.layout.exponent_bytes() > 0) {
      place.record[p.layout.bytes() - p.layout.exponent_bytes() + place.slot] =
          static_cast<std::uint8_t>(n);
    }
  }
  if (p.counts != nullptr) add_counts<kMx>(p, counts);
}

template <bool kMx, bool kRecord, int kLanes, int kChunks, bool kWide = false>
void launch(const Lane& lane, unsigned int threads, cudaStream_t stream) {
  const std::int64_t rows_each = kWide ? 1 : kThreads / kLanes;
  const auto grid = static_cast<unsigned int>((lane.p.rows + rows_each - 1) / rows_each);
  quantize_lane_kernel<kMx, kRecord, kLanes, kChunks, kWide><<<grid, threads, 0, stream>>>(lane);
  cuda::require_launch("quantize_lane_kernel");
}

template <bool kMx, bool kRecord>
void launch_for(const Lane& lane, cudaStream_t stream) {
  const std::int32_t blocks = lane.blocks;
  if (blocks <= 8) return launch<kMx, kRecord, 8, 1>(lane, kThreads, stream);
  if (blocks <= 16) return launch<kMx, kRecord, 16, 1>(lane, kThreads, stream);
  if (blocks <= 32) return launch<kMx, kRecord, 32, 1>(lane, kThreads, stream);
  if (blocks <= 64) return launch<kMx, kRecord, 32, 2>(lane, kThreads, stream);
  if (blocks <= 128) return launch<kMx, kRecord, 32, 4>(lane, kThreads, stream);
  const auto warps = static_cast<unsigned int>((blocks + 127) / 128);
  launch<kMx, kRecord, 32, 4, true>(lane, warps * 32, stream);
}

template <typename Pointer>
bool aligned(const Pointer* data, std::int64_t stride_bytes, std::int64_t to) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(to) == 0 &&
         stride_bytes % to == 0;
}

bool knows(const QuantizeParams& p) {
  const Quantizer& rule = p.rule;
  if (rule.element != Element::kE2m1 || rule.code_rule != CodeRule::kExact ||
      rule.tie != Tie::kEven || rule.sign_of_zero != SignOfZero::kDropped ||
      rule.four_over_six != FourOverSix::kOff) {
    return false;
  }
  if (rule.is_mx()) return rule.block == 32 || rule.block == 16 || rule.block == 64;
  if (rule.block != 16 || rule.scale_rule != ScaleRule::kExact || !rule.global_is_power_of_two ||
      rule.global == GlobalScale::kNone) {
    return false;
  }
  return rule.global != GlobalScale::kStatic ||
         (p.exponent >= kMinExponent && p.exponent <= kMaxExponent);
}

std::uint32_t above(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kMxEven: return (mx_e2m1().even >> 16) - 1;
    case ScaleRule::kMxCeil: return 0;
    case ScaleRule::kMxRceil: return mx_e2m1().mantissa >> 16;
    default: return 0x7F;
  }
}

}  // namespace

bool quantize_lanes(const QuantizeParams& p, Stream stream) {
  const RowLayout& layout = p.layout;
  const std::int64_t blocks = p.cols / 16;
  if (!knows(p) || p.rows >= (std::int64_t{1} << 31) || blocks == 0 || blocks > kMostWarps * 128) {
    return false;
  }
  if (!aligned(static_cast<const char*>(p.x), p.x_stride * 2, 16) ||
      !aligned(p.codes, p.codes_stride, 8)) {
    return false;
  }
  const bool mod4 = layout.encoding == Encoding::kLsbScaleMod4;
  if (layout.encoding == Encoding::kBf16 || layout.encoding == Encoding::kLsbScaleMod4Map ||
      (mod4 && p.cols / p.rule.block % 4 != 0)) {
    return false;
  }
  Lane lane{p, above(p.rule.scale_rule), static_cast<std::int32_t>(blocks), p.rule.block / 16};
  const cudaStream_t order = cuda::stream_of(stream);
  const bool record = layout.encoding != Encoding::kNone;
  if (p.rule.is_mx()) {
    record ? launch_for<true, true>(lane, order) : launch_for<true, false>(lane, order);
  } else {
    record ? launch_for<false, true>(lane, order) : launch_for<false, false>(lane, order);
  }
  return true;
}

}  // namespace lockstep::kernels
