#include "rollout/forward.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "kernels/dense/attention.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "numerics/bf16.h"
#include "rollout/capture.h"
#include "rollout/forward_experts.h"
#include "rollout/weights.h"

namespace lockstep::rollout {
namespace {

constexpr std::uint32_t kAfterAttention = 0, kAfterExperts = 1;  // where drift.noise is added

[[noreturn]] void stop(const Pass& pass, std::int32_t layer, const Nonfinite& found) {
  const auto row = static_cast<std::size_t>(found.row);
  throw Error(cat({"layer ", layer, ": ", found.what, " is not finite at token ", pass.tokens[row],
                   ", position ", pass.positions[row], ", span ", pass.keys[row].span.value,
                   "; nothing was sampled from it: look at the weights of the last update"}));
}

void require_pass(const Pass& pass, const ModelConfig& model, std::size_t layers) {
  const std::size_t rows = pass.tokens.size();
  if (pass.positions.size() != rows || pass.keys.size() != rows || pass.sequence.size() != rows) {
    throw Error(cat({"forward: ", rows, " tokens with ", pass.positions.size(), " positions, ",
                     pass.keys.size(), " keys and ", pass.sequence.size(), " sequences"}));
  }
  if (layers != static_cast<std::size_t>(model.num_layers)) {
    throw Error(cat({"forward: a cache of ", layers, " layers; the model has ", model.num_layers}));
  }
  for (const Token token : pass.tokens) {
    if (token >= 0 && token < model.vocabulary) continue;
    throw Error(
        cat({"forward: token ", token, " is outside the vocabulary of ", model.vocabulary}));
  }
  for (const std::int32_t row : pass.wanted) {
    if (row >= 0 && static_cast<std::size_t>(row) < rows) continue;
    throw Error(cat({"forward: logits of row ", row, " are wanted; the pass has ", rows}));
  }
}

}  // namespace

struct Forward::Impl {
  Impl(const Agreement& agreement, const Options& options)
      : agreement(agreement),
        options(options),
        weights(agreement),
        experts(agreement, options),
        rope(agreement.model.rope_theta, agreement.model.head_dim) {
    if (agreement.contract.kv_point != KvPoint::kAfterRope) {
      throw Error("contract.kv_point is before_rope; this engine quantizes K after_rope alone");
    }
  }

  TensorView<const float, 2> run(const Pass& pass, std::span<const LayerKv> cache,
                                 Capture& capture);
  void embed(const Pass& pass);
  void attend(const Pass& pass, std::int32_t layer, const LayerKv& cache, Capture& capture);
  void feed(const Pass& pass, std::int32_t layer, Capture& capture);
  void add(const Pass& pass, std::int32_t layer, std::uint32_t site, TensorView<Bf16, 2> x);
  TensorView<const float, 2> logits_of(const Pass& pass);

  Agreement agreement;
  Options options;
  Weights weights;
  ForwardExperts experts;
  kernels::RopeTable rope;

  // Of the pass that runs; memory is kept from pass to pass.
  std::int64_t rows = 0;
  std::vector<std::uint64_t> streams;
  Rows2d<Bf16> h_, x_, qkv_, attended_, o_, wanted_;
  Rows2d<float> logits_;
  std::vector<std::int64_t> kv_counts = std::vector<std::int64_t>(kernels::kNumQuantizeCounts);

  TensorView<Bf16, 2> h() { return h_.view(rows, agreement.model.hidden); }
  TensorView<Bf16, 2> x() { return x_.view(rows, agreement.model.hidden); }
  TensorView<Bf16, 2> o() { return o_.view(rows, agreement.model.hidden); }
};

TensorView<const float, 2> Forward::Impl::run(const Pass& pass, std::span<const LayerKv> cache,
                                              Capture& capture) {
  weights.require_ready();
  require_pass(pass, agreement.model, cache.size());
  rows = pass.rows();
  if (rows == 0) return logits_.view(0, agreement.model.vocabulary);
  const std::int32_t last = *std::max_element(pass.positions.begin(), pass.positions.end());
  rope.grow((last / 256 + 1) * 256);
  streams.resize(static_cast<std::size_t>(rows));
  std::transform(pass.keys.begin(), pass.keys.end(), streams.begin(),
                 [](const TokenKey& key) { return key.span.value; });
  embed(pass);
  for (std::int32_t layer = 0; layer < agreement.model.num_layers; ++layer) {
    attend(pass, layer, cache[static_cast<std::size_t>(layer)], capture);
    feed(pass, layer, capture);
  }
  return logits_of(pass);
}

void Forward::Impl::embed(const Pass& pass) {
  const std::int64_t d = agreement.model.hidden;
  const auto to = h();
  for (std::int64_t row = 0; row < rows; ++row) {
    const Bf16* from = weights.embedding().data + pass.tokens[static_cast<std::size_t>(row)] * d;
    std::copy_n(from, d, to.data + row * d);
  }
}

void Forward::Impl::attend(const Pass& pass, std::int32_t layer, const LayerKv& cache,
                           Capture& capture) {
  const ModelConfig& model = agreement.model;
  const LayerWeights& w = weights.layer(layer);
  const std::int64_t q_width = model.q_width();
  const std::int64_t kv_width = model.kv_width();
  const bool split_k = options.drift.split_k;
  kernels::rms_norm({.x = h(), .weight = w.attention_norm, .eps = model.rms_eps, .y = x()}, {});
  const auto qkv = qkv_.view(rows, q_width + 2 * kv_width);
  kernels::linear_bf16({.x = x(), .weight = w.qkv, .y_bf16 = qkv, .split_k = split_k}, {});
  const auto part = [&](std::int64_t first, std::int64_t width) {
    return TensorView<Bf16, 2>{qkv.data + first, {rows, width}, qkv.stride};
  };
  const auto q = part(0, q_width);
  const auto k = part(q_width, kv_width);
  const auto v = part(q_width + kv_width, kv_width);
  kernels::RopeArgs turn{.x = q,
                         .head_dim = model.head_dim,
                         .positions = pass.positions,
                         .table = &rope,
                         .norm = w.q_norm,
                         .eps = model.rms_eps};
  kernels::rope(turn, {});
  turn.x = k;
  turn.norm = w.k_norm;
  kernels::rope(turn, {});
  if (const auto row = kernels::first_nonfinite(qkv); row >= 0)
    stop(pass, layer, {row, "q, k or v"});

  capture.numbers(pass, {layer}, Site::kK, k);
  capture.numbers(pass, {layer}, Site::kV, v);

  const kernels::PagedRows where = {pass.positions, pass.sequence, pass.pages};
  const TensorView<std::int64_t, 1> counts = {kv_counts.data(), {kernels::kNumQuantizeCounts}, {1}};
  kernels::write_kv({.x = k, .kv = cache.k, .rows = where, .counts = counts}, {});
  kernels::write_kv({.x = v, .kv = cache.v, .rows = where, .counts = counts}, {});
  const auto attended = attended_.view(rows, q_width);
  kernels::attention({.q = q,
                      .k = cache.k,
                      .v = cache.v,
                      .rows = where,
                      .num_heads = model.num_heads,
                      .num_kv_heads = model.num_kv_heads,
                      .head_dim = model.head_dim,
                      .out = attended},
                     {});
  kernels::linear_bf16({.x = attended, .weight = w.o, .y_bf16 = o(), .split_k = split_k}, {});
  add(pass, layer, kAfterAttention, o());
}

void Forward::Impl::feed(const Pass& pass, std::int32_t layer, Capture& capture) {
  const LayerWeights& w = weights.layer(layer);
  kernels::rms_norm({.x = h(), .weight = w.mlp_norm, .eps = agreement.model.rms_eps, .y = x()}, {});
  capture.numbers(pass, {layer}, Site::kW13In, x());
  const Nonfinite found = experts.run(pass, {layer}, w, x(), capture, o());
  if (found.row >= 0) stop(pass, layer, found);
  add(pass, layer, kAfterExperts, o());
}

/// h += x, drifted where the options say so.
void Forward::Impl::add(const Pass& pass, std::int32_t layer, std::uint32_t site,
                        TensorView<Bf16, 2> x) {
  if (options.drift.noise != 0.0f) {
    kernels::drift_noise({.x = x,
                          .sigma = options.drift.noise,
                          .seed = agreement.seed,
                          .streams = streams,
                          .positions = pass.positions,
                          .site = static_cast<std::uint32_t>(layer) * 2 + site},
                         {});
  }
  const auto row = kernels::residual_add(x, h());
  const char* what = site == kAfterAttention ? "the attention's output" : "the experts' output";
  if (row >= 0) stop(pass, layer, {row, what});
}

TensorView<const float, 2> Forward::Impl::logits_of(const Pass& pass) {
  const ModelConfig& model = agreement.model;
  const auto count = static_cast<std::int64_t>(pass.wanted.size());
  const auto last = wanted_.view(count, model.hidden);
  const auto logits = logits_.view(count, model.vocabulary);
  kernels::gather_rows(h(), pass.wanted, last);
  kernels::rms_norm({.x = last, .weight = weights.final_norm(), .eps = model.rms_eps, .y = last},
                    {});
  kernels::linear_bf16(
      {.x = last, .weight = weights.head(), .y = logits, .split_k = options.drift.split_k}, {});
  for (std::int64_t i = 0; i < count; ++i) {
    const float* row = logits.data + i * model.vocabulary;
    const bool finite =
        std::all_of(row, row + model.vocabulary, [](float x) { return is_finite(x); });
    if (!finite)
      stop(pass, model.num_layers, {pass.wanted[static_cast<std::size_t>(i)], "a logit"});
  }
  return logits;
}

Forward::Forward(const Agreement& agreement, const Options& options, Device device) {
  if (device != Device{}) {
    throw Error("forward: this build runs on the CPU; choose device cpu");
  }
  impl_ = std::make_unique<Impl>(agreement, options);
}

Forward::~Forward() = default;

TensorView<const float, 2> Forward::run(const Pass& pass, std::span<const LayerKv> cache,
                                        Capture& capture) {
  return impl_->run(pass, cache, capture);
}

WeightSink& Forward::weights() { return impl_->weights; }

void Forward::observe(std::function<void(const ExpertInputs&)> observer) {
  impl_->experts.observe(std::move(observer));
}

Metrics Forward::metrics() {
  const auto& kv = impl_->kv_counts;
  const auto& activations = impl_->experts.counts();
  const auto both = [&](int count) {
    const auto i = static_cast<std::size_t>(count);
    return static_cast<double>(kv[i] + activations[i]);
  };
  Metrics metrics;
  if (both(kernels::kBlocks) > 0) {
    metrics["fp4/scale/zero_frac"] = both(kernels::kZeroBlocks) / both(kernels::kBlocks);
    metrics["fp4/scale/underflow_frac"] = both(kernels::kUnderflowBlocks) / both(kernels::kBlocks);
  }
  if (kv[kernels::kBlocks] > 0) {
    metrics["fp4/scale/sat_frac"] = static_cast<double>(kv[kernels::kSaturatedBlocks]) /
                                    static_cast<double>(kv[kernels::kBlocks]);
  }
  if (const double error = impl_->experts.top_error().take(); error >= 0) {
    metrics["fp4/scale/top_err"] = error;
  }
  if (kernels::MxError& lost = impl_->experts.mx_error(); lost.elements > 0) {
    metrics.merge(kernels::metrics(lost, "fp4/mx/act"));
    lost = {};
  }
  std::fill(impl_->kv_counts.begin(), impl_->kv_counts.end(), 0);
  std::fill(impl_->experts.counts().begin(), impl_->experts.counts().end(), 0);
  return metrics;
}

}  // namespace lockstep::rollout
