#include "kernels/dense/add_norm.h"

#include "kernels/dense/add_norm_rows.h"
#include "kernels/dense/check.h"
#include "kernels/dense/rms_norm.h"

namespace lockstep::kernels {

void add_norm(const AddNormArgs& args, Stream stream) {
  const std::int64_t rows = args.x.shape[0], cols = args.x.shape[1];
  const Device device = args.x.device;
  require_shape("add_norm", "x", args.x, rows, cols, device);
  require_shape("add_norm", "h", args.h, rows, cols, device);
  if (args.bad == nullptr) throw Error("add_norm: bad must be there, on the device where x lies");
  if (!args.weight.empty()) {
    require_shape("add_norm", "y", args.y, rows, cols, device);
    if (std::ssize(args.weight) != cols) {
      throw Error(cat({"add_norm: weight has ", args.weight.size(), " elements; expected ", cols}));
    }
  }
  if (!args.outputs.empty()) {
    const std::int64_t slots = args.gates.shape[1];
    require_shape("add_norm", "gates", args.gates, rows, slots, device);
    require_shape("add_norm", "outputs", args.outputs, rows * slots, cols, device);
  }
  if (on_cuda("add_norm", device)) {
    if constexpr (build::has_cuda) {
      if (add_norm_cuda(args, stream)) return;
    }
  }
  if (!args.outputs.empty()) {
    combine({.y = args.outputs, .gates = args.gates, .out = args.x}, stream);
  }
  if (args.sigma != 0.0f) {
    drift_noise({.x = args.x,
                 .sigma = args.sigma,
                 .seed = args.seed,
                 .streams = args.streams,
                 .positions = args.positions,
                 .site = args.site},
                stream);
  }
  residual_add(args.x, args.h, args.bad, stream);
  if (args.weight.empty()) return;
  rms_norm({.x = args.h, .weight = args.weight, .eps = args.eps, .y = args.y}, stream);
  if (args.bad_y != nullptr) first_nonfinite(args.y, args.bad_y, stream);
}

}  // namespace lockstep::kernels
