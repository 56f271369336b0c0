#include "device/cuda/law.h"

#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::cuda {

double slope_of(const Law& law) {
  double x_mean = 0, y_mean = 0;
  const auto count = static_cast<double>(law.points.size());
  for (const auto& [x, y] : law.points) {
    if (!(x > 0) || !(y > 0) || std::isinf(x) || std::isinf(y)) {
      throw Error(cat({law.cost, ": a cost of ", y, " at ", x, " ", law.size,
                       " has no logarithm; measure again"}));
    }
    x_mean += std::log(x) / count;
    y_mean += std::log(y) / count;
  }
  double xx = 0, xy = 0;
  for (const auto& [x, y] : law.points) {
    const double dx = std::log(x) - x_mean;
    xx += dx * dx;
    xy += dx * (std::log(y) - y_mean);
  }
  if (xx == 0) throw Error(cat({law.cost, ": a slope needs two sizes of ", law.size}));
  return xy / xx;
}

bool holds(const Law& law) { return std::abs(slope_of(law) - law.slope) <= law.within; }

std::string to_string(const Law& law) {
  std::string points;
  for (const auto& [x, y] : law.points) {
    char text[64];
    std::snprintf(text, sizeof(text), "%s%.6g: %.4g", points.empty() ? "" : ", ", x, y);
    points += text;
  }
  char text[96];
  std::snprintf(text, sizeof(text), "slope %+.3f, must be %+.2f within %.2f: %s", slope_of(law),
                law.slope, law.within, holds(law) ? "holds" : "DOES NOT HOLD");
  return cat({law.cost, " by ", law.size, " (", points, "): ", std::string(text)});
}

}  // namespace lockstep::cuda
