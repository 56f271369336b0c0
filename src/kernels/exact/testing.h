/// For tests of kernels/exact/: the rule most of them use, and matrices in vectors.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::kernels::testing {

/// NVFP4 with a power of two a token, as the contract lockstep has it for activations.
inline constexpr Quantizer kToken = {.element = Element::kE2m1,
                                     .scale = ScaleFormat::kE4m3,
                                     .global = GlobalScale::kPerToken,
                                     .global_is_power_of_two = true};

/// All of a vector as [rows, size / rows].
template <typename T>
TensorView<T, 2> view(std::vector<std::remove_const_t<T>>& data, std::int64_t rows) {
  const std::int64_t cols = static_cast<std::int64_t>(data.size()) / rows;
  return {data.data(), {rows, cols}, {cols, 1}};
}

}  // namespace lockstep::kernels::testing
