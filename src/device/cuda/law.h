/// How a cost grows: a slope between the logarithms of a size and of what was measured there.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::cuda {

/// One cost at sizes of which each is a multiple of another: y ~ x^slope.
struct Law {
  std::string cost;                                 // "quantize and capture, time"
  std::string size;                                 // "tokens"
  double slope = 1;                                 // that must hold
  double within = 0;                                // of it
  std::vector<std::pair<double, double>> points{};  // (x, y), both above 0

  void add(double x, double y) { points.emplace_back(x, y); }
};

/// The straight line's through the logarithms, by least squares. Throws Error for fewer than two
/// sizes, and for numbers that have no logarithm.
double slope_of(const Law& law);

bool holds(const Law& law);

/// Size and cost of each point, the slope, and whether it holds: a row of a table.
std::string to_string(const Law& law);

}  // namespace lockstep::cuda
