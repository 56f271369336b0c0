#pragma once

#include <cmath>

#include "kernels/dense/lanes.h"
#include "kernels/dense/rms_norm.h"

namespace lockstep::kernels {

/// One row of `cols` numbers, also a head's of rope.h.
[[gnu::always_inline]] inline void rms_norm_row(const Bf16* x, const Bf16* weight, float eps,
                                                std::int64_t cols, Bf16* y) {
  const float mean = sum_of_squares(x, cols) / static_cast<float>(cols);
  const float inverse = 1.0f / std::sqrt(mean + eps);
#pragma GCC ivdep  // y is x, or apart
  for (std::int64_t i = 0; i < cols; ++i) {
    const Bf16 normal = to_bf16(to_float(x[i]) * inverse);
    y[i] = to_bf16(to_float(normal) * to_float(weight[i]));
  }
}

[[gnu::always_inline]] inline void rms_norm_rows(const RmsNormArgs& args, std::int64_t first,
                                                 std::int64_t end) {
  for (std::int64_t row = first; row < end; ++row) {
    rms_norm_row(args.x.data + row * args.x.stride[0], args.weight.data(), args.eps,
                 args.x.shape[1], args.y.data + row * args.y.stride[0]);
  }
}

void rms_norm_portable(const RmsNormArgs& args, std::int64_t first, std::int64_t end);
void rms_norm_avx2(const RmsNormArgs& args, std::int64_t first, std::int64_t end);
void rms_norm_avx512(const RmsNormArgs& args, std::int64_t first, std::int64_t end);
void rms_norm_cuda(const RmsNormArgs& args, Stream stream);

}  // namespace lockstep::kernels
