#include "kernels/dense/elementwise_rows.h"

namespace lockstep::kernels {

ElementwiseOps elementwise_portable() {
  return {
      .add = [](const Bf16* x, std::int64_t cols, Bf16* h) { return add_row(x, cols, h); },
      .finite = [](const Bf16* x, std::int64_t cols) { return row_is_finite(x, cols); },
      .combine = [](const CombineArgs& args, std::int64_t first,
                    std::int64_t end) { combine_rows(args, first, end); },
      .noise = [](const DriftNoiseArgs& args,
                  std::int64_t row) { noise_row<philox_lanes>(args, row); },
  };
}

}  // namespace lockstep::kernels
