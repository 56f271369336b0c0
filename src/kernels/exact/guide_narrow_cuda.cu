/// Guided rounding on a CUDA device where it has to be fast: a warp takes a row, keeps it in
/// registers, and reads and writes memory once. guide_cuda.cu is the same for every rule.
#include "device/cuda/check.h"
#include "kernels/exact/guide_cuda.h"
#include "kernels/exact/guide_pairs.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 256;  // elements of a row that a warp loads at once: 8 a lane

/// A row as a lane sees it: eight elements of each chunk, what is recorded of them, and the byte in
/// which their scale is recorded; a byte of bits and a block's maximum share a word with that.
template <Guidance kGuidance, int kChunks>
struct Row {
  static constexpr bool kCodes = choice_of(kGuidance) >= Choice::kCodeGuided;
  uint4 x[kChunks];
  std::uint32_t codes[kCodes ? kChunks : 1];
  std::uint32_t bytes[kChunks];  // bits in the lowest, the scale above, then 16 of the maximum
  std::int32_t first_block;      // of the row in its record
  std::int32_t n;

  __device__ std::uint32_t recorded(int chunk) const {
    if constexpr (kCodes) return codes[chunk];
    return bytes[chunk] & 0xFFu;
  }
  __device__ std::uint32_t scale(int chunk) const { return bytes[chunk] >> 8 & 0xFFu; }
  __device__ std::uint32_t amax(int chunk) const { return bytes[chunk] >> 16; }
};

/// What a warp takes: a row, or of a wide one the part that begins at `first`.
struct Part {
  std::uint32_t row;
  std::int32_t first;
  std::int32_t cols;

  __device__ bool holds(int chunk, int lane) const { return chunk * kChunk + lane * 8 < cols; }
};

/// The largest magnitude among eight elements.
__device__ std::uint32_t amax_of(uint4 x) {
  constexpr std::uint32_t kMagnitudes = 0x7FFF7FFFu;
  const std::uint32_t pair = __vmaxu2(__vmaxu2(x.x & kMagnitudes, x.y & kMagnitudes),
                                      __vmaxu2(x.z & kMagnitudes, x.w & kMagnitudes));
  return max(pair & 0xFFFFu, pair >> 16);
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
__device__ std::int32_t block_of(std::int32_t first, int chunk, int lane) {
  constexpr int kLanes = kMx ? 4 : 2;
  return first + chunk * (32 / kLanes) + lane / kLanes;
}

template <bool kMx>
__device__ Scale recorded_scale(std::uint32_t byte, std::int32_t n) {
  return scale_of_byte<kMx>(byte, kMx ? 1.0f : power_of_two(n));
}

/// The scale whose residue is recorded in `byte`.
template <bool kMx>
__device__ Scale residue_scale(const GuideParams& p, std::uint32_t amax_bits, std::uint32_t byte,
                               std::int32_t block, std::int32_t n) {
  const std::uint32_t residue = byte >> block % 4 * 2 & 3u;
  const float amax = float_of(amax_bits << 16);
  if constexpr (kMx) {
    const std::uint8_t own = scale_byte(p.rule, amax, {});
    return scale_of_byte<true>(mx_byte_of_residue(p.rule, residue, own), 1.0f);
  }
  return scale_of_residue(residue, amax, n);
}

template <bool kMx>
__device__ Scale own_scale(const GuideParams& p, std::uint32_t amax_bits, std::int32_t n) {
  const float amax = float_of(amax_bits << 16);
  if constexpr (kMx) return scale_of_byte<true>(scale_byte(p.rule, amax, {}), 1.0f);
  return scale_of_byte<false>(block_code(amax, n), power_of_two(n));
}

/// The largest magnitude that a warp holds.
template <int kChunks>
__device__ std::uint32_t amax_of_warp(const uint4 (&x)[kChunks]) {
  std::uint32_t most = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) most = max(most, amax_of(x[c]));
  return __reduce_max_sync(0xFFFFFFFFu, most);
}

/// A row at its own scale and nearest; `amax` is the row's.
template <bool kMx, int kChunks>
__device__ void round_row(const GuideParams& p, Part part, const uint4 (&x)[kChunks],
                          std::uint32_t amax, uint4* out, int lane) {
  std::int32_t n = p.exponent;
  if (!kMx && p.rule.global == GlobalScale::kPerToken) {
    n = own_exponent(p.rule, float_of(amax << 16));
  }
  std::uint32_t none = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (c * kChunk >= part.cols) break;
    const Scale scale = own_scale<kMx>(p, block_amax<kMx>(x[c]), n);
    const uint4 y = guide_eight<Choice::kNearest, false>(x[c], scale, 0, none);
    if (part.holds(c, lane)) out[c * 32 + lane] = y;
  }
}

template <int kChunks>
__device__ void read_row(const GuideParams& p, Part part, int lane, uint4 (&words)[kChunks]) {
  const Bf16* row = p.x + std::int64_t{part.row} * p.x_stride + part.first;
  const auto* x = reinterpret_cast<const uint4*>(row);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) words[c] = part.holds(c, lane) ? x[c * 32 + lane] : uint4{};
}

__device__ uint4* out_of(const GuideParams& p, Part part) {
  return reinterpret_cast<uint4*>(p.out + std::int64_t{part.row} * p.out_stride + part.first);
}

/// The same where a record was expected: read again, so that such rows cost others no registers.
template <bool kMx, bool kWide, int kChunks>
__device__ __noinline__ void round_row_without_record(const GuideParams& p, Part part,
                                                      std::uint32_t amax, int lane) {
  uint4 x[kChunks];
  read_row(p, part, lane, x);
  if (!kWide) amax = amax_of_warp(x);
  round_row<kMx>(p, part, x, amax, out_of(p, part), lane);
}

/// A row toward its record.
template <Guidance kGuidance, bool kMx, bool kCounted, int kChunks>
__device__ int follow_row(const GuideParams& p, Part part, const Row<kGuidance, kChunks>& row,
                          uint4* out, int lane) {
  std::uint32_t moved = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (c * kChunk >= part.cols) break;
    Scale scale;
    if constexpr (kGuidance == Guidance::kLsbScaleMod4) {
      const std::int32_t block = block_of<kMx>(row.first_block, c, lane);
      scale = residue_scale<kMx>(p, row.amax(c), row.scale(c), block, row.n);
    } else {
      scale = recorded_scale<kMx>(row.scale(c), row.n);
    }
    // What lies beyond the row is zero, at a scale of its own, and never moved.
    const uint4 y =
        guide_eight<choice_of(kGuidance), kCounted>(row.x[c], scale, row.recorded(c), moved);
    if (part.holds(c, lane)) out[c * 32 + lane] = y;
  }
  return kCounted ? sum_of_moved(moved) : 0;
}

/// Four bytes from anywhere, by the one or two words that hold them.
__device__ std::uint32_t read_word(const std::uint8_t* bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(bytes);
  const auto word_at = [](std::uintptr_t address) {
    return *reinterpret_cast<const std::uint32_t*>(address & ~std::uintptr_t{3});
  };
  return __funnelshift_r(word_at(first), word_at(first + 3), 8 * static_cast<unsigned>(first & 3));
}

/// Reads what is recorded of a row.
template <Guidance kGuidance, bool kMx, int kChunks>
__device__ void read_record(const GuideParams& p, Part part, const GuideRecord& record,
                            std::int32_t slot, int lane, Row<kGuidance, kChunks>& row) {
  constexpr Choice kChoice = choice_of(kGuidance);
  const std::int32_t first = slot * p.cols + part.first;
  row.first_block = first / (kMx ? 32 : 16);
  row.n = p.layout.exponents > 0 ? record.exponents[slot] : p.exponent;
  const std::int32_t at = first + lane * 8;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    row.bytes[c] = 0;
    if constexpr (kChoice >= Choice::kCodeGuided) row.codes[c] = 0;
    if (!part.holds(c, lane)) continue;
    const std::int32_t block = block_of<kMx>(row.first_block, c, lane);
    const std::uint32_t scale =
        record.scales[kGuidance == Guidance::kLsbScaleMod4 ? block / 4 : block];
    row.bytes[c] = scale << 8;
    if constexpr (kChoice == Choice::kBit) {
      row.bytes[c] |= record.elements[at / 8 + c * (kChunk / 8)];
    } else if constexpr (kChoice != Choice::kNearest) {
      row.codes[c] = read_word(record.elements + at / 2 + c * (kChunk / 2));
    }
  }
}

/// Whether the lane sees that the record holds what no rollout writes.
template <Guidance kGuidance, int kChunks>
__device__ bool sees_damage(const GuideParams& p, const GuideRecord& record,
                            const Row<kGuidance, kChunks>& row, int lane) {
  bool bad = false;
  if constexpr (kGuidance != Guidance::kLsbScaleMod4) {
    if (p.shape.slots == 1) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) bad |= row.scale(c) > p.most_scale;
    } else {  // another slot's too make the whole record damaged
      const bool words = (reinterpret_cast<std::uintptr_t>(record.scales) | p.scale_bytes) % 4 == 0;
      const auto* four = reinterpret_cast<const std::uint32_t*>(record.scales);
#pragma unroll 4
      for (int i = lane; words && i < p.scale_bytes / 4; i += 32) {
        bad |= __vcmpgtu4(four[i], p.most_scale * 0x01010101u) != 0;
      }
#pragma unroll 1
      for (int i = lane; !words && i < p.scale_bytes; i += 32) {
        bad |= record.scales[i] > p.most_scale;
      }
    }
  }
#pragma unroll 1
  for (int i = lane; i < p.exponent_bytes; i += 32) {
    bad |= record.exponents[i] < kMinExponent || record.exponents[i] > kMaxExponent;
  }
  return bad;
}

/// Whether the lane's elements hold Inf or NaN. Where maxima of blocks are needed they tell.
template <Guidance kGuidance, bool kMx, int kChunks>
__device__ bool sees_nonfinite(Row<kGuidance, kChunks>& row) {
  if constexpr (kGuidance == Guidance::kLsbScaleMod4) {
    std::uint32_t most = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const std::uint32_t amax = block_amax<kMx>(row.x[c]);
      row.bytes[c] |= amax << 16;
      most = max(most, amax);
    }
    return most >= 0x7F80u;
  }
  std::uint32_t most = 0;  // of pairs; NaN is more than Inf
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    for (const std::uint32_t word : {row.x[c].x, row.x[c].y, row.x[c].z, row.x[c].w}) {
      most = most_of_magnitudes(most, word);
    }
  }
  return (most & 0x7F80u) == 0x7F80u || (most & 0x7F800000u) == 0x7F800000u;
}

/// What must be known of a whole row before any of it is written.
struct Seen {
  bool damaged, nonfinite;
  std::uint32_t amax;  // of a wide row alone
};

/// The warps of a wide row, one after the other in their block, tell each other. All of a block's
/// threads call it.
__device__ Seen see_together(Seen own, int team) {
  __shared__ std::uint32_t words[kThreads / 32];
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    words[warp] = own.amax | (own.damaged ? 1u << 16 : 0u) | (own.nonfinite ? 1u << 17 : 0u);
  }
  __syncthreads();
  Seen all{};
  for (int i = warp / team * team; i < warp / team * team + team; ++i) {
    all.amax = max(all.amax, words[i] & 0xFFFFu);
    all.damaged |= (words[i] & 1u << 16) != 0;
    all.nonfinite |= (words[i] & 1u << 17) != 0;
  }
  return all;
}

/// Returns how many of the lane's elements were moved. Of a wide row's `team` of warps each calls
/// it with its part of it.
template <Guidance kGuidance, bool kMx, bool kCounted, bool kWide, int kChunks>
__device__ int guide_row(const GuideParams& p, Part part, int team, int lane, GuideTally& tally) {
  constexpr bool kGuided = kGuidance != Guidance::kOwnScale;
  uint4* out = out_of(p, part);
  Row<kGuidance, kChunks> row;
  read_row(p, part, lane, row.x);
  const auto slots = static_cast<std::uint32_t>(p.shape.slots);
  const std::uint32_t token = slots == 1 ? part.row : part.row / slots;
  const auto slot = static_cast<std::int32_t>(part.row - token * slots);
  const bool exists = !kWide || part.cols > 0;
  bool covered = kGuided && exists && p.is_present(token);
  bool damaged = false;
  if constexpr (kGuided) {
    if (exists) {
      const GuideRecord record = p.record_at(token);
      read_record<kGuidance, kMx>(p, part, record, slot, lane, row);
      damaged = covered && sees_damage(p, record, row, lane);
    }
  }
  const std::uint32_t flags = __reduce_or_sync(
      0xFFFFFFFFu, (damaged ? 1u : 0u) | (sees_nonfinite<kGuidance, kMx>(row) ? 2u : 0u));
  Seen seen{(flags & 1u) != 0, (flags & 2u) != 0, 0};
  if constexpr (kWide) {
    seen.amax = amax_of_warp(row.x);
    seen = see_together(seen, team);
    if (!exists) return 0;
  }
  if (seen.damaged) covered = false;
  const bool speaks = lane == 0 && part.first == 0;
  if (speaks && kGuided) {
    tally.add(covered ? kCovered : kAbsent, 1);
    if (seen.damaged && slot == 0) tally.add(kDamaged, 1);
  }
  if (seen.nonfinite) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (part.holds(c, lane)) out[c * 32 + lane] = uint4{};
    }
    if (speaks) tally.add(kNonfinite, 1);
    return 0;
  }
  if constexpr (kGuided) {
    if (covered) return follow_row<kGuidance, kMx, kCounted>(p, part, row, out, lane);
    round_row_without_record<kMx, kWide, kChunks>(p, part, seen.amax, lane);
  } else {
    if (!kWide) seen.amax = amax_of_warp(row.x);
    round_row<kMx>(p, part, row.x, seen.amax, out, lane);
  }
  return 0;
}

template <Guidance kGuidance, bool kMx, bool kCounted, int kChunks>
__global__ void __launch_bounds__(kThreads, 3)
    guide_narrow_kernel(const __grid_constant__ GuideParams p) {
  __shared__ GuideTally tally;
  tally.begin();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t warps = gridDim.x * (kThreads / 32);
  const auto rows = static_cast<std::uint32_t>(p.shape.rows);
  int moved = 0;
  for (std::uint32_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < rows;
       row += warps) {
    const Part part{row, 0, p.cols};
    moved += guide_row<kGuidance, kMx, kCounted, false, kChunks>(p, part, 1, lane, tally);
  }
  tally.flush(p, moved);
}

/// Rows of more than one warp's width: `team` warps of a block, a divisor of its eight, take one.
template <Guidance kGuidance, bool kCounted, int kChunks>
__global__ void __launch_bounds__(kThreads,
                                  kCounted || kGuidance == Guidance::kLsbScaleMod4 ? 2 : 3)
    guide_wide_kernel(const __grid_constant__ GuideParams p, int team) {
  __shared__ GuideTally tally;
  tally.begin();
  constexpr std::int32_t kWidth = kChunks * kChunk;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const std::uint32_t rows_of_block = kThreads / 32 / team;
  const auto rows = static_cast<std::uint32_t>(p.shape.rows);
  const std::int32_t first = warp % team * kWidth;
  int moved = 0;
  for (std::uint32_t top = blockIdx.x * rows_of_block; top < rows;
       top += gridDim.x * rows_of_block) {
    const std::uint32_t row = top + warp / team;
    const std::int32_t left = row < rows ? p.cols - first : 0;
    const Part part{row < rows ? row : rows - 1, first, min(max(left, 0), kWidth)};
    moved += guide_row<kGuidance, false, kCounted, true, kChunks>(p, part, team, lane, tally);
  }
  tally.flush(p, moved);
}

template <Guidance kGuidance, bool kMx, bool kCounted, int kChunks>
void launch(const GuideParams& p, cudaStream_t stream) {
  // Few enough blocks that adding up their counts costs nothing, enough to even out their times.
  constexpr std::int64_t kMostBlocks = 1 << 12;
  const std::int64_t blocks = (p.shape.rows + kThreads / 32 - 1) / (kThreads / 32);
  const auto grid = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
  guide_narrow_kernel<kGuidance, kMx, kCounted, kChunks><<<grid, kThreads, 0, stream>>>(p);
  cuda::require_launch("guide_narrow_kernel");
}

template <Guidance kGuidance, bool kCounted>
void launch_wide(const GuideParams& p, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1 << 12;
  const int warps = (p.cols + 8 * kChunk - 1) / (8 * kChunk);
  const int team = warps <= 2 ? 2 : warps <= 4 ? 4 : 8;
  const std::int64_t rows_of_block = kThreads / 32 / team;
  const std::int64_t blocks = (p.shape.rows + rows_of_block - 1) / rows_of_block;
  const auto grid = static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
  guide_wide_kernel<kGuidance, kCounted, 8><<<grid, kThreads, 0, stream>>>(p, team);
  cuda::require_launch("guide_wide_kernel");
}

template <Guidance kGuidance, bool kCounted>
void launch(const GuideParams& p, cudaStream_t stream) {
  if (p.rule.is_mx()) return launch<kGuidance, true, kCounted, 8>(p, stream);
  if (p.cols > 8 * kChunk) return launch_wide<kGuidance, kCounted>(p, stream);
  if (p.cols <= 3 * kChunk) return launch<kGuidance, false, kCounted, 3>(p, stream);
  launch<kGuidance, false, kCounted, 8>(p, stream);
}

template <Guidance kGuidance>
void launch(const GuideParams& p, cudaStream_t stream) {
  constexpr bool kNearest = choice_of(kGuidance) == Choice::kNearest;  // and nothing is moved
  constexpr bool kBit = choice_of(kGuidance) == Choice::kBit;
  if constexpr (kBit) {
    if (p.num_counts == 0) return launch<kGuidance, false>(p, stream);
  }
  launch<kGuidance, !kNearest>(p, stream);
}

bool is_on_16_bytes(const Bf16* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}

}  // namespace

bool guide_narrow_cuda(const GuideParams& p, cudaStream_t stream) {
  // The last word of a narrow row's codes may reach beyond its record.
  const bool codes = choice_of(p.guidance) >= Choice::kCodeGuided;
  if (codes && p.cols < 64) return false;
  const bool narrow = !p.rule.is_wide() && p.rule.four_over_six == FourOverSix::kOff &&
                      p.matrix_amax == nullptr && p.shape.span == p.shape.cols &&
                      p.shape.cols <= (p.rule.is_mx() ? 8 : 64) * kChunk &&
                      p.shape.rows < std::int64_t{1} << 31 && is_on_16_bytes(p.x, p.x_stride) &&
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
