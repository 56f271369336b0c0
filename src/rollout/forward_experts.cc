#include "rollout/forward_experts.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/router.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/residual.h"
#include "kernels/exact/swiglu.h"
#include "numerics/bf16.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kMxErrorRows = 32;

/// A copy of rows of codes with one half of the columns zero: the product of that is a half sum.
void half_of(const PackedView<const std::uint8_t>& from, bool second,
             const PackedView<std::uint8_t>& to) {
  const std::int64_t bytes = from.codes.shape[1];
  const std::int64_t middle = bytes / 2;
  for (std::int64_t row = 0; row < from.codes.shape[0]; ++row) {
    std::uint8_t* codes = to.codes.data + row * bytes;
    std::memcpy(codes, from.codes.data + row * from.codes.stride[0],
                static_cast<std::size_t>(bytes));
    std::fill(codes + (second ? 0 : middle), codes + (second ? middle : bytes), std::uint8_t{0});
    std::memcpy(to.scales.data + row * to.scales.stride[0],
                from.scales.data + row * from.scales.stride[0],
                static_cast<std::size_t>(from.scales.shape[1]));
    to.global.data[row] = from.global.data[row * from.global.stride[0]];
  }
}

void require_residual(const Agreement& agreement, const Options& options) {
  const float alpha = options.residual_alpha;
  if (alpha != 1.0f && alpha != 0.5f && alpha != 0.25f) {
    throw Error(cat({"residual.alpha is ", alpha,
                     "; expected 1, 0.5 or 0.25, whose products are "
                     "exact"}));
  }
  if (takes_groups(options)) {
    const ModelConfig& m = agreement.model;
    const auto expected =
        static_cast<std::size_t>(m.num_layers * (m.hidden / 16 + m.expert_width / 16));
    if (agreement.contract.residual_groups.size() != expected) {
      throw Error(cat({"residual.scope is static, and the contract has ",
                       agreement.contract.residual_groups.size(), " residual_groups of ", expected,
                       ": fill them with calibrate_residual"}));
    }
  }
  if (options.residual_permille < 0 || options.residual_permille > 1000) {
    throw Error(cat({"residual.permille is ", options.residual_permille,
                     "; expected 0 to 1000, tenths of a percent"}));
  }
}

TensorView<const std::int32_t, 1> as_view(std::span<const std::int32_t> values) {
  return {values.data(), {static_cast<std::int64_t>(values.size())}, {1}};
}

}  // namespace

ForwardExperts::ForwardExperts(const Agreement& agreement, const Options& options)
    : agreement_(agreement),
      options_(options),
      d_(agreement.model.hidden),
      f_(agreement.model.expert_width),
      experts_(agreement.model.num_experts),
      slots_(agreement.model.experts_per_token),
      counts_(kernels::kNumQuantizeCounts, 0),
      offsets_(static_cast<std::size_t>(experts_ + 1)) {
  require_residual(agreement, options);
}

bool ForwardExperts::quantizes(Layer layer) const {
  return agreement_.contract.activation.element != Element::kBf16 &&
         agreement_.contract.layers.has(layer);
}

Nonfinite ForwardExperts::run(const Pass& pass, Layer layer, const LayerWeights& weights,
                              TensorView<const Bf16, 2> x, Capture& capture,
                              TensorView<Bf16, 2> out) {
  const std::int64_t rows = pass.rows();
  const std::int64_t items = rows * slots_;
  if (const auto row = kernels::first_nonfinite(x); row >= 0) return {row, "w13_in"};
  route(pass, layer, weights, x, capture);
  dispatch(rows);

  SiteInput site{.x = x, .rule = agreement_.rule(Site::kW13In), .codes = {}, .residual = {}};
  if (quantizes(layer)) site.codes = quantize(pass, layer, Site::kW13In, x, capture);
  if (compensates(layer, weights, Site::kW13In))
    site.residual = residual(layer, Site::kW13In, site);
  if (observer_) observer_({layer, Site::kW13In, x, row_of_, offsets_});
  const auto up = up_.view(items, 2 * f_);
  product(site, weights, false, row_of_, up);

  const auto w2_in = w2_in_.view(items, f_);
  kernels::swiglu({.gate = {up.data, {items, f_}, {2 * f_, 1}},
                   .up = {up.data + f_, {items, f_}, {2 * f_, 1}},
                   .out = w2_in});
  if (const auto item = kernels::first_nonfinite(w2_in); item >= 0) {
    return {item / slots_, "w2_in"};
  }
  site = {.x = w2_in, .rule = agreement_.rule(Site::kW2In), .codes = {}, .residual = {}};
  if (quantizes(layer)) site.codes = quantize(pass, layer, Site::kW2In, w2_in, capture);
  if (compensates(layer, weights, Site::kW2In)) site.residual = residual(layer, Site::kW2In, site);
  if (observer_) observer_({layer, Site::kW2In, w2_in, slot_of_, offsets_});
  const auto down = down_.view(items, d_);
  product(site, weights, true, slot_of_, down);
  kernels::combine({.y = down, .gates = gates_.view(rows, slots_), .out = out}, {});
  return {};
}

void ForwardExperts::route(const Pass& pass, Layer layer, const LayerWeights& weights,
                           TensorView<const Bf16, 2> x, Capture& capture) {
  const std::int64_t rows = pass.rows();
  const auto logits = logits_.view(rows, experts_);
  const auto chosen = chosen_.view(rows, slots_);
  kernels::linear_bf16(
      {.x = x, .weight = weights.router, .y = logits, .split_k = options_.drift.split_k}, {});
  kernels::router({.logits = logits,
                   .normalize = agreement_.model.normalize_gates,
                   .experts = chosen,
                   .gates = gates_.view(rows, slots_)},
                  {});
  capture.routes(pass, layer, chosen);
}

/// Counting sort of the items by expert, rows in order within each.
void ForwardExperts::dispatch(std::int64_t rows) {
  const auto items = static_cast<std::size_t>(rows * slots_);
  const std::int32_t* chosen = chosen_.view(rows, slots_).data;
  row_of_.resize(items);
  slot_of_.resize(items);
  std::fill(offsets_.begin(), offsets_.end(), 0);
  for (std::size_t i = 0; i < items; ++i) ++offsets_[static_cast<std::size_t>(chosen[i]) + 1];
  for (std::size_t e = 1; e < offsets_.size(); ++e) offsets_[e] += offsets_[e - 1];
  for (std::size_t i = 0; i < items; ++i) {
    // offsets_[e] runs from the expert's begin to its end, then all move up by one expert.
    const auto at = static_cast<std::size_t>(offsets_[static_cast<std::size_t>(chosen[i])]++);
    slot_of_[at] = static_cast<std::int32_t>(i);
    row_of_[at] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) / slots_);
  }
  std::copy_backward(offsets_.begin(), offsets_.end() - 1, offsets_.end());
  offsets_.front() = 0;
}

PackedView<const std::uint8_t> ForwardExperts::quantize(const Pass& pass, Layer layer, Site site,
                                                        TensorView<const Bf16, 2> x,
                                                        Capture& capture) {
  const Quantizer rule = agreement_.rule(site);
  const auto codes = codes_.view(x.shape[0], x.shape[1], rule);
  const RowLayout layout = capture.layout(layer, site);
  TensorView<std::uint8_t, 2> records;
  if (layout.encoding != Encoding::kNone) records = records_.view(pass.rows(), layout.bytes());
  kernels::quantize({.x = x,
                     .rule = rule,
                     .out = codes,
                     .layout = layout,
                     .records = records,
                     .counts = {counts_.data(), {kernels::kNumQuantizeCounts}, {1}}});
  top_error_.add(x, rule, codes);
  if (rule.is_mx() && !rule.is_wide()) {
    // One row in so many: the decomposition is dearer than quantizing.
    mx_error_.add(kernels::mx_error({x.data,
                                     {(x.shape[0] + kMxErrorRows - 1) / kMxErrorRows, x.shape[1]},
                                     {x.stride[0] * kMxErrorRows, 1}},
                                    rule));
  }
  capture.activations(pass, layer, site, records, codes);
  return codes;
}

bool ForwardExperts::compensates(Layer layer, const LayerWeights& weights, Site site) const {
  if (options_.residual == Residual::kNone || !options_.residual_sites.has(site)) return false;
  if (weights.format == ExpertFormat::kW4a4) return true;
  const Quantizer& rule = agreement_.contract.activation;
  return quantizes(layer) && rule.is_mx() && !rule.is_wide() &&
         options_.residual == Residual::kDense;
}

/// What the codes lost where they lost most, for the second pass.
PackedView<const std::uint8_t> ForwardExperts::residual(Layer layer, Site site,
                                                        const SiteInput& input) {
  const auto out = residual_.view(input.x.shape[0], input.x.shape[1], input.rule);
  if (input.rule.is_mx()) {
    kernels::residual_of(input.x, input.rule, input.codes, out);
    return out;
  }
  kernels::ResidualArgs args = {.x = input.x, .q = input.codes, .out = out};
  args.per_mille = options_.residual == Residual::kDense ? 1000 : options_.residual_permille;
  if (options_.residual == Residual::kBlocks) args.pattern = kernels::ResidualPattern::kBlocks;
  if (options_.residual == Residual::kTwoOfFour) {
    args.pattern = kernels::ResidualPattern::kTwoOfFour;
  }
  const bool chooses =
      options_.residual == Residual::kChannels || options_.residual == Residual::kBlocks;
  if (chooses && options_.residual_scope == ResidualScope::kBatch) {
    args.choice = kernels::ResidualChoice::kBatch;
  } else if (takes_groups(options_)) {
    const std::int64_t first = layer.value * (d_ / 16 + f_ / 16);
    args.choice = kernels::ResidualChoice::kStatic;
    args.chosen = {
        agreement_.contract.residual_groups.data() + first + (site == Site::kW2In ? d_ / 16 : 0),
        {input.x.shape[1] / 16},
        {1}};
  }
  kernels::residual(args);
  return out;
}

void ForwardExperts::product(const SiteInput& site, const LayerWeights& weights, bool down,
                             std::span<const std::int32_t> from, TensorView<float, 2> y) {
  if (weights.format == ExpertFormat::kW4a4) {
    return coded_product(site, down ? weights.down_codes : weights.gate_up_codes, from, y);
  }
  if (weights.format == ExpertFormat::kMx) {
    return mx_product(site, down ? weights.down_mx : weights.gate_up_mx, from, y);
  }
  bf16_product(site, down ? weights.down : weights.gate_up, from, y);
}

void ForwardExperts::coded_product(const SiteInput& site, const kernels::W4a4Weights& weights,
                                   std::span<const std::int32_t> from, TensorView<float, 2> y) {
  kernels::W4a4Args args{.a = site.codes,
                         .residual = site.residual,
                         .w = weights,
                         .offsets = as_view(offsets_),
                         .from = as_view(from),
                         .to = as_view(slot_of_),
                         .out = y,
                         .residual_halvings = options_.residual_alpha == 1.0f   ? 0
                                              : options_.residual_alpha == 0.5f ? 1
                                                                                : 2,
                         .rule = site.rule};
  if (!options_.drift.split_k) return kernels::w4a4(args);
  in_halves(site, y, [&](const SiteInput& half, TensorView<float, 2> out) {
    args.a = half.codes;
    args.residual = half.residual;
    args.out = out;
    kernels::w4a4(args);
  });
}

void ForwardExperts::mx_product(const SiteInput& site,
                                const PackedView<const std::uint8_t>& weights,
                                std::span<const std::int32_t> from, TensorView<float, 2> y) {
  kernels::MxProductArgs args{.a = site.codes,
                              .w = weights,
                              .experts = agreement_.model.num_experts,
                              .offsets = as_view(offsets_),
                              .from = as_view(from),
                              .to = as_view(slot_of_),
                              .out = y};
  if (!options_.drift.split_k) return mx_sum(site, args);
  in_halves(site, y, [&](const SiteInput& half, TensorView<float, 2> out) {
    args.a = half.codes;
    args.out = out;
    mx_sum(half, args);
  });
}

/// The product, and alpha times the residual's where there is one: each exact, and their sum
/// rounded once more.
void ForwardExperts::mx_sum(const SiteInput& site, kernels::MxProductArgs args) {
  kernels::mx_product(args);
  if (site.residual.codes.empty()) return;
  const TensorView<float, 2> y = args.out;
  args.a = site.residual;
  args.out = rest_.view(y.shape[0], y.shape[1]);
  kernels::mx_product(args);
  for (std::int64_t i = 0; i < y.shape[0] * y.shape[1]; ++i) {
    y.data[i] += options_.residual_alpha * args.out.data[i];
  }
}

/// The declared drift of an exact product: two sums, each rounded to BF16.
void ForwardExperts::in_halves(
    const SiteInput& site, TensorView<float, 2> y,
    const std::function<void(const SiteInput& half, TensorView<float, 2> out)>& multiply) {
  const std::int64_t rows = site.codes.codes.shape[0];
  const std::int64_t cols = 2 * site.codes.codes.shape[1];
  const auto second = half_.view(y.shape[0], y.shape[1]);
  for (const bool upper : {false, true}) {
    SiteInput half = site;
    const auto codes = halves_.view(rows, cols, agreement_.contract.activation);
    half_of(site.codes, upper, codes);
    half.codes = codes;
    if (!site.residual.codes.empty()) {
      const auto residual = residual_halves_.view(rows, cols, agreement_.contract.activation);
      half_of(site.residual, upper, residual);
      half.residual = residual;
    }
    multiply(half, upper ? second : y);
  }
  for (std::int64_t i = 0; i < y.shape[0] * y.shape[1]; ++i) {
    y.data[i] = to_float(to_bf16(y.data[i])) + to_float(to_bf16(second.data[i]));
  }
}

void ForwardExperts::bf16_product(const SiteInput& site, const kernels::PackedMatrix& weights,
                                  std::span<const std::int32_t> from, TensorView<float, 2> y) {
  TensorView<const Bf16, 2> x = site.x;
  if (!site.codes.codes.empty()) {
    const auto plain = dequantized_.view(x.shape[0], x.shape[1]);
    if (site.residual.codes.empty()) {
      kernels::dequantize({.codes = site.codes, .rule = site.rule, .bf16 = plain});
    } else {
      kernels::add_residual(site.codes, site.residual, site.rule, options_.residual_alpha, plain);
    }
    x = plain;
  }
  const auto items = static_cast<std::int64_t>(from.size());
  const auto sorted = gathered_.view(items, x.shape[1]);
  kernels::gather_rows(x, from, sorted);
  kernels::grouped_linear_bf16({.x = sorted,
                                .offsets = offsets_,
                                .weights = weights,
                                .to = slot_of_,
                                .y = y,
                                .split_k = options_.drift.split_k},
                               {});
}

}  // namespace lockstep::rollout
