#include "kernels/exact/mx_error.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "kernels/exact/quantize_rows.h"
#include "numerics/e2m1.h"
#include "numerics/macro_block.h"

namespace lockstep::kernels {
namespace {

/// The magnitude nearest to a / (amax / 6), times that scale. Both sides of every comparison are
/// exact in double: no quotient is formed.
double ideal(double a, double amax) {
  constexpr double kMidpoints[7] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};
  std::uint32_t m = 0;
  for (std::uint32_t i = 0; i < 7; ++i) {
    const double edge = kMidpoints[i] * amax;
    m += i % 2 == 1 ? 6 * a >= edge : 6 * a > edge;  // a tie goes to the even code
  }
  return static_cast<double>(e2m1_magnitude(m)) * amax / 6;
}

/// Sums are of x itself: what is rounded has been stretched by 1 + m / 256.
void add_block(const Bf16* x, std::uint8_t m, const Quantizer& rule, MxError& sum) {
  const float amax = stretch(row_amax(x, rule.block), m);
  const std::uint8_t byte = scale_byte(rule, amax, {});
  const float scale = to_float(static_cast<E8m0>(byte));
  const double factor = 256.0 / (256 + m);
  for (std::int32_t i = 0; i < rule.block; ++i) {
    const float a = stretch(magnitude(to_float(x[i])), m);
    const auto exact = static_cast<double>(a) * factor;
    const auto real =
        static_cast<double>(e2m1_magnitude(e2m1_quotient(a, scale, rule.tie)) * scale) * factor;
    const double wish = ideal(static_cast<double>(a), static_cast<double>(amax)) * factor;
    const bool dead = 24 * a < amax;
    const double bias = real - wish, rest = wish - exact;
    sum.signal += exact * exact;
    sum.total += (real - exact) * (real - exact);
    sum.scale += bias * bias;
    (dead ? sum.dead_zone : sum.grid) += rest * rest;
    (dead ? sum.scale_dead_zone : sum.scale_grid) += bias * rest;
    sum.elements += 1;
    sum.dead += dead ? 1 : 0;
  }
}

}  // namespace

void MxError::add(const MxError& other) {
  signal += other.signal;
  total += other.total;
  scale += other.scale;
  dead_zone += other.dead_zone;
  grid += other.grid;
  scale_grid += other.scale_grid;
  scale_dead_zone += other.scale_dead_zone;
  elements += other.elements;
  dead += other.dead;
}

double MxError::cosine() const {
  const double norms = std::sqrt(scale * grid);
  return norms > 0 ? scale_grid / norms : 0;
}

MxError mx_error(TensorView<const Bf16, 2> x, const Quantizer& rule) {
  if (!rule.is_mx() || rule.element != Element::kE2m1) {
    throw Error("mx_error: the rule is not MXFP4, whose error alone has these parts");
  }
  if (x.device.kind != Device::Kind::kCpu) throw Error("mx_error: x must lie on the CPU");
  if ((x.shape[1] > 1 && x.stride[1] != 1) || (x.empty() && x.shape[0] > 0 && x.shape[1] > 0)) {
    throw Error(cat({"mx_error: x is ", x.empty() ? "null" : "there", " with stride ", x.stride[1],
                     " along a row; expected contiguous rows"}));
  }
  if (x.shape[1] % rule.block != 0) {
    throw Error(
        cat({"mx_error: x has ", x.shape[1], " columns, must be a multiple of ", rule.block}));
  }
  MxError sum;
  for (std::int64_t r = 0; r < x.shape[0]; ++r) {
    const Bf16* row = x.data + r * x.stride[0];
    if (!is_finite(row_amax(row, x.shape[1]))) continue;
    std::uint8_t m = 0;
    for (std::int64_t c = 0; c < x.shape[1]; c += rule.block) {
      if (rule.macro_block > 0 && c % rule.macro_block == 0) {
        m = macro_mantissa(
            row_amax(row + c, std::min<std::int64_t>(rule.macro_block, x.shape[1] - c)));
      }
      add_block(row + c, m, rule, sum);
    }
  }
  return sum;
}

Metrics metrics(const MxError& error, const std::string& prefix) {
  const auto share = [&](double part) { return error.total > 0 ? part / error.total : 0; };
  return {{prefix + "/rel_err", error.signal > 0 ? std::sqrt(error.total / error.signal) : 0},
          {prefix + "/scale", share(error.scale)},
          {prefix + "/dead_zone", share(error.dead_zone)},
          {prefix + "/grid", share(error.grid)},
          {prefix + "/scale_grid_cos", error.cosine()},
          {prefix + "/dead_frac", error.elements > 0 ? error.dead / error.elements : 0}};
}

}  // namespace lockstep::kernels
