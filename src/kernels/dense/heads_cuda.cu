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

constexpr int kHeadLanes = 16;   // of a head: those of lanes.h, and both of a pair are one lane's
constexpr int kBlockHeads = 16;  // that a block has at once
constexpr int kThreads = kHeadLanes * kBlockHeads;
constexpr std::int64_t kMostBytes = 48 << 10;  // of K's and V's rows, in shared memory

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

/// A lane's numbers of a head, sixteen apart, and what they are multiplied with.
template <int kDim>
struct HeadLane {
  static constexpr int kOfLane = kDim / kHeadLanes;
  float v[kOfLane];
  Bf16 norm[kOfLane];
  float cos[kOfLane / 2];
  float sin[kOfLane / 2];

  __device__ void load_turn(const Bf16* weight, const float* cosines, const float* sines) {
#pragma unroll
    for (int k = 0; k < kOfLane / 2; ++k) {
      cos[k] = cosines[kHeadLanes * k];
      sin[k] = sines[kHeadLanes * k];
    }
    if (weight == nullptr) return;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) norm[k] = weight[kHeadLanes * k];
  }

  /// Zeros where there is none.
  __device__ void load(const Bf16* x, bool there) {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) v[k] = there ? to_float(x[kHeadLanes * k]) : 0.0f;
  }

  /// All lanes of the warp.
  __device__ void normalize(float eps) {
    const float inverse = inverse_rms_of_head(v, eps);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) v[k] = normed(v[k], inverse, norm[k]);
  }

  __device__ void turn() {
#pragma unroll
    for (int k = 0; k < kOfLane / 2; ++k) {
      const float a = v[k], b = v[k + kOfLane / 2];
      v[k] = to_float(to_bf16(__fsub_rn(__fmul_rn(a, cos[k]), __fmul_rn(b, sin[k]))));
      v[k + kOfLane / 2] = to_float(to_bf16(__fadd_rn(__fmul_rn(b, cos[k]), __fmul_rn(a, sin[k]))));
    }
  }

  /// Whether one is not finite.
  __device__ bool is_bad() const {
    std::uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) most = max(most, float_bits(v[k]) & 0x7FFFFFFFu);
    return most >= 0x7F800000u;
  }

  __device__ void store(Bf16* x) const {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) x[kHeadLanes * k] = bf16_of(v[k]);
  }

 private:
  static __device__ Bf16 bf16_of(float x) {
    return static_cast<Bf16>(float_bits(x) >> 16);  // it is one
  }
};

/// What a block counts before it adds it to what all have.
struct SharedCounts {
  std::uint32_t of[kNumQuantizeCounts];

  /// All threads of a warp.
  __device__ void add(QuantizeCount which, bool there) {
    const unsigned lanes = __ballot_sync(0xFFFFFFFFu, there);
    if (lanes != 0 && threadIdx.x % 32 == 0) {
      atomicAdd(&of[which], static_cast<std::uint32_t>(__popc(lanes)));
    }
  }
};

/// Where a row's place in the cache begins.
struct CacheRow {
  std::int64_t page;
  std::int32_t in_page;

  __device__ std::byte* in(const Side& side, std::int32_t row_bytes) const {
    return side.pool + page * side.page_bytes + std::int64_t{in_page} * row_bytes;
  }
};

/// Codes K's and V's rows, which lie behind each other, into their places; a thread a sixteen.
/// `bad`: bits of the sides that are not finite.
template <bool kMx>
__device__ void code_sides(const HeadParams& p, const Bf16* rows, const CacheRow& at,
                           std::uint32_t bad, SharedCounts& counts) {
  const std::int32_t width = p.kv_heads * p.dim;
  const std::int32_t blocks = width / 16;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / 32 * 32;
  for (std::int32_t first = warp; first < 2 * blocks; first += kThreads) {
    const std::int32_t i = first + static_cast<std::int32_t>(threadIdx.x) % 32;
    const bool there = i < 2 * blocks;
    const std::int32_t which = i < blocks ? 0 : 1;
    const std::int32_t j = i - which * blocks;
    const Side& side = p.sides[which];
    const Sixteen x = there ? load_sixteen(rows + i * 16) : Sixteen{};
    std::uint32_t amax = abs_max_bits(x);
    if constexpr (kMx) {
      if (there) amax = max(amax, abs_max_bits(load_sixteen(rows + (i ^ 1) * 16)));
    }
    const bool finite = (bad >> which & 1u) == 0;
    const Nvfp4Row row = kMx ? Nvfp4Row{} : nvfp4_row(side.exponent);
    const std::uint32_t byte = sixteen_byte<kMx>(amax, row, p.above);
    const bool leads = there && (!kMx || j % 2 == 0);  // has its block's scale
    if (there) {
      auto* const to = reinterpret_cast<std::uint8_t*>(at.in(side, p.row_bytes));
      *reinterpret_cast<uint2*>(to + j * 8) =
          finite ? sixteen_codes<kMx>(x, byte, row) : make_uint2(0, 0);
      if (leads) to[width / 2 + (kMx ? j / 2 : j)] = static_cast<std::uint8_t>(finite ? byte : 0);
    }
    if (p.counts == nullptr) continue;
    counts.add(kNonfiniteRows, there && j == 0 && !finite);
    const bool counted = leads && finite;
    counts.add(kBlocks, counted);
    counts.add(kZeroBlocks, counted && amax == 0);
    if constexpr (!kMx) {
      counts.add(kUnderflowBlocks, counted && byte == 0 && amax != 0);
      counts.add(kSaturatedBlocks, counted && is_saturated(float_of(amax << 16), side.exponent));
    }
  }
}

/// The first block of a row has its keys and values, each of the others sixteen of its queries.
template <HeadCodes kCodes, int kDim>
__global__ void __launch_bounds__(kThreads)
    place_heads_kernel(const __grid_constant__ HeadParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ std::uint32_t bad_sides;
  __shared__ SharedCounts counts;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kHeadLanes;
  const auto row = static_cast<std::int32_t>(blockIdx.x);
  const bool has_queries = blockIdx.y != 0;
  const std::int32_t position = p.positions[row];
  const CacheRow at = {
      has_queries ? 0 : p.table[p.sequence[row] * p.table_stride + position / p.page_tokens],
      position % p.page_tokens};
  const std::int64_t angle = std::int64_t{position} * (kDim / 2) + lane;
  const Bf16* const norm = has_queries ? p.q_norm : p.k_norm;
  HeadLane<kDim> head;
  head.load_turn(norm == nullptr ? nullptr : norm + lane, p.cos + angle, p.sin + angle);
  if (thread == 0) bad_sides = 0;
  if (thread < kNumQuantizeCounts) counts.of[thread] = 0;
  __syncthreads();

  cuda::take_turn();
  Bf16* const x = p.qkv + row * p.stride + lane;
  int index = thread / kHeadLanes;  // all lanes of a warp go on together
  if (has_queries) {
    index += (static_cast<int>(blockIdx.y) - 1) * kBlockHeads;
    const bool is_head = index < p.heads;
    head.load(x + index * kDim, is_head);
    if (norm != nullptr) head.normalize(p.eps);
    head.turn();
    if (is_head) head.store(x + index * kDim);
    if (__any_sync(0xFFFFFFFFu, head.is_bad()) && thread % 32 == 0) atomicMin(p.bad, row);
    return;
  }

  auto* const rows = reinterpret_cast<Bf16*>(shared);  // K's, then V's
  for (int first = index / 2 * 2; first < 2 * p.kv_heads; first += kBlockHeads) {
    index = first + thread / kHeadLanes % 2;
    const bool is_key = index < p.kv_heads;
    Bf16* const from = x + (p.heads + index) * kDim;
    HeadLane<kDim> own = head;
    own.load(from, true);
    if (first < p.kv_heads) {  // a warp whose second head is a value keeps that as it was
      if (norm != nullptr) own.normalize(p.eps);
      own.turn();
      if (is_key) {
        own.store(from);
      } else {
        own.load(from, true);
      }
    }
    own.store(rows + index * kDim + lane);
    if (own.is_bad()) atomicOr(&bad_sides, is_key ? 1u : 2u);
  }
  __syncthreads();
  if (thread == 0 && bad_sides != 0) atomicMin(p.bad, row);
  const std::int32_t width = p.kv_heads * kDim;
  if constexpr (kCodes == HeadCodes::kBf16) {
    for (int i = thread; i < 2 * width; i += kThreads) {
      const int which = i < width ? 0 : 1;
      auto* const to = reinterpret_cast<Bf16*>(at.in(p.sides[which], p.row_bytes));
      to[i - which * width] = rows[i];
    }
    return;
  }
  code_sides<kCodes == HeadCodes::kMxfp4>(p, rows, at, bad_sides, counts);
  if (p.counts == nullptr) return;
  __syncthreads();
  if (thread < kNumQuantizeCounts && counts.of[thread] != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + thread * p.counts_stride),
              static_cast<unsigned long long>(counts.of[thread]));
  }
}

using HeadKernel = void (*)(HeadParams);

template <int kDim>
HeadKernel heads_kernel_for(const Quantizer& rule) {
  if (!rule.quantizes()) return place_heads_kernel<HeadCodes::kBf16, kDim>;
  return rule.is_mx() ? place_heads_kernel<HeadCodes::kMxfp4, kDim>
                      : place_heads_kernel<HeadCodes::kNvfp4, kDim>;
}

HeadKernel heads_kernel_of(const PlaceHeadsArgs& args) {
  switch (args.head_dim) {
    case 32: return heads_kernel_for<32>(args.k.rule);
    case 64: return heads_kernel_for<64>(args.k.rule);
    case 96: return heads_kernel_for<96>(args.k.rule);
    case 128: return heads_kernel_for<128>(args.k.rule);
    case 256: return heads_kernel_for<256>(args.k.rule);
    default: return nullptr;
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

std::int64_t bytes_of_sides(const PlaceHeadsArgs& args) {
  return 2 * std::int64_t{sizeof(Bf16)} * args.num_kv_heads * args.head_dim;
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
  return heads_kernel_of(args) != nullptr && bytes_of_sides(args) <= kMostBytes;
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
  const HeadKernel kernel = heads_kernel_of(args);
  const auto bytes = static_cast<std::size_t>(bytes_of_sides(args));
  const int of_queries = (args.num_heads + kBlockHeads - 1) / kBlockHeads;
  cuda::allow_shared(kernel, bytes);
  cuda::lay_out_for_shared(kernel);
  cuda::launch_beside("place_heads_kernel", kernel,
                      dim3(static_cast<unsigned>(rows), static_cast<unsigned>(1 + of_queries)),
                      dim3(kThreads), bytes, stream, params);
  return true;
}

}  // namespace lockstep::kernels
