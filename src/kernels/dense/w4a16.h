/// The experts' product of BF16 activations with NVFP4 weights, straight from their codes.
#pragma once

#include <cstdint>

#include "device/view.h"
#include "kernels/exact/w4a4.h"

namespace lockstep::kernels {

struct W4a16Args {
  TensorView<const Bf16, 2> x{};  // [rows, cols]
  W4a4Weights w{};                // of one power of two an expert
  // As in W4a4Args.
  TensorView<const std::int32_t, 1> offsets{};
  TensorView<const std::int32_t, 1> from{};
  TensorView<const std::int32_t, 1> to{};
  TensorView<float, 2> out{};
};

/// Up to so many items an expert a CUDA device is as fast with rows that lie anywhere as with such
/// as lie in the items' order; beyond, the latter, without `from`, are faster by a fifth.
inline constexpr std::int64_t kW4a16FewItems = 32;

/// out[to[i]] = x[from[i]] . w[expert of i], in FP32. A weight, code times scale, is exact in BF16.
/// Each sum depends on its row and its matrix alone, in one fixed order over K; the error is at
/// most (cols / 8 + 4) 2^-23 sum |x w| on a CUDA device, cols 2^-24 sum |x w| on a CPU. Throws
/// Error naming the argument.
void w4a16(const W4a16Args& args, Stream stream = {});

/// Whether it is as good for many rows as for few there, so that it may be the one product of all.
bool w4a16_takes_any(Device device);

}  // namespace lockstep::kernels
