#include "ops/guide.h"

#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "base/parallel.h"
#include "numerics/bf16.h"
#include "ops/device.h"

namespace lockstep::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr std::int64_t kCastGrain = 1 << 15;  // elements worth a task

struct StraightThrough : Function<StraightThrough> {
  static Tensor forward(AutogradContext*, const Tensor& x, const Rounding& rounding) {
    if (x.is_cuda()) {
      const Tensor from = x.to(at::kBFloat16).contiguous(), to = at::empty_like(from);
      rounding(view_of<const Bf16>(from), view_of<Bf16>(to));
      return to.to(x.scalar_type());
    }
    std::vector<Bf16> numbers(static_cast<std::size_t>(x.numel()));
    store_bf16(x, numbers.data());
    const TensorView<Bf16, 2> all = {numbers.data(), {x.size(0), x.size(1)}, {x.size(1), 1}};
    rounding(all, all);
    Tensor y = at::empty_like(x);
    load_bf16(numbers.data(), y);
    return y;
  }

  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor()};
  }
};

}  // namespace

void store_bf16(const Tensor& x, Bf16* to) {
  const float* from = x.data_ptr<float>();
  parallel_for(x.numel(), kCastGrain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) to[i] = to_bf16(from[i]);
  });
}

void load_bf16(const Bf16* x, const Tensor& to) {
  float* numbers = to.data_ptr<float>();
  parallel_for(to.numel(), kCastGrain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) numbers[i] = to_float(x[i]);
  });
}

Tensor straight_through(const Tensor& x, const Rounding& rounding) {
  return StraightThrough::apply(x, rounding);
}

}  // namespace lockstep::ops
