#include "kernels/exact/macro_block.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {
namespace {

std::int64_t macro_blocks(std::int64_t cols) { return (cols + kMacroBlock - 1) / kMacroBlock; }

void check(const MacroArgs& args) {
  const auto [rows, cols] = args.x.shape;
  if (!args.rule.is_mx() || args.rule.element != Element::kE2m1) {
    throw Error("quantize_macro: the rule is not MXFP4, whose scales alone are powers of two");
  }
  if (args.mantissas.shape[0] != rows || args.mantissas.shape[1] != macro_blocks(cols)) {
    throw Error(
        cat({"quantize_macro: mantissas are [", args.mantissas.shape[0], ", ",
             args.mantissas.shape[1], "], must be [", rows, ", ", macro_blocks(cols), "]"}));
  }
  if (!args.values.empty() && args.values.shape != args.x.shape) {
    throw Error("quantize_macro: values must have the shape of x");
  }
}

}  // namespace

void quantize_macro(const MacroArgs& args) {
  check(args);
  const auto [rows, cols] = args.x.shape;
  std::vector<float> stretched(static_cast<std::size_t>(rows * cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    const Bf16* x = args.x.data + r * args.x.stride[0];
    std::uint8_t* mantissas = args.mantissas.data + r * args.mantissas.stride[0];
    const bool finite = is_finite(row_amax(x, cols));
    for (std::int64_t first = 0; first < cols; first += kMacroBlock) {
      const std::int64_t count = std::min<std::int64_t>(kMacroBlock, cols - first);
      const std::uint8_t m = finite ? macro_mantissa(row_amax(x + first, count)) : std::uint8_t{0};
      mantissas[first / kMacroBlock] = m;
      for (std::int64_t c = first; c < first + count; ++c) {
        stretched[static_cast<std::size_t>(r * cols + c)] = stretch(to_float(x[c]), m);
      }
    }
  }
  const TensorView<float, 2> view = {stretched.data(), {rows, cols}, {cols, 1}};
  quantize({.x_f32 = view, .rule = args.rule, .out = args.out});
  if (args.values.empty()) return;
  dequantize({.codes = args.out, .rule = args.rule, .f32 = args.values});
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      float& value = args.values.data[r * args.values.stride[0] + c];
      value = unstretch(value, args.mantissas.data[r * args.mantissas.stride[0] + c / kMacroBlock]);
    }
  }
}

}  // namespace lockstep::kernels
