#include "rollout/forward_experts.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "kernels/dense/add_norm.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/route.h"
#include "kernels/dense/w4a16.h"
#include "kernels/exact/dequantize.h"
#include "kernels/exact/halves.h"
#include "kernels/exact/moe_w4a4.h"
#include "kernels/exact/residual.h"
#include "kernels/exact/swiglu.h"
#include "numerics/bf16.h"

namespace lockstep::rollout {
namespace {

constexpr std::int64_t kMxErrorRows = 32;
constexpr std::int64_t kOneOpRows = 256;

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

}  // namespace

ForwardExperts::ForwardExperts(const Agreement& agreement, const Options& options, Workplace& at,
                               std::int64_t* counts)
    : agreement_(agreement),
      options_(options),
      at_(&at),
      d_(agreement.model.hidden),
      f_(agreement.model.expert_width),
      experts_(agreement.model.num_experts),
      slots_(agreement.model.experts_per_token),
      counts_(kernels::kNumQuantizeCounts, at, counts),
      logits_(at),
      gates_(at),
      up_(at),
      down_(at),
      half_(at),
      rest_(at),
      scores_(at),
      powers_(at),
      chosen_(at),
      index_(at),
      gathered_(at),
      w2_in_(at),
      dequantized_(at),
      codes_(at),
      w2_codes_(at),
      residual_(at),
      halves_(at),
      residual_halves_(at) {
  require_residual(agreement, options);
  const std::vector<std::uint8_t>& groups = agreement_.contract.residual_groups;
  groups_ = Buffer(at.device, std::ssize(groups), at.stream);
  copy_bytes(groups_.as<void>(), at.device, groups.data(), {}, groups_.bytes(), at.stream);
}

bool ForwardExperts::quantizes(Layer layer) const {
  return agreement_.contract.activation.element != Element::kBf16 &&
         agreement_.contract.layers.has(layer);
}

ForwardExperts::Outputs ForwardExperts::run(const Pass& pass, Layer layer,
                                            const LayerWeights& weights,
                                            TensorView<const Bf16, 2> x, Capture& capture,
                                            const PassChecks& checks, TensorView<Bf16, 2> out) {
  const std::int64_t rows = pass.rows();
  const std::int64_t items = rows * slots_;
  std::int32_t* const bad_w2 = checks.cell(layer.value, Check::kW2In);
  route(pass, layer, weights, x, capture);

  SiteInput site{.x = x, .rule = agreement_.rule(Site::kW13In), .codes = {}, .residual = {}};
  if (quantizes(layer)) site.codes = quantize(pass, layer, Site::kW13In, x, capture);
  const auto down = down_.view(items, d_);
  const Outputs outputs = {down, gates_.view(rows, slots_)};
  if (fits_one_op(pass, layer, weights, capture)) {
    if (rows > kernels::kSlotSumRows) out = {};  // add_norm() does it by the way
    one_op(pass, layer, weights, site.codes, capture, bad_w2, out);
    return out.empty() ? outputs : Outputs{};
  }
  if (compensates(layer, weights, Site::kW13In))
    site.residual = residual(layer, Site::kW13In, site);
  if (observer_) observer_({layer, Site::kW13In, x, items_.row_of, items_.offsets});
  const auto up = up_.view(items, 2 * f_);
  product(site, weights, false, items_.row_of, up);

  const auto w2_in = w2_in_.view(items, f_);
  kernels::swiglu({.gate = {up.data, {items, f_}, {2 * f_, 1}, up.device},
                   .up = {up.data + f_, {items, f_}, {2 * f_, 1}, up.device},
                   .out = w2_in},
                  at_->stream);
  // A row's slots together, so that what is found is a row of the pass.
  const TensorView<const Bf16, 2> by_row = {
      w2_in.data, {rows, slots_ * f_}, {slots_ * f_, 1}, w2_in.device};
  kernels::first_nonfinite(by_row, bad_w2, at_->stream);
  checks.look(bad_w2);
  site = {.x = w2_in, .rule = agreement_.rule(Site::kW2In), .codes = {}, .residual = {}};
  if (quantizes(layer)) site.codes = quantize(pass, layer, Site::kW2In, w2_in, capture);
  if (compensates(layer, weights, Site::kW2In)) site.residual = residual(layer, Site::kW2In, site);
  if (observer_) observer_({layer, Site::kW2In, w2_in, items_.slot_of, items_.offsets});
  product(site, weights, true, items_.slot_of, down);
  return outputs;
}

bool ForwardExperts::fits_one_op(const Pass& pass, Layer layer, const LayerWeights& weights,
                                 const Capture& capture) const {
  if (!at_->on_cuda() || pass.rows() > kOneOpRows || f_ > kernels::kMoeMostWidth) return false;
  if (weights.format != ExpertFormat::kW4a4 || options_.drift.split_k) return false;
  if (weights.gate_up_codes.scaled) return false;
  const Quantizer& rule = agreement_.contract.activation;
  if (rule.global != GlobalScale::kPerToken || !rule.is_guidable()) return false;
  return !compensates(layer, weights, Site::kW13In) && !compensates(layer, weights, Site::kW2In) &&
         capture.layout(layer, Site::kW2In).encoding == Encoding::kNone;
}

void ForwardExperts::one_op(const Pass& pass, Layer layer, const LayerWeights& weights,
                            PackedView<const std::uint8_t> codes, Capture& capture,
                            std::int32_t* bad, TensorView<Bf16, 2> out) {
  const std::int64_t rows = pass.rows();
  const std::int64_t items = rows * slots_;
  const auto w2_in = w2_codes_.view(items, f_, agreement_.rule(Site::kW2In));
  kernels::moe_w4a4({.a = codes,
                     .gate_up = weights.gate_up_codes,
                     .down = weights.down_codes,
                     .offsets = index(items_.offsets),
                     .rows_of = index(items_.row_of),
                     .slots_of = index(items_.slot_of),
                     .gates = gates_.view(rows, slots_),
                     .up = up_.view(items, 2 * f_),
                     .w2_in = w2_in,
                     .y = down_.view(items, d_),
                     .out = out,
                     .bad = bad,
                     .settled = true},  // by quantize(), which waited for route()
                    at_->stream);
  capture.activations(pass, layer, Site::kW2In, {}, w2_in);
}

void ForwardExperts::route(const Pass& pass, Layer layer, const LayerWeights& weights,
                           TensorView<const Bf16, 2> x, Capture& capture) {
  const std::int64_t rows = pass.rows();
  const std::int64_t items = rows * slots_;
  const auto logits = logits_.view(rows, experts_);
  TensorView<std::int32_t, 2> chosen = capture.route_room(pass, layer);
  if (chosen.empty()) chosen = chosen_.view(rows, slots_);
  const auto room = index_.view(1, experts_ + 1 + 2 * items);
  const std::span<std::int32_t> all(room.data, static_cast<std::size_t>(room.shape[1]));
  const auto count = static_cast<std::size_t>(items);
  items_ = {.offsets = all.first(all.size() - 2 * count),
            .row_of = all.subspan(all.size() - 2 * count, count),
            .slot_of = all.last(count)};
  kernels::route({.x = x,
                  .weight = weights.router,
                  .split_k = options_.drift.split_k,
                  .settled = true,
                  .normalize = agreement_.model.normalize_gates,
                  .logits = logits,
                  .experts = chosen,
                  .gates = gates_.view(rows, slots_),
                  .offsets = items_.offsets,
                  .row_of = items_.row_of,
                  .slot_of = items_.slot_of},
                 at_->stream);
  capture.routes(pass, layer, chosen);
}

PackedView<const std::uint8_t> ForwardExperts::quantize(const Pass& pass, Layer layer, Site site,
                                                        TensorView<const Bf16, 2> x,
                                                        Capture& capture) {
  const Quantizer rule = agreement_.rule(site);
  const PackedView<std::uint8_t> wanted = capture.code_room(layer, site);
  const auto codes = wanted.codes.empty() ? codes_.view(x.shape[0], x.shape[1], rule) : wanted;
  const TensorView<std::uint8_t, 2> records = capture.record_room(pass, layer, site);
  kernels::quantize({.x = x,
                     .rule = rule,
                     .out = codes,
                     .layout = records.empty() ? RowLayout{} : capture.layout(layer, site),
                     .records = records,
                     .counts = counts_.view()},
                    at_->stream);
  capture.activations(pass, layer, site, records, codes);
  if (at_->on_cuda()) return codes;
  top_error_.add(x, rule, codes);
  if (rule.is_mx() && !rule.is_wide()) {
    // One row in so many: the decomposition is dearer than quantizing.
    mx_error_.add(kernels::mx_error({x.data,
                                     {(x.shape[0] + kMxErrorRows - 1) / kMxErrorRows, x.shape[1]},
                                     {x.stride[0] * kMxErrorRows, 1}},
                                    rule));
  }
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
    const auto rest =
        at_->on_cuda() ? rest_.view(input.x.shape[0], input.x.shape[1]) : TensorView<float, 2>{};
    kernels::residual_of(input.x, input.rule, input.codes, out, rest, at_->stream);
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
    args.chosen = {groups_.as<std::uint8_t>() + first + (site == Site::kW2In ? d_ / 16 : 0),
                   {input.x.shape[1] / 16},
                   {1},
                   at_->device};
  }
  if (at_->on_cuda() && args.choice == kernels::ResidualChoice::kBatch) {
    const std::int64_t numbers = kernels::residual_workspace(args);
    args.workspace = {scores_.view(1, numbers).data, {numbers}, {1}, at_->device};
  }
  kernels::residual(args, at_->stream);
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
  if (weights.format == ExpertFormat::kW4a16) {
    return packed_product(site, down ? weights.down_codes : weights.gate_up_codes, from, y);
  }
  bf16_product(site, down ? weights.down : weights.gate_up, from, y);
}

void ForwardExperts::coded_product(const SiteInput& site, const kernels::W4a4Weights& weights,
                                   std::span<const std::int32_t> from, TensorView<float, 2> y) {
  kernels::W4a4Args args{.a = site.codes,
                         .residual = site.residual,
                         .w = weights,
                         .offsets = index(items_.offsets),
                         .from = index(from),
                         .to = index(items_.slot_of),
                         .out = y,
                         .residual_halvings = options_.residual_alpha == 1.0f   ? 0
                                              : options_.residual_alpha == 0.5f ? 1
                                                                                : 2,
                         .rule = site.rule};
  if (at_->on_cuda() && (weights.scaled || !site.rule.global_is_power_of_two)) {
    const auto powers = powers_.view(1, site.codes.codes.shape[0]);
    args.room = {powers.data, static_cast<std::size_t>(powers.shape[1])};
  }
  if (!options_.drift.split_k) return kernels::w4a4(args, at_->stream);
  in_halves(site, y, [&](const SiteInput& half, TensorView<float, 2> out) {
    args.a = half.codes;
    args.residual = half.residual;
    args.out = out;
    kernels::w4a4(args, at_->stream);
  });
}

void ForwardExperts::mx_product(const SiteInput& site,
                                const PackedView<const std::uint8_t>& weights,
                                std::span<const std::int32_t> from, TensorView<float, 2> y) {
  kernels::MxProductArgs args{.a = site.codes,
                              .w = weights,
                              .experts = agreement_.model.num_experts,
                              .offsets = index(items_.offsets),
                              .from = index(from),
                              .to = index(items_.slot_of),
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
  kernels::mx_product(args, at_->stream);
  if (site.residual.codes.empty()) return;
  const TensorView<float, 2> y = args.out;
  args.a = site.residual;
  args.out = rest_.view(y.shape[0], y.shape[1]);
  kernels::mx_product(args, at_->stream);
  kernels::add_product(args.out, options_.residual_alpha, y, at_->stream);
}

/// The declared drift of an exact product: two sums, each rounded to BF16.
void ForwardExperts::in_halves(
    const SiteInput& site, TensorView<float, 2> y,
    const std::function<void(const SiteInput& half, TensorView<float, 2> out)>& multiply) {
  const std::int64_t rows = site.codes.codes.shape[0];
  const std::int64_t cols = 2 * site.codes.codes.shape[1];
  const auto second = half_.view(y.shape[0], y.shape[1]);
  for (const bool first : {true, false}) {
    SiteInput half = site;
    const auto codes = halves_.view(rows, cols, agreement_.contract.activation);
    kernels::keep_half(site.codes, first, codes, at_->stream);
    half.codes = codes;
    if (!site.residual.codes.empty()) {
      const auto residual = residual_halves_.view(rows, cols, agreement_.contract.activation);
      kernels::keep_half(site.residual, first, residual, at_->stream);
      half.residual = residual;
    }
    multiply(half, first ? y : second);
  }
  kernels::add_halves(second, y, at_->stream);
}

/// What a BF16 product multiplies: x, or what its codes are worth.
TensorView<const Bf16, 2> ForwardExperts::numbers(const SiteInput& site) {
  if (site.codes.codes.empty()) return site.x;
  const auto plain = dequantized_.view(site.x.shape[0], site.x.shape[1]);
  if (site.residual.codes.empty()) {
    kernels::dequantize({.codes = site.codes, .rule = site.rule, .bf16 = plain}, at_->stream);
  } else {
    kernels::add_residual(site.codes, site.residual, site.rule, options_.residual_alpha, plain,
                          at_->stream);
  }
  return plain;
}

/// Many rows are brought into the order of the experts first, from which they are fetched faster.
void ForwardExperts::packed_product(const SiteInput& site, const kernels::W4a4Weights& weights,
                                    std::span<const std::int32_t> from, TensorView<float, 2> y) {
  const auto items = static_cast<std::int64_t>(from.size());
  kernels::W4a16Args args{.x = numbers(site),
                          .w = weights,
                          .offsets = index(items_.offsets),
                          .to = index(items_.slot_of),
                          .out = y};
  if (items <= kernels::kW4a16FewItems * weights.experts) {
    args.from = index(from);
  } else {
    const auto sorted = gathered_.view(items, args.x.shape[1]);
    kernels::gather_rows(args.x, from, sorted, at_->stream);
    args.x = sorted;
  }
  kernels::w4a16(args, at_->stream);
}

void ForwardExperts::bf16_product(const SiteInput& site, const kernels::PackedMatrix& weights,
                                  std::span<const std::int32_t> from, TensorView<float, 2> y) {
  const TensorView<const Bf16, 2> x = numbers(site);
  const auto items = static_cast<std::int64_t>(from.size());
  const auto sorted = gathered_.view(items, x.shape[1]);
  kernels::gather_rows(x, from, sorted, at_->stream);
  kernels::grouped_linear_bf16({.x = sorted,
                                .offsets = items_.offsets,
                                .weights = weights,
                                .to = items_.slot_of,
                                .y = y,
                                .split_k = options_.drift.split_k},
                               at_->stream);
}

}  // namespace lockstep::rollout
