/// count_flips() on a CUDA device, checked. Inside kernels/exact/ only.
#pragma once

#include "kernels/exact/code_flips.h"

namespace lockstep::kernels {

void count_flips_cuda(const PackedView<const std::uint8_t>& now, const W4a4Weights& before,
                      std::int32_t expert, std::int64_t* counts, Stream stream);
void count_flips_cuda(const PackedView<const std::uint8_t>& now,
                      const PackedView<const std::uint8_t>& before, std::int64_t* counts,
                      Stream stream);
void count_flips_cuda(TensorView<const Bf16, 2> now, TensorView<const Bf16, 2> before,
                      std::int64_t* counts, Stream stream);

}  // namespace lockstep::kernels
