#pragma once

#include <cstdint>
#include <vector>

#include "model/weights.h"

namespace lockstep {

/// A weight's numbers in FP32, row by row without gaps, on the host. Throws Error naming one that
/// comes as codes.
std::vector<float> f32_of(const Weight& weight);

/// How many rows a weight has, codes or not.
std::int64_t rows_of(const Weight& weight);

}  // namespace lockstep
