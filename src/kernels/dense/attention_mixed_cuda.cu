/// Attention over K and V of two formats on a CUDA device, which few contracts ask for: a warp has
/// a head of a row and takes its keys one by one, in order. Nothing follows from what else there
/// is.
#include <cmath>

#include "device/cuda/check.h"
#include "kernels/dense/attention_cuda.h"
#include "kernels/exact/code_value_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kMixedWarps = 4;
constexpr int kMostLaneDims = 4;  // numbers of a head that a lane has

struct MixedParams {
  const Bf16* q;
  std::int64_t q_stride;
  Bf16* out;
  std::int64_t out_stride;
  PagedKv k, v;
  const std::int32_t* positions;
  const std::int32_t* sequence;
  const std::int32_t* table;
  std::int64_t table_stride;
  std::int64_t items;  // heads of all rows
  std::int32_t heads, group, dim, width;
  float scale;
};

/// The row of one position.
struct KvRow {
  const std::byte* data;
  CodeSource codes;

  __device__ KvRow(const PagedKv& kv, const std::int32_t* pages, std::int32_t position,
                   std::int32_t width)
      : data(kv.pool + std::int64_t{pages[position / kv.page_tokens]} * kv.page_bytes + kv.offset +
             std::int64_t{position % kv.page_tokens} * kv.row_bytes) {
    codes.rule = kv.rule;
    codes.rule.macro_block = 0;  // a cache has no mantissas
    codes.codes = reinterpret_cast<const std::uint8_t*>(data);
    codes.scales = codes.codes + kv.rule.code_bytes(width);
    codes.whole = power_of_two(kv.exponent);
  }
  __device__ float operator[](std::int32_t column) const {
    if (codes.rule.quantizes()) return value_at(codes, 0, static_cast<std::uint32_t>(column));
    return to_float(reinterpret_cast<const Bf16*>(data)[column]);
  }
};

__device__ float sum_of_warp(float x) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, d);
  return x;
}

__global__ void __launch_bounds__(32 * kMixedWarps)
    attention_mixed_kernel(const __grid_constant__ MixedParams p) {
  const std::int64_t item = std::int64_t{blockIdx.x} * kMixedWarps + threadIdx.x / 32;
  if (item >= p.items) return;
  const std::int64_t row = item / p.heads;
  const auto head = static_cast<std::int32_t>(item % p.heads);
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int32_t kv_at = head / p.group * p.dim + lane;
  const Bf16* const q = p.q + row * p.q_stride + head * p.dim + lane;
  float query[kMostLaneDims] = {}, sum[kMostLaneDims] = {};
#pragma unroll
  for (int i = 0; i < kMostLaneDims; ++i) {
    if (32 * i < p.dim) query[i] = to_float(q[32 * i]);
  }
  const std::int32_t* const pages = p.table + p.sequence[row] * p.table_stride;
  float top = -INFINITY, total = 0.0f;
  for (std::int32_t position = 0; position <= p.positions[row]; ++position) {
    const KvRow k(p.k, pages, position, p.width), v(p.v, pages, position, p.width);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostLaneDims; ++i) {
      if (32 * i < p.dim) score = fmaf(query[i], k[kv_at + 32 * i], score);
    }
    score = sum_of_warp(score) * p.scale;
    const float now = fmaxf(top, score);
    const float keep = expf(top - now), weight = expf(score - now);
    top = now;
    total = fmaf(total, keep, weight);
#pragma unroll
    for (int i = 0; i < kMostLaneDims; ++i) {
      if (32 * i < p.dim) sum[i] = fmaf(weight, v[kv_at + 32 * i], sum[i] * keep);
    }
  }
  Bf16* const out = p.out + row * p.out_stride + head * p.dim + lane;
#pragma unroll
  for (int i = 0; i < kMostLaneDims; ++i) {
    if (32 * i < p.dim) out[32 * i] = to_bf16(__fdiv_rn(sum[i], total));
  }
}

}  // namespace

void attention_mixed_cuda(const AttentionArgs& args, Stream stream) {
  const MixedParams p = {.q = args.q.data,
                         .q_stride = args.q.stride[0],
                         .out = args.out.data,
                         .out_stride = args.out.stride[0],
                         .k = args.k,
                         .v = args.v,
                         .positions = args.rows.positions.data(),
                         .sequence = args.rows.sequence.data(),
                         .table = args.rows.table.data,
                         .table_stride = args.rows.table.stride[0],
                         .items = args.q.shape[0] * args.num_heads,
                         .heads = args.num_heads,
                         .group = args.num_heads / args.num_kv_heads,
                         .dim = args.head_dim,
                         .width = args.num_kv_heads * args.head_dim,
                         .scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim))};
  if (p.items == 0) return;
  const cuda::OnDevice scope(args.q.device.index);
  const auto blocks = static_cast<unsigned>((p.items + kMixedWarps - 1) / kMixedWarps);
  attention_mixed_kernel<<<blocks, 32 * kMixedWarps, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("attention_mixed_kernel");
}

}  // namespace lockstep::kernels
