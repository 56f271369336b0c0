#pragma once

#include <span>

#include "device/view.h"

namespace lockstep::kernels {

struct RmsNormArgs {
  TensorView<const Bf16, 2> x;   // [rows, cols]
  std::span<const Bf16> weight;  // [cols]
  float eps = 1e-6f;
  TensorView<Bf16, 2> y;  // [rows, cols]; may be x
};

/// y = bf16(bf16(x / sqrt(mean(x^2) + eps)) * weight), the mean in FP32: squares summed in 16 lanes
/// (element i in lane i mod 16), lanes added by halves. Rows do not depend on each other.
/// On every device the same bits; `weight` lies where x does.
/// Throws Error naming the argument, its value and what was expected.
void rms_norm(const RmsNormArgs& args, Stream stream);

}  // namespace lockstep::kernels
