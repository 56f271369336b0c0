/// Is a weight that was repacked for a kernel still the one that arrived? Checksums say that it
/// arrived whole; a product says that it lies where the kernel reads it.
#pragma once

#include <functional>

#include "device/view.h"
#include "numerics/quantizer.h"

namespace lockstep::rollout {

/// y [1, out] = x [1, in] times the repacked weight.
using ProbedProduct = std::function<void(TensorView<const Bf16, 2> x, TensorView<float, 2> y)>;

/// ||y - y'|| / ||y'|| over some of the outputs, y' from what the codes that arrived are worth. x
/// holds numbers that every quantizer of four or more bits keeps. 0 where y' is 0 throughout.
double probe_error(const PackedView<const std::uint8_t>& arrived, const Quantizer& rule,
                   const ProbedProduct& product);

}  // namespace lockstep::rollout
