#pragma once

#include <cstdint>
#include <span>

#include "device/view.h"

namespace lockstep::kernels {

struct LogSoftmaxArgs {
  TensorView<const float, 2> logits;     // [rows, V]
  std::span<const float> temperature;    // [rows] above 0
  std::span<float> logsumexp;            // [rows] of logits / temperature
};

/// log(sum(exp(logits / temperature))) of each row in FP32: the greatest is taken out, terms are
/// summed in 16 lanes (element i in lane i mod 16), lanes added by halves. A token's log-prob is
/// logits[token] / temperature - logsumexp. Rows do not depend on each other.
/// Throws Error naming what is wrong.
void log_softmax(const LogSoftmaxArgs& args, Stream stream);

}  // namespace lockstep::kernels
