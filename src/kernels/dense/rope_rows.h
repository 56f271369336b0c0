#pragma once

#include "kernels/dense/rms_norm_rows.h"
#include "kernels/dense/rope.h"

namespace lockstep::kernels {

[[gnu::always_inline]] inline void rope_rows(const RopeArgs& args, std::int64_t first,
                                             std::int64_t end) {
  const std::int64_t dim = args.head_dim;
  const std::int64_t half = dim / 2;
  for (std::int64_t row = first; row < end; ++row) {
    Bf16* x = args.x.data + row * args.x.stride[0];
    const std::int32_t position = args.positions[static_cast<std::size_t>(row)];
    const float* cos = args.table->cos(position);
    const float* sin = args.table->sin(position);
    for (Bf16* head = x; head < x + args.x.shape[1]; head += dim) {
      if (!args.norm.empty()) rms_norm_row(head, args.norm.data(), args.eps, dim, head);
#pragma GCC ivdep  // the halves are apart
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = to_float(head[i]);
        const float b = to_float(head[i + half]);
        head[i] = to_bf16(a * cos[i] - b * sin[i]);
        head[i + half] = to_bf16(b * cos[i] + a * sin[i]);
      }
    }
  }
}

void rope_portable(const RopeArgs& args, std::int64_t first, std::int64_t end);
void rope_avx2(const RopeArgs& args, std::int64_t first, std::int64_t end);
void rope_avx512(const RopeArgs& args, std::int64_t first, std::int64_t end);
void rope_cuda(const RopeArgs& args, Stream stream);

}  // namespace lockstep::kernels
