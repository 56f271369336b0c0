#include "rollout/forward.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/text.h"
#include "kernels/dense/add_norm.h"
#include "kernels/dense/attention.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/heads.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/rope.h"
#include "kernels/dense/w4a16.h"
#include "rollout/capture.h"
#include "rollout/door.h"
#include "rollout/forward_experts.h"
#include "rollout/pass_checks.h"
#include "rollout/pass_graphs.h"
#include "rollout/pass_view.h"
#include "rollout/weights.h"

namespace lockstep::rollout {
namespace {

constexpr std::uint32_t kAfterAttention = 0, kAfterExperts = 1;  // where drift.noise is added

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

/// All that the work for a pass of one row a sequence depends on.
PassShape shape_of(const PassView& view, std::span<const LayerKv> cache, const Capture& capture) {
  const std::array<std::int64_t, 3> kept = capture.shape();
  return {view.rows,
          view.where.table.shape[1],
          std::ssize(view.wanted),
          kept[0],
          kept[1],
          kept[2],
          reinterpret_cast<std::intptr_t>(cache.data()),
          reinterpret_cast<std::intptr_t>(&capture)};
}

}  // namespace

struct Forward::Impl {
  Impl(const Agreement& agreement, const Options& options, Device device, Stream stream)
      : agreement(agreement),
        options(options),
        at{device, stream},
        // The products in halves are made of copies.
        weights(agreement, device, stream,
                kernels::w4a16_takes_any(device) && !options.drift.split_k),
        checks(agreement.model.num_layers, at, 2 * kernels::kNumQuantizeCounts),
        experts(agreement, options, at, checks.counts() + kernels::kNumQuantizeCounts),
        upload(at, agreement.model.num_heads / agreement.model.num_kv_heads),
        rope(agreement.model.rope_theta, agreement.model.head_dim, device) {}

  TensorView<const float, 2> run(const Pass& pass, std::span<const LayerKv> cache,
                                 Capture& capture);
  void give(const Pass& pass, std::span<const LayerKv> cache, Capture& capture);
  void grow_rope(const Pass& pass);
  void attend(const Pass& pass, std::int32_t layer, const LayerKv& cache, Capture& capture);
  void feed(const Pass& pass, std::int32_t layer, Capture& capture);
  void add(std::int32_t layer, Check check, const ForwardExperts::Outputs& outputs,
           std::span<const Bf16> norm);
  std::span<std::byte> attention_room();
  TensorView<float, 2> logits();
  void predict();

  Agreement agreement;
  Options options;
  Workplace at;
  Weights weights;
  PassChecks checks;
  ForwardExperts experts;
  PassUpload upload;
  kernels::RopeTable rope;
  PassGraphs graphs;

  // Of the pass that runs; memory is kept from pass to pass.
  PassView view;
  std::int64_t rows = 0;
  Rows2d<Bf16> h_{at}, x_{at}, qkv_{at}, attended_{at}, o_{at}, wanted_{at};
  Rows2d<float> logits_{at};
  Rows2d<std::byte> workspace_{at};
  DeviceCounts kv_counts{kernels::kNumQuantizeCounts, at, checks.counts()};

  /// What the passes that ended well have met since metrics().
  struct Met {
    std::vector<std::int64_t> counts = std::vector<std::int64_t>(2 * kernels::kNumQuantizeCounts);
    TopError top_error{};
    kernels::MxError mx_error{};
  };
  Met met{};
  Met met_before{};       // the last of them
  bool finished = false;  // the pass that run() gave

  void put_met() {
    checks.put_counts(met.counts);
    experts.top_error() = met.top_error;
    experts.mx_error() = met.mx_error;
  }

  TensorView<Bf16, 2> h() { return h_.view(rows, agreement.model.hidden); }
  TensorView<Bf16, 2> x() { return x_.view(rows, agreement.model.hidden); }
  TensorView<Bf16, 2> o() { return o_.view(rows, agreement.model.hidden); }
};

TensorView<const float, 2> Forward::Impl::run(const Pass& pass, std::span<const LayerKv> cache,
                                              Capture& capture) {
  finished = false;
  weights.require_ready();
  require_pass(pass, agreement.model, cache.size());
  rows = pass.rows();
  checks.begin(pass);
  if (rows == 0) return logits_.view(0, agreement.model.vocabulary);
  grow_rope(pass);
  view = upload.view(pass, cache[0].k.page_tokens);
  if (pass.real_rows < 0 || !at.on_cuda()) {
    give(pass, cache, capture);
  } else {
    graphs.run(at, shape_of(view, cache, capture), [&] { give(pass, cache, capture); });
  }
  return logits();
}

/// Gives the pass to the device. On a CUDA device nothing here depends on what is in it: equal
/// shapes give equal work.
void Forward::Impl::give(const Pass& pass, std::span<const LayerKv> cache, Capture& capture) {
  kernels::gather_rows(weights.embedding(), view.tokens, h(), at.stream);
  kernels::rms_norm({.x = h(),
                     .weight = weights.layer(0).attention_norm,
                     .eps = agreement.model.rms_eps,
                     .y = x()},
                    at.stream);
  for (std::int32_t layer = 0; layer < agreement.model.num_layers; ++layer) {
    attend(pass, layer, cache[static_cast<std::size_t>(layer)], capture);
    feed(pass, layer, capture);
  }
  predict();
}

/// On a CUDA device in large steps, since what runs there has to end first.
void Forward::Impl::grow_rope(const Pass& pass) {
  const std::int32_t last = *std::max_element(pass.positions.begin(), pass.positions.end());
  if (last < rope.positions()) return;
  const std::int32_t step = at.on_cuda() ? 8192 : 256;
  synchronize(at.device, at.stream);
  rope.grow((last / step + 1) * step);
  ++at.moves;
}

/// On a CUDA device: for decoding, where the splits of the keys are read side by side.
std::span<std::byte> Forward::Impl::attention_room() {
  constexpr std::int64_t kMostBytes = 1 << 30;
  if (!at.on_cuda() || !view.where.tiles.empty()) return {};
  const ModelConfig& model = agreement.model;
  const std::int64_t bytes =
      kernels::attention_workspace(rows, model.num_heads, model.head_dim, view.where.longest);
  if (bytes > kMostBytes) return {};
  return {workspace_.view(1, bytes).data, static_cast<std::size_t>(bytes)};
}

/// x() is what comes behind the layer's first norm.
void Forward::Impl::attend(const Pass& pass, std::int32_t layer, const LayerKv& cache,
                           Capture& capture) {
  const ModelConfig& model = agreement.model;
  const LayerWeights& w = weights.layer(layer);
  const std::int64_t q_width = model.q_width();
  const std::int64_t kv_width = model.kv_width();
  const bool split_k = options.drift.split_k;
  const auto qkv = qkv_.view(rows, q_width + 2 * kv_width);
  kernels::linear_bf16(
      {.x = x(), .weight = w.qkv, .y_bf16 = qkv, .split_k = split_k, .settled = true}, at.stream);
  std::int32_t* const bad = checks.cell(layer, Check::kQkv);
  kernels::place_heads({.qkv = qkv,
                        .num_heads = model.num_heads,
                        .num_kv_heads = model.num_kv_heads,
                        .head_dim = model.head_dim,
                        .table = &rope,
                        .q_norm = w.q_norm,
                        .k_norm = w.k_norm,
                        .eps = model.rms_eps,
                        .k = cache.k,
                        .v = cache.v,
                        .rows = view.where,
                        .counts = kv_counts.view(),
                        .bad = bad},
                       at.stream);
  checks.look(bad);
  const auto part = [&](std::int64_t first, std::int64_t width) {
    return TensorView<Bf16, 2>{qkv.data + first, {rows, width}, qkv.stride, at.device};
  };
  capture.numbers(pass, {layer}, Site::kK, part(q_width, kv_width));
  capture.numbers(pass, {layer}, Site::kV, part(q_width + kv_width, kv_width));

  const auto attended = attended_.view(rows, q_width);
  kernels::attention({.q = part(0, q_width),
                      .k = cache.k,
                      .v = cache.v,
                      .rows = view.where,
                      .num_heads = model.num_heads,
                      .num_kv_heads = model.num_kv_heads,
                      .head_dim = model.head_dim,
                      .out = attended,
                      .workspace = attention_room()},
                     at.stream);
  kernels::linear_bf16(
      {.x = attended, .weight = w.o, .y_bf16 = o(), .split_k = split_k, .settled = true},
      at.stream);
  add(layer, Check::kAttention, {}, w.mlp_norm);
}

/// x() is what comes behind the layer's second norm.
void Forward::Impl::feed(const Pass& pass, std::int32_t layer, Capture& capture) {
  capture.numbers(pass, {layer}, Site::kW13In, x());
  const ForwardExperts::Outputs outputs =
      experts.run(pass, {layer}, weights.layer(layer), x(), capture, checks, o());
  const bool is_last = layer + 1 == agreement.model.num_layers;
  add(layer, Check::kExperts, outputs,
      is_last ? std::span<const Bf16>() : weights.layer(layer + 1).attention_norm);
}

/// h += o(), which outputs become first if there are any, drifted where the options say so; then
/// x() is its norm, if there is one.
void Forward::Impl::add(std::int32_t layer, Check check, const ForwardExperts::Outputs& outputs,
                        std::span<const Bf16> norm) {
  std::int32_t* const bad = checks.cell(layer, check);
  const bool attended = check == Check::kAttention;
  std::int32_t* const bad_x = attended ? checks.cell(layer, Check::kW13In) : nullptr;
  kernels::add_norm(
      {.x = o(),
       .h = h(),
       .bad = bad,
       .outputs = outputs.y,
       .gates = outputs.gates,
       .sigma = options.drift.noise,
       .seed = agreement.seed,
       .streams = view.streams,
       .positions = view.positions,
       .site = static_cast<std::uint32_t>(layer) * 2 + (attended ? kAfterAttention : kAfterExperts),
       .weight = norm,
       .eps = agreement.model.rms_eps,
       .y = x(),
       .bad_y = bad_x},
      at.stream);
  checks.look(bad);
  if (bad_x != nullptr) checks.look(bad_x);
}

TensorView<float, 2> Forward::Impl::logits() {
  return logits_.view(std::ssize(view.wanted), agreement.model.vocabulary);
}

void Forward::Impl::predict() {
  const ModelConfig& model = agreement.model;
  const auto last = wanted_.view(std::ssize(view.wanted), model.hidden);
  if (view.wanted.empty()) return;
  kernels::gather_rows(h(), view.wanted, last, at.stream);
  kernels::rms_norm({.x = last, .weight = weights.final_norm(), .eps = model.rms_eps, .y = last},
                    at.stream);
  kernels::linear_bf16({.x = last,
                        .weight = weights.head(),
                        .y = logits(),
                        .split_k = options.drift.split_k,
                        .settled = true},
                       at.stream);
  kernels::first_nonfinite(logits(), checks.logits(), at.stream);
  checks.look(checks.logits());
}

Forward::Forward(const Agreement& agreement, const Options& options, Device device, Stream stream) {
  require_runs(agreement, options, device);
  impl_ = std::make_unique<Impl>(agreement, options, device, stream);
}

Forward::~Forward() = default;

TensorView<const float, 2> Forward::run(const Pass& pass, std::span<const LayerKv> cache,
                                        Capture& capture) {
  return impl_->run(pass, cache, capture);
}

void Forward::finish() {
  impl_->checks.fetch();
  synchronize(impl_->at.device, impl_->at.stream);
  impl_->checks.settle();
  impl_->finished = true;
  impl_->met_before =
      std::exchange(impl_->met, Impl::Met{impl_->checks.settled_counts(),
                                          impl_->experts.top_error(), impl_->experts.mx_error()});
}

void Forward::abandon() noexcept {
  try {
    synchronize(impl_->at.device, impl_->at.stream);
    if (impl_->finished) impl_->met = impl_->met_before;
    impl_->put_met();
  } catch (...) {
  }
}

void Forward::take_back() noexcept {
  try {
    impl_->met = impl_->met_before;
    impl_->put_met();
  } catch (...) {
  }
}

std::int64_t Forward::take_replays() { return impl_->graphs.take_replays(); }

WeightSink& Forward::weights() { return impl_->weights; }

void Forward::observe(std::function<void(const ExpertInputs&)> observer) {
  if (impl_->at.on_cuda()) throw Error("forward: inputs are observed on the CPU; use device cpu");
  impl_->experts.observe(std::move(observer));
}

Metrics Forward::metrics() {
  const std::vector<std::int64_t> kv = impl_->kv_counts.take();
  const std::vector<std::int64_t> activations = impl_->experts.take_counts();
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
  impl_->met = impl_->met_before = {};
  return metrics;
}

}  // namespace lockstep::rollout
