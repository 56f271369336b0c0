#pragma once

#include <span>
#include <vector>

#include "instruments/diff.h"
#include "numerics/quantizer.h"

namespace lockstep::instruments {

struct PlaceArgs {
  Place place{};
  std::int64_t width = 0;
  Quantizer rule{};
  std::int8_t exponent = 0;   // n where the rule's global scale is static
  std::span<const Bf16> a{};  // [rows, width]
  std::span<const Bf16> b{};
};

/// Fills `drift` [rows] with each token's ||b - a|| / ||a||.
PlaceDiff compare_place(const PlaceArgs& args, std::vector<double>& drift);

}  // namespace lockstep::instruments
