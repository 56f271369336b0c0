/// What stands behind weight_numbers.h on a CUDA device. Inside kernels/exact/ only.
#pragma once

#include "kernels/exact/weight_numbers.h"

namespace lockstep::kernels {

inline constexpr int kErrorBlocks = 512;

void round_weight_cuda(TensorView<const float, 2> master, TensorView<Bf16, 2> rounded,
                       std::uint64_t* bad, Stream stream);
void copy_weight_cuda(TensorView<const Bf16, 2> from, Bf16* to, std::int32_t* bad, Stream stream);
/// `sums` [2 + 2 * kErrorBlocks].
void weight_error_cuda(TensorView<const float, 2> master, TensorView<const float, 2> back,
                       double* sums, Stream stream);

}  // namespace lockstep::kernels
