/// The network once more, in plain tensor operations on one sequence, for autograd and for tests.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <vector>

#include "model/config.h"
#include "model/weights.h"
#include "ops/torch.h"
#include "record/trajectory.h"

namespace lockstep::train {

using at::Tensor;
using Role = WeightId::Role;
using Weights = std::map<WeightId, Tensor>;

inline Tensor plain_norm(const Tensor& x, const Tensor& w, double eps) {
  return x * (x.pow(2).mean(-1, true) + eps).rsqrt() * w.squeeze(0);
}

inline Tensor plain_rope(const Tensor& x, double theta) {  // [H, T, C]
  const std::int64_t c = x.size(2);
  const Tensor frequency = at::pow(theta, at::arange(0, c, 2, at::kDouble) / -c);
  const Tensor angle = at::outer(at::arange(x.size(1), at::kDouble), frequency);
  const Tensor both = at::cat({angle, angle}, 1);
  const Tensor turned = at::cat({-x.narrow(2, c / 2, c / 2), x.narrow(2, 0, c / 2)}, 2);
  return x * both.cos().to(at::kFloat) + turned * both.sin().to(at::kFloat);
}

inline Tensor plain_attention(const ModelConfig& m, const Weights& w, Layer layer,
                              const Tensor& h) {
  const auto at = [&](Role role) { return w.at({role, layer, {}}); };
  const std::int64_t t = h.size(0), c = m.head_dim;
  const Tensor x = plain_norm(h, at(Role::kAttentionNorm), m.rms_eps);
  const auto heads = [&](Role role, std::int64_t n) {
    return x.mm(at(role).t()).view({t, n, c}).transpose(0, 1);
  };
  const Tensor q = plain_rope(plain_norm(heads(Role::kQ, m.num_heads), at(Role::kQNorm), m.rms_eps),
                              m.rope_theta);
  Tensor k = plain_rope(plain_norm(heads(Role::kK, m.num_kv_heads), at(Role::kKNorm), m.rms_eps),
                        m.rope_theta);
  const std::int64_t group = m.num_heads / m.num_kv_heads;
  k = k.repeat_interleave(group, 0);
  const Tensor v = heads(Role::kV, m.num_kv_heads).repeat_interleave(group, 0);
  const Tensor later = at::ones({t, t}, at::kBool).triu(1);
  const Tensor scores = (q.matmul(k.transpose(1, 2)) / std::sqrt(static_cast<double>(c)))
                            .masked_fill(later, -INFINITY);
  const Tensor o = scores.softmax(-1).matmul(v).transpose(0, 1).reshape({t, m.q_width()});
  return o.mm(at(Role::kO).t());
}

inline Tensor plain_mlp(const ModelConfig& m, const Weights& w, Layer layer, const Tensor& h,
                        const Tensor& routes) {
  const Tensor x = plain_norm(h, w.at({Role::kMlpNorm, layer, {}}), m.rms_eps);
  const Tensor p = x.mm(w.at({Role::kRouter, layer, {}}).t()).softmax(-1);
  const Tensor chosen =
      routes.defined() ? routes : std::get<1>(p.detach().topk(m.experts_per_token));
  Tensor gates = p.gather(1, chosen);
  if (m.normalize_gates) gates = gates / gates.sum(1, true);
  Tensor out = at::zeros_like(x);
  for (std::int32_t e = 0; e < m.num_experts; ++e) {
    const Tensor gate = (gates * (chosen == e)).sum(1, true);
    const Tensor gate_up = x.mm(w.at({Role::kGateUp, layer, Expert{e}}).t());
    const Tensor g = gate_up.narrow(1, 0, m.expert_width);
    const Tensor u = gate_up.narrow(1, m.expert_width, m.expert_width);
    const Tensor y = (g * g.sigmoid() * u).mm(w.at({Role::kDown, layer, Expert{e}}).t());
    out = out + gate * y;
  }
  return out;
}

/// log p of every token at each position after the first.   [T - 1, V]
inline Tensor plain_log_softmax(const ModelConfig& m, const Weights& w,
                                const Trajectory& trajectory,
                                const std::vector<Tensor>& routes = {}) {
  const auto t = static_cast<std::int64_t>(trajectory.tokens.size()) - 1;
  Tensor tokens = at::empty({t + 1}, at::kLong);
  std::copy(trajectory.tokens.begin(), trajectory.tokens.end(), tokens.data_ptr<std::int64_t>());
  Tensor h = w.at({Role::kEmbedding, {}, {}}).index_select(0, tokens.narrow(0, 0, t));
  for (std::int32_t i = 0; i < m.num_layers; ++i) {
    const Layer layer{i};
    h = h + plain_attention(m, w, layer, h);
    h = h +
        plain_mlp(m, w, layer, h, routes.empty() ? Tensor() : routes[static_cast<std::size_t>(i)]);
  }
  const Tensor& head = w.at({m.tied_embeddings ? Role::kEmbedding : Role::kHead, {}, {}});
  const Tensor logits = plain_norm(h, w.at({Role::kFinalNorm, {}, {}}), m.rms_eps).mm(head.t());
  return (logits / trajectory.sampling.temperature).log_softmax(-1);
}

/// log p of each token after the first.   [T - 1]
inline Tensor plain_logp(const ModelConfig& m, const Weights& w, const Trajectory& trajectory,
                         const std::vector<Tensor>& routes = {}) {
  const Tensor all = plain_log_softmax(m, w, trajectory, routes);
  const Tensor tokens = at::empty({all.size(0) + 1}, at::kLong);
  std::copy(trajectory.tokens.begin(), trajectory.tokens.end(), tokens.data_ptr<std::int64_t>());
  return all.gather(1, tokens.narrow(0, 1, all.size(0)).unsqueeze(1)).squeeze(1);
}

}  // namespace lockstep::train
