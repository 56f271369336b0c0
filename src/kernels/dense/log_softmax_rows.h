#pragma once

#include <cmath>

#include "kernels/dense/lanes.h"
#include "kernels/dense/log_softmax.h"

namespace lockstep::kernels {

[[gnu::always_inline]] inline void log_softmax_rows(const LogSoftmaxArgs& args, std::int64_t first,
                                                    std::int64_t end) {
  const std::int64_t cols = args.logits.shape[1];
  const std::int64_t whole = cols / kLanes * kLanes;
  for (std::int64_t row = first; row < end; ++row) {
    const float* logits = args.logits.data + row * args.logits.stride[0];
    const float temperature = args.temperature[static_cast<std::size_t>(row)];
    float top = logits[0] / temperature;
    for (std::int64_t i = 1; i < cols; ++i) {
      const float x = logits[i] / temperature;
      top = x > top ? x : top;
    }
    float lane[kLanes] = {};
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      for (std::int64_t j = 0; j < kLanes; ++j) {
        lane[j] += exp_fp32(logits[i + j] / temperature - top);
      }
    }
    for (std::int64_t j = 0; whole + j < cols; ++j) {
      lane[j] += exp_fp32(logits[whole + j] / temperature - top);
    }
    const double sum = sum_of_lanes(lane);
    args.logsumexp[static_cast<std::size_t>(row)] = static_cast<float>(top + std::log(sum));
  }
}

void log_softmax_portable(const LogSoftmaxArgs& args, std::int64_t first, std::int64_t end);
void log_softmax_avx2(const LogSoftmaxArgs& args, std::int64_t first, std::int64_t end);
void log_softmax_avx512(const LogSoftmaxArgs& args, std::int64_t first, std::int64_t end);

}  // namespace lockstep::kernels
