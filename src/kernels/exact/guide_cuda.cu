/// Guided rounding on a CUDA device, under every rule: the functions of numerics/ as they stand. A
/// block of threads takes a record.
#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "device/cuda/check.h"
#include "device/cuda/shared.h"
#include "device/memory.h"
#include "kernels/exact/guide_cuda.h"
#include "kernels/exact/quantize_block.h"
#include "numerics/four_over_six.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostScales = 12288;  // a row's are kept in shared memory

/// Most over the block of threads; every thread gets it.
__device__ std::uint32_t block_max(std::uint32_t own) {
  __shared__ std::uint32_t most[kThreads / 32];
  own = __reduce_max_sync(0xFFFFFFFFu, own);
  __syncthreads();
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own;
  __syncthreads();
  for (const std::uint32_t one : most) own = own > one ? own : one;
  return own;
}

__device__ std::uint32_t amax_bits(const Bf16* x, std::int64_t count) {
  std::uint32_t most = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    const std::uint32_t here = bits_of(x[i]) & 0x7FFFu;
    most = most > here ? most : here;
  }
  return block_max(most);
}

/// n of a matrix whose global scale is its own: over the rows that are finite.
__global__ void __launch_bounds__(kThreads)
    matrix_amax_kernel(const __grid_constant__ GuideParams p, std::uint32_t* most) {
  for (std::int64_t row = blockIdx.x; row < p.shape.rows; row += gridDim.x) {
    const std::uint32_t bits = amax_bits(p.x + row * p.x_stride, p.shape.cols);
    if (threadIdx.x == 0 && bits < 0x7F80u) atomicMax(most, bits);
  }
}

/// Whether the record holds what no rollout writes. All threads get the answer.
__device__ bool is_damaged(const GuideParams& p, const GuideRecord& record) {
  bool bad = false;
  const auto here = static_cast<int>(threadIdx.x);
  if (p.guidance != Guidance::kLsbScaleMod4) {
    for (int i = here; i < p.scale_bytes; i += kThreads) bad |= record.scales[i] > p.most_scale;
  }
  if (p.layout.encoding == Encoding::kCodes8) {
    for (int i = here; i < p.layout.width; i += kThreads) {
      bad |= (record.elements[i] & 0x7Fu) > kE4m3Max;
    }
  }
  for (int i = here; i < p.exponent_bytes; i += kThreads) {
    bad |= record.exponents[i] < kMinExponent || record.exponents[i] > kMaxExponent;
  }
  return __syncthreads_or(bad) != 0;
}

/// One span: elements that share an n.
struct Span {
  const Bf16* x;
  Bf16* out;
  std::int64_t at;  // in its record
  std::int64_t size;
  std::int64_t block;  // elements that share a scale
  std::uint32_t amax;  // BF16 bits
};

__device__ float block_amax(const Bf16* x, std::int64_t block) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < block; ++i) {
    const std::uint32_t here = bits_of(x[i]) & 0x7FFFu;
    most = most > here ? most : here;
  }
  return float_of(most << 16);
}

__device__ float own_scale(const GuideParams& p, const Span& span, std::int64_t b) {
  std::int32_t n = p.exponent;
  if (p.rule.global == GlobalScale::kPerToken) n = own_exponent(p.rule, float_of(span.amax << 16));
  if (p.matrix_amax != nullptr) n = own_exponent(p.rule, float_of(*p.matrix_amax << 16));
  if (p.rule.scale == ScaleFormat::kNone) return scale_value(p.rule, 0, n);
  const Bf16* x = span.x + b * span.block;
  const std::uint8_t byte = block_byte(x, block_amax(x, span.block), p.rule, global_of_exponent(n));
  return scale_value(p.rule, byte, n);
}

__device__ float recorded_scale(const GuideParams& p, const Span& span, const GuideRecord& record,
                                std::int64_t b) {
  const std::int32_t n =
      p.layout.exponents > 0 ? record.exponents[span.at / span.size] : p.exponent;
  if (p.layout.block == 0) return scale_value(p.rule, 0, n);
  const std::int64_t at = span.at / span.block + b;
  if (p.guidance != Guidance::kLsbScaleMod4) return scale_value(p.rule, record.scales[at], n);
  const std::uint32_t residue = record.scales[at / 4] >> at % 4 * 2 & 3u;
  const float amax = block_amax(span.x + b * span.block, span.block);
  if (p.rule.is_mx()) {
    const std::uint8_t own = scale_byte(p.rule, amax, {});
    return scale_value(p.rule, mx_byte_of_residue(p.rule, residue, own), n);
  }
  const bool four = p.map_bytes > 0 && (record.maps[at / 8] >> at % 8 & 1) != 0;
  const float y = four ? scale_quotient_of_four(amax, n) : scale_quotient(amax, n);
  return scale_value(scale_of_residue(residue, y), n);
}

/// The elements of a span at their scales; returns how many were moved.
template <typename Grid, Choice kChoice>
__device__ int guide_span(const Span& span, const std::uint8_t* plane, const float* scales) {
  int moved = 0;
  for (std::int64_t i = threadIdx.x; i < span.size; i += kThreads) {
    const float scale = scales[i / span.block];
    const std::uint32_t recorded = recorded_of<Grid, kChoice>(plane, span.at + i);
    const Guided guided = guide_element<kChoice>(Grid(scale), span.x[i], recorded);
    span.out[i] = static_cast<Bf16>(guided.value);
    moved += scale > 0.0f && guided.moved;
  }
  return moved;
}

template <typename Grid>
__device__ int guide_span(Choice choice, const Span& span, const std::uint8_t* plane,
                          const float* scales) {
  switch (choice) {
    case Choice::kNearest: return guide_span<Grid, Choice::kNearest>(span, plane, scales);
    case Choice::kBit: return guide_span<Grid, Choice::kBit>(span, plane, scales);
    case Choice::kCodeGuided: return guide_span<Grid, Choice::kCodeGuided>(span, plane, scales);
    case Choice::kCodeForced: return guide_span<Grid, Choice::kCodeForced>(span, plane, scales);
  }
  return 0;
}

__global__ void __launch_bounds__(kThreads)
    guide_general_kernel(const __grid_constant__ GuideParams p) {
  extern __shared__ float scales[];
  __shared__ GuideTally tally;
  tally.begin();
  int moved = 0;
  const bool first_thread = threadIdx.x == 0;
  const GuideShape& shape = p.shape;
  for (std::int64_t index = blockIdx.x; index < shape.rows / shape.slots; index += gridDim.x) {
    GuideRecord record{};
    bool covered = p.is_present(index);
    if (covered) {
      record = p.record_at(index);
      covered = !is_damaged(p, record);
      if (first_thread && !covered) tally.add(kDamaged, 1);
    }
    if (first_thread && p.guided()) {
      tally.add(covered ? kCovered : kAbsent, static_cast<int>(shape.slots));
    }
    for (std::int64_t at = 0; at < shape.slots * shape.cols; at += shape.span) {
      const std::int64_t row = index * shape.slots + at / shape.cols;
      const std::int64_t col = at % shape.cols;
      const bool scaled = p.rule.scale != ScaleFormat::kNone;
      Span span{p.x + row * p.x_stride + col,
                p.out + row * p.out_stride + col,
                at,
                shape.span,
                scaled ? p.rule.block : shape.span,
                0};
      span.amax = amax_bits(span.x, span.size);
      if (span.amax >= 0x7F80u) {
        for (std::int64_t i = threadIdx.x; i < span.size; i += kThreads) span.out[i] = Bf16{};
        if (first_thread) tally.add(kNonfinite, 1);
        continue;
      }
      for (std::int64_t b = threadIdx.x; b < span.size / span.block; b += kThreads) {
        scales[b] = covered ? recorded_scale(p, span, record, b) : own_scale(p, span, b);
      }
      __syncthreads();
      const Choice choice = covered ? choice_of(p.guidance) : Choice::kNearest;
      moved += p.rule.is_wide() ? guide_span<OfE4m3>(choice, span, record.elements, scales)
                                : guide_span<OfE2m1>(choice, span, record.elements, scales);
      __syncthreads();  // the next span's scales take the place of these
    }
  }
  tally.flush(p, moved);
}

GuideParams params_of(const GuideArgs& args, const GuideShape& shape) {
  GuideParams p{};
  p.x = args.x.data;
  p.out = args.out.data;
  p.records = args.records.data;
  p.present = args.present.data;
  p.x_stride = args.x.stride[0];
  p.out_stride = args.out.stride[0];
  p.record_stride = args.records.stride[0];
  p.present_stride = args.present.stride[0];
  p.counts = reinterpret_cast<unsigned long long*>(args.counts.data);
  p.count_stride = args.counts.stride[0];
  p.num_counts = args.counts.empty() ? 0 : static_cast<int>(args.counts.shape[0]);
  p.rule = args.rule;
  p.layout = args.layout;
  p.guidance = args.guidance;
  p.shape = shape;
  p.exponent = args.exponent;
  p.cols = static_cast<std::int32_t>(shape.cols);
  p.element_bytes = args.layout.element_bytes();
  p.scale_bytes = args.layout.scale_bytes();
  p.map_bytes = args.layout.map_bytes();
  p.exponent_bytes = args.layout.exponent_bytes();
  p.most_scale = most_scale_byte(args.rule);
  return p;
}

}  // namespace

void guide_cuda(const GuideArgs& args, const GuideShape& shape, Stream stream) {
  const cuda::OnDevice scope(args.x.device.index);
  GuideParams p = params_of(args, shape);
  const std::int64_t blocks =
      args.rule.scale == ScaleFormat::kNone ? 1 : shape.span / args.rule.block;
  if (blocks > kMostScales) {
    throw Error(
        cat({"guide: ", blocks, " blocks of a row share an exponent; on a CUDA device at most ",
             kMostScales, " can"}));
  }
  const auto handle = cuda::stream_of(stream);
  Buffer amax;
  if (args.rule.global == GlobalScale::kPerTensor) {
    amax = Buffer(args.x.device, sizeof(std::uint32_t), stream);
    fill_bytes(amax.as<void>(), args.x.device, 0, amax.bytes(), stream);
    p.matrix_amax = amax.as<std::uint32_t>();
    const auto grid = static_cast<unsigned>(std::min<std::int64_t>(shape.rows, 1 << 14));
    matrix_amax_kernel<<<grid, kThreads, 0, handle>>>(p, amax.as<std::uint32_t>());
    cuda::require_launch("matrix_amax_kernel");
  }
  if (guide_narrow_cuda(p, handle)) return;
  const std::int64_t records = shape.rows / shape.slots;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(records, 1 << 16));
  const auto shared = static_cast<std::size_t>(blocks) * sizeof(float);
  cuda::allow_shared(guide_general_kernel, shared);
  guide_general_kernel<<<grid, kThreads, shared, handle>>>(p);
  cuda::require_launch("guide_general_kernel");
}

}  // namespace lockstep::kernels
