#include "rollout/top_error.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"

namespace lockstep::rollout {

void TopError::add(TensorView<const Bf16, 2> x, const Quantizer& rule,
                   const PackedView<const std::uint8_t>& codes) {
  if (rule.element != Element::kE2m1 || !rule.is_guidable()) return;
  const std::int64_t blocks = codes.scales.shape[1];
  for (std::int64_t row = 0; row < x.shape[0]; ++row) {
    const std::uint8_t* scales = codes.scales.data + row * codes.scales.stride[0];
    // Bytes of positive E4M3 and of E8M0 are in the order of their values.
    const std::int64_t top = std::max_element(scales, scales + blocks) - scales;
    const float scale = rule.is_mx() ? to_float(static_cast<E8m0>(scales[top]))
                                     : to_float(static_cast<E4m3>(scales[top])) *
                                           codes.global.data[row * codes.global.stride[0]];
    const Bf16* values = x.data + row * x.stride[0] + top * rule.block;
    const std::uint8_t* packed =
        codes.codes.data + row * codes.codes.stride[0] + top * rule.block / 2;
    for (std::int64_t i = 0; i < rule.block; ++i) {
      const auto code = static_cast<E2m1>(packed[i / 2] >> i % 2 * 4 & 15);
      const double value = static_cast<double>(to_float(values[i]));
      const double error = static_cast<double>(to_float(code) * scale) - value;
      errors_ += error * error;
      values_ += value * value;
    }
  }
}

double TopError::take() {
  const double errors = std::exchange(errors_, 0), values = std::exchange(values_, 0);
  return values > 0 ? std::sqrt(errors / values) : -1;
}

}  // namespace lockstep::rollout
