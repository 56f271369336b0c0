/// Weights whose experts are already codes, scales refined by what their inputs were (H-Scale).
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "contract/contract.h"
#include "model/weights.h"

namespace lockstep::sync {

/// The sum of squares of each input column of an expert's matrix, over a calibration batch.
using InputSquares = std::function<std::span<const double>(const WeightId&)>;

/// `from`, but what the contract quantizes as codes of kernels::quantize_weight_h_scale: refit()
/// hands codes on as they are. `from` must outlive it. each() throws Error naming the weight.
std::unique_ptr<WeightSource> h_scaled(const WeightSource& from, const Contract& contract,
                                       InputSquares squares);

}  // namespace lockstep::sync
