#include "kernels/dense/route.h"

#include "kernels/dense/check.h"
#include "kernels/dense/dispatch.h"
#include "kernels/dense/linear_rows.h"
#include "kernels/dense/route_rows.h"
#include "kernels/dense/router.h"

namespace lockstep::kernels {
namespace {

void require_route(const RouteArgs& args) {
  const std::int64_t rows = args.x.shape[0], count = args.weight.out;
  const std::int64_t slots = args.experts.shape[1];
  const Device device = args.weight.device;
  require_packed("route", args.weight);
  require_shape("route", "x", args.x, rows, args.weight.in, device);
  require_shape("route", "logits", args.logits, rows, count, device);
  require_shape("route", "experts", args.experts, rows, slots, device);
  require_shape("route", "gates", args.gates, rows, slots, device);
  if (slots < 1 || slots > count) {
    throw Error(cat({"route: ", slots, " experts a token; expected 1..", count}));
  }
  const auto items = static_cast<std::size_t>(rows * slots);
  if (std::ssize(args.offsets) != count + 1 || args.row_of.size() != items ||
      args.slot_of.size() != items) {
    throw Error(
        cat({"route: ", args.offsets.size(), " offsets of ", count, " experts, room for ",
             args.row_of.size(), " rows and ", args.slot_of.size(),
             " slots; expected one offset more than experts and ", items, " of the others"}));
  }
}

}  // namespace

void route(const RouteArgs& args, Stream stream) {
  require_route(args);
  if (on_cuda("route", args.weight.device)) {
    if constexpr (build::has_cuda) {
      if (route_cuda(args, stream)) return;
    }
  }
  linear_bf16({.x = args.x,
               .weight = args.weight,
               .y = args.logits,
               .split_k = args.split_k,
               .settled = args.settled},
              stream);
  router({.logits = args.logits,
          .normalize = args.normalize,
          .experts = args.experts,
          .gates = args.gates},
         stream);
  dispatch({.experts = args.experts,
            .num_experts = static_cast<std::int32_t>(args.weight.out),
            .offsets = args.offsets,
            .row_of = args.row_of,
            .slot_of = args.slot_of},
           stream);
}

}  // namespace lockstep::kernels
