/// Guided rounding on a CUDA device where it has to be fast: a warp takes a row, keeps it in
/// registers, and reads and writes memory once. guide_cuda.cu is the same for every rule.
///
/// The magnitudes of E2M1 are indexed as floats are: m << 22, taken for the bits of a float, is
/// V[m] * 2^-126, subnormals included. So with z = |x| / S in FP32 the lower end of z's bracket is
/// bits(z * 2^-126) >> 22, and a code is decoded by a product. z comes from an approximate
/// reciprocal: |x| has 8 significant bits, V[i] * S and the midpoints at most 6, so where they
/// differ they differ by 2^-8 of themselves, and a factor of 1 + 2^-16 keeps every z that should
/// be a threshold just above it. What lies within kNoise above a midpoint is the midpoint.
#include "device/cuda/check.h"
#include "kernels/exact/guide_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 256;  // elements of a row that a warp loads at once: 8 a lane
constexpr float kAbove = 1.0f + 0x1p-16f;
constexpr std::uint32_t kIndex = 1u << 22;  // where an index's lowest bit stands
constexpr std::uint32_t kNoise = 0x800;     // more than kAbove adds, less than 2^-8 of a midpoint
constexpr float kBelowSix = 0x1.7ff8p+2f;   // the upper end of the last bracket

__device__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Negative zeros become zeros.
__device__ std::uint32_t drop_signs_of_zeros(std::uint32_t pair) {
  std::uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(0u));
  return sum;
}

/// The larger of two pairs of 16-bit numbers.
__device__ std::uint32_t most_of(std::uint32_t a, std::uint32_t b) { return __vmaxu2(a, b); }

/// A block's scale, and what |x| is multiplied by to have z. A scale of 0 makes every z 0.
struct Scale {
  float value;
  float inverse;
};

__device__ Scale scale_of(float value) {
  return {value, value > 0.0f ? reciprocal(value) * kAbove : 0.0f};
}

template <bool kMx>
__device__ Scale scale_of_byte(std::uint32_t byte, float power) {
  if constexpr (kMx) {
    return {to_float(static_cast<E8m0>(static_cast<std::uint8_t>(byte))),
            float_of((254u - byte) << 23) * kAbove};
  }
  return scale_of(float_of(byte << 20) * 0x1p120f * power);
}

/// NVFP4's scale from two bits: scale_of_residue(), with y kept just below what it should be, so
/// that its code line needs no division.
__device__ Scale scale_of_residue(std::uint32_t residue, float amax, std::int32_t n) {
  constexpr float kSixth = 0x1.555p-3f;  // below 1 / 6 by 2^-14 of it
  const float y = amax * power_of_two(-n) * kSixth;
  const auto ceil = static_cast<std::int32_t>((float_bits(y * 0x1p-120f) + 0xFFFFFu) >> 20);
  std::int32_t first = ceil - 2;
  first = first < 0 ? 0 : first > 123 ? 123 : first;
  const std::int32_t c = first + ((static_cast<std::int32_t>(residue) - first) & 3);
  return scale_of_byte<false>(static_cast<std::uint32_t>(c), power_of_two(n));
}

/// Element i of a lane's eight: index << 22 of its code, and whether it was moved. `z_bits` are
/// those of z * 2^-126, `recorded` the lane's bits or codes.
template <Choice kChoice>
__device__ std::uint32_t choose(std::uint32_t z_bits, bool negative, std::uint32_t recorded, int i,
                                int& moved) {
  const std::uint32_t near = z_bits + (kIndex / 2 - kNoise) + (z_bits >> 11 & kNoise);
  if constexpr (kChoice == Choice::kNearest) return near & ~(kIndex - 1);
  if constexpr (kChoice == Choice::kBit) {
    const std::uint32_t bit = recorded << 22 >> i & kIndex;
    moved += static_cast<int>((near ^ bit) & kIndex);
    return (z_bits + (kIndex - bit) & ~(2 * kIndex - 1)) | bit;
  }
  const std::uint32_t code = recorded >> 4 * i & 15u;
  std::uint32_t m = code & 7u;
  bool is_moved = m != near >> 22;
  if constexpr (kChoice == Choice::kCodeGuided) {
    const auto rollout = static_cast<E2m1>(static_cast<std::uint8_t>(code));
    m = guided_by_code(z_bits >> 22, negative, rollout);
    is_moved = m != near >> 22;
  } else {
    is_moved |= m != 0 && (code >> 3 != 0) != negative;
  }
  moved += is_moved ? static_cast<int>(kIndex) : 0;
  return m << 22;
}

/// A lane's eight elements.
template <Choice kChoice>
__device__ uint4 guide_eight(uint4 x, Scale scale, std::uint32_t recorded, int& moved) {
  std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
  int moved_here = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float values[2];
    std::uint32_t signs = words[w];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t bits = half == 0 ? words[w] << 16 : words[w] & 0xFFFF0000u;
      const float z = fminf(fabsf(float_of(bits)) * scale.inverse, kBelowSix);
      const std::uint32_t index = choose<kChoice>(float_bits(z * 0x1p-126f), bits >> 31 != 0,
                                                  recorded, 2 * w + half, moved_here);
      values[half] = float_of(index) * 0x1p126f * scale.value;
    }
    if constexpr (kChoice == Choice::kCodeForced) {
      const std::uint32_t pair = recorded >> 8 * w;
      signs = (pair & 8u) << 12 | (pair & 0x80u) << 24;
    }
    const std::uint32_t magnitudes =
        __byte_perm(float_bits(values[0]), float_bits(values[1]), 0x7632);
    words[w] = drop_signs_of_zeros(magnitudes | (signs & 0x80008000u));
  }
  if constexpr (kChoice != Choice::kNearest) {
    moved += scale.value > 0.0f ? moved_here >> 22 : 0;  // under scale 0 every code is 0
  }
  return {words[0], words[1], words[2], words[3]};
}

/// A row as a lane sees it: eight elements of each chunk, what is recorded of them, and the byte in
/// which their scale is recorded; a byte of bits shares its word with that.
template <Guidance kGuidance, int kChunks>
struct Row {
  static constexpr bool kCodes = choice_of(kGuidance) >= Choice::kCodeGuided;
  uint4 x[kChunks];
  std::uint32_t codes[kCodes ? kChunks : 1];
  std::uint32_t bytes[kChunks];  // bits in the lowest, the scale above
  std::int64_t first_block;      // of the row in its record
  std::int32_t n;

  __device__ std::uint32_t recorded(int chunk) const {
    if constexpr (kCodes) return codes[chunk];
    return bytes[chunk] & 0xFFu;
  }
  __device__ std::uint32_t scale(int chunk) const { return bytes[chunk] >> 8; }
};

__device__ bool is_inside(const GuideParams& p, int chunk, int lane) {
  return chunk * kChunk + lane * 8 < p.shape.cols;
}

/// The largest magnitude among eight elements.
__device__ std::uint32_t amax_of(uint4 x) {
  constexpr std::uint32_t kMagnitudes = 0x7FFF7FFFu;
  const std::uint32_t pair = most_of(most_of(x.x & kMagnitudes, x.y & kMagnitudes),
                                     most_of(x.z & kMagnitudes, x.w & kMagnitudes));
  const std::uint32_t low = pair & 0xFFFFu;
  const std::uint32_t high = pair >> 16;
  return low > high ? low : high;
}

/// ... and in the block that they are part of: its elements lie in two lanes, or four.
template <bool kMx>
__device__ std::uint32_t block_amax(uint4 x) {
  std::uint32_t most = amax_of(x);
  most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
  if constexpr (kMx) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
  return most;
}

/// The block that a lane's eight elements of a chunk lie in.
template <bool kMx>
__device__ std::int64_t block_of(std::int64_t first, int chunk, int lane) {
  constexpr int kLanes = kMx ? 4 : 2;
  return first + chunk * (32 / kLanes) + lane / kLanes;
}

template <bool kMx>
__device__ Scale recorded_scale(std::uint32_t byte, std::int32_t n) {
  return scale_of_byte<kMx>(byte, kMx ? 1.0f : power_of_two(n));
}

/// The scale whose residue is recorded in `byte`.
template <bool kMx>
__device__ Scale residue_scale(const GuideParams& p, uint4 x, std::uint32_t byte,
                               std::int64_t block, std::int32_t n) {
  const std::uint32_t residue = byte >> block % 4 * 2 & 3u;
  const float amax = float_of(block_amax<kMx>(x) << 16);
  if constexpr (kMx) {
    const std::uint8_t own = scale_byte(p.rule, amax, {});
    return scale_of_byte<true>(mx_byte_of_residue(p.rule, residue, own), 1.0f);
  }
  return scale_of_residue(residue, amax, n);
}

template <bool kMx>
__device__ Scale own_scale(const GuideParams& p, std::uint32_t amax, std::int32_t n) {
  const std::uint8_t byte = scale_byte(p.rule, float_of(amax << 16), global_of_exponent(n));
  return scale_of_byte<kMx>(byte, kMx ? 1.0f : power_of_two(n));
}

/// A row at its own scale and nearest.
template <bool kMx, int kChunks>
__device__ void round_row(const GuideParams& p, const uint4 (&x)[kChunks], uint4* out, int lane) {
  std::int32_t n = p.exponent;
  if (!kMx && p.rule.global == GlobalScale::kPerToken) {
    std::uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) most = max(most, amax_of(x[c]));
    n = own_exponent(p.rule, float_of(__reduce_max_sync(0xFFFFFFFFu, most) << 16));
  }
  int none = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (c * kChunk >= p.shape.cols) break;
    const Scale scale = own_scale<kMx>(p, block_amax<kMx>(x[c]), n);
    const uint4 y = guide_eight<Choice::kNearest>(x[c], scale, 0, none);
    if (is_inside(p, c, lane)) out[c * 32 + lane] = y;
  }
}

template <int kChunks>
__device__ void read_row(const GuideParams& p, std::int64_t index, int lane,
                         uint4 (&words)[kChunks]) {
  const auto* x = reinterpret_cast<const uint4*>(p.x + index * p.x_stride);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) words[c] = is_inside(p, c, lane) ? x[c * 32 + lane] : uint4{};
}

/// The same where a record was expected: read again, so that such rows cost others no registers.
template <bool kMx, int kChunks>
__device__ __noinline__ void round_row_without_record(const GuideParams& p, std::int64_t index,
                                                      int lane) {
  uint4 x[kChunks];
  read_row(p, index, lane, x);
  round_row<kMx>(p, x, reinterpret_cast<uint4*>(p.out + index * p.out_stride), lane);
}

/// A row toward its record.
template <Guidance kGuidance, bool kMx, int kChunks>
__device__ int follow_row(const GuideParams& p, const Row<kGuidance, kChunks>& row, uint4* out,
                          int lane) {
  int moved = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (c * kChunk >= p.shape.cols) break;
    Scale scale;
    if constexpr (kGuidance == Guidance::kLsbScaleMod4) {
      const std::int64_t block = block_of<kMx>(row.first_block, c, lane);
      scale = residue_scale<kMx>(p, row.x[c], row.scale(c), block, row.n);
    } else {
      scale = recorded_scale<kMx>(row.scale(c), row.n);
    }
    int moved_here = 0;
    const uint4 y = guide_eight<choice_of(kGuidance)>(row.x[c], scale, row.recorded(c), moved_here);
    if (is_inside(p, c, lane)) {
      out[c * 32 + lane] = y;
      moved += moved_here;
    }
  }
  return moved;
}

/// Reads what is recorded of a row.
template <Guidance kGuidance, bool kMx, int kChunks>
__device__ void read_record(const GuideParams& p, const GuideRecord& record, std::int64_t slot,
                            int lane, Row<kGuidance, kChunks>& row) {
  constexpr Choice kChoice = choice_of(kGuidance);
  row.first_block = slot * p.shape.cols / (kMx ? 32 : 16);
  row.n = p.layout.exponents > 0 ? record.exponents[slot] : p.exponent;
  const std::int64_t at = slot * p.shape.cols + lane * 8;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    row.bytes[c] = 0;
    if constexpr (kChoice >= Choice::kCodeGuided) row.codes[c] = 0;
    if (!is_inside(p, c, lane)) continue;
    const std::int64_t block = block_of<kMx>(row.first_block, c, lane);
    const std::uint32_t scale =
        record.scales[kGuidance == Guidance::kLsbScaleMod4 ? block / 4 : block];
    row.bytes[c] = scale << 8;
    if constexpr (kChoice == Choice::kBit) {
      row.bytes[c] |= record.elements[at / 8 + c * (kChunk / 8)];
    } else if constexpr (kChoice != Choice::kNearest) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t two = record.elements[at / 2 + c * (kChunk / 2) + i];
        row.codes[c] |= two << 8 * i;
      }
    }
  }
}

/// Whether the lane sees that the record holds what no rollout writes.
template <Guidance kGuidance, int kChunks>
__device__ bool sees_damage(const GuideParams& p, const GuideRecord& record,
                            const Row<kGuidance, kChunks>& row, int lane) {
  bool bad = false;
  if constexpr (kGuidance != Guidance::kLsbScaleMod4) {
    const std::uint8_t limit = most_scale_byte(p.rule);
    if (p.shape.slots == 1) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) bad |= row.scale(c) > limit;
    } else {  // another slot's too make the whole record damaged
      for (int i = lane; i < p.layout.scale_bytes(); i += 32) bad |= record.scales[i] > limit;
    }
  }
  for (int i = lane; i < p.layout.exponent_bytes(); i += 32) {
    bad |= record.exponents[i] < kMinExponent || record.exponents[i] > kMaxExponent;
  }
  return bad;
}

template <Guidance kGuidance, int kChunks>
__device__ bool sees_nonfinite(const Row<kGuidance, kChunks>& row) {
  std::uint32_t any = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    // Bit 15 of a half that is Inf or NaN, its sign apart.
    for (const std::uint32_t word : {row.x[c].x, row.x[c].y, row.x[c].z, row.x[c].w}) {
      any |= (word & 0x7FFF7FFFu) + 0x00800080u;
    }
  }
  return (any & 0x80008000u) != 0;
}

/// Returns how many of the lane's elements were moved.
template <Guidance kGuidance, bool kMx, int kChunks>
__device__ int guide_row(const GuideParams& p, std::int64_t index, int lane, GuideTally& tally) {
  constexpr bool kGuided = kGuidance != Guidance::kOwnScale;
  auto* out = reinterpret_cast<uint4*>(p.out + index * p.out_stride);
  Row<kGuidance, kChunks> row;
  read_row(p, index, lane, row.x);
  const std::int64_t slots = p.shape.slots;
  const std::int64_t slot = slots == 1 ? 0 : index % slots;
  bool covered = kGuided && p.is_present(slots == 1 ? index : index / slots);
  bool damaged = false;
  if constexpr (kGuided) {
    const GuideRecord record = p.record_at(slots == 1 ? index : index / slots);
    read_record<kGuidance, kMx>(p, record, slot, lane, row);
    damaged = covered && sees_damage(p, record, row, lane);
  }
  const std::uint32_t seen =
      __reduce_or_sync(0xFFFFFFFFu, (damaged ? 1u : 0u) | (sees_nonfinite(row) ? 2u : 0u));
  if ((seen & 1u) != 0) covered = false;
  if (lane == 0 && kGuided) {
    tally.add(covered ? kCovered : kAbsent, 1);
    if ((seen & 1u) != 0 && slot == 0) tally.add(kDamaged, 1);
  }
  if ((seen & 2u) != 0) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (is_inside(p, c, lane)) out[c * 32 + lane] = uint4{};
    }
    if (lane == 0) tally.add(kNonfinite, 1);
    return 0;
  }
  if constexpr (kGuided) {
    if (covered) return follow_row<kGuidance, kMx>(p, row, out, lane);
    round_row_without_record<kMx, kChunks>(p, index, lane);
  } else {
    round_row<kMx>(p, row.x, out, lane);
  }
  return 0;
}

template <Guidance kGuidance, bool kMx, int kChunks>
__global__ void __launch_bounds__(kThreads, 3)
    guide_narrow_kernel(const __grid_constant__ GuideParams p) {
  __shared__ GuideTally tally;
  tally.begin();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  int moved = 0;
  for (std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
       row < p.shape.rows; row += warps) {
    moved += guide_row<kGuidance, kMx, kChunks>(p, row, lane, tally);
  }
  tally.flush(p, moved);
}

template <Guidance kGuidance, bool kMx, int kChunks>
void launch(const GuideParams& p, cudaStream_t stream) {
  // Few enough blocks that adding up their counts costs nothing, enough to even out their times.
  constexpr std::int64_t kMostBlocks = 1 << 12;
  const std::int64_t blocks = (p.shape.rows + kThreads / 32 - 1) / (kThreads / 32);
  const auto grid = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
  guide_narrow_kernel<kGuidance, kMx, kChunks><<<grid, kThreads, 0, stream>>>(p);
  cuda::require_launch("guide_narrow_kernel");
}

template <Guidance kGuidance, bool kMx>
void launch(const GuideParams& p, cudaStream_t stream) {
  if (p.shape.cols <= 3 * kChunk && !kMx) return launch<kGuidance, false, 3>(p, stream);
  launch<kGuidance, kMx, 8>(p, stream);
}

template <Guidance kGuidance>
void launch(const GuideParams& p, cudaStream_t stream) {
  p.rule.is_mx() ? launch<kGuidance, true>(p, stream) : launch<kGuidance, false>(p, stream);
}

bool is_on_16_bytes(const Bf16* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

}  // namespace

bool guide_narrow_cuda(const GuideParams& p, cudaStream_t stream) {
  const bool narrow = !p.rule.is_wide() && p.rule.four_over_six == FourOverSix::kOff &&
                      p.matrix_amax == nullptr && p.shape.span == p.shape.cols &&
                      p.shape.cols <= 8 * kChunk && is_on_16_bytes(p.x, p.x_stride) &&
                      is_on_16_bytes(p.out, p.out_stride);
  if (!narrow) return false;
  switch (p.guidance) {
    case Guidance::kOwnScale: launch<Guidance::kOwnScale>(p, stream); break;
    case Guidance::kRolloutScale: launch<Guidance::kRolloutScale>(p, stream); break;
    case Guidance::kLsbScaleMod4: launch<Guidance::kLsbScaleMod4>(p, stream); break;
    case Guidance::kLsb: launch<Guidance::kLsb>(p, stream); break;
    case Guidance::kFullGuided: launch<Guidance::kFullGuided>(p, stream); break;
    case Guidance::kFullForced: launch<Guidance::kFullForced>(p, stream); break;
  }
  return true;
}

}  // namespace lockstep::kernels
