/// Between sample.cc and its backend.
#pragma once

#include "kernels/dense/sample.h"

namespace lockstep::kernels {

/// Tokens whose exps are summed in FP32: rollout::kSoftmaxBlock.
inline constexpr std::int64_t kSampleBlock = 128;

void sample_cuda(const SampleArgs& args, Stream stream);

}  // namespace lockstep::kernels
