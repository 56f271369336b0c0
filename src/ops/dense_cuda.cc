#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>

#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "ops/cuda.h"
#include "ops/device.h"
#include "ops/rows_cuda.h"

namespace lockstep::ops::cuda {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Tensor f32(const Tensor& x) { return x.to(at::kFloat); }
Tensor bf16(const Tensor& x) { return x.to(at::kBFloat16); }

/// Whether tensor cores take them; torch's CPU has no such product.
bool on_tensor_cores(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && (a.scalar_type() == at::kBFloat16 || b.scalar_type() == at::kBFloat16);
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, bool rounded) {
    ctx->save_for_backward({x, w});
    return rounded ? at::mm(x, w.t()) : product(x, w.t());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &dy = grads[0], &x = saved[0], &w = saved[1];
    if (dy.scalar_type() == x.scalar_type()) {
      add_product(grad_of(w), dy.t(), x);
      return {at::mm(dy, w), Tensor(), Tensor()};
    }
    // The router's: few outputs, whose gradient is not rounded.
    grad_of(w).addmm_(dy.t(), f32(x));
    return {at::mm(dy, f32(w)).to(x.scalar_type()), Tensor(), Tensor()};
  }
};

/// Along the last dimension; the numbers before the weight, and 1 / rms.
struct Normed {
  Tensor y;
  Tensor r;
};

Normed normalize(const Tensor& x, double eps) {
  const Tensor wide = f32(x);
  const Tensor r = (wide.square().mean(-1, true) + eps).rsqrt();
  return {(wide * r).to(x.scalar_type()), r};
}

/// d x; adds to w's gradient.   dy FP32
Tensor normalize_backward(const Tensor& x, const Tensor& w, const Tensor& dy, double eps) {
  const Tensor wide = f32(x);
  const auto [y, r] = normalize(x, eps);
  grad_of(w).add_((dy * f32(y)).reshape({-1, x.size(-1)}).sum(0));
  const Tensor weighted = dy * f32(w);
  const Tensor mean = (weighted * wide).mean(-1, true) * r * r;
  return (r * (weighted - wide * mean)).to(x.scalar_type());
}

std::span<const Bf16> span_of(const Tensor& w) {
  return {static_cast<const Bf16*>(w.const_data_ptr()), static_cast<std::size_t>(w.numel())};
}

Bf16* bf16_of(const Tensor& x) { return static_cast<Bf16*>(x.data_ptr()); }

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, double eps) {
    ctx->save_for_backward({x, w});
    ctx->saved_data["eps"] = eps;
    if (!has_kernels(x)) return normalize(x, eps).y * w;
    const Tensor y = at::empty_like(x);
    kernels::rms_norm({.x = view_of<const Bf16>(x),
                       .weight = span_of(w),
                       .eps = static_cast<float>(eps),
                       .y = view_of<Bf16>(y)},
                      stream_of(x));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const double eps = ctx->saved_data["eps"].toDouble();
    const Tensor &x = saved[0], &w = saved[1];
    const std::int64_t cols = x.size(1);
    if (!has_kernels(x) || cols % 2 != 0 || cols > kMostNormCols) {
      return {normalize_backward(x, w, f32(grads[0]), eps), Tensor(), Tensor()};
    }
    const Device device = house_device(x);
    const Tensor dy = grads[0].contiguous(), dx = at::empty_like(x);
    const Tensor parts = at::empty({norm_parts(device), cols}, x.options().dtype(at::kFloat));
    norm_backward({.x = bf16_of(x),
                   .weight = bf16_of(w),
                   .dy = bf16_of(dy),
                   .dx = bf16_of(dx),
                   .parts = parts.data_ptr<float>(),
                   .rows = x.size(0),
                   .cols = static_cast<std::int32_t>(cols),
                   .eps = static_cast<float>(eps)},
                  device, stream_of(x));
    grad_of(w).add_(parts.sum(0));
    return {dx, Tensor(), Tensor()};
  }
};

/// Pairs (i, i + C / 2) of x [T, heads, C] in FP32; `direction` -1 is the way back.
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, double direction) {
  const std::int64_t half = x.size(-1) / 2;
  const Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  const Tensor s = sin * direction;
  return at::cat({a * cos - b * s, b * cos + a * s}, -1);
}

struct SplitHeads : Function<SplitHeads> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& q_norm,
                               const Tensor& k_norm, const Tensor& positions, const RopeTable& rope,
                               const HeadShape& shape) {
    ctx->save_for_backward({qkv, q_norm, k_norm, positions, rope.cos, rope.sin});
    ctx->saved_data["shape"] =
        std::vector<std::int64_t>{shape.heads, shape.kv_heads, shape.head_dim};
    ctx->saved_data["eps"] = shape.eps;
    const std::int64_t t = qkv.size(0), h = shape.heads, n = shape.kv_heads, c = shape.head_dim;
    const Tensor heads = qkv.view({t, h + 2 * n, c});
    const auto turned = [&](std::int64_t first, std::int64_t count, const Tensor& norm) {
      const Tensor part = heads.narrow(1, first, count);
      return has_kernels(qkv) ? by_kernel(part, norm, positions, rope, shape)
                              : composed(part, norm, positions, rope, shape);
    };
    return {turned(0, h, q_norm), turned(h, n, k_norm),
            heads.narrow(1, h + n, n).reshape({t, n * c})};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const double eps = ctx->saved_data["eps"].toDouble();
    const Tensor& qkv = saved[0];
    const std::int64_t t = qkv.size(0), h = shape[0], n = shape[1], c = shape[2];
    const Tensor none;
    if (has_kernels(qkv) && c <= kMostHeadDim) {
      const Tensor dqkv = at::empty_like(qkv);
      backward_by_kernel(saved, {0, h, c}, saved[1], grads[0].contiguous(), eps, dqkv);
      backward_by_kernel(saved, {h, n, c}, saved[2], grads[1].contiguous(), eps, dqkv);
      dqkv.narrow(1, (h + n) * c, n * c).copy_(grads[2]);
      return {dqkv, none, none, none, none, none};
    }
    const Tensor heads = qkv.view({t, h + 2 * n, c});
    const Tensor cos = saved[4].index_select(0, saved[3]).unsqueeze(1);
    const Tensor sin = saved[5].index_select(0, saved[3]).unsqueeze(1);
    const auto back = [&](std::int64_t first, std::int64_t count, const Tensor& norm,
                          const Tensor& grad) {
      const Tensor dy = rotate(f32(grad).view({t, count, c}), cos, sin, -1.0);
      return normalize_backward(heads.narrow(1, first, count), norm, dy, eps);
    };
    const Tensor dqkv = at::cat(
        {back(0, h, saved[1], grads[0]), back(h, n, saved[2], grads[1]), grads[2].view({t, n, c})},
        1);
    return {dqkv.view({t, -1}), none, none, none, none, none};
  }

 private:
  /// heads [T, count, C] -> [T, count * C]
  static Tensor composed(const Tensor& heads, const Tensor& norm, const Tensor& positions,
                         const RopeTable& rope, const HeadShape& shape) {
    const Tensor cos = rope.cos.index_select(0, positions).unsqueeze(1);
    const Tensor sin = rope.sin.index_select(0, positions).unsqueeze(1);
    const Tensor y = normalize(heads, shape.eps).y * norm;
    return rotate(f32(y), cos, sin, 1.0).to(heads.scalar_type()).view({heads.size(0), -1});
  }

  static Tensor by_kernel(const Tensor& heads, const Tensor& norm, const Tensor& positions,
                          const RopeTable& rope, const HeadShape& shape) {
    const Tensor x = heads.contiguous().view({heads.size(0), -1});
    kernels::rope({.x = view_of<Bf16>(x),
                   .head_dim = static_cast<std::int32_t>(shape.head_dim),
                   .positions = {positions.const_data_ptr<std::int32_t>(),
                                 static_cast<std::size_t>(positions.size(0))},
                   .table = rope.there.get(),
                   .norm = span_of(norm),
                   .eps = static_cast<float>(shape.eps)},
                  stream_of(x));
    return x;
  }

  struct Part {
    std::int64_t first, count, dim;  // heads of a row
  };
  static void backward_by_kernel(const variable_list& saved, const Part& part, const Tensor& norm,
                                 const Tensor& dy, double eps, const Tensor& dqkv) {
    const Tensor& qkv = saved[0];
    const Device device = house_device(qkv);
    const Tensor parts = at::empty({norm_parts(device), part.dim}, qkv.options().dtype(at::kFloat));
    heads_backward({.x = bf16_of(qkv) + part.first * part.dim,
                    .weight = bf16_of(norm),
                    .dy = bf16_of(dy),
                    .cos = saved[4].const_data_ptr<float>(),
                    .sin = saved[5].const_data_ptr<float>(),
                    .positions = saved[3].const_data_ptr<std::int32_t>(),
                    .dx = bf16_of(dqkv) + part.first * part.dim,
                    .parts = parts.data_ptr<float>(),
                    .rows = qkv.size(0),
                    .stride = qkv.size(1),
                    .heads = static_cast<std::int32_t>(part.count),
                    .dim = static_cast<std::int32_t>(part.dim),
                    .eps = static_cast<float>(eps)},
                   device, stream_of(qkv));
    grad_of(norm).add_(parts.sum(0));
  }
};

}  // namespace

bool has_kernels(const Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kBFloat16; }

Tensor product(const Tensor& a, const Tensor& b) {
  if (on_tensor_cores(a, b)) return at::mm(bf16(a), bf16(b), at::kFloat);
  return at::mm(f32(a), f32(b));
}

void add_product(const Tensor& sum, const Tensor& a, const Tensor& b) {
  Tensor to = sum;
  if (on_tensor_cores(a, b)) {
    at::addmm_out(to, sum, bf16(a), bf16(b), at::kFloat);
  } else {
    to.addmm_(f32(a), f32(b));
  }
}

Tensor grad_of(const Tensor& w) {
  if (!w.grad().defined()) {
    w.mutable_grad() = at::zeros(w.sizes(), w.options().dtype(at::kFloat));
  }
  return w.grad();
}

Tensor linear(const Tensor& x, const Tensor& w, bool rounded) {
  return Linear::apply(x, w, rounded);
}

Tensor rms_norm(const Tensor& x, const Tensor& w, double eps) { return RmsNorm::apply(x, w, eps); }

Heads split_heads(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                  const RopeTable& rope, const Tensor& positions, const HeadShape& shape) {
  const variable_list out = SplitHeads::apply(qkv, q_norm, k_norm, positions, rope, shape);
  return {out[0], out[1], out[2]};
}

bool scores_rows(const Tensor& x, std::int64_t vocabulary) {
  return has_kernels(x) && vocabulary % 4 == 0;
}

void score_rows(const Tensor& logits, const Tensor& temperature, const Tensor& token,
                const Tensor& logp, const Tensor& log_sum, const Tensor& entropy) {
  score_rows({.logits = logits.const_data_ptr<float>(),
              .temperature = temperature.const_data_ptr<float>(),
              .token = token.const_data_ptr<std::int64_t>(),
              .logp = logp.data_ptr<float>(),
              .log_sum = log_sum.data_ptr<float>(),
              .entropy = entropy.data_ptr<float>(),
              .rows = logits.size(0),
              .vocabulary = static_cast<std::int32_t>(logits.size(1))},
             house_device(logits), stream_of(logits));
}

Tensor score_rows_backward(const Tensor& logits, const Tensor& temperature, const Tensor& token,
                           const Tensor& log_sum, const Tensor& slope) {
  const Tensor d = at::empty(logits.sizes(), logits.options().dtype(at::kBFloat16));
  score_rows_backward({.logits = logits.const_data_ptr<float>(),
                       .temperature = temperature.const_data_ptr<float>(),
                       .log_sum = log_sum.const_data_ptr<float>(),
                       .slope = slope.const_data_ptr<float>(),
                       .token = token.const_data_ptr<std::int64_t>(),
                       .d = bf16_of(d),
                       .rows = logits.size(0),
                       .vocabulary = static_cast<std::int32_t>(logits.size(1))},
                      house_device(logits), stream_of(logits));
  return d;
}

}  // namespace lockstep::ops::cuda
