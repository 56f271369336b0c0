#pragma once

#include "device/view.h"

namespace lockstep::kernels {

struct RouterArgs {
  TensorView<const float, 2> logits;    // [rows, E]
  bool normalize = true;                // the chosen gates are divided by their sum
  TensorView<std::int32_t, 2> experts;  // [rows, K] in falling order of probability
  TensorView<float, 2> gates;           // [rows, K]
};

/// Softmax over all experts in FP32 (summed in order of the expert), the K greatest of it, ties to
/// the lower index. On every device the same bits. Throws Error naming what is wrong. A row that
/// holds a NaN is chosen by rule too, and its gates are NaN: what reads them says so.
void router(const RouterArgs& args, Stream stream);

}  // namespace lockstep::kernels
