/// Residual compensation on a CUDA device: a block of threads takes a row, and four lanes, or one,
/// a group of sixteen channels, which stay in registers from the residual to the codes. Under one
/// choice for all rows their scores are added up by kernels before it.
#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/memory.h"
#include "kernels/exact/residual_row.h"

namespace lockstep::kernels {
namespace {

constexpr int kGroup = 16;
constexpr int kMostThreads = 1024;
constexpr int kMostUnits = 1024;
constexpr std::int64_t kMostCols = std::int64_t{kMostUnits} * kGroup;

struct Params {
  const Bf16* x;
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  const float* global;
  const std::uint8_t* chosen;  // kStatic
  std::uint8_t* out_codes;
  std::uint8_t* out_scales;
  float* out_global;  // or null
  std::int64_t x_stride, codes_stride, scales_stride, global_stride, chosen_stride;
  std::int64_t out_codes_stride, out_scales_stride, out_global_stride;
  float* scores;  // kBatch: [rows, groups]
  float* sums;    // kBatch: [tiles, units]
  std::int64_t rows;
  std::int64_t tile_rows;  // that share a choice under kBatch
  int groups;
  int together;  // groups of a unit, which is chosen or not
  int units;     // of a row
  std::int32_t per_mille;
  ResidualPattern pattern;
  bool aligned;
};

/// What a lane holds of its group: 16 / kLanes channels.
template <int kLanes>
struct Part {
  static constexpr int kSize = kGroup / kLanes;
  std::uint32_t words[kSize / 2];  // residuals, two BF16 each
  float score;                     // the group's
  bool finite;
};

template <int kLanes>
__device__ void read_part(const Params& p, std::int64_t row, int at,
                          std::uint32_t (&x)[kGroup / kLanes / 2], std::uint32_t (&codes)[2]) {
  constexpr int kSize = kGroup / kLanes;
  const Bf16* from = p.x + row * p.x_stride + at;
  const std::uint8_t* bytes = p.codes + row * p.codes_stride + at / 2;
  codes[1] = 0;
  if (p.aligned) {
    if constexpr (kLanes == 4) {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      x[0] = words.x, x[1] = words.y;
      codes[0] = *reinterpret_cast<const std::uint16_t*>(bytes);
    } else {
      const uint4 low = reinterpret_cast<const uint4*>(from)[0];
      const uint4 high = reinterpret_cast<const uint4*>(from)[1];
      const uint2 pair = *reinterpret_cast<const uint2*>(bytes);
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
      codes[0] = pair.x, codes[1] = pair.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    x[i] = bits_of(from[2 * i]) | static_cast<std::uint32_t>(bits_of(from[2 * i + 1])) << 16;
  }
  codes[0] = 0;
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    codes[i / 4] |= static_cast<std::uint32_t>(bytes[i]) << i % 4 * 8;
  }
}

/// residual_row_body() of one group. A score is the sum of its squares in their order: each lane
/// goes on where the one before it stopped.
template <int kLanes>
__device__ Part<kLanes> residual_of(const Params& p, std::int64_t row, int at, std::int32_t n) {
  using Own = Part<kLanes>;
  std::uint32_t x[Own::kSize / 2];
  std::uint32_t codes[2];
  read_part<kLanes>(p, row, at, x, codes);
  const float inverse = power_of_two(-n);
  const std::uint8_t byte = p.scales[row * p.scales_stride + at / kGroup];
  const float scale = scale_value(static_cast<E4m3>(byte), n);
  Own part{{}, 0.0f, true};
  float squares[Own::kSize];
#pragma unroll
  for (int i = 0; i < Own::kSize; ++i) {
    const std::uint32_t bits = i % 2 == 0 ? x[i / 2] << 16 : x[i / 2] & 0xFFFF0000u;
    const std::uint32_t code = codes[i / 8] >> i % 8 * 4 & 15u;
    part.finite &= (bits & 0x7F800000u) != 0x7F800000u;
    const float magnitude = float_of((code & 7u) << 22) * 0x1p126f * scale;
    const float r = float_of(float_bits(magnitude) | (code & 8u) << 28) - float_of(bits);
    const std::uint32_t word = float_bits(r) >> 16;
    part.words[i / 2] |= i % 2 == 0 ? word : word << 16;
    const float scaled = r * inverse;
    squares[i] = scaled * scaled;
  }
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    float sum = part.score;
#pragma unroll
    for (int i = 0; i < Own::kSize; ++i) sum += squares[i];
    part.score = kLanes == 1 ? sum : __shfl_sync(0xFFFFFFFFu, sum, lane, kLanes);
  }
  return part;
}

template <int kLanes>
__device__ float residual_at(const Part<kLanes>& part, int i) {
  const std::uint32_t pair = part.words[i / 2];
  return float_of(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

/// Which codes stay where of every four only the two with the larger residuals do.
template <int kLanes>
__device__ std::uint64_t two_of_four(const Part<kLanes>& part) {
  std::uint64_t keep = 0;
#pragma unroll
  for (int i = 0; i < Part<kLanes>::kSize; ++i) {
    const std::uint32_t own = float_bits(residual_at(part, i)) & 0x7FFFFFFFu;
    int before = 0;
#pragma unroll
    for (int j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
      const std::uint32_t other = float_bits(residual_at(part, j)) & 0x7FFFFFFFu;
      before += other > own || (other == own && j < i);
    }
    if (before < 2) keep |= std::uint64_t{15} << 4 * i;
  }
  return keep;
}

template <int kLanes>
__device__ void write_part(const Params& p, std::int64_t row, int at, std::uint64_t codes,
                           std::uint8_t scale) {
  if (at % kGroup == 0) p.out_scales[row * p.out_scales_stride + at / kGroup] = scale;
  std::uint8_t* to = p.out_codes + row * p.out_codes_stride + at / 2;
  if (p.aligned) {
    if constexpr (kLanes == 4) {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(codes);
    } else {
      *reinterpret_cast<std::uint64_t*>(to) = codes;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Part<kLanes>::kSize / 2; ++i) {
    to[i] = static_cast<std::uint8_t>(codes >> 8 * i);
  }
}

/// Quantizes a group's residual under 2^(n - 2), or clears what is not chosen. All lanes call it.
template <int kLanes>
__device__ void encode_part(const Params& p, std::int64_t row, int at, const Part<kLanes>& part,
                            std::int32_t n, bool chosen) {
  constexpr int kSize = Part<kLanes>::kSize;
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    most = max(most, float_bits(residual_at(part, i)) & 0x7FFFFFFFu);
  }
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) {
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, other));
  }
  if (at >= p.groups * kGroup) return;
  if (!chosen) return write_part<kLanes>(p, row, at, 0, 0);
  const E4m3 s8 = block_scale(float_of(most), n - 2);
  const float scale = scale_value(s8, n - 2);
  std::uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const E2m1 code = to_e2m1_scaled(residual_at(part, i), scale);
    codes |= static_cast<std::uint64_t>(bits_of(code)) << 4 * i;
  }
  if (p.pattern == ResidualPattern::kTwoOfFour) codes &= two_of_four(part);
  write_part<kLanes>(p, row, at, codes, bits_of(s8));
}

/// Whether unit `own` is among the `count` largest, ties to the lower index. The lanes of a group
/// share the work.
template <int kLanes>
__device__ bool is_chosen(const float* scores, int units, int own, int count, int lane) {
  const float score = scores[own];
  int before = 0;
#pragma unroll 8
  for (int j = lane; j < own; j += kLanes) before += scores[j] >= score;
  const int after = own / kLanes * kLanes + lane;
#pragma unroll 8
  for (int j = after > own ? after : after + kLanes; j < units; j += kLanes) {
    before += scores[j] > score;
  }
#pragma unroll
  for (int other = 1; other < kLanes; other *= 2) {
    before += __shfl_xor_sync(0xFFFFFFFFu, before, other);
  }
  return before < count;
}

constexpr int kManyUnits = 256;  // from here on, halving beats comparing every pair

/// The same of thread i's own score, i < units, for a block that has a thread for each: the
/// `count`-th largest is found bit by bit, for scores are not negative and so ordered as their bits
/// are. All threads call it; `finds` is shared memory.
__device__ bool is_chosen_of_many(float score, int units, int count, int (&finds)[32]) {
  const auto thread = static_cast<int>(threadIdx.x);
  const bool valid = thread < units;
  const std::uint32_t key = valid ? float_bits(score) : 0;
  std::uint32_t least = 0;  // of the chosen
#pragma unroll 1
  for (std::uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
    if (__syncthreads_count(key >= (least | bit)) >= count) least |= bit;
  }
  const int above = __syncthreads_count(key > least);
  const bool is_least = valid && key == least;
  const std::uint32_t equals = __ballot_sync(0xFFFFFFFFu, is_least);
  const int lane = thread % 32;
  if (lane == 0) finds[thread / 32] = __popc(equals);
  __syncthreads();
  int before = above + __popc(equals & ((1u << lane) - 1));
  for (int warp = 0; warp < thread / 32; ++warp) before += finds[warp];
  return valid && (key > least || (is_least && before < count));
}

__host__ __device__ constexpr int count_chosen(std::int32_t per_mille, std::int64_t units) {
  return static_cast<int>((std::int64_t{per_mille} * units + 999) / 1000);
}

/// What a row's kernel does once it has residuals.
enum class Stage : std::uint8_t {
  kAll,     // chooses by its own scores or the given groups, and encodes
  kScore,   // leaves its scores
  kEncode,  // chooses by the sums of all rows, and encodes
};

/// All threads call it; those beyond the row choose as the last group does.
template <Stage kStage, int kLanes>
__device__ bool chooses(const Params& p, std::int64_t row, int group, float score, float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (p.pattern == ResidualPattern::kTwoOfFour) return true;
  const int g = min(group, p.groups - 1);
  if constexpr (kStage == Stage::kEncode) {
    const auto units = static_cast<int>((p.rows + p.tile_rows - 1) / p.tile_rows * p.units);
    const auto own = static_cast<int>(row / p.tile_rows * p.units + g / p.together);
    const float* sums = p.sums;
    if (units <= kMostUnits) {  // one trip to memory for all that is compared
      for (int i = static_cast<int>(threadIdx.x); i < units; i += static_cast<int>(blockDim.x)) {
        scores[i] = p.sums[i];
      }
      __syncthreads();
      sums = scores;
    }
    return is_chosen<kLanes>(sums, units, own, count_chosen(p.per_mille, units), lane);
  }
  if (p.chosen != nullptr) return p.chosen[g * p.chosen_stride] != 0;
  if constexpr (kLanes == 1) {
    if (p.together == 1 && p.units >= kManyUnits) {
      __shared__ int finds[32];
      return is_chosen_of_many(score, p.units, count_chosen(p.per_mille, p.units), finds);
    }
  }
  if (lane == 0 && group < p.groups) scores[group] = score;
  __syncthreads();
  if (p.together > 1) {
    float sum = 0.0f;
    const int first = group * p.together;
    for (int i = first; i < first + p.together && i < p.groups; ++i) sum += scores[i];
    __syncthreads();
    if (lane == 0 && group < p.units) scores[group] = sum;
    __syncthreads();
  }
  const int count = count_chosen(p.per_mille, p.units);
  return is_chosen<kLanes>(scores, p.units, g / p.together, count, lane);
}

template <Stage kStage, int kLanes>
__global__ void __launch_bounds__(kMostThreads) residual_kernel(const __grid_constant__ Params p) {
  __shared__ float scores[kMostUnits];
  // What is encoded is older than the sums, and read while they are made.
  if constexpr (kStage != Stage::kEncode) cuda::take_turn();
  const std::int64_t row = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x);
  const int group = thread / kLanes;
  const int at = thread * (kGroup / kLanes);
  const std::int32_t n = exponent_of(p.global[row * p.global_stride]);
  // A group beyond the row reads the last one, so that all lanes have something to exchange.
  const int from = group < p.groups ? at : (p.groups - 1) * kGroup + at % kGroup;
  const Part<kLanes> part = residual_of<kLanes>(p, row, from, n);
  const bool finite = __syncthreads_and(part.finite) != 0;
  if constexpr (kStage == Stage::kEncode) cuda::take_turn();
  if constexpr (kStage == Stage::kScore) {
    if (at % kGroup == 0 && group < p.groups) {
      p.scores[row * p.groups + group] = finite ? part.score : 0.0f;
    }
    return;
  }
  const bool chosen = chooses<kStage, kLanes>(p, row, group, part.score, scores) && finite;
  encode_part<kLanes>(p, row, at, part, n, chosen);
  if (thread == 0 && p.out_global != nullptr) {
    p.out_global[row * p.out_global_stride] = power_of_two(n - 2);
  }
}

/// By a warp.
__device__ bool is_finite_row(const Params& p, std::int64_t row) {
  const Bf16* const x = p.x + row * p.x_stride;
  bool finite = true;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x) % 32; i < p.groups * kGroup; i += 32) {
    finite &= is_finite(x[i]);
  }
  return __all_sync(0xFFFFFFFFu, finite) != 0;
}

constexpr int kColumnRows = 256;  // at a time
constexpr int kAddends = 16;      // that are on their way to a sum

/// A group's scores of all rows, which one thread adds up in their order: so that a choice for the
/// batch is made by this and the kernel that encodes.
__global__ void __launch_bounds__(kColumnRows)
    score_column_kernel(const __grid_constant__ Params p) {
  __shared__ float scores[kColumnRows];
  cuda::take_turn();
  const auto thread = static_cast<int>(threadIdx.x);
  const auto group = static_cast<int>(blockIdx.x);
  float sum = 0.0f;
  for (std::int64_t first = 0; first < p.rows; first += kColumnRows) {
    const std::int64_t row = first + thread;
    float score = 0.0f;
    bool doubtful = false;
    if (row < p.rows) {
      const std::int32_t n = exponent_of(p.global[row * p.global_stride]);
      const Part<1> part = residual_of<1>(p, row, group * kGroup, n);
      score = part.finite ? part.score : 0.0f;
      doubtful = score > 0.0f && p.scales[row * p.scales_stride + group] == 0;
    }
    // A row that is not finite counts nowhere, and has no scale anywhere.
    for (unsigned left = __ballot_sync(0xFFFFFFFFu, doubtful); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const bool finite = is_finite_row(p, first + thread / 32 * 32 + lane);
      if (thread % 32 == lane && !finite) score = 0.0f;
    }
    scores[thread] = score;
    __syncthreads();
    if (thread == 0) {
      const auto rows = static_cast<int>(min(std::int64_t{kColumnRows}, p.rows - first));
      for (int r = 0; r < rows; r += kAddends) {
#pragma unroll
        for (int i = 0; i < kAddends; ++i) sum += scores[r + i];  // 0 past the last row
      }
    }
    __syncthreads();
  }
  if (thread == 0) p.sums[group] = sum;
}

constexpr int kSumUnits = 32;

/// The scores of a tile's units of several groups, a thread each, in the order of rows and groups.
__global__ void __launch_bounds__(kSumUnits) sum_kernel(const __grid_constant__ Params p) {
  cuda::take_turn();
  const auto unit = static_cast<int>(blockIdx.x * kSumUnits + threadIdx.x);
  if (unit >= p.units) return;
  const std::int64_t first = blockIdx.y * p.tile_rows;
  const std::int64_t end = min(first + p.tile_rows, p.rows);
  const int end_group = min((unit + 1) * p.together, p.groups);
  float sum = 0.0f;
#pragma unroll 4
  for (std::int64_t row = first; row < end; ++row) {
    for (int i = unit * p.together; i < end_group; ++i) sum += p.scores[row * p.groups + i];
  }
  p.sums[blockIdx.y * p.units + unit] = sum;
}

bool is_on(const void* data, std::int64_t stride, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         stride % bytes == 0;
}

template <Stage kStage>
void launch(const Params& p, Stream stream) {
  const dim3 rows(static_cast<unsigned>(p.rows));
  const auto threads = [&](int lanes) {
    return dim3(static_cast<unsigned>((lanes * p.groups + 31) / 32 * 32));
  };
  // Four lanes a group make a step's few rows faster and many rows slower.
  constexpr std::int64_t kFewRows = 1024;
  if (4 * p.groups <= kMostThreads && p.rows <= kFewRows) {
    cuda::launch_beside("residual_kernel", residual_kernel<kStage, 4>, rows, threads(4), 0, stream,
                        p);
  } else {
    cuda::launch_beside("residual_kernel", residual_kernel<kStage, 1>, rows, threads(1), 0, stream,
                        p);
  }
}

Params params_of(const ResidualArgs& args) {
  Params p{};
  p.x = args.x.data;
  p.codes = args.q.codes.data;
  p.scales = args.q.scales.data;
  p.global = args.q.global.data;
  p.out_codes = args.out.codes.data;
  p.out_scales = args.out.scales.data;
  p.out_global = args.out.global.data;
  p.x_stride = args.x.stride[0];
  p.codes_stride = args.q.codes.stride[0];
  p.scales_stride = args.q.scales.stride[0];
  p.global_stride = args.q.global.stride[0];
  p.out_codes_stride = args.out.codes.stride[0];
  p.out_scales_stride = args.out.scales.stride[0];
  p.out_global_stride = args.out.global.stride[0];
  if (args.choice == ResidualChoice::kStatic) p.chosen = args.chosen.data;
  p.chosen_stride = args.chosen.stride[0];
  const bool blocks = args.pattern == ResidualPattern::kBlocks;
  p.rows = args.x.shape[0];
  p.tile_rows = blocks ? kResidualBlockRows : p.rows;
  p.groups = static_cast<int>(args.x.shape[1] / kGroup);
  p.together = blocks ? static_cast<int>(kResidualBlockCols) / kGroup : 1;
  p.units = (p.groups + p.together - 1) / p.together;
  p.per_mille = args.per_mille;
  p.pattern = args.pattern;
  p.aligned = is_on(p.x, 2 * p.x_stride, 16) && is_on(p.codes, p.codes_stride, 8) &&
              is_on(p.out_codes, p.out_codes_stride, 8);
  return p;
}

}  // namespace

void residual_cuda(const ResidualArgs& args, Stream stream) {
  if (args.x.shape[1] > kMostCols) {
    throw Error(cat({"residual: x has ", args.x.shape[1], " columns, on a CUDA device at most ",
                     kMostCols, " are possible"}));
  }
  const cuda::OnDevice scope(args.x.device.index);
  Params p = params_of(args);
  const bool together = args.choice == ResidualChoice::kBatch;
  if (!together || p.pattern == ResidualPattern::kTwoOfFour) return launch<Stage::kAll>(p, stream);
  const std::int64_t needed = residual_workspace(args);
  Buffer own;
  p.scores = args.workspace.data;
  if (args.workspace.empty()) {
    own = Buffer(args.x.device, needed * static_cast<std::int64_t>(sizeof(float)), stream);
    p.scores = own.as<float>();
  }
  p.sums = p.scores + p.rows * p.groups;
  if (p.together == 1) {
    cuda::launch_beside("score_column_kernel", score_column_kernel,
                        dim3(static_cast<unsigned>(p.groups)), dim3(kColumnRows), 0, stream, p);
  } else {
    launch<Stage::kScore>(p, stream);
    const auto tiles = static_cast<unsigned>((p.rows + p.tile_rows - 1) / p.tile_rows);
    const dim3 grid(static_cast<unsigned>((p.units + kSumUnits - 1) / kSumUnits), tiles);
    cuda::launch_beside("sum_kernel", sum_kernel, grid, dim3(kSumUnits), 0, stream, p);
  }
  launch<Stage::kEncode>(p, stream);
}

}  // namespace lockstep::kernels
