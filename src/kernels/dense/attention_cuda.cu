#include <algorithm>
#include <cmath>

#include "device/cuda/beside.h"
#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/cuda/shared.h"
#include "kernels/dense/attention_kernel_cuda.h"

namespace lockstep::kernels {
namespace {

struct CombineParams {
  const float* sums;
  const float* tops;
  Bf16* out;
  std::int64_t out_stride;
  const std::int32_t* positions;
  std::int32_t heads;
  std::int32_t splits;
  float value_scale;
  std::int32_t batches;  // in shared memory
};

inline constexpr int kBatch = 32;       // splits that are folded one after another
inline constexpr int kMostBatches = 4;  // on their way

/// What a split's sums and total and those before it are multiplied by.
struct alignas(16) SplitWeights {
  float before, own, total, unused;
};

/// A head's splits of one row on their way into shared memory, batch by batch.
template <int kDim>
class SplitReader {
 public:
  __device__ SplitReader(const float* sums, int splits, int batches, unsigned char* shared)
      : sums_(sums), splits_(splits), batches_(batches), shared_(shared) {}

  __device__ int count(int batch) const { return min(kBatch, splits_ - batch * kBatch); }
  __device__ const float* batch(int index) const {
    return reinterpret_cast<const float*>(shared_) + index % batches_ * kBatch * kDim;
  }
  /// One more, or nothing, is on its way.
  __device__ void start(int index) const {
    const int pieces = count(index) * (kDim / 4);
    const float* const from = sums_ + index * std::int64_t{kBatch * kDim};
    const std::uint32_t to = address_of(batch(index));
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kDim) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i), "l"(from + 4 * i)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  /// The oldest of kMostBatches is there, of this thread's part.
  static __device__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kMostBatches - 1) : "memory");
  }

 private:
  const float* sums_;
  int splits_;
  int batches_;  // in shared memory
  unsigned char* shared_;
};

/// By a warp: weights of a batch's splits, a lane each, and the greatest score up to their end.
__device__ inline float weigh_splits(float2 top_and_total, float running, SplitWeights* weights) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float now = fmaxf(running, top_and_total.x);  // the greatest up to and with this split
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(kAll, now, static_cast<unsigned>(step));
    if (lane >= step) now = fmaxf(now, before);
  }
  float before = __shfl_up_sync(kAll, now, 1);
  if (lane == 0) before = running;
  weights[lane] = {shrink(before, now), shrink(top_and_total.x, now), top_and_total.y, 0.0f};
  return __shfl_sync(kAll, now, 31);
}

/// What attention_kernel does when it folds the splits itself, for one head of one row: the running
/// maxima of 32 splits at once, the sums in their order. A thread a channel.
template <int kDim>
__global__ void __launch_bounds__(kDim)
    combine_splits_kernel(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ SplitWeights weights[2][kBatch];
  const std::int64_t row = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  // Older than attention_kernel, which has waited for it.
  const int splits = p.positions[row] / kSplitKeys + 1;
  cuda::take_turn();
  const std::int64_t first = (row * p.heads + head) * p.splits;
  const SplitReader<kDim> reader(p.sums + first * kDim, splits, p.batches, shared);
  const auto* const tops = reinterpret_cast<const float2*>(p.tops) + first;
  const auto top_of = [&](int split) {
    return split < splits ? tops[split] : make_float2(minus_infinity(), 0.0f);
  };
  for (int i = 0; i < kMostBatches; ++i) reader.start(i);
  float2 top = top_of(thread % kBatch);
  float running = minus_infinity();
  float total = 0.0f;
  float sum = 0.0f;
  for (int batch = 0; batch * kBatch < splits; ++batch) {
    const float2 next_top = top_of((batch + 1) * kBatch + thread % kBatch);
    if (thread < kBatch) running = weigh_splits(top, running, weights[batch % 2]);
    top = next_top;
    reader.wait();
    __syncthreads();
    const float* const sums = reader.batch(batch) + thread;
    const int count = reader.count(batch);
    const auto add = [&](int i) {
      const SplitWeights by = weights[batch % 2][i];
      total = fold(total, by.before, by.total, by.own);
      sum = fold(sum, by.before, sums[i * kDim], by.own);
    };
    if (count >= kBatch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add(i);
    } else {
#pragma unroll 4
      for (int i = 0; i < count; ++i) add(i);
    }
    if (count < kBatch) break;
    __syncthreads();
    reader.start(batch + kMostBatches);
  }
  p.out[row * p.out_stride + head * kDim + thread] =
      to_bf16(__fdiv_rn(__fmul_rn(sum, p.value_scale), total));
}

void combine(const AttentionParams& p, int dim, std::int64_t rows, Stream stream) {
  const int batches = std::min((p.splits + kBatch - 1) / kBatch, kMostBatches);
  const CombineParams params{p.sums,  p.tops,   p.out,         p.out_stride, p.positions,
                             p.heads, p.splits, p.value_scale, batches};
  const auto kernel = dim == 32   ? combine_splits_kernel<32>
                      : dim == 64 ? combine_splits_kernel<64>
                                  : combine_splits_kernel<128>;
  const int bytes = std::min(p.splits, batches * kBatch) * dim * 4;
  cuda::allow_shared(kernel, bytes);
  cuda::lay_out_for_shared(kernel);
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(p.heads));
  cuda::launch_beside("combine_splits_kernel", kernel, grid, dim3(static_cast<unsigned>(dim)),
                      static_cast<std::size_t>(bytes), stream, params);
}

constexpr std::int64_t kMostItems = std::int64_t{1} << 30;

KvFormat format_of(const Quantizer& rule) {
  if (!rule.quantizes()) return KvFormat::kBf16;
  if (rule.is_wide()) return KvFormat::kE4m3;
  return rule.is_mx() ? KvFormat::kMxfp4 : KvFormat::kNvfp4;
}

void check(const AttentionArgs& args) {
  const std::int32_t dim = args.head_dim;
  if (dim != 32 && dim != 64 && dim != 128) {
    throw Error(cat({"attention: head_dim is ", dim, "; a CUDA device takes 32, 64 or 128"}));
  }
  if (args.num_heads / args.num_kv_heads > kMostGroup) {
    throw Error(cat({"attention: ", args.num_heads, " heads on ", args.num_kv_heads,
                     " KV heads; a CUDA device takes at most ", kMostGroup, " heads on each"}));
  }
  if (args.k.page_tokens != args.v.page_tokens) {
    throw Error("attention: K and V have different pages; on a CUDA device both are alike");
  }
  if (reinterpret_cast<std::uintptr_t>(args.q.data) % 16 != 0 || args.q.stride[0] % 8 != 0) {
    throw Error(
        "attention: a row of q does not begin at a multiple of 16 bytes, as a CUDA device "
        "needs it");
  }
  if (args.rows.table.empty() || args.rows.longest < 1 ||
      args.rows.longest > args.rows.table.shape[1] * args.k.page_tokens) {
    throw Error(cat({"attention: rows.longest is ", args.rows.longest, ", the table has ",
                     args.rows.table.shape[1], " pages of ", args.k.page_tokens,
                     " tokens; expected 1.. and no more than those hold"}));
  }
}

/// How a block's heads of a row come into shared memory.
void lay_out(const AttentionArgs& args, AttentionParams& p) {
  const std::int32_t heads = args.num_kv_heads;
  p.block_heads = heads % kMostHeads == 0 ? kMostHeads : heads % 2 == 0 ? 2 : 1;
  p.head_blocks = heads / p.block_heads;
  const Quantizer& rule = args.k.rule;
  const std::int32_t dim = args.head_dim;
  const auto codes =
      static_cast<std::int32_t>(rule.quantizes() ? rule.code_bytes(dim) : 2 * std::int64_t{dim});
  const auto scales = static_cast<std::int32_t>(rule.quantizes() ? rule.scale_cols(dim) : 0);
  p.row_bytes = args.k.row_bytes;
  p.code_bytes = p.code_offset = p.block_heads * codes;
  p.scale_bytes = p.scale_offset = p.block_heads * scales;
  p.scales_at = heads * codes;
  const std::int32_t row = p.code_bytes + p.scale_bytes;
  p.stride = (row + 15) / 16 * 16;
  const auto lie_at = [&](int bytes) {
    const auto is_there = [&](const PagedKv& kv) {
      return (reinterpret_cast<std::uintptr_t>(kv.pool) | kv.page_bytes | kv.offset) % bytes == 0;
    };
    return is_there(args.k) && is_there(args.v);
  };
  const std::int32_t tokens = args.k.page_tokens;
  // That threads read.
  const int word = format_of(rule) == KvFormat::kNvfp4 ? dim / 8 : std::max(4, dim / 16);
  const bool in_pages = row % word == 0 && tokens * row % 16 == 0 &&
                        (kTurnKeys % tokens == 0 || tokens % kTurnKeys == 0);
  const auto parts = p.code_bytes | p.scale_bytes | p.scales_at | p.row_bytes;
  if (lie_at(16) && p.block_heads == heads && (row % 16 == 0 || in_pages)) {
    p.stride = row;
    p.copy = KvCopy::kRuns;
  } else if (lie_at(16) && parts % 16 == 0) {
    p.copy = KvCopy::kRows;
  } else {
    p.copy = lie_at(4) && parts % 4 == 0 ? KvCopy::kWords : KvCopy::kBytes;
  }
}

/// Whether splits go to blocks of their own. It changes no bit.
bool takes_splits_apart(const AttentionArgs& args) {
  const std::int64_t wanted =
      attention_workspace(args.q.shape[0], args.num_heads, args.head_dim, args.rows.longest);
  return args.rows.tiles.empty() && splits_of(args.rows.longest) > 1 &&
         static_cast<std::int64_t>(args.workspace.size()) >= wanted;
}

}  // namespace

void attention_cuda(const AttentionArgs& args, Stream stream) {
  check(args);
  const std::int64_t rows = args.q.shape[0];
  if (rows == 0) return;
  if (!(args.k.rule == args.v.rule)) return attention_mixed_cuda(args, stream);
  const cuda::OnDevice scope(args.q.device.index);
  const KvFormat format = format_of(args.k.rule);
  const bool fp16 = format == KvFormat::kNvfp4 || format == KvFormat::kE4m3;
  const std::int32_t code_shift = format == KvFormat::kNvfp4 ? kCodeShift : 0;
  AttentionParams p{};
  p.q = args.q.data;
  p.out = args.out.data;
  p.q_stride = args.q.stride[0];
  p.out_stride = args.out.stride[0];
  p.k = {args.k.pool + args.k.offset, args.k.page_bytes};
  p.v = {args.v.pool + args.v.offset, args.v.page_bytes};
  p.positions = args.rows.positions.data();
  p.sequence = args.rows.sequence.data();
  p.table = args.rows.table.data;
  p.table_stride = args.rows.table.stride[0];
  p.tiles = args.rows.tiles.empty() ? nullptr : args.rows.tiles.data();
  p.heads = args.num_heads;
  p.group = args.num_heads / args.num_kv_heads;
  p.splits = splits_of(args.rows.longest);
  p.page_tokens = args.k.page_tokens;
  p.score_scale = std::ldexp(1.44269504f / std::sqrt(static_cast<float>(args.head_dim)),
                             fp16 ? args.k.exponent + code_shift : 0);
  p.value_scale = std::ldexp(1.0f, fp16 ? args.v.exponent + code_shift : 0);
  lay_out(args, p);
  if (takes_splits_apart(args)) {
    p.sums = reinterpret_cast<float*>(args.workspace.data());
    p.tops = p.sums + rows * p.heads * p.splits * args.head_dim;
  }
  const auto tiles = static_cast<std::int64_t>(args.rows.tiles.size());
  const std::int64_t items = p.tiles != nullptr
                                 ? tiles * args.num_kv_heads
                                 : rows * p.head_blocks * (p.sums == nullptr ? 1 : p.splits);
  if (items > kMostItems) {
    throw Error(cat({"attention: ", rows, " rows over ", args.rows.longest,
                     " tokens; a CUDA device takes fewer at a time"}));
  }
  p.rows = static_cast<std::int32_t>(rows);
  p.tile_count = static_cast<std::int32_t>(tiles);
  p.items = static_cast<std::int32_t>(items);
  const int groups = p.group > 8 ? 2 : 1;
  const auto launch = format == KvFormat::kNvfp4   ? launch_attention_nvfp4
                      : format == KvFormat::kMxfp4 ? launch_attention_mxfp4
                      : format == KvFormat::kE4m3  ? launch_attention_e4m3
                                                   : launch_attention_bf16;
  launch(p, args.head_dim, groups, args.q.device.index, stream.handle);
  if (p.sums != nullptr) combine(p, args.head_dim, rows, stream);
}

}  // namespace lockstep::kernels
