/// The guided inputs of the routed experts, and guided K and V: the trainer's own numbers, rounded
/// toward the codes that the rollout used (docs/methods.md, TRACE). Products then run on values
/// that FP4 codes name, and their gradients see the same values; the gradient of the rounding
/// itself is the identity.
#include "kernels/exact/audit.h"
#include "kernels/exact/guide.h"
#include "kernels/exact/quantize.h"
#include "kernels/exact/residual.h"
#include "numerics/bf16.h"
#include "train/sites.h"

namespace lockstep::train {

using at::Tensor;

Tensor Sites::w13_in(Layer layer, const Tensor& x) const {
  show({layer, Site::kW13In}, x);
  return rounded({layer, Site::kW13In}, x);
}

Tensor Sites::kv(Place place, const Tensor& x) const {
  show(place, x);
  return rounded(place, x);
}

ops::Rounding Sites::w2_in(Layer layer) const {
  const Place place = {layer, Site::kW2In};
  if (!imitates(place)) return {};
  return [this, place](TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) {
    round(place, from, to);
  };
}

Tensor Sites::rounded(Place place, const Tensor& x) const {
  if (imitates(place)) {
    return ops::straight_through(
        x, [&](TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) { round(place, from, to); });
  }
  if (audits(place) && x.is_cuda()) {
    if constexpr (build::has_cuda) audit_unrounded(place, x);
  } else if (audits(place)) {
    // An arm that does not round still learns how far its numbers are from the rollout's codes.
    std::vector<Bf16> numbers(static_cast<std::size_t>(x.numel()));
    ops::store_bf16(x.detach(), numbers.data());
    const std::vector<Bf16> before = audited_rows(numbers.data(), x.size(1));
    audit(place, x.size(1), before, {});
  }
  return x;
}

bool Sites::imitates(Place place) const {
  if (!quantized(place)) return false;
  switch (place.site) {
    case Site::kW13In:
    case Site::kW2In: return qat_.activations;
    case Site::kK: return qat_.k;
    case Site::kV: return qat_.v;
    case Site::kRouter: return false;
  }
  return false;
}

bool Sites::compensates(Place place) const {
  return qat_.residual_alpha > 0.0f && qat_.residual_sites.has(place.site);
}

/// Codes with an owner.
struct OwnCodes {
  OwnCodes(std::int64_t rows, std::int64_t cols, const Quantizer& rule)
      : codes(static_cast<std::size_t>(rows * rule.code_bytes(cols))),
        scales(static_cast<std::size_t>(rows * rule.scale_cols(cols))),
        mantissas(static_cast<std::size_t>(rows * rule.macro_cols(cols))),
        globals(static_cast<std::size_t>(rows)),
        view{.codes = {codes.data(), {rows, rule.code_bytes(cols)}, {rule.code_bytes(cols), 1}},
             .scales = {scales.data(), {rows, rule.scale_cols(cols)}, {rule.scale_cols(cols), 1}},
             .global = {globals.data(), {rows}, {1}},
             .mantissas = {
                 mantissas.data(), {rows, rule.macro_cols(cols)}, {rule.macro_cols(cols), 1}}} {}
  std::vector<std::uint8_t> codes, scales, mantissas;
  std::vector<float> globals;
  PackedView<std::uint8_t> view;
};

/// Of a second pass that is added. NVFP4's residual is quantized minus true: it is taken away.
float Sites::residual_factor(const Quantizer& rule) const {
  return rule.is_mx() ? qat_.residual_alpha : -qat_.residual_alpha;
}

/// x in place: Q(x) + alpha Q(x - Q(x)), the rollout's two operands in one.
void Sites::compensate(Place place, TensorView<Bf16, 2> x) const {
  const auto [rows, cols] = x.shape;
  const Quantizer& rule = agreement_.rule(place.site);
  const OwnCodes main(rows, cols, rule), rest(rows, cols, rule);
  kernels::quantize({.x = x, .rule = rule, .out = main.view});
  if (rule.is_mx()) {
    kernels::residual_of(x, rule, main.view, rest.view);
  } else {
    kernels::residual({.x = x, .q = main.view, .per_mille = 1000, .out = rest.view});
  }
  kernels::add_residual(main.view, rest.view, rule, residual_factor(rule), x);
}

/// Rows that no record covers are rounded at their own scale.
void Sites::round(Place place, TensorView<const Bf16, 2> from, TensorView<Bf16, 2> to) const {
  if (to.device.kind == Device::Kind::kCpu) return round_here(place, to);
  if constexpr (build::has_cuda) round_there(place, from, to);
}

/// x in place.
void Sites::round_here(Place place, TensorView<Bf16, 2> x) const {
  const std::int64_t width = x.shape[0] * x.shape[1] / std::max<std::int64_t>(pack_.rows(), 1);
  std::vector<Bf16> before;
  if (audits(place)) before = audited_rows(x.data, width);

  if (compensates(place)) {
    compensate(place, x);
    if (!before.empty()) audit(place, x.shape[1], before, audited_rows(x.data, width));
    return;
  }
  kernels::GuideArgs args = {.x = x, .rule = agreement_.rule(place.site), .out = x};
  args.exponent = exponent(place);
  Records records;
  std::int64_t counts[kernels::kNumGuideCounts] = {};
  if (follows(place)) {
    records = read(place, agreement_.encoding(place));
    args.guidance = agreement_.guide.mode;
    args.layout = records.layout;
    const std::int64_t bytes = records.layout.bytes();
    args.records = {records.bytes.data(), {pack_.rows(), bytes}, {bytes, 1}};
    args.present = {records.present.data(), {pack_.rows()}, {1}};
    args.counts = {counts, {kernels::kNumGuideCounts}, {1}};
  }
  kernels::guide(args);

  if (!before.empty()) audit(place, x.shape[1], before, audited_rows(x.data, width));
  if (tally_ != nullptr && follows(place)) count(place.site, counts, x.shape[1]);
}

void Sites::count(Site site, std::span<const std::int64_t> counts, std::int64_t cols) const {
  Tally::Guided& tally = tally_->of(site);
  tally.covered += counts[kernels::kCovered];
  tally.absent += counts[kernels::kAbsent];
  tally.moved += counts[kernels::kMoved];
  tally.elements += counts[kernels::kCovered] * cols;
}

/// The audit tokens' rows, `width` elements each.
std::vector<Bf16> Sites::audited_rows(const Bf16* x, std::int64_t width) const {
  std::vector<Bf16> rows;
  rows.reserve(audited_.size() * static_cast<std::size_t>(width));
  for (const std::size_t i : audited_) {
    const Bf16* row = x + pack_.key_row[i] * width;
    rows.insert(rows.end(), row, row + width);
  }
  return rows;
}

void Sites::audit(Place place, std::int64_t cols, const std::vector<Bf16>& before,
                  const std::vector<Bf16>& after) const {
  std::vector<TokenKey> keys;
  for (const std::size_t i : audited_) keys.push_back(pack_.keys[i]);
  const RowLayout layout = agreement_.layout(place, Encoding::kCodes);
  std::vector<std::uint8_t> bytes(keys.size() * static_cast<std::size_t>(layout.bytes()));
  std::vector<std::uint8_t> present(keys.size());
  trace_->read(keys, contract_,
               {place, layout, std::as_writable_bytes(std::span(bytes))}, present);
  const auto tokens = static_cast<std::int64_t>(keys.size());
  const std::int64_t rows = static_cast<std::int64_t>(before.size()) / cols;
  std::array<std::int64_t, kernels::kNumAuditCounts> counts{};
  kernels::audit({.x = {before.data(), {rows, cols}, {cols, 1}},
                  .operand = {(after.empty() ? before : after).data(), {rows, cols}, {cols, 1}},
                  .rule = agreement_.rule(place.site),
                  .layout = layout,
                  .records = {bytes.data(), {tokens, layout.bytes()}, {layout.bytes(), 1}},
                  .present = {present.data(), {tokens}, {1}},
                  .exponent = exponent(place),
                  .counts = {counts.data(), {kernels::kNumAuditCounts}, {1}}});
  count_audit(place, counts, !after.empty());
}

void Sites::count_audit(Place place, std::span<const std::int64_t> counts, bool rounded) const {
  Tally::Audit& tally = tally_->of(place);
  for (std::size_t i = 0; i < counts.size(); ++i) tally.counts[i] += counts[i];
  // What still differs is asked of those who round.
  if (!rounded) {
    tally.counts[kernels::kAuditStillDiffer] -= counts[kernels::kAuditStillDiffer];
  } else {
    tally.rounded += counts[kernels::kAuditCodes];
  }
}

}  // namespace lockstep::train
