/// MXFP4 in macro blocks: numbers are stretched, then quantized as ever.
#include "numerics/macro_block.h"

#include <algorithm>
#include <vector>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/quantize_rows.h"

namespace lockstep::kernels {
namespace {

void check(const QuantizeArgs& args, std::int64_t rows, std::int64_t cols) {
  const Quantizer& rule = args.rule;
  if (!rule.is_mx() || rule.element != Element::kE2m1 || rule.macro_block % rule.block != 0) {
    throw Error(cat({"quantize: rule.macro_block is ", rule.macro_block,
                     ", which MXFP4 alone has, in multiples of its block of ", rule.block}));
  }
  const auto& mantissas = args.out.mantissas;
  if (mantissas.shape[0] != rows || mantissas.shape[1] != rule.macro_cols(cols)) {
    throw Error(cat({"quantize: out.mantissas is [", mantissas.shape[0], ", ", mantissas.shape[1],
                     "], must be [", rows, ", ", rule.macro_cols(cols), "]"}));
  }
  if (args.layout.encoding != Encoding::kNone) {
    throw Error(
        "quantize: a record has no mantissas; rule.macro_block must be 0 where one is kept");
  }
}

template <typename T>
void stretch_row(const T* x, std::int64_t cols, std::int32_t macro_block, std::uint8_t* mantissas,
                 float* out) {
  const bool finite = is_finite(row_amax(x, cols));
  for (std::int64_t first = 0; first < cols; first += macro_block) {
    const std::int64_t count = std::min<std::int64_t>(macro_block, cols - first);
    const std::uint8_t m = finite ? macro_mantissa(row_amax(x + first, count)) : std::uint8_t{0};
    mantissas[first / macro_block] = m;
    for (std::int64_t c = first; c < first + count; ++c) {
      if constexpr (std::is_same_v<T, float>) {
        out[c] = stretch(x[c], m);
      } else {
        out[c] = stretch(to_float(x[c]), m);
      }
    }
  }
}

template <typename T>
void run(const QuantizeArgs& args, const TensorView<const T, 2>& x, Stream stream) {
  const auto [rows, cols] = x.shape;
  check(args, rows, cols);
  if constexpr (build::has_cuda) {
    if (x.device.kind == Device::Kind::kCuda) return quantize_macro_cuda(args, stream);
  }
  if (x.device.kind == Device::Kind::kCuda) {
    throw Error("quantize: x is on a CUDA device, this build has no CUDA backend");
  }
  std::vector<float> stretched(static_cast<std::size_t>(rows * cols));
  parallel_for(rows, (1 << 14) / std::max<std::int64_t>(cols, 1) + 1,
               [&](std::int64_t first, std::int64_t end) {
                 for (std::int64_t r = first; r < end; ++r) {
                   stretch_row(x.data + r * x.stride[0], cols, args.rule.macro_block,
                               args.out.mantissas.data + r * args.out.mantissas.stride[0],
                               stretched.data() + r * cols);
                 }
               });
  QuantizeArgs plain = args;
  plain.x = {};
  plain.amax = {};
  plain.x_f32 = {stretched.data(), {rows, cols}, {cols, 1}};
  plain.rule.macro_block = 0;
  quantize(plain);
}

}  // namespace

void quantize_macro(const QuantizeArgs& args, Stream stream) {
  if (args.x_f32.empty()) return run(args, args.x, stream);
  run(args, args.x_f32, stream);
}

}  // namespace lockstep::kernels
