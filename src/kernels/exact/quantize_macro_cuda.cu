/// quantize() of rows in macro blocks on a CUDA device: a block of threads takes a row, and runs
/// the definition of quantize_block.h on stretched numbers.
#include <algorithm>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "kernels/exact/quantize_rows.h"
#include "numerics/macro_block.h"

namespace lockstep::kernels {
namespace {

constexpr int kMacroThreads = 64;
constexpr int kMostBlock = 32;

struct MacroParams {
  Quantizer rule;  // macro_block is that of `macro` columns
  std::int32_t macro = 0;
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  PackedView<std::uint8_t> out;
  TensorView<std::uint8_t, 1> nonfinite;
  TensorView<std::int64_t, 1> counts;
};

/// Mantissas of a row; whether all of it is finite when it is stretched.
template <typename T>
__device__ bool write_mantissas(const MacroParams& p, const T* x, std::uint8_t* mantissas) {
  const auto amax_at = [&](std::int64_t first) {
    return amax_of(x + first, min(std::int64_t{p.macro}, p.cols - first));
  };
  const std::int64_t step = std::int64_t{p.macro} * kMacroThreads;
  bool bad = false;
  for (std::int64_t at = std::int64_t{threadIdx.x} * p.macro; at < p.cols; at += step) {
    bad |= !is_finite(amax_at(at));
  }
  const bool finite = __syncthreads_or(bad) == 0;
  for (std::int64_t at = std::int64_t{threadIdx.x} * p.macro; at < p.cols; at += step) {
    const float amax = amax_at(at);
    const std::uint8_t m = finite ? macro_mantissa(amax) : std::uint8_t{0};
    mantissas[at / p.macro] = m;
    bad |= !is_finite(stretch(amax, m));
  }
  return __syncthreads_or(bad) == 0;
}

template <typename T>
__global__ void __launch_bounds__(kMacroThreads)
    quantize_macro_general_kernel(const __grid_constant__ MacroParams p) {
  __shared__ float stretched[kMacroThreads][kMostBlock + 1];
  float* const own = stretched[threadIdx.x];
  QuantizeCounts counts{};
  const std::int32_t block = p.rule.block;
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* const x = static_cast<const T*>(p.x) + row * p.x_stride;
    std::uint8_t* const mantissas = p.out.mantissas.data + row * p.out.mantissas.stride[0];
    std::uint8_t* const codes = p.out.codes.data + row * p.out.codes.stride[0];
    std::uint8_t* const scales = p.out.scales.data + row * p.out.scales.stride[0];
    const bool finite = write_mantissas(p, x, mantissas);
    for (std::int64_t j = threadIdx.x; j < p.cols / block; j += kMacroThreads) {
      const std::uint8_t m = mantissas[j * block / p.macro];
      for (std::int32_t i = 0; i < block; ++i) {
        own[i] = finite ? stretch(value_of(x[j * block + i]), m) : 0.0f;
      }
      QuantizeCounts of_block{};
      const std::uint8_t byte =
          encode_block(own, p.rule, {}, codes + j * block / 2, finite ? counts : of_block);
      scales[j] = finite ? byte : std::uint8_t{0};
    }
    if (threadIdx.x != 0) continue;
    counts[kNonfiniteRows] += !finite;
    if (!p.nonfinite.empty()) p.nonfinite.data[row * p.nonfinite.stride[0]] = finite ? 0 : 1;
    if (row < p.out.global.shape[0]) p.out.global.data[row * p.out.global.stride[0]] = 1.0f;
  }
  if (p.counts.empty()) return;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    auto* const to = reinterpret_cast<unsigned long long*>(
        p.counts.data + static_cast<std::int64_t>(i) * p.counts.stride[0]);
    atomicAdd(to, static_cast<unsigned long long>(counts[i]));
  }
}

}  // namespace

void quantize_macro_cuda(const QuantizeArgs& args, Stream stream) {
  const bool f32 = !args.x_f32.empty();
  const Device device = f32 ? args.x_f32.device : args.x.device;
  if (args.rule.block > kMostBlock) {
    throw Error(
        cat({"quantize: rule.block is ", args.rule.block, " under macro blocks, must be at ",
             "most ", kMostBlock, " on a CUDA device"}));
  }
  MacroParams p{.rule = args.rule, .macro = args.rule.macro_block};
  p.rule.macro_block = 0;
  p.x = f32 ? static_cast<const void*>(args.x_f32.data) : args.x.data;
  p.x_stride = f32 ? args.x_f32.stride[0] : args.x.stride[0];
  p.rows = f32 ? args.x_f32.shape[0] : args.x.shape[0];
  p.cols = f32 ? args.x_f32.shape[1] : args.x.shape[1];
  p.out = args.out;
  p.nonfinite = args.nonfinite;
  p.counts = args.counts;
  if (p.rows == 0) return;
  const cuda::OnDevice scope(device.index);
  const auto most = std::int64_t{cuda::multiprocessors(device.index)} * 16;
  const auto grid = static_cast<unsigned>(std::min(p.rows, most));
  const auto kernel = f32 ? quantize_macro_general_kernel<float> : quantize_macro_general_kernel<Bf16>;
  kernel<<<grid, kMacroThreads, 0, cuda::stream_of(stream)>>>(p);
  cuda::require_launch("quantize_macro_general_kernel");
}

}  // namespace lockstep::kernels
