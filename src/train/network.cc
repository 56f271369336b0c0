#include "train/network.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "base/build.h"
#include "ops/attention.h"
#include "ops/cuda.h"
#include "ops/device.h"
#include "ops/experts.h"

namespace lockstep::train {
namespace {

using at::Tensor;
using Role = WeightId::Role;

// Logits that are held at once, in numbers.
constexpr std::int64_t kLogits = std::int64_t{1} << 25;
constexpr std::int64_t kLogitsOnDevice = std::int64_t{1} << 28;

/// A leaf over the compute weights that lie from `id` on, whose gradient lies in the same place of
/// `grads`: in FP32, whatever the weights' type.
Tensor leaf(const Parameters& parameters, const Floats& grads, const WeightId& id,
            at::IntArrayRef shape) {
  const std::int64_t offset = parameters.slot(id).offset;
  const auto numbers = at::TensorOptions(ops::torch_device(parameters.device())).dtype(at::kFloat);
  const bool narrow = parameters.compute_bf16.bytes() > 0;
  Tensor weight = narrow ? at::from_blob(parameters.compute_bf16.as<Bf16>() + offset, shape,
                                         numbers.dtype(at::kBFloat16))
                         : at::from_blob(parameters.compute.data() + offset, shape, numbers);
  weight.requires_grad_(true);
  weight.mutable_grad() = at::from_blob(grads.data() + offset, shape, numbers);
  return weight;
}

Tensor int64_tensor(const std::vector<std::int64_t>& values, const at::Device& device) {
  return ops::upload(ops::over(values, at::kLong), device);
}

/// Copies to the host, and waits.
void fetch(const Tensor& from, std::vector<float>& to) {
  if (to.empty()) return;
  const Tensor here = from.cpu().contiguous();
  std::copy_n(here.const_data_ptr<float>(), to.size(), to.begin());
}

}  // namespace

Network::Network(const ModelConfig& config, const Parameters& parameters, const Floats& grads,
                 const ops::RopeTable& rope, bool bf16)
    : config_(config), parameters_(parameters), bf16_(bf16), rope_(rope) {
  const std::int64_t d = config.hidden;
  const std::int64_t c = config.head_dim;
  const std::int64_t e = config.num_experts;
  const std::int64_t f = config.expert_width;
  for (std::int32_t i = 0; i < config.num_layers; ++i) {
    const auto at = [&](Role role, at::IntArrayRef shape) {
      return leaf(parameters, grads, {role, Layer{i}, {}}, shape);
    };
    layers_.push_back({.attention_norm = at(Role::kAttentionNorm, {d}),
                       .qkv = at(Role::kQ, {config.q_width() + 2 * config.kv_width(), d}),
                       .o = at(Role::kO, {d, config.q_width()}),
                       .q_norm = at(Role::kQNorm, {c}),
                       .k_norm = at(Role::kKNorm, {c}),
                       .mlp_norm = at(Role::kMlpNorm, {d}),
                       .router = at(Role::kRouter, {e, d}),
                       .w13 = at(Role::kGateUp, {e, 2 * f, d}),
                       .w2 = at(Role::kDown, {e, d, f})});
  }
  const Role head = config.tied_embeddings ? Role::kEmbedding : Role::kHead;
  embedding_ = leaf(parameters, grads, {Role::kEmbedding, {}, {}}, {config.vocabulary, d});
  final_norm_ = leaf(parameters, grads, {Role::kFinalNorm, {}, {}}, {d});
  head_ = leaf(parameters, grads, {head, {}, {}}, {config.vocabulary, d});
  embedding_grad_ = embedding_.grad();
  head_grad_ = head_.grad();
  embedding_ = embedding_.detach();
  head_ = head_.detach();
}

Tensor Network::embed(const Pack& pack) const {
  if (embedding_.is_cuda()) {
    return embedding_.index_select(0, ops::upload(ops::over(pack.token, at::kInt), device()));
  }
  Tensor h = at::empty({pack.rows(), config_.hidden}, at::kFloat);
  const float* from = embedding_.data_ptr<float>();
  float* to = h.data_ptr<float>();
  for (std::size_t t = 0; t < pack.token.size(); ++t) {
    to = std::copy_n(from + std::int64_t{pack.token[t]} * config_.hidden, config_.hidden, to);
  }
  return h;
}

void Network::embed_backward(const Tensor& dh, const Pack& pack) const {
  if (dh.is_cuda()) {
    const Tensor tokens = ops::upload(ops::over(pack.token, at::kInt), device()).to(at::kLong);
    Tensor grad = embedding_grad_;
    grad.index_put_({tokens}, dh.to(at::kFloat), /*accumulate=*/true);  // sorted, then added
    return;
  }
  const float* from = dh.data_ptr<float>();
  float* to = embedding_grad_.data_ptr<float>();
  const std::int64_t d = config_.hidden;
  for (std::size_t t = 0; t < pack.token.size(); ++t) {
    float* row = to + pack.token[t] * d;
    const float* grad = from + static_cast<std::int64_t>(t) * d;
    for (std::int64_t i = 0; i < d; ++i) row[i] += grad[i];
  }
}

Tensor Network::attention(std::int32_t layer, const Tensor& h, const Pack& pack,
                          const Sites& sites) const {
  const LayerWeights& w = layers_[static_cast<std::size_t>(layer)];
  const Tensor positions = ops::upload(ops::over(pack.position, at::kInt), device());
  const Tensor x = ops::rms_norm(h, w.attention_norm, config_.rms_eps, bf16_);
  const ops::Heads heads =
      ops::split_heads(ops::linear(x, w.qkv, bf16_), w.q_norm, w.k_norm, rope_, positions,
                       {.heads = config_.num_heads,
                        .kv_heads = config_.num_kv_heads,
                        .head_dim = config_.head_dim,
                        .eps = config_.rms_eps,
                        .bf16 = bf16_});
  const Tensor k = sites.kv({Layer{layer}, Site::kK}, heads.k);
  const Tensor v = sites.kv({Layer{layer}, Site::kV}, heads.v);
  const Tensor o = ops::attention(heads.q, k, v, pack.blocks,
                                  {.heads = config_.num_heads,
                                   .kv_heads = config_.num_kv_heads,
                                   .head_dim = config_.head_dim,
                                   .bf16 = bf16_});
  return ops::linear(o, w.o, bf16_);
}

Network::Routing Network::route(Layer layer, const Tensor& logits, const Sites& sites) const {
  if constexpr (build::has_cuda) {
    if (logits.is_cuda()) {
      const Tensor chosen = sites.experts(layer, logits.detach());
      return {chosen, ops::cuda::gates(logits, chosen, config_.normalize_gates)};
    }
  }
  const Tensor p = logits.softmax(-1);
  const Tensor chosen = sites.experts(layer, p.detach());
  const Tensor gates = p.gather(1, chosen);
  return {chosen, config_.normalize_gates ? gates / gates.sum(1, true) : gates};
}

Tensor Network::mlp(std::int32_t layer, const Tensor& h, const Sites& sites) const {
  const LayerWeights& w = layers_[static_cast<std::size_t>(layer)];
  const Tensor x = ops::rms_norm(h, w.mlp_norm, config_.rms_eps, bf16_);
  // The selection is constant; gates carry the gradient, through the chosen experts' logits where
  // they are normalised and through all of them where they are not.
  const Tensor logits = ops::linear(x, w.router, false);
  const auto [chosen, gates] = route(Layer{layer}, logits, sites);
  ops::Coded coded;
  if (const ExpertCodes* codes = parameters_.codes(Layer{layer})) {
    coded = {&codes->gate_up, &codes->down, sites.activation_rule(), x.detach()};
  }
  return ops::experts(sites.w13_in(Layer{layer}, x), gates, w.w13, w.w2, chosen,
                      sites.w2_in(Layer{layer}), bf16_, coded, sites.w2_in_by_row(Layer{layer}));
}

Tensor Network::layer(std::int32_t layer, const Tensor& h, const Pack& pack,
                      const Sites& sites) const {
  const Tensor mid = ops::add(h, attention(layer, h, pack, sites), bf16_);
  return ops::add(mid, mlp(layer, mid, sites), bf16_);
}

namespace {

/// Calls body(first, rows) on runs of rows whose logits fit.
template <typename Body>
void by_logits(std::int64_t rows, const Tensor& head, Body&& body) {
  const std::int64_t most = head.is_cuda() ? kLogitsOnDevice : kLogits;
  const std::int64_t step = std::max<std::int64_t>(most / head.size(0), 1);
  for (std::int64_t first = 0; first < rows; first += step) {
    body(first, std::min(step, rows - first));
  }
}

/// logits / temperature of rows [first, first + rows).
Tensor scaled_logits(const Tensor& normed, const Tensor& head, const Tensor& temperature,
                     std::int64_t first, std::int64_t rows) {
  return ops::product(normed.narrow(0, first, rows), head.t())
      .div_(temperature.narrow(0, first, rows));
}

/// Whether one kernel takes what follows the head's product.
bool scored_by_kernel(const Tensor& normed, std::int64_t vocabulary) {
  if constexpr (build::has_cuda) return ops::cuda::scores_rows(normed, vocabulary);
  return false;
}

/// [scored, 1]
Tensor temperatures(const Pack& pack, const at::Device& device) {
  return ops::upload(ops::over(pack.temperature, at::kFloat), device).unsqueeze(1);
}

/// [scored, k]
Tensor top_tokens(const Pack& pack, const at::Device& device) {
  return int64_tensor(pack.top_token, device).view({-1, std::max<std::int64_t>(pack.top, 1)});
}

}  // namespace

Scores Network::score(const Tensor& h, const Pack& pack, bool with_grad) const {
  const auto rows = static_cast<std::int64_t>(pack.scored_row.size());
  Scores scores;
  scores.logp.resize(pack.scored_row.size());
  scores.top_logp.resize(with_grad ? pack.top_token.size() : 0);
  scores.x = h.detach().index_select(0, int64_tensor(pack.scored_row, device()));
  scores.log_sum = at::empty({rows}, h.options().dtype(at::kFloat));
  scores.x.requires_grad_(with_grad);
  {
    const at::AutoGradMode mode(with_grad);
    scores.normed = ops::rms_norm(scores.x, final_norm_, config_.rms_eps, bf16_);
  }
  const at::AutoGradMode none(false);
  const Tensor tokens = int64_tensor(pack.scored_token, device());
  const Tensor temperature = temperatures(pack, device());
  const Tensor top_token = top_tokens(pack, device());
  const Tensor logp = at::empty_like(scores.log_sum),
               entropy = at::zeros({}, logp.options().dtype(at::kDouble));
  const Tensor top = at::empty(top_token.sizes(), logp.options());
  const bool by_kernel = scored_by_kernel(scores.normed, head_.size(0)) && scores.top_logp.empty();
  by_logits(rows, head_, [&](std::int64_t first, std::int64_t count) {
    if constexpr (build::has_cuda) {
      if (by_kernel) {
        const Tensor spread = at::empty({count}, logp.options());
        ops::cuda::score_rows(ops::product(scores.normed.narrow(0, first, count), head_.t()),
                              temperature.narrow(0, first, count), tokens.narrow(0, first, count),
                              logp.narrow(0, first, count), scores.log_sum.narrow(0, first, count),
                              spread);
        entropy.add_(spread.sum(at::kDouble));
        return;
      }
    }
    const Tensor logits = scaled_logits(scores.normed, head_, temperature, first, count);
    const Tensor all = at::log_softmax(logits, -1);
    logp.narrow(0, first, count)
        .copy_(all.gather(1, tokens.narrow(0, first, count).unsqueeze(1)).squeeze(1));
    if (!scores.top_logp.empty()) {
      top.narrow(0, first, count).copy_(all.gather(1, top_token.narrow(0, first, count)));
    }
    scores.log_sum.narrow(0, first, count).copy_(at::logsumexp(logits, -1));
    entropy.sub_((all.exp() * all).sum(at::kDouble));
  });
  fetch(logp, scores.logp);
  fetch(top, scores.top_logp);
  scores.entropy = entropy.item<double>();
  return scores;
}

/// Adds to d [rows, V] what the top tokens' slopes give: sum_v slope_v (one-hot_v - softmax).
void Network::add_top(const Tensor& d, const Scores& scores, const Tensor& temperature,
                      const Tensor& top_token, std::int64_t first, const Tensor& dtop) const {
  const std::int64_t rows = d.size(0);
  const Tensor slope = dtop.narrow(0, first, rows);
  Tensor p = scaled_logits(scores.normed, head_, temperature, first, rows);
  p.sub_(scores.log_sum.narrow(0, first, rows).unsqueeze(1)).exp_();
  d.sub_(p.mul_(slope.sum(1, true)));
  d.scatter_add_(1, top_token.narrow(0, first, rows), slope);
}

Tensor Network::score_backward(const Scores& scores, const Pack& pack, std::span<const float> dlogp,
                               std::span<const float> dtop) const {
  const auto rows = static_cast<std::int64_t>(pack.scored_row.size());
  const Tensor dnormed = at::empty(scores.normed.sizes(), scores.log_sum.options());
  {
    const at::AutoGradMode none(false);
    const Tensor tokens = int64_tensor(pack.scored_token, device());
    const Tensor temperature = temperatures(pack, device());
    const Tensor top_token = top_tokens(pack, device());
    const auto slopes = [&](std::span<const float> values, at::IntArrayRef shape) {
      return ops::upload(at::from_blob(const_cast<float*>(values.data()), shape, at::kFloat),
                         device());
    };
    const Tensor upstream = slopes(dlogp, {rows, 1});
    const Tensor top_slopes = dtop.empty() ? Tensor() : slopes(dtop, {rows, pack.top});
    const bool by_kernel = scored_by_kernel(scores.normed, head_.size(0)) && dtop.empty();
    by_logits(rows, head_, [&](std::int64_t first, std::int64_t count) {
      if constexpr (build::has_cuda) {
        if (by_kernel) {
          const Tensor x = scores.normed.detach().narrow(0, first, count);
          const Tensor d = ops::cuda::score_rows_backward(
              ops::product(x, head_.t()), temperature.narrow(0, first, count),
              tokens.narrow(0, first, count), scores.log_sum.narrow(0, first, count),
              upstream.narrow(0, first, count));
          ops::product_out(d, head_, dnormed.narrow(0, first, count));
          ops::add_product(head_grad_, d.t(), x);
          return;
        }
      }
      // d logp / d logits = (one-hot - softmax) / temperature
      Tensor d = scaled_logits(scores.normed, head_, temperature, first, count);
      d.sub_(scores.log_sum.narrow(0, first, count).unsqueeze(1)).exp_().neg_();
      d.scatter_add_(1, tokens.narrow(0, first, count).unsqueeze(1),
                     at::ones({count, 1}, d.options()));
      d.mul_(upstream.narrow(0, first, count));
      if (!dtop.empty()) add_top(d, scores, temperature, top_token, first, top_slopes);
      d.div_(temperature.narrow(0, first, count));
      ops::product_out(d, head_, dnormed.narrow(0, first, count));
      ops::add_product(head_grad_, d.t(), scores.normed.detach().narrow(0, first, count));
    });
  }
  scores.normed.backward(dnormed.to(scores.normed.scalar_type()));
  Tensor dh = at::zeros({pack.rows(), config_.hidden}, scores.x.options());
  // Rows are distinct: a copy, not a sum.
  return dh.index_copy_(0, int64_tensor(pack.scored_row, device()), scores.x.grad());
}

}  // namespace lockstep::train
