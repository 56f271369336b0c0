#include "kernels/dense/dispatch.h"

#include <algorithm>

#include "kernels/dense/check.h"
#include "kernels/dense/dispatch_rows.h"

namespace lockstep::kernels {

void dispatch(const DispatchArgs& args, Stream stream) {
  const std::int64_t rows = args.experts.shape[0];
  const std::int64_t slots = args.experts.shape[1];
  const auto items = static_cast<std::size_t>(rows * slots);
  const Device device = args.experts.device;
  require_shape("dispatch", "experts", args.experts, rows, slots, device);
  if (args.num_experts < 1 || std::ssize(args.offsets) != args.num_experts + 1 ||
      args.row_of.size() != items || args.slot_of.size() != items) {
    throw Error(
        cat({"dispatch: ", args.offsets.size(), " offsets of ", args.num_experts,
             " experts, room for ", args.row_of.size(), " rows and ", args.slot_of.size(),
             " slots; expected one offset more than experts and ", items, " of the others"}));
  }
  const std::int64_t room = dispatch_room(rows * slots, args.num_experts);
  if (!args.room.empty() && std::ssize(args.room) < room) {
    throw Error(cat({"dispatch: room for ", args.room.size(), " numbers; expected ", room}));
  }
  if (on_cuda("dispatch", device)) {
    if constexpr (build::has_cuda) return dispatch_cuda(args, stream);
  }
  const auto each = [&](const auto& act) {
    for (std::int64_t i = 0; i < rows * slots; ++i) {
      act(static_cast<std::size_t>(
              args.experts.data[i / slots * args.experts.stride[0] + i % slots]),
          i);
    }
  };
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int32_t* chosen = args.experts.data + row * args.experts.stride[0];
    require_below("dispatch", "experts of a row", {chosen, static_cast<std::size_t>(slots)},
                  args.num_experts);
  }
  std::fill(args.offsets.begin(), args.offsets.end(), 0);
  each([&](std::size_t expert, std::int64_t) { ++args.offsets[expert + 1]; });
  for (std::size_t e = 1; e < args.offsets.size(); ++e) args.offsets[e] += args.offsets[e - 1];
  each([&](std::size_t expert, std::int64_t i) {
    // offsets[e] runs from the expert's begin to its end, then all move up by one expert.
    const auto at = static_cast<std::size_t>(args.offsets[expert]++);
    args.slot_of[at] = static_cast<std::int32_t>(i);
    args.row_of[at] = static_cast<std::int32_t>(i / slots);
  });
  std::copy_backward(args.offsets.begin(), args.offsets.end() - 1, args.offsets.end());
  args.offsets.front() = 0;
}

}  // namespace lockstep::kernels
