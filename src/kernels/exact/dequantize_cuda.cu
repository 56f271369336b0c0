/// dequantize() on a CUDA device: eight elements a thread where they lie well, else one.
#include <algorithm>

#include "device/cuda/check.h"
#include "kernels/exact/code_value_cuda.h"
#include "kernels/exact/dequantize_rows.h"
#include "kernels/exact/sixteen_cuda.h"
#include "numerics/bf16_pair_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr unsigned int kThreads = 256;

struct Params {
  CodeSource from;
  Bf16* bf16 = nullptr;
  std::int64_t bf16_stride = 0;
  float* f32 = nullptr;
  std::int64_t f32_stride = 0;
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;
  std::uint32_t first = 0;  // of blocks along a row: those before it are other launches'
};

/// The four pairs of eight codes as FP16, the even element low.
///
/// FP16 has its smallest normal number, 2^-14, where E2M1 has 1: as FP16's upper bits the codes are
/// their values times 2^-14, and the product with 2^14 is exact.
__device__ inline std::uint32_t half_pair(std::uint32_t even, std::uint32_t odd,
                                          std::uint32_t select) {
  const std::uint32_t codes = __byte_perm(even, odd, select);  // at bits 8 to 11 of each half
  const std::uint32_t bits = (codes << 1 & 0x0E000E00u) | (codes << 4 & 0x80008000u);
  std::uint32_t values;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(values) : "r"(bits), "r"(0x74007400u));
  return values;
}

__device__ inline float2 unpack_half(std::uint32_t pair) {
  float2 values;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

/// Threads: x along the row, y over rows. E2M1 alone.
template <bool kBf16, bool kF32>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ Params p) {
  const std::uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const std::uint32_t eight = (p.first + blockIdx.y) * blockDim.x + threadIdx.x;
  if (row >= p.rows || eight * 8 >= p.cols) return;
  const std::uint32_t word =
      *reinterpret_cast<const std::uint32_t*>(p.from.codes + row * p.from.codes_stride + eight * 4);
  const std::uint32_t block = p.from.rule.block == 16
                                  ? eight / 2
                                  : eight * 8 / static_cast<std::uint32_t>(p.from.rule.block);
  const float factor = factor_of(p.from, row, block);
  const std::uint32_t even = word & 0x0F0F0F0Fu;
  const std::uint32_t odd = word >> 4 & 0x0F0F0F0Fu;
  const std::uint32_t selects[4] = {0x4000, 0x5010, 0x6020, 0x7030};  // bytes 1 and 3 count
  float2 values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = unpack_half(half_pair(even, odd, selects[i]));
    values[i].x *= factor;
    values[i].y *= factor;
  }
  if constexpr (kBf16) {
    const auto pair = [](float2 both) { return to_bf16_pair(both.x, both.y); };
    *reinterpret_cast<uint4*>(p.bf16 + row * p.bf16_stride + eight * 8) = {
        pair(values[0]), pair(values[1]), pair(values[2]), pair(values[3])};
  }
  if constexpr (kF32) {
    auto* to = reinterpret_cast<float4*>(p.f32 + row * p.f32_stride + eight * 8);
    to[0] = {values[0].x, values[0].y, values[1].x, values[1].y};
    to[1] = {values[2].x, values[2].y, values[3].x, values[3].y};
  }
}

/// An element a thread, of any format.
__global__ void __launch_bounds__(kThreads)
    dequantize_general_kernel(const __grid_constant__ Params p) {
  const std::uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const std::uint32_t col = (p.first + blockIdx.y) * blockDim.x + threadIdx.x;
  if (row >= p.rows || col >= p.cols) return;
  const float value = value_at(p.from, row, col);
  if (p.bf16 != nullptr) p.bf16[row * p.bf16_stride + col] = to_bf16(value);
  if (p.f32 != nullptr) p.f32[row * p.f32_stride + col] = value;
}

template <typename T>
bool aligned(const T* data, std::int64_t stride, std::int64_t to) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(to) == 0 &&
         stride * static_cast<std::int64_t>(sizeof(T)) % to == 0;
}

using Kernel = void (*)(Params);

/// Blocks of threads as wide as a row of `wide` pieces, in as many launches as a grid's second
/// dimension makes necessary.
void launch(const char* name, Kernel kernel, Params p, std::uint32_t wide, cudaStream_t order) {
  constexpr unsigned int kMostAcross = 65535;
  unsigned int x = 1;
  while (x < wide && x < kThreads) x *= 2;
  const unsigned int y = kThreads / x;
  const unsigned int across = (wide + x - 1) / x;
  for (p.first = 0; p.first < across; p.first += kMostAcross) {
    const dim3 grid((p.rows + y - 1) / y, std::min(kMostAcross, across - p.first));
    kernel<<<grid, dim3(x, y), 0, order>>>(p);
    cuda::require_launch(name);
  }
}

Params params_of(const DequantizeArgs& args) {
  Params p{.from = code_source(args.codes, args.rule, args.exponent)};
  p.bf16 = args.bf16.data;
  p.bf16_stride = args.bf16.stride[0];
  p.f32 = args.f32.data;
  p.f32_stride = args.f32.stride[0];
  p.rows = static_cast<std::uint32_t>(args.codes.codes.shape[0]);
  p.cols = static_cast<std::uint32_t>(args.rule.columns(args.codes.codes.shape[1]));
  return p;
}

}  // namespace

void dequantize_cuda(const DequantizeArgs& args, Stream stream) {
  const cuda::OnDevice scope(args.codes.codes.device.index);
  const Params p = params_of(args);
  if (p.rows == 0 || p.cols == 0 || (p.bf16 == nullptr && p.f32 == nullptr)) return;
  const cudaStream_t order = cuda::stream_of(stream);
  if (p.from.rule.is_wide() || p.from.rule.macro_block > 0 ||
      !aligned(p.from.codes, p.from.codes_stride, 4) || !aligned(p.bf16, p.bf16_stride, 16) ||
      !aligned(p.f32, p.f32_stride, 16)) {
    return launch("dequantize_general_kernel", dequantize_general_kernel, p, p.cols, order);
  }
  const Kernel kernel = p.f32 == nullptr    ? dequantize_kernel<true, false>
                        : p.bf16 == nullptr ? dequantize_kernel<false, true>
                                            : dequantize_kernel<true, true>;
  launch("dequantize_kernel", kernel, p, p.cols / 8, order);
}

}  // namespace lockstep::kernels
