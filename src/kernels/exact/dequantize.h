#pragma once

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

struct DequantizeArgs {
  PackedView<const std::uint8_t> codes;
  Quantizer rule;
  std::int8_t exponent = 0;  // n where codes.global is empty
  // One of the two, or both:
  TensorView<Bf16, 2> bf16{};  // [rows, cols]
  TensorView<float, 2> f32{};  // [rows, cols]
};

/// What the codes are worth, global scale included: V[code] * s8 * 2^n or V[code] * 2^e, which BF16
/// holds exactly; under an FP32 global scale the dialect's own order of operations in FP32, rounded
/// to BF16 last; under macro blocks V[code] * 2^e / (1 + m / 256), rounded to FP32, then to BF16,
/// on a CPU. codes.global is [rows], [1], of stride 0, or empty. Throws Error naming argument and
/// value where shapes disagree or E2M1 codes have no scales, and row and block of a scale byte that
/// no quantizer wrote: above 0x7E, under MXFP4 0xFC, under MXFP8 0xF6; on a CUDA device, where
/// nobody waits, the values of such a block are NaN, and so is one of a code that is no number.
void dequantize(const DequantizeArgs& args, Stream stream = {});

}  // namespace lockstep::kernels
