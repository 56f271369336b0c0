#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/dense/router.h"
#include "ops/cuda.h"
#include "ops/device.h"
#include "ops/rows_cuda.h"

namespace lockstep::ops::cuda {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Gates args_of(const Tensor& logits, const Tensor& chosen, const Tensor& gates, bool normalize) {
  return {.logits = logits.const_data_ptr<float>(),
          .chosen = chosen.const_data_ptr<std::int32_t>(),
          .gates = gates.data_ptr<float>(),
          .rows = logits.size(0),
          .experts = static_cast<std::int32_t>(logits.size(1)),
          .slots = static_cast<std::int32_t>(chosen.size(1)),
          .normalize = normalize};
}

struct GatesOf : Function<GatesOf> {
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& chosen,
                        bool normalize) {
    const Tensor out = at::empty(chosen.sizes(), logits.options());
    gates(args_of(logits, chosen, out, normalize), house_device(logits), stream_of(logits));
    ctx->save_for_backward({logits, chosen, out});
    ctx->saved_data["normalize"] = normalize;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &logits = saved[0], dgates = grads[0].contiguous();
    const Tensor dlogits = at::empty_like(logits);
    gates_backward(
        {.of = args_of(logits, saved[1], saved[2], ctx->saved_data["normalize"].toBool()),
         .dgates = dgates.const_data_ptr<float>(),
         .dlogits = dlogits.data_ptr<float>()},
        house_device(logits), stream_of(logits));
    return {dlogits, Tensor(), Tensor()};
  }
};

}  // namespace

Tensor choose_experts(const Tensor& logits, std::int64_t k) {
  const std::int64_t rows = logits.size(0);
  const Tensor chosen = at::empty({rows, k}, logits.options().dtype(at::kInt));
  const Tensor unused = at::empty({rows, k}, logits.options());
  const Device device = house_device(logits);
  kernels::router({.logits = view_of<const float>(logits),
                   .experts = {chosen.data_ptr<std::int32_t>(), {rows, k}, {k, 1}, device},
                   .gates = view_of<float>(unused)},
                  stream_of(logits));
  return chosen;
}

Tensor gates(const Tensor& logits, const Tensor& chosen, bool normalize) {
  return GatesOf::apply(logits, chosen, normalize);
}

void follow(const Tensor& theirs, const Tensor& present, const Tensor& chosen,
            const Tensor& mismatched) {
  follow({.theirs = theirs.const_data_ptr<std::int32_t>(),
          .present = present.const_data_ptr<std::uint8_t>(),
          .chosen = chosen.data_ptr<std::int32_t>(),
          .mismatched = mismatched.defined() ? reinterpret_cast<unsigned long long*>(
                                                   mismatched.data_ptr<std::int64_t>())
                                             : nullptr,
          .rows = chosen.size(0),
          .slots = static_cast<std::int32_t>(chosen.size(1))},
         house_device(chosen), stream_of(chosen));
}

}  // namespace lockstep::ops::cuda
