#include "ops/experts.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "base/build.h"
#include "base/error.h"
#include "base/parallel.h"
#include "kernels/exact/mx_product.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/swiglu.h"
#include "numerics/bf16.h"
#include "ops/cuda.h"
#include "ops/round.h"

namespace lockstep::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Pairs (token, slot) in the order of their experts.
struct Sorted {
  Tensor row_of;                      // int64 [T * K] the sorted row of pair t * K + k
  Tensor pair_of;                     // int64 [T * K] the way back
  std::vector<std::int64_t> offsets;  // [E + 1] the rows of each expert
};

Sorted sort_by_expert(const Tensor& experts, std::int64_t num_experts) {
  const std::int64_t pairs = experts.numel();
  const std::int64_t* expert = experts.data_ptr<std::int64_t>();
  Sorted sorted = {at::empty({pairs}, at::kLong), at::empty({pairs}, at::kLong), {}};
  sorted.offsets.assign(static_cast<std::size_t>(num_experts) + 1, 0);
  for (std::int64_t p = 0; p < pairs; ++p)
    ++sorted.offsets[static_cast<std::size_t>(expert[p]) + 1];
  for (std::size_t e = 1; e < sorted.offsets.size(); ++e) {
    sorted.offsets[e] += sorted.offsets[e - 1];
  }
  std::vector<std::int64_t> next(sorted.offsets);
  std::int64_t* row_of = sorted.row_of.data_ptr<std::int64_t>();
  std::int64_t* pair_of = sorted.pair_of.data_ptr<std::int64_t>();
  for (std::int64_t p = 0; p < pairs; ++p) {
    row_of[p] = next[static_cast<std::size_t>(expert[p])]++;
    pair_of[row_of[p]] = p;
  }
  return sorted;
}

/// out[r] = x[index[r] / divisor].
Tensor gather_rows(const Tensor& x, const Tensor& index, std::int64_t divisor) {
  const std::int64_t width = x.size(1);
  Tensor out = at::empty({index.numel(), width}, at::kFloat);
  const float* from = x.data_ptr<float>();
  const std::int64_t* at = index.data_ptr<std::int64_t>();
  float* to = out.data_ptr<float>();
  parallel_for(index.numel(), kGrain / width + 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t r = first; r < end; ++r) {
      std::copy_n(from + at[r] / divisor * width, width, to + r * width);
    }
  });
  return out;
}

/// One product an expert: y[rows of e] = x[rows of e] * w[e]^T, or * w[e].
Tensor grouped(const Tensor& x, const Tensor& w, const std::vector<std::int64_t>& offsets,
               bool transposed) {
  Tensor y = at::empty({x.size(0), w.size(transposed ? 1 : 2)}, at::kFloat);
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const std::int64_t count = offsets[e + 1] - offsets[e];
    if (count == 0) continue;
    const Tensor matrix = w[static_cast<std::int64_t>(e)];
    Tensor out = y.narrow(0, offsets[e], count);
    at::mm_out(out, x.narrow(0, offsets[e], count), transposed ? matrix.t() : matrix);
  }
  return y;
}

/// The same product of codes: item i is row from[i] of x, quantized by the rule; empty: row i. In
/// FP32, rounded once.
Tensor coded_product(TensorView<const Bf16, 2> x, const Quantizer& rule, const CodeMatrix& w,
                     const std::vector<std::int64_t>& offsets,
                     const std::vector<std::int32_t>& from) {
  const std::int64_t rows = x.shape[0], cols = x.shape[1], blocks = cols / rule.block;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * cols / 2));
  std::vector<std::uint8_t> scales(static_cast<std::size_t>(rows * blocks));
  std::vector<float> global(static_cast<std::size_t>(rows));
  const PackedView<std::uint8_t> packed = {.codes = {codes.data(), {rows, cols / 2}, {cols / 2, 1}},
                                           .scales = {scales.data(), {rows, blocks}, {blocks, 1}},
                                           .global = {global.data(), {rows}, {1}}};
  kernels::quantize({.x = x, .rule = rule, .out = packed});
  const std::vector<std::int32_t> ends(offsets.begin(), offsets.end());
  const auto items = offsets.back();
  Tensor y = at::empty({items, w.out}, at::kFloat);
  const TensorView<const std::int32_t, 1> ranges = {ends.data(), {std::ssize(ends)}, {1}};
  const TensorView<float, 2> out = {y.data_ptr<float>(), {items, w.out}, {w.out, 1}};
  TensorView<const std::int32_t, 1> rows_of;
  if (!from.empty()) rows_of = {from.data(), {items}, {1}};
  if (rule.is_mx()) {
    kernels::mx_product({.a = packed,
                         .w = w.mxfp4,
                         .experts = w.experts,
                         .offsets = ranges,
                         .from = rows_of,
                         .out = out});
  } else {
    kernels::w4a4(
        {.a = packed, .w = w.nvfp4, .offsets = ranges, .from = rows_of, .out = out, .rule = rule});
  }
  return y;
}

Tensor coded_gate_up(const Coded& coded, const Sorted& sorted, std::int64_t k) {
  const std::int64_t tokens = coded.source.size(0), width = coded.source.size(1);
  std::vector<Bf16> numbers(static_cast<std::size_t>(tokens * width));
  store_bf16(coded.source, numbers.data());
  std::vector<std::int32_t> token;
  const std::int64_t* pair = sorted.pair_of.data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < tokens * k; ++r) {
    token.push_back(static_cast<std::int32_t>(pair[r] / k));
  }
  return coded_product({numbers.data(), {tokens, width}, {width, 1}}, coded.rule, *coded.gate_up,
                       sorted.offsets, token);
}

/// dw[e] = dy[rows of e]^T * x[rows of e]; zero for an expert without rows.
Tensor grouped_weight_grad(const Tensor& dy, const Tensor& x,
                           const std::vector<std::int64_t>& offsets) {
  const auto experts = static_cast<std::int64_t>(offsets.size()) - 1;
  Tensor dw = at::empty({experts, dy.size(1), x.size(1)}, at::kFloat);
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t first = offsets[static_cast<std::size_t>(e)];
    const std::int64_t count = offsets[static_cast<std::size_t>(e) + 1] - first;
    Tensor out = dw[e];
    if (count == 0) {
      out.zero_();
    } else {
      at::mm_out(out, dy.narrow(0, first, count).t(), x.narrow(0, first, count));
    }
  }
  return dw;
}

float sigmoid(float g) { return 1.0f / (1.0f + std::exp(-g)); }

/// Sorted gate-over-up rows [T * K, 2F] -> swiglu [T * K, F] in FP32.
Tensor swiglu_f32(const Tensor& gate_up) {
  const std::int64_t f = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), f}, at::kFloat);
  const float* from = gate_up.data_ptr<float>();
  float* to = out.data_ptr<float>();
  parallel_for(out.size(0), kGrain / f / 4 + 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t r = first; r < end; ++r) {
      const float* g = from + r * 2 * f;
      for (std::int64_t i = 0; i < f; ++i) to[r * f + i] = g[i] * sigmoid(g[i]) * g[i + f];
    }
  });
  return out;
}

/// The same to the rollout's bits, as BF16 numbers; `rounding`, if there is one, sees the rows in
/// the order of pairs. `numbers` keeps what they were before it, sorted.
Tensor swiglu_bf16(const Tensor& gate_up, const Sorted& sorted, const Rounding& rounding,
                   std::vector<Bf16>& numbers) {
  const std::int64_t rows = gate_up.size(0);
  const std::int64_t f = gate_up.size(1) / 2;
  const float* from = gate_up.data_ptr<float>();
  numbers.resize(static_cast<std::size_t>(rows * f));
  kernels::swiglu({.gate = {from, {rows, f}, {2 * f, 1}},
                   .up = {from + f, {rows, f}, {2 * f, 1}},
                   .out = {numbers.data(), {rows, f}, {f, 1}}});
  Tensor out = at::empty({rows, f}, at::kFloat);
  if (!rounding) {
    load_bf16(numbers.data(), out);
    return out;
  }
  std::vector<Bf16> pairs(numbers.size());
  const auto copy_rows = [&](const Bf16* x, const Tensor& index, auto&& put) {
    const std::int64_t* row = index.data_ptr<std::int64_t>();
    parallel_for(rows, kGrain / f + 1, [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t r = first; r < end; ++r) put(x + row[r] * f, r * f);
    });
  };
  copy_rows(numbers.data(), sorted.row_of,
            [&](const Bf16* row, std::int64_t at) { std::copy_n(row, f, pairs.data() + at); });
  const TensorView<Bf16, 2> all = {pairs.data(), {rows, f}, {f, 1}};
  rounding(all, all);
  float* to = out.data_ptr<float>();
  copy_rows(pairs.data(), sorted.pair_of, [&](const Bf16* row, std::int64_t at) {
    std::transform(row, row + f, to + at, [](Bf16 x) { return to_float(x); });
  });
  return out;
}

/// d gate_up from d swiglu, both sorted.
Tensor swiglu_backward(const Tensor& gate_up, const Tensor& grad) {
  const std::int64_t f = grad.size(1);
  Tensor out = at::empty_like(gate_up);
  const float* from = gate_up.data_ptr<float>();
  const float* da = grad.data_ptr<float>();
  float* to = out.data_ptr<float>();
  parallel_for(grad.size(0), kGrain / f / 4 + 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t r = first; r < end; ++r) {
      const float* g = from + r * 2 * f;
      float* dg = to + r * 2 * f;
      for (std::int64_t i = 0; i < f; ++i) {
        const float s = sigmoid(g[i]);
        const float d = da[r * f + i];
        dg[i] = d * g[i + f] * s * (1.0f + g[i] * (1.0f - s));
        dg[i + f] = d * g[i] * s;
      }
    }
  });
  return out;
}

/// out[t] = sum over slots, in order, of gate * y; rounded once. Without gates they are one.
Tensor combine(const Tensor& y, const Tensor& gates, const Tensor& row_of, std::int64_t k,
               bool bf16) {
  const std::int64_t width = y.size(1);
  const std::int64_t tokens = y.size(0) / k;
  Tensor out = at::empty({tokens, width}, at::kFloat);
  const float* from = y.data_ptr<float>();
  const float* gate = gates.defined() ? gates.data_ptr<float>() : nullptr;
  const std::int64_t* row = row_of.data_ptr<std::int64_t>();
  float* to = out.data_ptr<float>();
  parallel_for(tokens, kGrain / width + 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t t = first; t < end; ++t) {
      float* sum = to + t * width;
      std::fill_n(sum, width, 0.0f);
      for (std::int64_t p = t * k; p < (t + 1) * k; ++p) {
        const float g = gate != nullptr ? gate[p] : 1.0f;
        const float* part = from + row[p] * width;
        for (std::int64_t i = 0; i < width; ++i) sum[i] += g * part[i];
      }
      if (!bf16) continue;
      for (std::int64_t i = 0; i < width; ++i) sum[i] = round_bf16(sum[i]);
    }
  });
  return out;
}

struct CombineGrads {
  Tensor y;      // [T * K, D] sorted
  Tensor gates;  // [T, K]
};

CombineGrads combine_backward(const Tensor& dout, const Tensor& y, const Tensor& gates,
                              const Tensor& pair_of) {
  const std::int64_t width = y.size(1);
  const std::int64_t k = gates.size(1);
  CombineGrads grads = {at::empty_like(y), at::empty_like(gates)};
  const float* out = dout.data_ptr<float>();
  const float* value = y.data_ptr<float>();
  const float* gate = gates.data_ptr<float>();
  const std::int64_t* pair = pair_of.data_ptr<std::int64_t>();
  float* dy = grads.y.data_ptr<float>();
  float* dgate = grads.gates.data_ptr<float>();
  parallel_for(y.size(0), kGrain / width + 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t r = first; r < end; ++r) {
      const std::int64_t p = pair[r];
      const float* d = out + p / k * width;
      const float* v = value + r * width;
      dgate[p] = lane_sum(width, [&](std::int64_t i) { return d[i] * v[i]; });
      for (std::int64_t i = 0; i < width; ++i) dy[r * width + i] = gate[p] * d[i];
    }
  });
  return grads;
}

struct Experts : Function<Experts> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& gates,
                        const Tensor& w13, const Tensor& w2, const Tensor& experts,
                        const Rounding& round_slots, bool bf16, const Coded& coded) {
    const std::int64_t k = gates.size(1);
    const Sorted sorted = sort_by_expert(experts, w13.size(0));
    const Tensor in = gather_rows(x, sorted.pair_of, k);
    const bool codes = coded.gate_up != nullptr;
    const Tensor gate_up =
        codes ? coded_gate_up(coded, sorted, k) : grouped(in, w13, sorted.offsets, true);
    std::vector<Bf16> numbers;
    const Tensor down_in = bf16 || round_slots ? swiglu_bf16(gate_up, sorted, round_slots, numbers)
                                               : swiglu_f32(gate_up);
    const std::int64_t rows = down_in.size(0), f = down_in.size(1);
    const Tensor down = codes ? coded_product({numbers.data(), {rows, f}, {f, 1}}, coded.rule,
                                              *coded.down, sorted.offsets, {})
                              : grouped(down_in, w2, sorted.offsets, true);
    ctx->save_for_backward(
        {gates, w13, w2, in, gate_up, down_in, down, sorted.row_of, sorted.pair_of});
    ctx->saved_data["offsets"] = sorted.offsets;
    return combine(down, gates, sorted.row_of, k, bf16);
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &gates = saved[0], &w13 = saved[1], &w2 = saved[2], &in = saved[3];
    const Tensor &gate_up = saved[4], &down_in = saved[5], &down = saved[6];
    const Tensor &row_of = saved[7], &pair_of = saved[8];
    const auto offsets = ctx->saved_data["offsets"].toIntVector();

    const CombineGrads d = combine_backward(upstream[0].contiguous(), down, gates, pair_of);
    const Tensor dw2 = grouped_weight_grad(d.y, down_in, offsets);
    const Tensor dgate_up = swiglu_backward(gate_up, grouped(d.y, w2, offsets, false));
    const Tensor dw13 = grouped_weight_grad(dgate_up, in, offsets);
    const Tensor din = grouped(dgate_up, w13, offsets, false);
    const Tensor dx = combine(din, Tensor(), row_of, gates.size(1), false);
    const Tensor none;
    return {dx, d.gates, dw13, dw2, none, none, none, none};
  }
};

}  // namespace

Tensor experts(const Tensor& x, const Tensor& gates, const Tensor& w13, const Tensor& w2,
               const Tensor& experts, const Rounding& round_slots, bool bf16, const Coded& coded,
               bool any_order) {
  if constexpr (build::has_cuda) {
    if (x.is_cuda()) {
      return cuda::experts(x, gates.contiguous(), w13, w2, experts, round_slots, coded, any_order);
    }
  }
  return Experts::apply(x, gates.contiguous(), w13, w2, experts, round_slots, bf16, coded);
}

Tensor choose_experts(const Tensor& p, std::int64_t k) {
  if constexpr (build::has_cuda) {
    if (p.is_cuda()) return cuda::choose_experts(p, k);
  }
  const std::int64_t tokens = p.size(0);
  const std::int64_t experts = p.size(1);
  Tensor out = at::empty({tokens, k}, at::kLong);
  const float* row = p.data_ptr<float>();
  std::int64_t* to = out.data_ptr<std::int64_t>();
  parallel_for(tokens, 512, [&](std::int64_t first, std::int64_t end) {
    std::vector<std::uint8_t> taken(static_cast<std::size_t>(experts));
    for (std::int64_t t = first; t < end; ++t) {
      std::fill(taken.begin(), taken.end(), std::uint8_t{0});
      for (std::int64_t j = 0; j < k; ++j) {
        std::int64_t best = -1;
        for (std::int64_t e = 0; e < experts; ++e) {
          if (taken[static_cast<std::size_t>(e)] != 0) continue;
          if (best < 0 || row[t * experts + e] > row[t * experts + best]) best = e;
        }
        taken[static_cast<std::size_t>(best)] = 1;
        to[t * k + j] = best;
      }
    }
  });
  return out;
}

}  // namespace lockstep::ops
