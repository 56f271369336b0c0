#include "kernels/exact/swiglu.h"

#include <algorithm>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/text.h"
#include "kernels/exact/swiglu_row.h"

namespace lockstep::kernels {
namespace {

constexpr std::int64_t kGrainElements = 1 << 14;

template <typename T>
void check(const TensorView<T, 2>& view, const char* name, std::int64_t rows, std::int64_t cols,
           Device device) {
  if (view.shape[0] != rows || view.shape[1] != cols) {
    throw Error(cat({"swiglu: ", name, " is [", view.shape[0], ", ", view.shape[1], "], must be [",
                     rows, ", ", cols, "] like gate"}));
  }
  if (view.stride[1] != 1 && cols > 1) {
    throw Error(cat({"swiglu: ", name, " has stride ", view.stride[1], " along a row, must be 1"}));
  }
  if (view.device != device) {
    throw Error(cat({"swiglu: ", name, " must be on the device of gate"}));
  }
}

void check(const SwigluArgs& args) {
  const std::int64_t rows = args.gate.shape[0];
  const std::int64_t cols = args.gate.shape[1];
  check(args.gate, "gate", rows, cols, args.gate.device);
  check(args.up, "up", rows, cols, args.gate.device);
  check(args.out, "out", rows, cols, args.gate.device);
}

}  // namespace

void swiglu_on(const SwigluArgs& args, Isa isa) {
  check(args);
  if (args.gate.device.kind != Device::Kind::kCpu) throw Error("swiglu: gate must be on the CPU");
  const std::int64_t rows = args.gate.shape[0];
  const std::int64_t cols = args.gate.shape[1];
  if (rows == 0 || cols == 0) return;
  const SwigluRow row = swiglu_row(isa);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / cols);
  parallel_for(rows, grain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t r = first; r < end; ++r) {
      row(args.gate.data + r * args.gate.stride[0], args.up.data + r * args.up.stride[0],
          args.out.data + r * args.out.stride[0], cols);
    }
  });
}

void swiglu(const SwigluArgs& args, Stream stream) {
  if (args.gate.device.kind == Device::Kind::kCpu) return swiglu_on(args, best_isa());
  if constexpr (build::has_cuda) {
    check(args);
    if (args.gate.shape[0] > 0 && args.gate.shape[1] > 0) swiglu_cuda(args, stream);
  } else {
    throw Error("swiglu: gate is on a CUDA device, and this build has no CUDA backend");
  }
}

}  // namespace lockstep::kernels
