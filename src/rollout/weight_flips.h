/// How far new weights are from those that a rollout used, in the codes that it multiplies.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/metrics.h"

namespace lockstep::rollout {

/// Of one layer.
struct WeightFlips {
  std::int64_t codes = 0;
  std::int64_t flips = 0;     // codes that name another place of the grid; -0 is 0
  std::int64_t adjacent = 0;  // ... one step away
  std::int64_t blocks = 0;
  std::int64_t scale_flips = 0;
  std::int64_t values = 0;  // of experts that are kept as the values of their codes
  std::int64_t value_flips = 0;

  /// Two E2M1 codes a byte, in whatever order, of the same layout before and now.
  void add_codes(std::span<const std::uint8_t> before, std::span<const std::uint8_t> now);
  void add_scales(std::span<const std::uint8_t> before, std::span<const std::uint8_t> now);
  /// BF16 numbers.
  void add_values(std::span<const std::uint16_t> before, std::span<const std::uint16_t> now);
};

/// fp4/weight/{flip_frac, adjacent_frac, scale_flip_frac, value_flip_frac}, and flip_frac or
/// value_flip_frac of each layer. Empty where nothing was compared.
Metrics metrics(std::span<const WeightFlips> layers);

}  // namespace lockstep::rollout
