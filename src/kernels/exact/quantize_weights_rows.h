/// What stands behind quantize_weights.h. Inside kernels/exact/ only.
#pragma once

#include "kernels/exact/quantize_weights.h"

namespace lockstep::kernels {

inline constexpr int kSumBlocks = 264;  // of a weight
inline constexpr int kMostParts = 64 * kMostWeights * kSumBlocks;

/// `parts` [weights, kSumBlocks, 2].
void quantize_weights_cuda(std::span<const WeightOnItsWay> weights, const Quantizer& rule,
                           double* parts, Stream stream);
/// sums[0..1] += parts.
void fold_sums_cuda(double* sums, const double* parts, int count, Device device, Stream stream);
void w4a4_replace_cuda(std::span<const Replaced> experts, Stream stream);

}  // namespace lockstep::kernels
