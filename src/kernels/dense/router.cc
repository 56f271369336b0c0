#include "kernels/dense/router.h"

#include "base/parallel.h"
#include "kernels/dense/check.h"
#include "kernels/dense/router_rows.h"

namespace lockstep::kernels {

void router(const RouterArgs& args, Stream stream) {
  const std::int64_t rows = args.logits.shape[0];
  const std::int64_t experts = args.logits.shape[1];
  const std::int64_t chosen = args.experts.shape[1];
  const Device device = args.logits.device;
  require_shape("router", "logits", args.logits, rows, experts, device);
  require_shape("router", "experts", args.experts, rows, chosen, device);
  require_shape("router", "gates", args.gates, rows, chosen, device);
  if (chosen < 1 || chosen > experts) {
    throw Error(cat({"router: ", chosen, " experts a token; expected 1..", experts}));
  }
  if (on_cuda("router", device)) {
    if constexpr (build::has_cuda) return router_cuda(args, stream);
  }
  parallel_for(rows, 1 + 4096 / experts,
               [&](std::int64_t first, std::int64_t end) { router_portable(args, first, end); });
}

}  // namespace lockstep::kernels
