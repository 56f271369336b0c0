#include <cuda.h>

#include "device/cuda/check.h"
#include "kernels/dense/linear_params_cuda.h"
#include "kernels/dense/linear_rows.h"
#include "kernels/dense/wgmma_cuda.h"

namespace lockstep::kernels {

namespace {

LinearParams params_of(const GroupedLinearArgs& args, bool grouped, TensorView<Bf16, 2> y_bf16) {
  const PackedMatrix& weight = args.weights;
  const bool aligned = (reinterpret_cast<std::uintptr_t>(args.x.data) |
                        reinterpret_cast<std::uintptr_t>(weight.data)) %
                           16 ==
                       0;
  const std::int64_t unit = args.split_k ? 64 : 32;
  if (weight.in % unit != 0 || args.x.stride[0] % 8 != 0 || !aligned) {
    throw Error(cat({"linear_bf16: ", weight.in, " inputs, rows of x ", args.x.stride[0],
                     " apart; a CUDA device wants multiples of ", unit, " and 8, from addresses ",
                     "that are multiples of 16"}));
  }
  LinearParams p{};
  p.x = args.x.data;
  p.weight = weight.data;
  p.y = args.y.data;
  p.y_bf16 = y_bf16.data;
  p.offsets = grouped ? args.offsets.data() : nullptr;
  p.to = args.to.empty() ? nullptr : args.to.data();
  p.x_stride = args.x.stride[0];
  p.y_stride = y_bf16.empty() ? args.y.stride[0] : y_bf16.stride[0];
  p.group_stride = packed_elements(weight.out, weight.in);
  p.rows = static_cast<std::int32_t>(args.x.shape[0]);
  p.groups = grouped ? static_cast<std::int32_t>(args.offsets.size()) - 1 : 1;
  p.out = static_cast<std::int32_t>(weight.out);
  p.in = static_cast<std::int32_t>(weight.in);
  p.split_k = args.split_k;
  return p;
}

}  // namespace

void linear_cuda(const GroupedLinearArgs& args, bool grouped, TensorView<Bf16, 2> y_bf16,
                 bool settled, Stream stream) {
  const std::int8_t device = args.x.device.index;
  if (!wgmma::is_hopper(device)) return linear_of_warps_cuda(args, grouped, y_bf16, stream);
  if (args.x.shape[0] == 0) return;
  const cuda::OnDevice scope(device);
  LinearParams p = params_of(args, grouped, y_bf16);
  p.settled = settled;
  linear_hopper(p, device, stream);
}

void linear_of_warps_cuda(const GroupedLinearArgs& args, bool grouped, TensorView<Bf16, 2> y_bf16,
                          Stream stream) {
  if (args.x.shape[0] == 0) return;
  const cuda::OnDevice scope(args.x.device.index);
  linear_of_warps(params_of(args, grouped, y_bf16), stream);
}

}  // namespace lockstep::kernels
