#include <ATen/Context.h>
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

#include "kernels/dense/elementwise.h"
#include "kernels/dense/grouped_product.h"
#include "kernels/exact/swiglu.h"
#include "ops/cuda.h"
#include "ops/device.h"
#include "ops/rows_cuda.h"

namespace lockstep::ops::cuda {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Where each expert's rows begin, [E + 1]: on the device, and on its way to the host, for the
/// products that are one an expert.
class Offsets : public torch::CustomClassHolder {
 public:
  explicit Offsets(Tensor there) : there_(std::move(there)) {
    if (!there_.is_cuda()) return;
    here_ = at::empty(there_.sizes(), at::TensorOptions(at::kInt).pinned_memory(true));
    here_.copy_(there_, /*non_blocking=*/true);
    arrived_.emplace(at::kCUDA);
    arrived_->record(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(there_.device()));
  }

  const Tensor& there() const { return there_; }
  std::int64_t experts() const { return there_.size(0) - 1; }

  /// Calls body(expert, first, rows) for those that have rows.
  template <typename Body>
  void each(Body&& body) const {
    if (arrived_) arrived_->synchronize();
    const std::int32_t* at = (there_.is_cuda() ? here_ : there_).const_data_ptr<std::int32_t>();
    for (std::int64_t e = 0; e < experts(); ++e) {
      if (at[e + 1] > at[e]) body(e, at[e], at[e + 1] - at[e]);
    }
  }

 private:
  Tensor there_, here_;
  std::optional<c10::Event> arrived_;
};

/// Pairs (token, slot) in the order of their experts.
struct Sorted {
  Tensor row_of;    // int64 [T * K] the sorted row of pair t * K + k
  Tensor pair_of;   // int64 [T * K] the way back
  Tensor token_of;  // int64 [T * K] the pair's token
  c10::intrusive_ptr<Offsets> offsets;
};

Sorted sort_by_expert(const Tensor& experts, std::int64_t num_experts) {
  const auto [expert, pair_of] = experts.reshape({-1}).sort(/*stable=*/true, 0, false);
  Sorted sorted;
  sorted.pair_of = pair_of;
  sorted.row_of = at::empty_like(pair_of);
  sorted.row_of.scatter_(0, pair_of, at::arange(pair_of.size(0), pair_of.options()));
  sorted.token_of = pair_of.div(experts.size(1), "floor");
  const Tensor numbers = at::arange(num_experts + 1, pair_of.options());
  sorted.offsets =
      c10::make_intrusive<Offsets>(at::searchsorted(expert.contiguous(), numbers, true));
  return sorted;
}

/// One product an expert, in FP32: y[rows of e] = x[rows of e] * w[e]^T.   w [E, out, in]
/// Row i of it lies at to[i], int64, if there is such.
Tensor grouped(const Tensor& x, const Tensor& w, const Offsets& offsets, const Tensor& to = {}) {
  Tensor y = at::empty({x.size(0), w.size(1)}, x.options().dtype(at::kFloat));
  if (has_kernels(x) && x.size(1) % 8 == 0) {
    const Device device = house_device(x);
    const std::int64_t out = w.size(1), in = w.size(2);
    kernels::GroupedProductArgs args = {.x = view_of<const Bf16>(x),
                                        .w = {static_cast<const Bf16*>(w.data_ptr()),
                                              {w.size(0), out, in},
                                              {out * in, in, 1},
                                              device},
                                        .offsets = {offsets.there().const_data_ptr<std::int32_t>(),
                                                    {offsets.experts() + 1},
                                                    {1},
                                                    device},
                                        .y = view_of<float>(y)};
    const Tensor narrow = to.defined() ? to.to(at::kInt) : Tensor();
    if (to.defined()) {
      args.to = {narrow.const_data_ptr<std::int32_t>(), {x.size(0)}, {1}, device};
    }
    kernels::grouped_product(args, stream_of(x));
    return y;
  }
  offsets.each([&](std::int64_t e, std::int64_t first, std::int64_t rows) {
    y.narrow(0, first, rows).copy_(product(x.narrow(0, first, rows), w[e].t()));
  });
  return to.defined() ? at::empty_like(y).index_copy_(0, to, y) : y;
}

/// grad[e] += dy[rows of e]^T * x[rows of e]. In BF16 the product is rounded before it is added:
/// one call of torch's for all experts, which has no other result, is several times as fast as one
/// for each.
void add_grouped(const Tensor& grad, const Tensor& dy, const Tensor& x, const Offsets& offsets) {
  if (has_kernels(x) && x.size(1) % 8 == 0 && dy.size(1) % 8 == 0) {
    Tensor sum = grad;
    sum.add_(at::_grouped_mm(dy.t(), x, offsets.there().narrow(0, 1, offsets.experts())));
    return;
  }
  offsets.each([&](std::int64_t e, std::int64_t first, std::int64_t rows) {
    add_product(grad[e], dy.narrow(0, first, rows).t(), x.narrow(0, first, rows));
  });
}

/// Sorted gate-over-up rows in FP32 -> swiglu [T * K, F]; BF16 ones are the rollout's to the bit.
Tensor swiglu(const Tensor& gate_up, const Sorted& sorted, const Rounding& rounding,
              at::ScalarType type) {
  const std::int64_t rows = gate_up.size(0), f = gate_up.size(1) / 2;
  if (type != at::kBFloat16 && !rounding) {
    const Tensor g = gate_up.narrow(1, 0, f);
    return g * g.sigmoid() * gate_up.narrow(1, f, f);
  }
  Tensor numbers = at::empty({rows, f}, gate_up.options().dtype(at::kBFloat16));
  const Device device = house_device(gate_up);
  const float* from = gate_up.const_data_ptr<float>();
  kernels::swiglu({.gate = {from, {rows, f}, {2 * f, 1}, device},
                   .up = {from + f, {rows, f}, {2 * f, 1}, device},
                   .out = view_of<Bf16>(numbers)},
                  stream_of(gate_up));
  if (rounding) {
    const Tensor pairs = numbers.index_select(0, sorted.row_of);
    rounding(view_of<const Bf16>(pairs), view_of<Bf16>(pairs));
    numbers = pairs.index_select(0, sorted.pair_of);
  }
  return numbers.to(type);
}

/// out[t] = sum over slots, in order, of gate * y, rounded once.   y [T * K, D] in the pairs' order
Tensor combine(const Tensor& y, const Tensor& gates, at::ScalarType type) {
  const std::int64_t tokens = gates.size(0), k = gates.size(1), d = y.size(1);
  if (y.is_cuda() && type == at::kBFloat16) {
    const Tensor out = at::empty({tokens, d}, y.options().dtype(type));
    kernels::combine({.y = view_of<const float>(y),
                      .gates = view_of<const float>(gates),
                      .out = view_of<Bf16>(out)},
                     stream_of(y));
    return out;
  }
  const Tensor parts = y.view({tokens, k, d});
  Tensor sum = parts.select(1, 0) * gates.narrow(1, 0, 1);
  for (std::int64_t j = 1; j < k; ++j) sum += parts.select(1, j) * gates.narrow(1, j, 1);
  return sum.to(type);
}

struct SwigluGrads {
  Tensor gate_up;  // [T * K, 2F] of x's type
  Tensor scaled;   // [T * K, F] gate * swiglu, of x's type
  Tensor gates;    // [T, K] FP32
};

/// `dout` [T * K, F] is the gradient of swiglu but for the gate.
SwigluGrads swiglu_grads(const Tensor& gate_up, const Tensor& dout, const Tensor& down_in,
                         const Tensor& gates, const Tensor& row_of, const Tensor& pair_of) {
  const std::int64_t f = dout.size(1);
  if (has_kernels(down_in) && f % 2 == 0) {
    const SwigluGrads grads = {at::empty(gate_up.sizes(), down_in.options()),
                               at::empty_like(down_in), at::empty_like(gates)};
    swiglu_backward({.gate_up = gate_up.const_data_ptr<float>(),
                     .dout = dout.const_data_ptr<float>(),
                     .down_in = static_cast<const Bf16*>(down_in.const_data_ptr()),
                     .gates = gates.const_data_ptr<float>(),
                     .pair = pair_of.const_data_ptr<std::int64_t>(),
                     .dgate_up = static_cast<Bf16*>(grads.gate_up.data_ptr()),
                     .scaled = static_cast<Bf16*>(grads.scaled.data_ptr()),
                     .dgates = grads.gates.data_ptr<float>(),
                     .rows = dout.size(0),
                     .width = static_cast<std::int32_t>(f)},
                    house_device(gate_up), stream_of(gate_up));
    return grads;
  }
  const Tensor gate = gates.view({-1}).index_select(0, pair_of);
  const at::ScalarType type = down_in.scalar_type();
  const Tensor a = down_in.to(at::kFloat), weight = gate.unsqueeze(1);
  const Tensor g = gate_up.narrow(1, 0, f), u = gate_up.narrow(1, f, f);
  const Tensor s = g.sigmoid(), d = dout * weight;
  const Tensor dg = d * u * s * (1.0 + g * (1.0 - s));
  return {at::cat({dg, d * g * s}, 1).to(type), (a * weight).to(type),
          (dout * a).sum(1).index_select(0, row_of).view(gates.sizes())};
}

struct Experts : Function<Experts> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& gates,
                        const Tensor& w13, const Tensor& w2, const Tensor& experts,
                        const Rounding& round_slots) {
    const Sorted sorted = sort_by_expert(experts, w13.size(0));
    const Tensor gate_up = grouped(x.index_select(0, sorted.token_of), w13, *sorted.offsets);
    const Tensor down_in = swiglu(gate_up, sorted, round_slots, x.scalar_type());
    const Tensor down = grouped(down_in, w2, *sorted.offsets, sorted.pair_of);
    ctx->save_for_backward(
        {x, gates, w13, w2, gate_up, down_in, sorted.row_of, sorted.pair_of, sorted.token_of});
    ctx->saved_data["offsets"] = c10::IValue::make_capsule(sorted.offsets);
    return combine(down, gates, x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &gates = saved[1], &w13 = saved[2], &w2 = saved[3];
    const Tensor &row_of = saved[6], &pair_of = saved[7], &token_of = saved[8];
    const auto kept = ctx->saved_data["offsets"].toCapsule();
    const auto& offsets = *static_cast<const Offsets*>(kept.get());

    // The gate's gradient is taken behind the down projection: dout . w2 x = (dout w2) . x.
    const Tensor dout = upstream[0].contiguous().index_select(0, token_of);
    const Tensor dslot = grouped(dout, w2.transpose(1, 2).contiguous(), offsets);
    const SwigluGrads d = swiglu_grads(saved[4], dslot, saved[5], gates, row_of, pair_of);
    add_grouped(grad_of(w2), dout, d.scaled, offsets);
    add_grouped(grad_of(w13), d.gate_up, x.index_select(0, token_of), offsets);
    const Tensor din = grouped(d.gate_up, w13.transpose(1, 2).contiguous(), offsets, pair_of);
    const Tensor none;
    return {combine(din, at::ones_like(gates), x.scalar_type()), d.gates, none, none, none, none};
  }
};

}  // namespace

Tensor experts(const Tensor& x, const Tensor& gates, const Tensor& w13, const Tensor& w2,
               const Tensor& experts, const Rounding& round_slots) {
  return Experts::apply(x, gates, w13, w2, experts, round_slots);
}

Tensor choose_experts(const Tensor& p, std::int64_t k) {
  return std::get<1>(p.sort(/*stable=*/true, 1, /*descending=*/true)).narrow(1, 0, k).contiguous();
}

}  // namespace lockstep::ops::cuda
