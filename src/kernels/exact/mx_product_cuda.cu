#include "device/cuda/check.h"
#include "kernels/exact/mx_product_rows.h"

namespace lockstep::kernels {
namespace {

constexpr int kWarps = 8;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr std::int32_t kNoBlock = -(1 << 20);  // the anchor of a row of zeros

struct Params {
  const std::uint8_t* a_codes;
  const std::uint8_t* a_scales;
  const std::uint8_t* w_codes;
  const std::uint8_t* w_scales;
  std::int64_t a_code_stride;
  std::int64_t a_scale_stride;
  std::int64_t w_code_stride;
  std::int64_t w_scale_stride;
  const std::int32_t* offsets;  // or null: all items are of expert 0
  const std::int32_t* from;     // or null
  const std::int32_t* to;       // or null
  float* out;
  std::int64_t out_stride;
  std::int32_t items;
  std::int32_t outs;
  std::int32_t blocks;
};

/// 32 codes.
struct Codes {
  std::uint32_t words[4];
};

__device__ Codes codes_of(const std::uint8_t* row, int block) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(row + std::int64_t{block} * 16);
  return {{words[0], words[1], words[2], words[3]}};
}

__device__ bool is_zero(const Codes& codes) {
  return ((codes.words[0] | codes.words[1] | codes.words[2] | codes.words[3]) & 0x77777777u) == 0;
}

/// Four codes in half units, a byte each.
__device__ std::int32_t half_units_of(std::uint32_t four) {
  const std::uint32_t index = four & 0x7777u;
  const std::uint32_t plus = __byte_perm(0x03020100u, 0x0C080604u, index);
  const std::uint32_t minus = __byte_perm(0xFDFEFF00u, 0xF4F8FAFCu, index);
  const std::uint32_t signs =
      (four & 0x8u) << 4 | (four & 0x80u) << 8 | (four & 0x800u) << 12 | (four & 0x8000u) << 16;
  const std::uint32_t negative = (signs >> 7) * 0xFFu;  // bytes of ones
  return static_cast<std::int32_t>(plus ^ ((plus ^ minus) & negative));
}

__device__ std::int32_t dot(const Codes& a, const Codes& w) {
  std::int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __dp4a(half_units_of(a.words[i] & 0xFFFFu), half_units_of(w.words[i] & 0xFFFFu), sum);
    sum = __dp4a(half_units_of(a.words[i] >> 16), half_units_of(w.words[i] >> 16), sum);
  }
  return sum;
}

/// x * 2^shift, to nearest even. |x| <= 4608, so that a shift of -30 leaves nothing.
__device__ std::int64_t shifted(std::int32_t x, std::int32_t shift) {
  if (shift >= 0) return std::int64_t{x} * (std::int64_t{1} << shift);
  if (shift < -30) return 0;
  const std::int32_t floor = x >> -shift;
  const std::int32_t rest = x - floor * (1 << -shift);
  const std::int32_t half = 1 << (-shift - 1);
  return floor + (rest > half || (rest == half && (floor & 1) != 0) ? 1 : 0);
}

/// The largest exponent of a row's blocks that are not all zero. All lanes call it.
__device__ std::int32_t anchor_of(const std::uint8_t* codes, const std::uint8_t* scales,
                                  int blocks) {
  std::int32_t most = kNoBlock;
  for (int b = static_cast<int>(threadIdx.x) % 32; b < blocks; b += 32) {
    if (!is_zero(codes_of(codes, b))) most = max(most, scales[b] - 127);
  }
  return __reduce_max_sync(kAll, most);
}

/// A warp an output of an expert: over all of its items, a lane every 32nd block.
__global__ void __launch_bounds__(32 * kWarps) mx_product_kernel(const __grid_constant__ Params p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int out = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const auto expert = static_cast<int>(blockIdx.y);
  if (out >= p.outs) return;
  const int begin = p.offsets == nullptr ? 0 : p.offsets[expert];
  const int end = p.offsets == nullptr ? p.items : p.offsets[expert + 1];
  if (begin >= end) return;
  const std::int64_t row = std::int64_t{expert} * p.outs + out;
  const std::uint8_t* const w = p.w_codes + row * p.w_code_stride;
  const std::uint8_t* const w_scales = p.w_scales + row * p.w_scale_stride;
  const std::int32_t w_anchor = anchor_of(w, w_scales, p.blocks);
  for (int item = begin; item < end; ++item) {
    const std::int64_t from = p.from == nullptr ? item : p.from[item];
    const std::int64_t to = p.to == nullptr ? item : p.to[item];
    const std::uint8_t* const a = p.a_codes + from * p.a_code_stride;
    const std::uint8_t* const a_scales = p.a_scales + from * p.a_scale_stride;
    const std::int32_t anchor = w_anchor + anchor_of(a, a_scales, p.blocks);
    std::int64_t sum = 0;
    for (int b = lane; b < p.blocks && anchor > kNoBlock / 2; b += 32) {
      const std::int32_t one = dot(codes_of(a, b), codes_of(w, b));
      // A block above the anchor is all zero on one side.
      if (one != 0) sum += shifted(one, a_scales[b] + w_scales[b] - 254 - anchor + 40);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (lane == 0) {
      p.out[to * p.out_stride + out] = sum == 0 ? 0.0f : ldexpf(__ll2float_rn(sum), anchor - 42);
    }
  }
}

}  // namespace

void mx_product_cuda(const MxProductArgs& args, std::int64_t items, Stream stream) {
  const cuda::OnDevice scope(args.out.device.index);
  const auto aligned = [](const TensorView<const std::uint8_t, 2>& codes) {
    return (reinterpret_cast<std::uintptr_t>(codes.data) % 4 |
            static_cast<std::uintptr_t>(codes.stride[0] % 4)) == 0;
  };
  if (!aligned(args.a.codes) || !aligned(args.w.codes)) {
    throw Error("mx_product: rows of codes must start at multiples of 4 bytes on a CUDA device");
  }
  Params p{};
  p.a_codes = args.a.codes.data;
  p.a_scales = args.a.scales.data;
  p.w_codes = args.w.codes.data;
  p.w_scales = args.w.scales.data;
  p.a_code_stride = args.a.codes.stride[0];
  p.a_scale_stride = args.a.scales.stride[0];
  p.w_code_stride = args.w.codes.stride[0];
  p.w_scale_stride = args.w.scales.stride[0];
  p.offsets = args.offsets.data;
  p.from = args.from.data;
  p.to = args.to.data;
  p.out = args.out.data;
  p.out_stride = args.out.stride[0];
  p.items = static_cast<std::int32_t>(items);
  p.outs = static_cast<std::int32_t>(args.out.shape[1]);
  p.blocks = static_cast<std::int32_t>(args.a.scales.shape[1]);
  const int experts = args.offsets.empty() ? 1 : args.experts;
  const dim3 grid(static_cast<unsigned>((p.outs + kWarps - 1) / kWarps),
                  static_cast<unsigned>(experts));
  mx_product_kernel<<<grid, 32 * kWarps, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("mx_product_kernel");
}

}  // namespace lockstep::kernels
