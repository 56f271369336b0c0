#pragma once

#include "device/view.h"
#include "numerics/macro_block.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

struct MacroArgs {
  TensorView<const Bf16, 2> x{};            // [rows, cols]
  Quantizer rule{};                         // MXFP4
  PackedView<std::uint8_t> out{};           // of the stretched values; `global` may be empty
  TensorView<std::uint8_t, 2> mantissas{};  // [rows, ceil(cols / 128)]
  TensorView<float, 2> values{};            // optional [rows, cols]: what they are worth, in FP32
};

/// MXFP4 under macro blocks: each 128 elements of a row (the last may be fewer) are stretched by
/// their mantissa, which is exact, then quantized by `rule`. A row that holds NaN or Inf has codes,
/// scales and mantissas 0. Bit-exact. Throws Error naming the argument.
void quantize_macro(const MacroArgs& args);

}  // namespace lockstep::kernels
