/// quantize() of BF16 rows under the rules of `lockstep` and MXFP4 at the speed of memory: a lane
/// holds blocks of sixteen in registers, a warp or a part of it a row, a block of threads a long
/// row. One pass over x: the row's amax comes from the registers that are then coded.
#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/quantize_params.h"
#include "kernels/exact/sixteen_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostWarps = 16;  // of a long row
constexpr int kFewRows = 1024;

/// What a kernel is compiled for.
enum class Record { kNone, kBits, kOther };  // kBits: kLsb and kLsbScaleMod4

/// Numbers of the rule that are the same for all rows.
struct Lane {
  QuantizeParams p;
  std::uint32_t above;  // MXFP4: the mantissa, of seven bits, from above which the scale is doubled
  std::int32_t blocks;  // of sixteen elements, in a row
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

__device__ inline void add_to(std::uint32_t* shared, QuantizeCount which, std::uint32_t count) {
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (count != 0 && threadIdx.x % 32 == 0) atomicAdd(shared + which, count);
}

/// Of a block of threads: one addition to memory for all of them. All threads call it.
template <bool kMx>
__device__ inline void add_counts(const QuantizeParams& p, const Counts& counts) {
  __shared__ std::uint32_t shared[kNumQuantizeCounts];
  if (threadIdx.x < kNumQuantizeCounts) shared[threadIdx.x] = 0;
  __syncthreads();
  add_to(shared, kBlocks, counts.blocks);
  add_to(shared, kZeroBlocks, counts.zero);
  if constexpr (!kMx) {
    add_to(shared, kUnderflowBlocks, counts.without_scale - counts.zero);
    add_to(shared, kSaturatedBlocks, counts.saturated);
  }
  add_to(shared, kNonfiniteRows, counts.nonfinite);
  __syncthreads();
  if (threadIdx.x >= kNumQuantizeCounts || shared[threadIdx.x] == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + threadIdx.x * p.counts_stride),
            static_cast<unsigned long long>(shared[threadIdx.x]));
}

/// Where a lane's first sixteen goes in its row's record: what else it has lies at multiples of the
/// row's lanes behind.
struct Place {
  std::uint8_t* elements = nullptr;
  std::uint8_t* scales = nullptr;
  std::uint8_t* exponent = nullptr;
};

template <bool kMx>
__device__ inline Place place_of(const Lane& lane, std::uint32_t row, std::uint32_t within) {
  const QuantizeParams& p = lane.p;
  const RowLayout& layout = p.layout;
  std::uint32_t group = row;
  std::int32_t slot = 0;
  if (p.slots != 1) {
    group = row / static_cast<std::uint32_t>(p.slots);
    slot = static_cast<std::int32_t>(row - group * static_cast<std::uint32_t>(p.slots));
  }
  std::uint8_t* record = p.records + group * p.records_stride;
  const bool codes = layout.encoding == Encoding::kCodes;
  const bool mod4 = layout.encoding == Encoding::kLsbScaleMod4;
  const std::int32_t sixteen = slot * lane.blocks + static_cast<std::int32_t>(within);
  const std::int32_t scale = kMx ? sixteen / 2 : sixteen;
  return {record + sixteen * (codes ? 8 : 2),
          record + layout.element_bytes() + (mod4 ? scale / 4 : scale),
          record + layout.bytes() - layout.exponent_bytes() + slot};
}

/// Eight bytes of codes a lane, wherever they begin: whole words, each half a lane's and half that
/// of the lane before; the region's ends in bytes. `first` and `last` lane of it. All lanes of the
/// warp call it.
__device__ inline void store_codes(std::uint8_t* to, uint2 codes, bool there, bool first,
                                   bool last) {
  const std::uint32_t before = __shfl_up_sync(0xFFFFFFFFu, codes.y, 1);
  if (!there) return;
  const auto over = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) & 3u);
  auto* words = reinterpret_cast<std::uint32_t*>(to - over);
  words[1] = __funnelshift_l(codes.x, codes.y, 8 * over);
  if (over == 0 || !first) {
    words[0] = __funnelshift_l(before, codes.x, 8 * over);
  } else {
    for (std::uint32_t i = 0; i < 4 - over; ++i) {
      to[i] = static_cast<std::uint8_t>(codes.x >> (8 * i));
    }
  }
  if (!last) return;
  for (std::uint32_t i = 8 - over; i < 8; ++i) {
    to[i] = static_cast<std::uint8_t>(codes.y >> (8 * (i - 4)));
  }
}

/// What one block of sixteen gives to a record. `step`: its distance from the lane's first, in
/// sixteens. All lanes of the warp call it; `first`: the block is the first that has its scale.
template <bool kMx, Record kRecord>
__device__ inline void record_sixteen(const Lane& lane, const Place& place, std::int32_t step,
                                      std::uint32_t within, std::uint32_t width, bool there,
                                      bool first, uint2 codes, std::uint32_t byte) {
  constexpr std::int32_t kFill = kMx ? 2 : 1;  // sixteens that share a scale
  const Encoding encoding = lane.p.layout.encoding;
  if constexpr (kRecord == Record::kBits) {
    const std::uint32_t plane = lsb_plane(codes);
    if (there) {
      place.elements[step * 2] = static_cast<std::uint8_t>(plane);
      place.elements[step * 2 + 1] = static_cast<std::uint8_t>(plane >> 8);
    }
    if (encoding == Encoding::kLsbScaleMod4) {
      // Four residues a byte: those of four scales in lanes that follow each other, since rows
      // hold whole fours.
      const std::uint32_t at = within / kFill & 3u;
      std::uint32_t residues = (byte & 3u) << (2 * at);
      residues |= __shfl_xor_sync(0xFFFFFFFFu, residues, kFill);
      residues |= __shfl_xor_sync(0xFFFFFFFFu, residues, 2 * kFill);
      if (there && first && at == 0) {
        place.scales[step / (4 * kFill)] = static_cast<std::uint8_t>(residues);
      }
      return;
    }
  } else if (encoding == Encoding::kCodes) {
    const auto last =
        static_cast<std::int32_t>(min(width, static_cast<std::uint32_t>(lane.blocks - step)) - 1);
    store_codes(place.elements + step * 8, codes, there, within % 32 == 0,
                static_cast<std::int32_t>(within) == last || within % 32 == 31);
  }
  if (there && first) place.scales[step / kFill] = static_cast<std::uint8_t>(byte);
}

/// A row of kLanes lanes with kChunks sixteens each; with kWide the row of a block of threads.
template <bool kMx, Record kRecord, int kLanes, int kChunks, bool kWide>
__global__ void __launch_bounds__(kWide ? kMostWarps * 32 : kThreads)
    quantize_lane_kernel(const __grid_constant__ Lane lane) {
  cuda::take_turn();
  const QuantizeParams& p = lane.p;
  const std::uint32_t thread = threadIdx.x;
  const std::uint32_t width = kWide ? blockDim.x : kLanes;
  const std::uint32_t row = kWide ? blockIdx.x : blockIdx.x * (kThreads / kLanes) + thread / kLanes;
  const std::uint32_t within = kWide ? thread : thread % kLanes;
  // How many of the lane's sixteens are there: c * width + within < blocks.
  const std::int32_t mine =
      row < p.rows ? lane.blocks - static_cast<std::int32_t>(within) : std::int32_t{0};
  const auto is_there = [&](int c) { return static_cast<std::int32_t>(c * width) < mine; };
  const Bf16* x = static_cast<const Bf16*>(p.x) + row * p.x_stride + within * 16;

  Sixteen chunks[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    chunks[c] = Sixteen{};
    if (is_there(c)) chunks[c] = load_sixteen(x + c * width * 16);
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
  const Nvfp4Row scales = kMx ? Nvfp4Row{} : nvfp4_row(n);

  Place place;
  if constexpr (kRecord != Record::kNone) place = place_of<kMx>(lane, row, within);
  Counts counts;
  const bool first = !kMx || within % 2 == 0;
  std::uint8_t* codes_at = p.codes + row * p.codes_stride + within * 8;
  std::uint8_t* scales_at = p.scales + row * p.scales_stride + (kMx ? within / 2 : within);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const bool there = is_there(c);
    const auto step = static_cast<std::int32_t>(c * width);
    if constexpr (kMx) most[c] = max(most[c], __shfl_xor_sync(0xFFFFFFFFu, most[c], 1));
    std::uint32_t byte = sixteen_byte<kMx>(most[c], scales, lane.above);
    uint2 codes = sixteen_codes<kMx>(chunks[c], byte, scales);
    if (!finite) {
      codes = {0, 0};
      byte = 0;
    }
    if (there) {
      *reinterpret_cast<uint2*>(codes_at + step * 8) = codes;
      if (first) scales_at[kMx ? step / 2 : step] = static_cast<std::uint8_t>(byte);
    }
    if constexpr (kRecord != Record::kNone) {
      record_sixteen<kMx, kRecord>(lane, place, step, within, width, there, first, codes, byte);
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
  if (within == 0 && row < p.rows) {
    counts.nonfinite = finite ? 0 : 1;
    if (p.nonfinite != nullptr) p.nonfinite[row * p.nonfinite_stride] = finite ? 0 : 1;
    if (p.global != nullptr && p.rule.global != GlobalScale::kPerTensor) {
      p.global[row * p.global_stride] = kMx ? 1.0f : power_of_two(n);
    }
    if (kRecord != Record::kNone && p.layout.exponent_bytes() > 0) {
      *place.exponent = static_cast<std::uint8_t>(n);
    }
  }
  if (p.counts != nullptr) add_counts<kMx>(p, counts);
}

/// The amax of the finite rows into *global, which began as 0, a warp a row.
__global__ void __launch_bounds__(kThreads)
    quantize_lane_amax_kernel(const __grid_constant__ Lane lane) {
  const QuantizeParams& p = lane.p;
  const std::uint32_t within = threadIdx.x % 32;
  std::uint32_t most = 0;
  for (std::int64_t row = (blockIdx.x * kThreads + threadIdx.x) / 32; row < p.rows;
       row += gridDim.x * (kThreads / 32)) {
    const Bf16* x = static_cast<const Bf16*>(p.x) + row * p.x_stride;
    std::uint32_t amax = 0;
#pragma unroll 4
    for (std::int32_t j = static_cast<std::int32_t>(within); j < lane.blocks; j += 32) {
      amax = max(amax, abs_max_bits(load_sixteen(x + std::int64_t{j} * 16)));
    }
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
    if (amax < 0x7F80u) most = max(most, amax);
  }
  // Floats that are not negative are ordered as their bits are.
  if (within == 0) atomicMax(reinterpret_cast<unsigned int*>(p.global), most << 16);
}

template <bool kMx, Record kRecord, int kLanes, int kChunks, bool kWide = false>
void launch(const Lane& lane, unsigned int threads, Stream stream) {
  const std::int64_t rows_each = kWide ? 1 : kThreads / kLanes;
  const auto grid = static_cast<unsigned int>((lane.p.rows + rows_each - 1) / rows_each);
  const auto kernel = quantize_lane_kernel<kMx, kRecord, kLanes, kChunks, kWide>;
  // A step's few rows come between the router and the experts, whose blocks start beside these.
  if (lane.p.rows <= kFewRows) cuda::lay_out_for_shared(kernel);
  cuda::launch_beside("quantize_lane_kernel", kernel, dim3(grid), dim3(threads), 0, stream, lane);
}

template <bool kMx, Record kRecord>
void launch_for(const Lane& lane, Stream stream) {
  const std::int32_t blocks = lane.blocks;
  // Few rows: time is that of one lane, so that each gets one sixteen.
  if (blocks > 32 && blocks <= kMostWarps * 32 && lane.p.rows <= kFewRows) {
    const auto warps = static_cast<unsigned int>((blocks + 31) / 32);
    return launch<kMx, kRecord, 32, 1, true>(lane, warps * 32, stream);
  }
  if (blocks <= 8) return launch<kMx, kRecord, 8, 1>(lane, kThreads, stream);
  if (blocks <= 16) return launch<kMx, kRecord, 16, 1>(lane, kThreads, stream);
  if (blocks <= 32) return launch<kMx, kRecord, 32, 1>(lane, kThreads, stream);
  if (blocks <= 48) return launch<kMx, kRecord, 16, 3>(lane, kThreads, stream);
  if (blocks <= 64) return launch<kMx, kRecord, 32, 2>(lane, kThreads, stream);
  if (blocks <= 128) return launch<kMx, kRecord, 32, 4>(lane, kThreads, stream);
  const auto warps = static_cast<unsigned int>((blocks + 127) / 128);
  launch<kMx, kRecord, 32, 4, true>(lane, warps * 32, stream);
}

template <bool kMx>
void launch_record(const Lane& lane, Stream stream) {
  switch (lane.p.layout.encoding) {
    case Encoding::kNone: return launch_for<kMx, Record::kNone>(lane, stream);
    case Encoding::kLsb:
    case Encoding::kLsbScaleMod4: return launch_for<kMx, Record::kBits>(lane, stream);
    default: return launch_for<kMx, Record::kOther>(lane, stream);
  }
}

template <typename Pointer>
bool aligned(const Pointer* data, std::int64_t stride_bytes, std::int64_t to) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(to) == 0 &&
         stride_bytes % to == 0;
}

bool knows(const QuantizeParams& p) {
  if (!sixteens_know(p.rule)) return false;
  return p.rule.is_mx() || p.rule.global != GlobalScale::kStatic ||
         (p.exponent >= kMinExponent && p.exponent <= kMaxExponent);
}

/// Whether rows lie where lanes can read them.
bool fits(const QuantizeParams& p) {
  return p.rows < (std::int64_t{1} << 31) && p.cols >= 16 &&
         aligned(static_cast<const char*>(p.x), p.x_stride * 2, 16);
}

}  // namespace

bool quantize_lanes(const QuantizeParams& p, Stream stream) {
  const RowLayout& layout = p.layout;
  const std::int64_t blocks = p.cols / 16;
  if (!knows(p) || !fits(p) || blocks > kMostWarps * 128 || !aligned(p.codes, p.codes_stride, 8)) {
    return false;
  }
  const bool mod4 = layout.encoding == Encoding::kLsbScaleMod4;
  if (layout.encoding == Encoding::kBf16 || layout.encoding == Encoding::kLsbScaleMod4Map ||
      (mod4 && p.cols / p.rule.block % 4 != 0)) {
    return false;
  }
  const Lane lane{p, doubles_above(p.rule.scale_rule), static_cast<std::int32_t>(blocks)};
  p.rule.is_mx() ? launch_record<true>(lane, stream) : launch_record<false>(lane, stream);
  return true;
}

bool amax_lanes(const QuantizeParams& p, Device device, Stream stream) {
  if (!fits(p) || p.cols % 16 != 0 || p.amax != nullptr) return false;
  const Lane lane{p, 0, static_cast<std::int32_t>(p.cols / 16)};
  const std::int64_t warps = kThreads / 32;
  const auto grid = static_cast<unsigned int>(std::min<std::int64_t>(
      (p.rows + warps - 1) / warps, std::int64_t{cuda::multiprocessors(device.index)} * 8));
  quantize_lane_amax_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(lane);
  cuda::require_launch("quantize_lane_amax_kernel");
  return true;
}

}  // namespace lockstep::kernels
