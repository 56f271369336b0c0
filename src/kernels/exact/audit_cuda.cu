/// audit() on a CUDA device: a block of threads takes a row, a thread its blocks. Audit tokens are
/// few, so it is the definition and nothing faster; several places' rows run side by side.
#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/exact/audit_block.h"
#include "kernels/exact/quantize_block.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;

struct Params {
  const Bf16* x;
  const Bf16* operand;
  const std::uint8_t* records;
  const std::uint8_t* present;  // null: all are audit tokens
  std::int64_t x_stride, operand_stride, record_stride, present_stride;
  unsigned long long* counts;
  std::int64_t count_stride;
  Quantizer rule;
  RowLayout layout;
  AuditShape shape;
  std::int32_t exponent;
};

/// All threads get the answer.
__device__ bool is_damaged(const Params& p, const std::uint8_t* record) {
  const std::uint8_t limit = most_scale_byte(p.rule);
  const std::int32_t scales = p.layout.element_bytes();
  const std::int32_t exponents = scales + p.layout.scale_bytes();
  bool bad = false;
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < p.layout.bytes(); i += kThreads) {
    const auto n = static_cast<std::int8_t>(record[i]);
    if (i >= exponents) {
      bad |= n < kMinExponent || n > kMaxExponent;
    } else if (i >= scales) {
      bad |= record[i] > limit;
    } else {
      bad |= p.rule.is_wide() && (record[i] & 0x7Fu) > kE4m3Max;
    }
  }
  return __syncthreads_or(bad) != 0;
}

/// All threads get the largest magnitude of the elements, Inf for NaN.
__device__ float amax_of_all(const Bf16* x, std::int64_t count) {
  __shared__ std::uint32_t most[kThreads / 32];
  std::uint32_t own = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    own = max(own, static_cast<std::uint32_t>(bits_of(x[i]) & 0x7FFFu));
  }
  own = __reduce_max_sync(0xFFFFFFFFu, own);
  __syncthreads();
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = own;
  __syncthreads();
  for (const std::uint32_t one : most) own = max(own, one);
  return float_of(min(own, 0x7F80u) << 16);
}

/// The blocks of elements [first, first + span) of a row.
__device__ void audit_span(const Params& p, std::int64_t row, std::int64_t first,
                           const std::uint8_t* record, AuditCounts& counts) {
  const bool scaled = p.rule.scale != ScaleFormat::kNone;
  const auto size = static_cast<std::int32_t>(scaled ? p.layout.block : p.shape.span);
  const std::uint8_t* scales = record + p.layout.element_bytes();
  const auto* exponents = reinterpret_cast<const std::int8_t*>(scales + p.layout.scale_bytes());
  const Bf16* x = p.x + row * p.x_stride + first;
  const Bf16* operand = p.operand + row * p.operand_stride + first;
  const float amax = amax_of_all(x, p.shape.span);
  const bool own_n = p.rule.global == GlobalScale::kPerToken;
  const std::int32_t n = own_n ? own_exponent(p.rule, amax) : p.exponent;
  for (std::int64_t b = threadIdx.x; b * size < p.shape.span; b += kThreads) {
    const std::int64_t c = b * size;
    const std::int64_t at = row % p.shape.slots * p.shape.cols + first + c;
    const std::int32_t recorded_n =
        p.layout.exponents > 0 ? exponents[at / p.shape.span] : p.exponent;
    std::uint8_t own = 0;
    std::uint8_t theirs = 0;
    if (scaled) {
      own = block_byte(x + c, amax_of(x + c, size), p.rule, global_of_exponent(n));
      theirs = scales[at / size];
    }
    count_audit({p.rule, x + c, operand + c, record + p.rule.code_bytes(at),
                 scale_value(p.rule, own, n), scale_value(p.rule, theirs, recorded_n), size},
                counts);
  }
}

struct AllParams {
  Params all[kMostAudits];
};
static_assert(sizeof(AllParams) <= 4096, "what a launch takes along everywhere");

/// Blocks of one y have one of them.
__global__ void __launch_bounds__(kThreads) audit_kernel(const __grid_constant__ AllParams all) {
  const Params& p = all.all[blockIdx.y];
  const std::int64_t row = blockIdx.x;
  if (row >= p.shape.rows) return;
  const std::int64_t index = row / p.shape.slots;
  if (p.present != nullptr && p.present[index * p.present_stride] == 0) return;
  const std::uint8_t* record = p.records + index * p.record_stride;
  if (is_damaged(p, record)) return;
  if (!is_finite(amax_of_all(p.x + row * p.x_stride, p.shape.cols))) return;
  AuditCounts counts{};
  if (threadIdx.x == 0) counts[kAuditRows] = 1;
  for (std::int64_t first = 0; first < p.shape.cols; first += p.shape.span) {
    audit_span(p, row, first, record, counts);
  }
  for (int i = 0; i < kNumAuditCounts; ++i) {
    const int sum = __reduce_add_sync(0xFFFFFFFFu, static_cast<int>(counts[i]));
    if (threadIdx.x % 32 == 0 && sum != 0) {
      atomicAdd(p.counts + i * p.count_stride, static_cast<unsigned long long>(sum));
    }
  }
}

}  // namespace

namespace {

Params params_of(const AuditArgs& args, const AuditShape& shape) {
  Params p{};
  p.x = args.x.data;
  p.operand = args.operand.data;
  p.records = args.records.data;
  p.present = args.present.data;
  p.x_stride = args.x.stride[0];
  p.operand_stride = args.operand.stride[0];
  p.record_stride = args.records.stride[0];
  p.present_stride = args.present.stride[0];
  p.counts = reinterpret_cast<unsigned long long*>(args.counts.data);
  p.count_stride = args.counts.stride[0];
  p.rule = args.rule;
  p.layout = args.layout;
  p.shape = shape;
  p.exponent = args.exponent;
  return p;
}

}  // namespace

void audit_cuda(std::span<const AuditArgs> all, std::span<const AuditShape> shapes, Stream stream) {
  AllParams params{};
  std::int64_t most = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    params.all[i] = params_of(all[i], shapes[i]);
    most = std::max(most, shapes[i].rows);
  }
  if (most == 0) return;
  const cuda::OnDevice scope(all[0].x.device.index);
  const dim3 grid(static_cast<unsigned>(most), static_cast<unsigned>(all.size()));
  audit_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(params);
  cuda::require_launch("audit_kernel");
}

}  // namespace lockstep::kernels
