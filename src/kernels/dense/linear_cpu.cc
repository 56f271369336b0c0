#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/dense/linear_rows.h"
#include "numerics/bf16.h"

namespace lockstep::kernels {
namespace {

/// The sums of one row over pairs first..end-1.
std::array<float, kPanel> sums(const Bf16* x, const Bf16* panel, std::int64_t first,
                               std::int64_t end) {
  std::array<float, kPanel> sum{};
  for (std::int64_t pair = first; pair < end; ++pair) {
    const float even = to_float(x[2 * pair]);
    const float odd = to_float(x[2 * pair + 1]);
    const Bf16* w = panel + pair * kPanel * 2;
    for (std::size_t o = 0; o < sum.size(); ++o) {
      sum[o] = std::fma(odd, to_float(w[2 * o + 1]), sum[o]);
      sum[o] = std::fma(even, to_float(w[2 * o]), sum[o]);
    }
  }
  return sum;
}

}  // namespace

void linear_panel_portable(const PanelArgs& args) {
  for (std::int64_t row = 0; row < args.rows; ++row) {
    const Bf16* x = args.x + row * args.x_stride;
    auto sum = sums(x, args.panel, args.split, args.pairs);
    if (args.split > 0) {
      const auto half = sums(x, args.panel, 0, args.split);
      for (std::size_t o = 0; o < sum.size(); ++o) {
        sum[o] = to_float(to_bf16(half[o])) + to_float(to_bf16(sum[o]));
      }
    }
    const std::int64_t at = offset_of(args, row);
    for (std::int64_t o = 0; o < args.columns; ++o) {
      const float value = sum[static_cast<std::size_t>(o)];
      if (args.y != nullptr) args.y[at + o] = value;
      if (args.y_bf16 != nullptr) args.y_bf16[at + o] = to_bf16(value);
    }
  }
}

}  // namespace lockstep::kernels
