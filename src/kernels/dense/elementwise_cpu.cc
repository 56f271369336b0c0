#include "kernels/dense/elementwise_rows.h"

namespace lockstep::kernels {

ElementwiseOps elementwise_portable() {
  return {
      .add = [](const Bf16* x, std::int64_t cols, Bf16* h) { return add_row(x, cols, h); },
      .finite = [](const Bf16* x, std::int64_t cols) { return row_is_finite(x, cols); },
      .combine = [](const CombineArgs& args, std::int64_t first,
                    std::int64_t end) { combine_rows(args, first, end); },
      .noise =
          [](std::uint64_t seed, const PhiloxWords& counter, float rms, float sigma,
             float(&x)[2][kLanes]) {
            PhiloxLanes draw;
            philox_lanes(seed, counter, draw);
            add_noise(draw, rms, sigma, x);
          },
  };
}

}  // namespace lockstep::kernels
