#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cstdint>
#include <span>

#include "kernels/dense/dispatch.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/grouped_product.h"
#include "kernels/exact/mx_product.h"
#include "kernels/exact/quantize.h"
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

/// Pairs (token, slot) in the order of their experts. All int32.
struct Sorted {
  Tensor pair_of;   // [T * K] the pair t * K + k of a sorted row
  Tensor token_of;  // [T * K] its token
  Tensor offsets;   // [E + 1] where each expert's rows begin
};

std::span<std::int32_t> numbers_of(const Tensor& x) {
  return {x.data_ptr<std::int32_t>(), static_cast<std::size_t>(x.numel())};
}

Sorted sort_by_expert(const Tensor& chosen, std::int64_t num_experts) {
  const Tensor experts = chosen.to(at::kInt);
  const std::int64_t rows = experts.size(0), k = experts.size(1);
  const auto room = [&](std::int64_t count) { return at::empty({count}, experts.options()); };
  const Sorted sorted = {room(rows * k), room(rows * k), room(num_experts + 1)};
  const Tensor scratch = room(kernels::dispatch_room(rows * k, num_experts));
  const Device device = house_device(experts);
  kernels::dispatch({.experts = {experts.const_data_ptr<std::int32_t>(), {rows, k}, {k, 1}, device},
                     .num_experts = static_cast<std::int32_t>(num_experts),
                     .offsets = numbers_of(sorted.offsets),
                     .row_of = numbers_of(sorted.token_of),
                     .slot_of = numbers_of(sorted.pair_of),
                     .room = numbers_of(scratch)},
                    stream_of(experts));
  return sorted;
}

/// Calls body(expert, first, rows) for those that have rows. Waits for the device.
template <typename Body>
void each_expert(const Tensor& offsets, Body&& body) {
  const Tensor here = offsets.cpu();
  const std::int32_t* at = here.const_data_ptr<std::int32_t>();
  for (std::int64_t e = 0; e + 1 < here.size(0); ++e) {
    if (at[e + 1] > at[e]) body(e, at[e], at[e + 1] - at[e]);
  }
}

/// Row i is x's row index[i].
Tensor gather(const Tensor& x, const Tensor& index) {
  if (!has_kernels(x)) return x.index_select(0, index);
  const Tensor to = at::empty({index.size(0), x.size(1)}, x.options());
  kernels::gather_rows(view_of<const Bf16>(x), numbers_of(index), view_of<Bf16>(to), stream_of(x));
  return to;
}

/// Row index[i] is x's row i; all rows are named.
Tensor scatter(const Tensor& x, const Tensor& index) {
  return at::empty_like(x).index_copy_(0, index.to(at::kLong), x);
}

template <typename T, std::size_t kRank>
TensorView<T, kRank> over(const Tensor& x, const std::array<std::int64_t, kRank>& shape) {
  TensorView<T, kRank> view{static_cast<T*>(x.data_ptr()), shape, {}, house_device(x)};
  std::int64_t stride = 1;
  for (std::size_t i = kRank; i-- > 0; stride *= shape[i]) view.stride[i] = stride;
  return view;
}

bool takes_rows(const Tensor& x, const Tensor& other) {
  return has_kernels(x) && x.size(-1) % 8 == 0 && other.size(-1) % 8 == 0;
}

/// One product an expert, in FP32: y[rows of e] = x[rows of e] * w[e]^T, or w[e] if it is turned.
/// w [E, out, in], turned [E, in, out]. Row i of it lies at to[i], if there is such.
Tensor grouped(const Tensor& x, const Tensor& w, bool turned, const Tensor& offsets,
               const Tensor& to = {}) {
  const Tensor y = at::empty({x.size(0), w.size(turned ? 2 : 1)}, x.options().dtype(at::kFloat));
  if (takes_rows(x, w)) {
    kernels::GroupedProductArgs args = {
        .x = view_of<const Bf16>(x),
        .w = over<const Bf16, 3>(w, {w.size(0), w.size(1), w.size(2)}),
        .turned = turned,
        .offsets = over<const std::int32_t, 1>(offsets, {offsets.size(0)}),
        .y = view_of<float>(y)};
    if (to.defined()) args.to = over<const std::int32_t, 1>(to, {to.size(0)});
    kernels::grouped_product(args, stream_of(x));
    return y;
  }
  each_expert(offsets, [&](std::int64_t e, std::int64_t first, std::int64_t rows) {
    y.narrow(0, first, rows).copy_(product(x.narrow(0, first, rows), turned ? w[e] : w[e].t()));
  });
  return to.defined() ? scatter(y, to) : y;
}

/// The same product of codes: of x's rows, BF16, by the rule, and of w. Item i is row from[i] of x,
/// and row to[i] of y; without them row i.
Tensor coded_product(const Tensor& x, const Quantizer& rule, const CodeMatrix& w,
                     const Tensor& offsets, const Tensor& from, const Tensor& to) {
  const std::int64_t rows = x.size(0), cols = x.size(1);
  const std::int64_t items = from.defined() ? from.size(0) : rows;
  const Stream stream = stream_of(x);
  const Tensor codes = at::empty({rows, rule.code_bytes(cols)}, x.options().dtype(at::kByte));
  const Tensor scales = at::empty({rows, rule.scale_cols(cols)}, codes.options());
  const Tensor global = at::empty({rows}, x.options().dtype(at::kFloat));
  const PackedView<std::uint8_t> packed = {.codes = view_of<std::uint8_t>(codes),
                                           .scales = view_of<std::uint8_t>(scales),
                                           .global = over<float, 1>(global, {rows})};
  kernels::quantize({.x = view_of<const Bf16>(x), .rule = rule, .out = packed}, stream);
  const Tensor y = at::empty({items, w.out}, global.options());
  const auto index = [](const Tensor& numbers) {
    if (!numbers.defined()) return TensorView<const std::int32_t, 1>{};
    return over<const std::int32_t, 1>(numbers, {numbers.size(0)});
  };
  if (rule.is_mx()) {
    kernels::mx_product({.a = packed,
                         .w = w.mxfp4,
                         .experts = w.experts,
                         .offsets = index(offsets),
                         .from = index(from),
                         .to = index(to),
                         .out = view_of<float>(y)},
                        stream);
  } else {
    const bool scaled = w.nvfp4.scaled || !rule.global_is_power_of_two;
    const Tensor room = at::empty({scaled ? rows : 0}, global.options());
    kernels::w4a4({.a = packed,
                   .w = w.nvfp4,
                   .offsets = index(offsets),
                   .from = index(from),
                   .to = index(to),
                   .out = view_of<float>(y),
                   .rule = rule,
                   .room = {room.data_ptr<float>(), static_cast<std::size_t>(room.size(0))}},
                  stream);
  }
  return y;
}

/// grad[e] += dy[rows of e]^T * x[rows of e].
void add_grouped(const Tensor& grad, const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  if (takes_rows(x, dy)) {
    kernels::grouped_sums({.a = view_of<const Bf16>(dy),
                           .b = view_of<const Bf16>(x),
                           .offsets = over<const std::int32_t, 1>(offsets, {offsets.size(0)}),
                           .sum = over<float, 3>(grad, {grad.size(0), grad.size(1), grad.size(2)})},
                          stream_of(x));
    return;
  }
  each_expert(offsets, [&](std::int64_t e, std::int64_t first, std::int64_t rows) {
    add_product(grad[e], dy.narrow(0, first, rows).t(), x.narrow(0, first, rows));
  });
}

/// Sorted gate-over-up rows in FP32 -> swiglu [T * K, F]; BF16 ones are the rollout's to the bit.
/// `before` gets them as they are before the rounding.
Tensor swiglu(const Tensor& gate_up, const Sorted& sorted, const Rounding& rounding, bool any_order,
              at::ScalarType type, Tensor* before) {
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
  if (before != nullptr) *before = rounding && any_order ? numbers.clone() : numbers;
  if (rounding && any_order) {
    rounding(view_of<const Bf16>(numbers), view_of<Bf16>(numbers));
  } else if (rounding) {
    const Tensor pairs = scatter(numbers, sorted.pair_of);
    rounding(view_of<const Bf16>(pairs), view_of<Bf16>(pairs));
    numbers = gather(pairs, sorted.pair_of);
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
                         const Tensor& gates, const Tensor& pair_of) {
  const std::int64_t f = dout.size(1);
  if (has_kernels(down_in) && f % 2 == 0) {
    const SwigluGrads grads = {at::empty(gate_up.sizes(), down_in.options()),
                               at::empty_like(down_in), at::empty_like(gates)};
    swiglu_backward({.gate_up = gate_up.const_data_ptr<float>(),
                     .dout = dout.const_data_ptr<float>(),
                     .down_in = static_cast<const Bf16*>(down_in.const_data_ptr()),
                     .gates = gates.const_data_ptr<float>(),
                     .pair = pair_of.const_data_ptr<std::int32_t>(),
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
          scatter((dout * a).sum(1), pair_of).view(gates.sizes())};
}

struct Experts : Function<Experts> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& gates,
                        const Tensor& w13, const Tensor& w2, const Tensor& experts,
                        const Rounding& round_slots, const Coded& coded, bool any_order) {
    const Sorted sorted = sort_by_expert(experts, w13.size(0));
    const bool codes = coded.gate_up != nullptr;
    const Tensor gate_up = codes ? coded_product(coded.source, coded.rule, *coded.gate_up,
                                                 sorted.offsets, sorted.token_of, {})
                                 : grouped(gather(x, sorted.token_of), w13, false, sorted.offsets);
    Tensor before;
    const Tensor down_in =
        swiglu(gate_up, sorted, round_slots, any_order, x.scalar_type(), codes ? &before : nullptr);
    const Tensor down =
        codes ? coded_product(before, coded.rule, *coded.down, sorted.offsets, {}, sorted.pair_of)
              : grouped(down_in, w2, false, sorted.offsets, sorted.pair_of);
    ctx->save_for_backward(
        {x, gates, w13, w2, gate_up, down_in, sorted.pair_of, sorted.token_of, sorted.offsets});
    return combine(down, gates, x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &gates = saved[1], &w13 = saved[2], &w2 = saved[3];
    const Tensor &pair_of = saved[6], &token_of = saved[7], &offsets = saved[8];

    // The gate's gradient is taken behind the down projection: dout . w2 x = (dout w2) . x.
    const Tensor dout = gather(upstream[0].contiguous(), token_of);
    const Tensor dslot = grouped(dout, w2, true, offsets);
    const SwigluGrads d = swiglu_grads(saved[4], dslot, saved[5], gates, pair_of);
    add_grouped(grad_of(w2), dout, d.scaled, offsets);
    add_grouped(grad_of(w13), d.gate_up, gather(x, token_of), offsets);
    const Tensor din = grouped(d.gate_up, w13, true, offsets, pair_of);
    const Tensor none;
    return {combine(din, at::ones_like(gates), x.scalar_type()),
            d.gates,
            none,
            none,
            none,
            none,
            none,
            none};
  }
};

}  // namespace

Tensor experts(const Tensor& x, const Tensor& gates, const Tensor& w13, const Tensor& w2,
               const Tensor& experts, const Rounding& round_slots, const Coded& coded,
               bool any_order) {
  return Experts::apply(x, gates, w13, w2, experts, round_slots, coded, any_order);
}

}  // namespace lockstep::ops::cuda
