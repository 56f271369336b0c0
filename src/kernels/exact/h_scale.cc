#include "kernels/exact/h_scale.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/quantize.h"
#include "numerics/e2m1.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kBlock = 16;
constexpr std::int64_t kGrainBlocks = 256;

struct Block {
  std::array<float, kBlock> w;  // BF16 numbers
  const double* h;
  std::int32_t n;

  double loss(std::uint8_t byte) const {
    const float scale = scale_value(static_cast<E4m3>(byte), n);
    double sum = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double value = static_cast<double>(to_float(to_e2m1_scaled(w[i], scale)) * scale);
      const double lost = static_cast<double>(w[i]) - value;
      sum += h[i] * lost * lost;
    }
    return sum;
  }

  std::uint8_t best(std::uint8_t plain) const {
    std::uint8_t best = plain;
    double least = loss(plain);
    const int last = std::min(plain + kHScaleUp, static_cast<int>(kE4m3Max));
    for (int code = std::max(plain - kHScaleDown, 1); code <= last; ++code) {
      const double here = loss(static_cast<std::uint8_t>(code));
      if (here < least) {
        least = here;
        best = static_cast<std::uint8_t>(code);
      }
    }
    return best;
  }
};

void check(TensorView<const float, 2> master, std::span<const double> h, const Quantizer& rule) {
  if (rule.element != Element::kE2m1 || rule.is_mx() || rule.block != kBlock ||
      !rule.global_is_power_of_two || rule.code_rule != CodeRule::kExact) {
    throw Error(
        "h_scale: the rule must be NVFP4 under a power-of-two global scale, as contract lockstep "
        "has it");
  }
  if (static_cast<std::int64_t>(h.size()) != master.shape[1]) {
    throw Error(cat({"h_scale: h has ", h.size(), " entries for ", master.shape[1], " columns"}));
  }
  for (std::size_t c = 0; c < h.size(); ++c) {
    if (h[c] >= 0.0 && h[c] < 1e300) continue;
    throw Error(cat({"h_scale: h[", c, "] is ", h[c], ", expected a sum of squares"}));
  }
}

}  // namespace

void quantize_weight_h_scale(TensorView<const float, 2> master, std::span<const double> h,
                             const Quantizer& rule, const PackedView<std::uint8_t>& out) {
  check(master, h, rule);
  quantize_weight(master, rule, out);
  const std::int64_t blocks = master.shape[1] / kBlock;
  parallel_for(master.shape[0] * blocks, kGrainBlocks, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
      const std::int64_t row = i / blocks, j = i % blocks;
      std::uint8_t& scale = out.scales.data[row * out.scales.stride[0] + j];
      const double* weights = h.data() + j * kBlock;
      if (scale == 0 || std::all_of(weights, weights + kBlock, [](double x) { return x == 0; })) {
        continue;
      }
      Block block{
          .w = {}, .h = weights, .n = exponent_of(out.global.data[row * out.global.stride[0]])};
      const float* from = master.data + row * master.stride[0] + j * kBlock;
      for (std::size_t k = 0; k < block.w.size(); ++k) block.w[k] = to_float(to_bf16(from[k]));
      const std::uint8_t best = block.best(scale);
      if (best == scale) continue;
      scale = best;
      const float value = scale_value(static_cast<E4m3>(best), block.n);
      std::uint8_t* codes = out.codes.data + row * out.codes.stride[0] + j * kBlock / 2;
      for (std::size_t k = 0; k < block.w.size(); k += 2) {
        codes[k / 2] =
            static_cast<std::uint8_t>(bits_of(to_e2m1_scaled(block.w[k], value)) |
                                      bits_of(to_e2m1_scaled(block.w[k + 1], value)) << 4);
      }
    }
  });
}

}  // namespace lockstep::kernels
