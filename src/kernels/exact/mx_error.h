#pragma once

#include <string>

#include "base/metrics.h"
#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels {

/// What MXFP4 loses, in three parts that add up element by element. Q* rounds under the scale that
/// a block would like, amax / 6; Q under the power of two that it gets.
///   Q(x) - x = [Q(x) - Q*(x)]           the scale's bias
///            + [Q*(x) - x] where |x| < amax / 24: the dead zone, which becomes 0
///            + [Q*(x) - x] elsewhere:   the grid
/// The parts are sums of squares, and sums of products where they are not orthogonal. Dead zone and
/// grid never meet in one element; nor do dead zone and scale where the scale is not below amax
/// / 6.
struct MxError {
  double signal = 0;  // sum of x^2
  double total = 0;
  double scale = 0;
  double dead_zone = 0;
  double grid = 0;
  double scale_grid = 0;  // sums of products
  double scale_dead_zone = 0;
  double elements = 0;
  double dead = 0;  // elements in the dead zone

  void add(const MxError& other);
  /// Of the scale's bias and the grid's error.
  double cosine() const;
};

/// Of the rows that are finite. Under macro blocks Q and Q* both round what the mantissa stretched,
/// so that what is left of the scale's bias shows. Throws Error where the rule is not MXFP4 or cols
/// no multiple of its block.
MxError mx_error(TensorView<const Bf16, 2> x, const Quantizer& rule);

/// `prefix`/{rel_err, scale, dead_zone, grid, scale_grid_cos, dead_frac}: the parts as shares of
/// the squared error; they and twice the two products add up to 1.
Metrics metrics(const MxError& error, const std::string& prefix);

}  // namespace lockstep::kernels
