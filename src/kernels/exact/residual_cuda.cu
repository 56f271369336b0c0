/// Residual compensation on a CUDA device: a block of threads takes a row, a thread sixteen
/// channels of it, which stay in its registers from the residual to the codes. Under one choice for
/// all rows their scores are added up by a kernel in between.
#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "device/cuda/check.h"
#include "device/memory.h"
#include "kernels/exact/residual_row.h"

namespace lockstep::kernels {
namespace {

constexpr int kGroup = 16;
constexpr int kMostThreads = 1024;
constexpr std::int64_t kMostCols = std::int64_t{kMostThreads} * kGroup;

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

/// What a thread holds of its sixteen channels.
struct Group {
  std::uint32_t words[8];  // residuals, two BF16 each
  float score;
  bool finite;
};

__device__ void read_group(const Params& p, std::int64_t row, int g, std::uint32_t (&x)[8],
                           std::uint32_t (&codes)[2]) {
  const Bf16* from = p.x + row * p.x_stride + g * kGroup;
  const std::uint8_t* bytes = p.codes + row * p.codes_stride + g * (kGroup / 2);
  if (p.aligned) {
    const uint4 low = reinterpret_cast<const uint4*>(from)[0];
    const uint4 high = reinterpret_cast<const uint4*>(from)[1];
    const uint2 pair = *reinterpret_cast<const uint2*>(bytes);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    codes[0] = pair.x, codes[1] = pair.y;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = bits_of(from[2 * i]) | static_cast<std::uint32_t>(bits_of(from[2 * i + 1])) << 16;
  }
  codes[0] = codes[1] = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    codes[i / 4] |= static_cast<std::uint32_t>(bytes[i]) << i % 4 * 8;
  }
}

/// residual_row_body() of one group.
__device__ Group residual_of(const Params& p, std::int64_t row, int g, std::int32_t n) {
  std::uint32_t x[8];
  std::uint32_t codes[2];
  read_group(p, row, g, x, codes);
  const float inverse = power_of_two(-n);
  const std::uint8_t byte = p.scales[row * p.scales_stride + g];
  const float scale = scale_value(static_cast<E4m3>(byte), n);
  Group group{{}, 0.0f, true};
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const std::uint32_t bits = i % 2 == 0 ? x[i / 2] << 16 : x[i / 2] & 0xFFFF0000u;
    const std::uint32_t code = codes[i / 8] >> i % 8 * 4 & 15u;
    group.finite &= (bits & 0x7F800000u) != 0x7F800000u;
    const float magnitude = e2m1_magnitude(code & 7u) * scale;
    const float r = float_of(float_bits(magnitude) | (code & 8u) << 28) - float_of(bits);
    const std::uint32_t word = float_bits(r) >> 16;
    group.words[i / 2] |= i % 2 == 0 ? word : word << 16;
    const float scaled = r * inverse;
    group.score += scaled * scaled;
  }
  return group;
}

__device__ float residual_at(const Group& group, int i) {
  const std::uint32_t pair = group.words[i / 2];
  return float_of(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

/// Which codes of a group stay where of every four only the two with the larger residuals do.
__device__ std::uint64_t two_of_four(const Group& group) {
  std::uint64_t keep = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const std::uint32_t own = float_bits(residual_at(group, i)) & 0x7FFFFFFFu;
    int before = 0;
#pragma unroll
    for (int j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
      const std::uint32_t other = float_bits(residual_at(group, j)) & 0x7FFFFFFFu;
      before += other > own || (other == own && j < i);
    }
    if (before < 2) keep |= std::uint64_t{15} << 4 * i;
  }
  return keep;
}

__device__ void write_group(const Params& p, std::int64_t row, int g, std::uint64_t codes,
                            std::uint8_t scale) {
  p.out_scales[row * p.out_scales_stride + g] = scale;
  std::uint8_t* to = p.out_codes + row * p.out_codes_stride + g * (kGroup / 2);
  if (p.aligned) {
    *reinterpret_cast<std::uint64_t*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint8_t>(codes >> 8 * i);
}

/// Quantizes a group's residual under 2^(n - 2).
__device__ void encode_group(const Params& p, std::int64_t row, int g, const Group& group,
                             std::int32_t n) {
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    most = max(most, float_bits(residual_at(group, i)) & 0x7FFFFFFFu);
  }
  const E4m3 s8 = block_scale(float_of(most), n - 2);
  const float scale = scale_value(s8, n - 2);
  std::uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const E2m1 code = to_e2m1_scaled(residual_at(group, i), scale);
    codes |= static_cast<std::uint64_t>(bits_of(code)) << 4 * i;
  }
  if (p.pattern == ResidualPattern::kTwoOfFour) codes &= two_of_four(group);
  write_group(p, row, g, codes, bits_of(s8));
}

/// Whether unit `own` is among the `count` largest, ties to the lower index.
__device__ bool is_chosen(const float* scores, int units, int own, int count) {
  const float score = scores[own];
  int before = 0;
  for (int j = 0; j < units; ++j) {
    const float other = scores[j];
    before += other > score || (other == score && j < own);
  }
  return before < count;
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

template <Stage kStage>
__device__ bool chooses(const Params& p, std::int64_t row, int g, float score, float* scores) {
  const bool takes_part = g < p.groups;
  if (p.pattern == ResidualPattern::kTwoOfFour) return true;
  if constexpr (kStage == Stage::kEncode) {
    if (!takes_part) return false;
    const auto units = static_cast<int>((p.rows + p.tile_rows - 1) / p.tile_rows * p.units);
    const auto own = static_cast<int>(row / p.tile_rows * p.units + g / p.together);
    return is_chosen(p.sums, units, own, count_chosen(p.per_mille, units));
  }
  if (p.chosen != nullptr) return takes_part && p.chosen[g * p.chosen_stride] != 0;
  scores[g] = takes_part ? score : 0.0f;
  __syncthreads();
  if (p.together > 1) {
    float sum = 0.0f;
    const int first = g * p.together;
    for (int i = first; i < first + p.together && i < p.groups; ++i) sum += scores[i];
    __syncthreads();
    if (g < p.units) scores[g] = sum;
    __syncthreads();
  }
  return takes_part &&
         is_chosen(scores, p.units, g / p.together, count_chosen(p.per_mille, p.units));
}

template <Stage kStage>
__global__ void __launch_bounds__(kMostThreads) residual_kernel(const __grid_constant__ Params p) {
  __shared__ float scores[kMostThreads];
  const std::int64_t row = blockIdx.x;
  const auto g = static_cast<int>(threadIdx.x);
  const std::int32_t n = exponent_of(p.global[row * p.global_stride]);
  Group group{{}, 0.0f, true};
  if (g < p.groups) group = residual_of(p, row, g, n);
  const bool finite = __syncthreads_and(group.finite) != 0;
  if constexpr (kStage == Stage::kScore) {
    if (g < p.groups) p.scores[row * p.groups + g] = finite ? group.score : 0.0f;
    return;
  }
  const bool chosen = chooses<kStage>(p, row, g, group.score, scores) && finite;
  if (g < p.groups) {
    if (chosen) {
      encode_group(p, row, g, group, n);
    } else {
      write_group(p, row, g, 0, 0);
    }
  }
  if (g == 0 && p.out_global != nullptr) {
    p.out_global[row * p.out_global_stride] = power_of_two(n - 2);
  }
}

/// A thread a unit of a tile: its scores in the order of their rows.
__global__ void sum_kernel(const __grid_constant__ Params p) {
  const auto unit = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (unit >= p.units) return;
  const std::int64_t first = blockIdx.y * p.tile_rows;
  const std::int64_t end = first + p.tile_rows < p.rows ? first + p.tile_rows : p.rows;
  const int group = unit * p.together;
  const int last = group + p.together < p.groups ? group + p.together : p.groups;
  float sum = 0.0f;
  if (p.together == 1) {
    const float* score = p.scores + first * p.groups + unit;
#pragma unroll 16
    for (std::int64_t r = first; r < end; ++r, score += p.groups) sum += *score;
  } else {
    for (std::int64_t r = first; r < end; ++r) {
      for (int i = group; i < last; ++i) sum += p.scores[r * p.groups + i];
    }
  }
  p.sums[blockIdx.y * p.units + unit] = sum;
}

bool is_on(const void* data, std::int64_t stride, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         stride % bytes == 0;
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
  const auto handle = cuda::stream_of(stream);
  Params p = params_of(args);
  const auto rows = static_cast<unsigned>(p.rows);
  const int threads = (p.groups + 31) / 32 * 32;
  if (args.choice != ResidualChoice::kBatch || p.pattern == ResidualPattern::kTwoOfFour) {
    residual_kernel<Stage::kAll><<<rows, threads, 0, handle>>>(p);
    cuda::require_launch("residual_kernel");
    return;
  }
  const std::int64_t needed = residual_workspace(args);
  Buffer own;
  p.scores = args.workspace.data;
  if (args.workspace.empty()) {
    own = Buffer(args.x.device, needed * static_cast<std::int64_t>(sizeof(float)), stream);
    p.scores = own.as<float>();
  }
  p.sums = p.scores + p.rows * p.groups;
  residual_kernel<Stage::kScore><<<rows, threads, 0, handle>>>(p);
  cuda::require_launch("residual_kernel");
  const auto tiles = static_cast<unsigned>((p.rows + p.tile_rows - 1) / p.tile_rows);
  const dim3 grid(static_cast<unsigned>((p.units + 31) / 32), tiles);
  sum_kernel<<<grid, 32, 0, handle>>>(p);
  cuda::require_launch("sum_kernel");
  residual_kernel<Stage::kEncode><<<rows, threads, 0, handle>>>(p);
  cuda::require_launch("residual_kernel");
}

}  // namespace lockstep::kernels
