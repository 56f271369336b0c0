#include <algorithm>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "kernels/dense/check.h"
#include "kernels/dense/heads_rows.h"
#include "kernels/dense/row_cuda.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/sixteen_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kFewestWarps = 4;
constexpr int kMostWarps = 16;
constexpr std::int64_t kMostBytes = 48 << 10;  // of a row, in shared memory

enum class HeadCodes : std::uint8_t { kBf16, kNvfp4, kMxfp4 };

/// K's or V's cache.
struct Side {
  std::byte* pool;  // with the layer's offset
  std::int64_t page_bytes;
  std::int32_t exponent;
};

struct HeadParams {
  Bf16* qkv;
  std::int64_t stride;
  const std::int32_t* positions;
  const std::int32_t* sequence;
  const std::int32_t* table;
  std::int64_t table_stride;
  const float* cos;
  const float* sin;
  const Bf16* q_norm;    // or null
  const Bf16* k_norm;    // or null
  std::int64_t* counts;  // or null
  std::int64_t counts_stride;
  std::int32_t* bad;
  Side sides[2];
  std::uint32_t above;  // doubles_above()
  std::int32_t heads;
  std::int32_t kv_heads;
  std::int32_t dim;
  std::int32_t page_tokens;
  std::int32_t row_bytes;
  float eps;
};

/// A head in shared memory, by a warp: its norm, then its rotation.
__device__ void turn_head(Bf16* head, const Bf16* norm, const float* cos, const float* sin, int dim,
                          float eps) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float inverse = 1.0f;
  if (norm != nullptr) {
    inverse = inverse_rms(warp_sum_of_squares(head, dim), static_cast<float>(dim), eps);
  }
  const auto value = [&](int i) {
    if (norm == nullptr) return to_float(head[i]);
    const Bf16 normal = to_bf16(__fmul_rn(to_float(head[i]), inverse));
    return to_float(to_bf16(__fmul_rn(to_float(normal), to_float(norm[i]))));
  };
  const int half = dim / 2;
  for (int i = lane; i < half; i += 32) {
    const float a = value(i);
    const float b = value(i + half);
    head[i] = to_bf16(__fsub_rn(__fmul_rn(a, cos[i]), __fmul_rn(b, sin[i])));
    head[i + half] = to_bf16(__fadd_rn(__fmul_rn(b, cos[i]), __fmul_rn(a, sin[i])));
  }
}

__device__ bool holds_nonfinite(std::uint32_t pair) {
  return (pair & 0x7F800000u) == 0x7F800000u || (pair & 0x7F80u) == 0x7F80u;
}

/// What a block counts before it adds it to what all have.
struct SharedCounts {
  std::uint32_t of[kNumQuantizeCounts];

  __device__ void add(QuantizeCount which, bool there) {
    if (there) atomicAdd(&of[which], 1u);
  }
};

/// Codes K's and V's rows, which lie behind each other, into their places; a thread a sixteen.
/// `most`: the bits of their amax.
template <bool kMx>
__device__ void code_sides(const HeadParams& p, const Bf16* rows, std::int64_t page,
                           std::int32_t in_page, const std::uint32_t* most, SharedCounts& counts) {
  const std::int32_t width = p.kv_heads * p.dim;
  const std::int32_t blocks = width / 16;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < 2 * blocks;
       i += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t which = i < blocks ? 0 : 1;
    const std::int32_t j = i - which * blocks;
    const Side& side = p.sides[which];
    auto* const to = reinterpret_cast<std::uint8_t*>(side.pool) + page * side.page_bytes +
                     std::int64_t{in_page} * p.row_bytes;
    const Sixteen x = load_sixteen(rows + i * 16);
    std::uint32_t amax = abs_max_bits(x);
    if constexpr (kMx) amax = max(amax, abs_max_bits(load_sixteen(rows + (i ^ 1) * 16)));
    const bool finite = most[which] < 0x7F80u;
    const Nvfp4Row row = kMx ? Nvfp4Row{} : nvfp4_row(side.exponent);
    const std::uint32_t byte = sixteen_byte<kMx>(amax, row, p.above);
    const uint2 codes = finite ? sixteen_codes<kMx>(x, byte, row) : make_uint2(0, 0);
    *reinterpret_cast<uint2*>(to + j * 8) = codes;
    const bool first = !kMx || j % 2 == 0;
    if (first) {
      to[width / 2 + (kMx ? j / 2 : j)] = static_cast<std::uint8_t>(finite ? byte : 0);
    }
    if (p.counts == nullptr || !first) continue;
    counts.add(kNonfiniteRows, j == 0 && !finite);
    if (!finite) continue;
    counts.add(kBlocks, true);
    counts.add(kZeroBlocks, amax == 0);
    if constexpr (!kMx) {
      counts.add(kUnderflowBlocks, byte == 0 && amax != 0);
      counts.add(kSaturatedBlocks, is_saturated(float_of(amax << 16), side.exponent));
    }
  }
}

/// A block a row, which it keeps in shared memory.
template <HeadCodes kCodes>
__global__ void __launch_bounds__(32 * kMostWarps)
    place_heads_kernel(const __grid_constant__ HeadParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ std::uint32_t most[2];
  __shared__ SharedCounts counts;
  auto* const row = reinterpret_cast<Bf16*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const std::int32_t width = p.kv_heads * p.dim;
  const std::int32_t turned = (p.heads + p.kv_heads) * p.dim;
  const std::int32_t cols = turned + width;
  const std::int32_t position = p.positions[blockIdx.x];
  const std::int64_t page =
      p.table[p.sequence[blockIdx.x] * p.table_stride + position / p.page_tokens];
  const std::int32_t in_page = position % p.page_tokens;
  if (thread < 2) most[thread] = 0;
  if (thread < kNumQuantizeCounts) counts.of[thread] = 0;

  cuda::take_turn();
  Bf16* const x = p.qkv + blockIdx.x * p.stride;
  for (int i = 8 * thread; i < cols; i += 8 * threads) {
    *reinterpret_cast<uint4*>(row + i) = *reinterpret_cast<const uint4*>(x + i);
  }
  __syncthreads();
  const std::int64_t angle = std::int64_t{position} * (p.dim / 2);
  for (int head = thread / 32; head < p.heads + p.kv_heads; head += threads / 32) {
    turn_head(row + head * p.dim, head < p.heads ? p.q_norm : p.k_norm, p.cos + angle,
              p.sin + angle, p.dim, p.eps);
  }
  __syncthreads();

  bool bad = false;
  for (int i = 8 * thread; i < cols; i += 8 * threads) {
    const uint4 value = *reinterpret_cast<const uint4*>(row + i);
    bad |= holds_nonfinite(value.x) || holds_nonfinite(value.y) || holds_nonfinite(value.z) ||
           holds_nonfinite(value.w);
    if (i < turned) *reinterpret_cast<uint4*>(x + i) = value;
  }
  const Bf16* const kv = row + p.heads * p.dim;
  if constexpr (kCodes != HeadCodes::kBf16) {
    for (int i = thread; i < width / 8; i += threads) {
      atomicMax(&most[i < width / 16 ? 0 : 1], abs_max_bits(load_sixteen(kv + i * 16)));
    }
  }
  if (__syncthreads_or(bad) != 0 && thread == 0) {
    atomicMin(p.bad, static_cast<std::int32_t>(blockIdx.x));
  }
  if constexpr (kCodes == HeadCodes::kBf16) {
    for (int i = thread; i < 2 * width; i += threads) {
      const int which = i < width ? 0 : 1;
      std::byte* const to = p.sides[which].pool + page * p.sides[which].page_bytes +
                            std::int64_t{in_page} * p.row_bytes;
      reinterpret_cast<Bf16*>(to)[i - which * width] = kv[i];
    }
    return;
  }
  code_sides<kCodes == HeadCodes::kMxfp4>(p, kv, page, in_page, most, counts);
  if (p.counts == nullptr) return;
  __syncthreads();
  if (thread < kNumQuantizeCounts && counts.of[thread] != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + thread * p.counts_stride),
              static_cast<unsigned long long>(counts.of[thread]));
  }
}

/// Whether rows of the cache lie where 8 bytes are stored at once, under a rule of sixteens.
bool codes_fit(const PagedKv& kv, std::int32_t width) {
  const auto at = reinterpret_cast<std::uintptr_t>(kv.pool) |
                  static_cast<std::uintptr_t>(kv.offset | kv.page_bytes | kv.row_bytes);
  if (!sixteens_know(kv.rule) || at % 8 != 0 || width % kv.rule.block != 0) return false;
  return kv.rule.is_mx() || (kv.rule.global == GlobalScale::kStatic &&
                             kv.exponent >= kMinExponent && kv.exponent <= kMaxExponent);
}

bool knows_heads(const PlaceHeadsArgs& args) {
  const std::int32_t width = args.num_kv_heads * args.head_dim;
  const PagedKv &k = args.k, &v = args.v;
  const std::int32_t row =
      k.rule.quantizes()
          ? static_cast<std::int32_t>(k.rule.code_bytes(width) + k.rule.scale_cols(width))
          : 2 * width;
  if (k.rule != v.rule || k.page_tokens != v.page_tokens || k.page_tokens <= 0 ||
      k.row_bytes != row || v.row_bytes != row || args.rows.table.empty()) {
    return false;
  }
  if (k.rule.quantizes() && !(codes_fit(k, width) && codes_fit(v, width))) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(args.qkv.data);
  return at % 16 == 0 && args.qkv.stride[0] % 8 == 0 && width % 16 == 0 && args.head_dim % 8 == 0 &&
         args.qkv.shape[1] * std::int64_t{sizeof(Bf16)} <= kMostBytes;
}

}  // namespace

bool place_heads_cuda(const PlaceHeadsArgs& args, Stream stream) {
  const std::int64_t rows = args.qkv.shape[0];
  if (!knows_heads(args)) return false;
  for (const std::span<const Bf16> norm : {args.q_norm, args.k_norm}) {
    if (norm.empty() || std::ssize(norm) == args.head_dim) continue;
    throw Error(
        cat({"place_heads: a norm has ", norm.size(), " elements; expected ", args.head_dim}));
  }
  if (std::ssize(args.rows.positions) != rows || std::ssize(args.rows.sequence) != rows) {
    throw Error(cat({"place_heads: ", args.rows.positions.size(), " positions and ",
                     args.rows.sequence.size(), " sequences for ", rows, " rows"}));
  }
  if (rows == 0) return true;
  const cuda::OnDevice scope(args.qkv.device.index);
  const auto side = [](const PagedKv& kv) {
    return Side{kv.pool + kv.offset, kv.page_bytes, kv.exponent};
  };
  const auto norm = [](std::span<const Bf16> of) { return of.empty() ? nullptr : of.data(); };
  const HeadParams params{.qkv = args.qkv.data,
                          .stride = args.qkv.stride[0],
                          .positions = args.rows.positions.data(),
                          .sequence = args.rows.sequence.data(),
                          .table = args.rows.table.data,
                          .table_stride = args.rows.table.stride[0],
                          .cos = args.table->cos(0),
                          .sin = args.table->sin(0),
                          .q_norm = norm(args.q_norm),
                          .k_norm = norm(args.k_norm),
                          .counts = args.counts.data,
                          .counts_stride = args.counts.stride[0],
                          .bad = args.bad,
                          .sides = {side(args.k), side(args.v)},
                          .above = doubles_above(args.k.rule.scale_rule),
                          .heads = args.num_heads,
                          .kv_heads = args.num_kv_heads,
                          .dim = args.head_dim,
                          .page_tokens = args.k.page_tokens,
                          .row_bytes = args.k.row_bytes,
                          .eps = args.eps};
  const auto kernel = !args.k.rule.quantizes() ? place_heads_kernel<HeadCodes::kBf16>
                      : args.k.rule.is_mx()    ? place_heads_kernel<HeadCodes::kMxfp4>
                                               : place_heads_kernel<HeadCodes::kNvfp4>;
  const int warps = std::clamp(args.num_heads + args.num_kv_heads, kFewestWarps, kMostWarps);
  const auto bytes = static_cast<std::size_t>(args.qkv.shape[1]) * sizeof(Bf16);
  cuda::allow_shared(kernel, bytes, kMostBytes);
  cuda::launch_beside("place_heads_kernel", kernel, dim3(static_cast<unsigned>(rows)),
                      dim3(static_cast<unsigned>(32 * warps)), bytes, stream, params);
  return true;
}

}  // namespace lockstep::kernels
