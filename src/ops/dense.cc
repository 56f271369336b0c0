#include "ops/dense.h"

#include <ATen/ops/add.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "base/build.h"
#include "base/parallel.h"
#include "ops/cuda.h"
#include "ops/device.h"
#include "ops/round.h"

namespace lockstep::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Rows whose contributions to a weight's gradient are summed before the parts are: fixed, so that
// the sum does not depend on the number of threads.
constexpr std::int64_t kChunk = 256;
void round_in_place(const Tensor& x) {
  float* data = x.data_ptr<float>();
  parallel_for(x.numel(), kGrain, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) data[i] = round_bf16(data[i]);
  });
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, bool bf16) {
    ctx->save_for_backward({x, w});
    Tensor y = at::mm(x, w.t());
    if (bf16) round_in_place(y);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& dy = grads[0];
    return {at::mm(dy, saved[1]), at::mm(dy.t(), saved[0]), Tensor()};
  }
};

struct Add : Function<Add> {
  static Tensor forward(AutogradContext*, const Tensor& h, const Tensor& o, bool bf16) {
    Tensor y = at::add(h, o);
    if (bf16) round_in_place(y);
    return y;
  }

  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], grads[0], Tensor()};
  }
};

float inverse_rms(const float* x, std::int64_t n, float eps) {
  const float squares = lane_sum(n, [&](std::int64_t i) { return x[i] * x[i]; });
  return 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
}

template <bool kBf16>
void norm_row(const float* x, const float* w, std::int64_t n, float eps, float* out) {
  const float r = inverse_rms(x, n, eps);
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = rounded<kBf16>(rounded<kBf16>(x[i] * r) * w[i]);
  }
}

/// dx may not be dy. Adds to dw.
template <bool kBf16>
void norm_row_backward(const float* x, const float* w, const float* dy, std::int64_t n, float eps,
                       float* dx, float* dw) {
  const float r = inverse_rms(x, n, eps);
  const float mean = lane_sum(n, [&](std::int64_t i) { return dy[i] * w[i] * x[i]; }) * r * r /
                     static_cast<float>(n);
  for (std::int64_t i = 0; i < n; ++i) {
    dw[i] += dy[i] * rounded<kBf16>(x[i] * r);
    dx[i] = r * (dy[i] * w[i] - x[i] * mean);
  }
}

/// Calls body(first, end, part) on chunks of rows; the sum of the parts.   part [width]
template <typename Body>
Tensor sum_of_chunks(std::int64_t rows, std::int64_t width, Body&& body) {
  const std::int64_t chunks = (rows + kChunk - 1) / kChunk;
  Tensor parts = at::zeros({std::max<std::int64_t>(chunks, 1), width}, at::kFloat);
  float* data = parts.data_ptr<float>();
  parallel_for(chunks, 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t c = first; c < end; ++c) {
      body(c * kChunk, std::min(rows, (c + 1) * kChunk), data + c * width);
    }
  });
  for (std::int64_t c = 1; c < chunks; ++c) {
    for (std::int64_t i = 0; i < width; ++i) data[i] += data[c * width + i];
  }
  return parts[0];
}

template <bool kBf16>
Tensor norm_forward(const Tensor& x, const Tensor& w, float eps) {
  Tensor y = at::empty_like(x);
  const std::int64_t n = x.size(1);
  const float* from = x.data_ptr<float>();
  const float* weight = w.data_ptr<float>();
  float* to = y.data_ptr<float>();
  parallel_for(x.size(0), kGrain / n + 1, [&](std::int64_t first, std::int64_t end) {
    for (std::int64_t t = first; t < end; ++t) {
      norm_row<kBf16>(from + t * n, weight, n, eps, to + t * n);
    }
  });
  return y;
}

template <bool kBf16>
variable_list norm_backward(const Tensor& x, const Tensor& w, const Tensor& dy, float eps) {
  Tensor dx = at::empty_like(x);
  const std::int64_t n = x.size(1);
  const float* from = x.data_ptr<float>();
  const float* weight = w.data_ptr<float>();
  const float* grad = dy.data_ptr<float>();
  float* to = dx.data_ptr<float>();
  const Tensor dw =
      sum_of_chunks(x.size(0), n, [&](std::int64_t first, std::int64_t end, float* part) {
        for (std::int64_t t = first; t < end; ++t) {
          const std::int64_t at = t * n;
          norm_row_backward<kBf16>(from + at, weight, grad + at, n, eps, to + at, part);
        }
      });
  return {dx, dw, Tensor(), Tensor()};
}

struct RmsNorm : Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w, double eps,
                        bool bf16) {
    ctx->save_for_backward({x, w});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["bf16"] = bf16;
    const auto e = static_cast<float>(eps);
    return bf16 ? norm_forward<true>(x, w, e) : norm_forward<false>(x, w, e);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto e = static_cast<float>(ctx->saved_data["eps"].toDouble());
    const Tensor dy = grads[0].contiguous();
    return ctx->saved_data["bf16"].toBool() ? norm_backward<true>(saved[0], saved[1], dy, e)
                                            : norm_backward<false>(saved[0], saved[1], dy, e);
  }
};

/// Rotates pairs (i, i + C/2) of `x` in place; `direction` -1 is the way back.
template <bool kBf16>
void rotate(float* x, const float* cos, const float* sin, std::int64_t half, float direction) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i];
    const float b = x[i + half];
    const float s = direction * sin[i];
    x[i] = rounded<kBf16>(a * cos[i] - b * s);
    x[i + half] = rounded<kBf16>(b * cos[i] + a * s);
  }
}

/// Where the parts of a token lie, forward and backward.
struct HeadViews {
  const HeadShape& shape;
  const float* qkv;
  const float* q_norm;
  const float* k_norm;
  const float* cos;
  const float* sin;
  const std::int32_t* positions;

  std::int64_t width() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_dim; }
};

template <bool kBf16>
void heads_forward(const HeadViews& in, std::int64_t t, float* q, float* k, float* v) {
  const HeadShape& s = in.shape;
  const std::int64_t c = s.head_dim;
  const auto eps = static_cast<float>(s.eps);
  const float* row = in.qkv + t * in.width();
  const float* cos = in.cos + in.positions[t] * (c / 2);
  const float* sin = in.sin + in.positions[t] * (c / 2);
  for (std::int64_t h = 0; h < s.heads; ++h) {
    float* out = q + (t * s.heads + h) * c;
    norm_row<kBf16>(row + h * c, in.q_norm, c, eps, out);
    rotate<kBf16>(out, cos, sin, c / 2, 1.0f);
  }
  for (std::int64_t h = 0; h < s.kv_heads; ++h) {
    float* out = k + (t * s.kv_heads + h) * c;
    norm_row<kBf16>(row + (s.heads + h) * c, in.k_norm, c, eps, out);
    rotate<kBf16>(out, cos, sin, c / 2, 1.0f);
  }
  const float* values = row + (s.heads + s.kv_heads) * c;
  std::copy(values, values + s.kv_heads * c, v + t * s.kv_heads * c);
}

/// Overwrites dq and dk of the token on the way. `part` is d q_norm, then d k_norm.
template <bool kBf16>
void heads_backward(const HeadViews& in, std::int64_t t, float* dq, float* dk, const float* dv,
                    float* dqkv, float* part) {
  const HeadShape& s = in.shape;
  const std::int64_t c = s.head_dim;
  const auto eps = static_cast<float>(s.eps);
  const float* row = in.qkv + t * in.width();
  float* out = dqkv + t * in.width();
  const float* cos = in.cos + in.positions[t] * (c / 2);
  const float* sin = in.sin + in.positions[t] * (c / 2);
  for (std::int64_t h = 0; h < s.heads; ++h) {
    float* grad = dq + (t * s.heads + h) * c;
    rotate<false>(grad, cos, sin, c / 2, -1.0f);
    norm_row_backward<kBf16>(row + h * c, in.q_norm, grad, c, eps, out + h * c, part);
  }
  for (std::int64_t h = 0; h < s.kv_heads; ++h) {
    float* grad = dk + (t * s.kv_heads + h) * c;
    const std::int64_t at = (s.heads + h) * c;
    rotate<false>(grad, cos, sin, c / 2, -1.0f);
    norm_row_backward<kBf16>(row + at, in.k_norm, grad, c, eps, out + at, part + c);
  }
  const float* values = dv + t * s.kv_heads * c;
  std::copy(values, values + s.kv_heads * c, out + (s.heads + s.kv_heads) * c);
}

struct SplitHeads : Function<SplitHeads> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& q_norm,
                               const Tensor& k_norm, const Tensor& cos, const Tensor& sin,
                               const Tensor& positions, const HeadShape& shape) {
    ctx->save_for_backward({qkv, q_norm, k_norm, cos, sin, positions});
    ctx->saved_data["shape"] =
        std::vector<std::int64_t>{shape.heads, shape.kv_heads, shape.head_dim, shape.bf16 ? 1 : 0};
    ctx->saved_data["eps"] = shape.eps;
    const HeadViews in = views(qkv, q_norm, k_norm, cos, sin, positions, shape);
    const std::int64_t tokens = qkv.size(0);
    Tensor q = at::empty({tokens, shape.heads * shape.head_dim}, at::kFloat);
    Tensor k = at::empty({tokens, shape.kv_heads * shape.head_dim}, at::kFloat);
    Tensor v = at::empty_like(k);
    float* to[] = {q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>()};
    const auto one = shape.bf16 ? heads_forward<true> : heads_forward<false>;
    parallel_for(tokens, kGrain / in.width() + 1, [&](std::int64_t first, std::int64_t end) {
      for (std::int64_t t = first; t < end; ++t) one(in, t, to[0], to[1], to[2]);
    });
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto numbers = ctx->saved_data["shape"].toIntVector();
    const HeadShape shape = {.heads = numbers[0],
                             .kv_heads = numbers[1],
                             .head_dim = numbers[2],
                             .eps = ctx->saved_data["eps"].toDouble(),
                             .bf16 = numbers[3] != 0};
    const HeadViews in = views(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], shape);
    // Clones, because rotating back overwrites them.
    const Tensor dq = grads[0].clone(at::MemoryFormat::Contiguous);
    const Tensor dk = grads[1].clone(at::MemoryFormat::Contiguous);
    const Tensor dv = grads[2].contiguous();
    Tensor dqkv = at::empty_like(saved[0]);
    float* at[] = {dq.data_ptr<float>(), dk.data_ptr<float>(), dqkv.data_ptr<float>()};
    const float* values = dv.data_ptr<float>();
    const auto one = shape.bf16 ? heads_backward<true> : heads_backward<false>;
    const Tensor norms = sum_of_chunks(saved[0].size(0), 2 * shape.head_dim,
                                       [&](std::int64_t first, std::int64_t end, float* part) {
                                         for (std::int64_t t = first; t < end; ++t)
                                           one(in, t, at[0], at[1], values, at[2], part);
                                       });
    const Tensor none;
    return {dqkv,
            norms.narrow(0, 0, shape.head_dim).clone(),
            norms.narrow(0, shape.head_dim, shape.head_dim).clone(),
            none,
            none,
            none,
            none};
  }

 private:
  static HeadViews views(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                         const Tensor& cos, const Tensor& sin, const Tensor& positions,
                         const HeadShape& shape) {
    return {shape,
            qkv.data_ptr<float>(),
            q_norm.data_ptr<float>(),
            k_norm.data_ptr<float>(),
            cos.data_ptr<float>(),
            sin.data_ptr<float>(),
            positions.data_ptr<std::int32_t>()};
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, bool bf16) {
  if constexpr (build::has_cuda) {
    if (x.is_cuda()) return cuda::linear(x, w, bf16);
  }
  return Linear::apply(x, w, bf16);
}

Tensor add(const Tensor& h, const Tensor& o, bool bf16) {
  if (h.is_cuda()) return at::add(h, o);  // of two BF16 tensors it is rounded
  return Add::apply(h, o, bf16);
}

void product_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  if constexpr (build::has_cuda) {
    if (a.is_cuda()) {
      out.copy_(cuda::product(a, b));
      return;
    }
  }
  Tensor to = out;
  at::mm_out(to, a, b);
}

Tensor product(const Tensor& a, const Tensor& b) {
  if constexpr (build::has_cuda) {
    if (a.is_cuda()) return cuda::product(a, b);
  }
  return at::mm(a, b);
}

void add_product(const Tensor& sum, const Tensor& a, const Tensor& b) {
  if constexpr (build::has_cuda) {
    if (a.is_cuda()) return cuda::add_product(sum, a, b);
  }
  Tensor to = sum;
  to.addmm_(a, b);
}

Tensor rms_norm(const Tensor& x, const Tensor& w, double eps, bool bf16) {
  if constexpr (build::has_cuda) {
    if (x.is_cuda()) return cuda::rms_norm(x, w, eps);
  }
  return RmsNorm::apply(x, w, eps, bf16);
}

RopeTable::RopeTable(std::int64_t positions, std::int64_t head_dim, double theta, Device device)
    : cos(at::empty({positions, head_dim / 2}, at::kFloat)), sin(at::empty_like(cos)) {
  float* c = cos.data_ptr<float>();
  float* s = sin.data_ptr<float>();
  const std::int64_t half = head_dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const double frequency =
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    for (std::int64_t t = 0; t < positions; ++t) {
      c[t * half + i] = static_cast<float>(std::cos(static_cast<double>(t) * frequency));
      s[t * half + i] = static_cast<float>(std::sin(static_cast<double>(t) * frequency));
    }
  }
  if (device.kind == Device::Kind::kCpu) return;
  const auto table =
      std::make_shared<kernels::RopeTable>(theta, static_cast<std::int32_t>(head_dim), device);
  table->grow(static_cast<std::int32_t>(positions));
  there = table;
  cos = upload(cos, torch_device(device));
  sin = upload(sin, torch_device(device));
}

Heads split_heads(const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                  const RopeTable& rope, const Tensor& positions, const HeadShape& shape) {
  if constexpr (build::has_cuda) {
    if (qkv.is_cuda()) return cuda::split_heads(qkv, q_norm, k_norm, rope, positions, shape);
  }
  const variable_list out =
      SplitHeads::apply(qkv, q_norm, k_norm, rope.cos, rope.sin, positions, shape);
  return {out[0], out[1], out[2]};
}

}  // namespace lockstep::ops
