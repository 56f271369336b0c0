#include <algorithm>
#include <limits>

#include "device/cuda/check.h"
#include "device/cuda/cuda.h"
#include "device/memory.h"
#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNowhere = std::numeric_limits<unsigned long long>::max();

/// Rounds to BF16; *bad becomes the first element that is not finite then.
__global__ void __launch_bounds__(kThreads)
    round_weight_kernel(const float* master, std::int64_t stride, std::int64_t rows,
                        std::int64_t cols, Bf16* rounded, unsigned long long* bad) {
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (std::int64_t col = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; col < cols;
         col += std::int64_t{gridDim.x} * kThreads) {
      const Bf16 x = to_bf16(master[row * stride + col]);
      rounded[row * cols + col] = x;
      if (!is_finite(x)) atomicMin(bad, static_cast<unsigned long long>(row * cols + col));
    }
  }
}

}  // namespace

void quantize_weight_cuda(TensorView<const float, 2> master, const Quantizer& rule,
                          const PackedView<std::uint8_t>& out, Stream stream) {
  const Device device = master.device;
  const cuda::OnDevice scope(device.index);
  const auto [rows, cols] = master.shape;
  const Buffer rounded(device, rows * cols * 2, stream);
  const Buffer bad(device, sizeof(kNowhere), stream);
  fill_bytes(bad.as<void>(), device, 0xFF, bad.bytes(), stream);
  if (rows > 0 && cols > 0) {
    const dim3 grid(static_cast<unsigned int>((cols + kThreads - 1) / kThreads),
                    static_cast<unsigned int>(std::min<std::int64_t>(rows, 32768)));
    round_weight_kernel<<<grid, kThreads, 0, cuda::stream_of(stream)>>>(
        master.data, master.stride[0], rows, cols, rounded.as<Bf16>(),
        bad.as<unsigned long long>());
    cuda::require_launch("round_weight_kernel");
  }
  unsigned long long at = kNowhere;
  copy_bytes(&at, {}, bad.as<void>(), device, sizeof(at), stream);
  synchronize(device, stream);
  if (at != kNowhere) throw_nonfinite_weight(static_cast<std::int64_t>(at), cols);
  quantize({.x = {rounded.as<Bf16>(), {rows, cols}, {cols, 1}, device}, .rule = rule, .out = out},
           stream);
}

}  // namespace lockstep::kernels
