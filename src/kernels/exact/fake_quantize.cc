#include "kernels/exact/fake_quantize.h"

#include "base/build.h"
#include "base/error.h"
#include "kernels/exact/quantize_weights.h"

namespace lockstep::kernels {

bool fakes_at_once(const FakeQuantizeArgs& args) {
  const auto& [weights, rows, cols] = args.x.shape;
  return takes_nvfp4_weights(args.rule) && args.x.device.kind == Device::Kind::kCuda &&
         args.x.stride == std::array<std::int64_t, 3>{rows * cols, cols, 1} && cols % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(args.x.data) % 16 == 0;
}

void fake_quantize(const FakeQuantizeArgs& args, Stream stream) {
  if (!fakes_at_once(args) || args.amax == nullptr) {
    throw Error("fake_quantize: there is no kernel for this rule, or for where the weights lie");
  }
  if (args.x.shape[0] * args.x.shape[1] * args.x.shape[2] == 0) return;
  if constexpr (build::has_cuda) fake_quantize_cuda(args, stream);
}

}  // namespace lockstep::kernels
