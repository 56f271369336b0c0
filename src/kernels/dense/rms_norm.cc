#include "kernels/dense/rms_norm.h"

#include "base/parallel.h"
#include "kernels/dense/check.h"
#include "kernels/dense/rms_norm_rows.h"
#include "kernels/dense/vectors.h"

namespace lockstep::kernels {

void rms_norm(const RmsNormArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t cols = args.x.shape[1];
  const Device device = args.x.device;
  require_shape("rms_norm", "x", args.x, rows, cols, device);
  require_shape("rms_norm", "y", args.y, rows, cols, device);
  if (static_cast<std::int64_t>(args.weight.size()) != cols || cols == 0) {
    throw Error(cat({"rms_norm: weight has ", args.weight.size(), " elements; expected ", cols}));
  }
  if (on_cuda("rms_norm", device)) {
    if constexpr (build::has_cuda) return rms_norm_cuda(args, stream);
  }
  parallel_for(rows, 1 + (1 << 15) / cols, [&](std::int64_t first, std::int64_t end) {
    switch (vectors()) {
      case Vectors::kAvx512Bf16:
      case Vectors::kAvx512: return rms_norm_avx512(args, first, end);
      case Vectors::kAvx2: return rms_norm_avx2(args, first, end);
      case Vectors::kPortable: return rms_norm_portable(args, first, end);
    }
  });
}

}  // namespace lockstep::kernels
