#include "recipe/arm.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "base/text.h"
#include "numerics/macro_block.h"

namespace lockstep {
namespace {

// Each arm is another one and what it changes. All of them record and replay the routes.

ArmSpec naive() { return {.name = "naive"}; }

ArmSpec bf16() {
  ArmSpec arm = naive();
  arm.name = "bf16";
  arm.contract = "bf16";
  return arm;
}

ArmSpec w4a16() {
  ArmSpec arm = naive();
  arm.name = "w4a16";
  arm.qat = {.weights = true};
  return arm;
}

ArmSpec w4a4() {
  ArmSpec arm = naive();
  arm.name = "w4a4";
  arm.qat = {.weights = true, .activations = true, .k = true, .v = true};
  return arm;
}

ArmSpec quads() {
  ArmSpec arm = w4a16();
  arm.name = "quads";
  arm.residual = rollout::Residual::kChannels;
  return arm;
}

/// Rollout-ResQ: at every input of the experts, whatever the residual's form.
ArmSpec resq(const char* name, rollout::Residual residual) {
  ArmSpec arm = w4a4();
  arm.name = name;
  arm.residual = residual;
  arm.residual_sites = {Site::kW13In, Site::kW2In};
  return arm;
}

/// Half of the residual goes back, on both sides.
ArmSpec of() {
  ArmSpec arm = resq("of", rollout::Residual::kDense);
  arm.residual_alpha = 0.5f;
  arm.qat_residual = true;
  return arm;
}

ArmSpec trace() {
  ArmSpec arm = w4a4();
  arm.name = "trace";
  arm.mode = Guidance::kLsb;
  arm.sites = {Site::kW13In, Site::kK, Site::kV};
  arm.layers = "latter_half";
  return arm;
}

ArmSpec four_over_six() {
  ArmSpec arm = w4a4();
  arm.name = "four_over_six";
  arm.four_over_six = FourOverSix::kMse;
  return arm;
}

/// humans&: the cache and the last layers stay BF16, blocks end at 4 or 6. That backward sees the
/// dequantized operands is so in every arm.
ArmSpec humans() {
  ArmSpec arm = four_over_six();
  arm.name = "humans";
  arm.four_over_six = FourOverSix::kMae;
  arm.contract_kv = "false";
  arm.contract_layers = "first_85%";
  arm.qat = {.weights = true, .activations = true};
  return arm;
}

ArmSpec trace_46() {
  ArmSpec arm = trace();
  arm.name = "trace_46";
  arm.four_over_six = FourOverSix::kMse;
  return arm;
}

ArmSpec trace_mod4() {
  ArmSpec arm = trace();
  arm.name = "trace_mod4";
  arm.mode = Guidance::kLsbScaleMod4;
  arm.layers = "latter_two_thirds";
  return arm;
}

ArmSpec trace_full() {
  ArmSpec arm = trace();
  arm.name = "trace_full";
  arm.mode = Guidance::kFullGuided;
  arm.layers = "all";
  return arm;
}

/// Weight-only rollouts under noise; no adapters, the masters learn.
ArmSpec qerl() {
  ArmSpec arm = w4a16();
  arm.name = "qerl";
  arm.contract_activations = "false";
  arm.contract_kv = "false";
  arm.sync.noise = {.start = 1e-2, .end = 1e-4};
  return arm;
}

ArmSpec qarl() {
  ArmSpec arm = w4a4();
  arm.name = "qarl";
  arm.qat.real_product = true;
  arm.surrogate = rl::Surrogate::kTbpo;
  return arm;
}

/// TransformerEngine's own rule, FP32 global scales and all, in its product on both sides; the
/// cache stays BF16.
ArmSpec te_qat() {
  ArmSpec arm = naive();
  arm.name = "te_qat";
  arm.contract = "te";
  arm.contract_kv = "false";
  arm.qat = {.weights = true, .activations = true, .real_product = true};
  return arm;
}

ArmSpec qurl() {
  ArmSpec arm = naive();
  arm.name = "qurl";
  arm.sync.uaq_scale = 1.5;
  arm.surrogate = rl::Surrogate::kAcr;
  return arm;
}

/// The preset that is nearest, for what shows a contract's name; the formats stand by themselves,
/// so that contract.mx_rule has its say.
ArmSpec in_formats(ArmSpec arm, const char* name, const char* weights, const char* activations,
                   const char* kv) {
  arm.name = name;
  arm.contract = std::string_view(weights) == "fp8" ? "fp8" : "mx-rceil";
  arm.contract_weights = weights;
  arm.contract_activations = activations;
  arm.contract_kv = kv;
  return arm;
}

/// 2605.20402: MXFP4 weights and activations on both sides, under a BF16 cache; alone, with macro
/// blocks, and these with noise on the experts as well.
std::vector<ArmSpec> macro() {
  ArmSpec plain = in_formats(naive(), "mxfp4_w4a4", "mxfp4", "mxfp4", "bf16");
  plain.qat = {.weights = true, .activations = true};
  ArmSpec mbs = plain;
  mbs.name = "mbs";
  mbs.macro_blocks = 3;
  ArmSpec noisy = mbs;
  noisy.name = "mbs_aqn";
  noisy.sync.noise = {.on = sync::NoiseOn::kExperts, .start = 1e-2, .end = 1e-3, .stages = 0};
  ArmSpec half = plain;
  half.name = "mxfp4_of";
  half.residual = rollout::Residual::kDense;
  half.residual_sites = {Site::kW13In, Site::kW2In};
  half.residual_alpha = 0.5f;
  half.qat_residual = true;
  return {plain, mbs, noisy, half};
}

/// QaRL's trainer of MXFP4 codes.
ArmSpec qarl_mx() {
  ArmSpec arm = in_formats(qarl(), "qarl_mx", "mxfp4", "mxfp4", "mxfp4");
  return arm;
}

std::vector<ArmSpec> mxfp4() {
  return {in_formats(naive(), "mxfp4_naive", "mxfp4", "mxfp4", "mxfp4"),
          in_formats(w4a4(), "mxfp4_qat", "mxfp4", "mxfp4", "mxfp4"),
          in_formats(trace(), "mxfp4_trace", "mxfp4", "mxfp4", "mxfp4"),
          in_formats(naive(), "mxfp4_w4a8_naive", "mxfp4", "mxfp8", "mxfp4"),
          in_formats(w4a4(), "mxfp4_w4a8_qat", "mxfp4", "mxfp8", "mxfp4"),
          in_formats(trace(), "mxfp4_w4a8_trace", "mxfp4", "mxfp8", "mxfp4")};
}

/// FP8-RL's rollout under a BF16 trainer, under a trainer whose products are FP8 as well, and under
/// one that computes the rollout's whole graph (Jet-RL).
std::vector<ArmSpec> fp8() {
  ArmSpec products = naive();
  products.qat = {.weights = true, .activations = true};
  return {in_formats(naive(), "fp8_naive", "fp8", "fp8", "fp8"),
          in_formats(products, "fp8", "fp8", "fp8", "fp8"),
          in_formats(w4a4(), "jet_rl", "fp8", "fp8", "fp8"),
          in_formats(trace(), "fp8_trace", "fp8", "fp8", "fp8")};
}

std::vector<ArmSpec> all_arms() {
  // One a line: a trailing comma keeps it so.
  std::vector<ArmSpec> arms = {
      bf16(),
      naive(),
      w4a16(),
      w4a4(),
      quads(),
      qarl(),
      qarl_mx(),
      te_qat(),
      qerl(),
      qurl(),
      trace(),
      trace_mod4(),
      trace_full(),
      four_over_six(),
      humans(),
      trace_46(),
      resq("resq_2_4", rollout::Residual::kTwoOfFour),
      resq("resq_blocks", rollout::Residual::kBlocks),
      resq("resq_channels", rollout::Residual::kChannels),
      resq("resq_dense", rollout::Residual::kDense),
      of(),
  };
  for (const std::vector<ArmSpec>& more : {mxfp4(), macro(), fp8()}) {
    arms.insert(arms.end(), more.begin(), more.end());
  }
  return arms;
}

std::int32_t layer_number(std::string_view text, std::string_view spelling,
                          std::int32_t num_layers) {
  std::int32_t layer = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), layer);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(cat({"layers '", spelling,
                     "' name no set; write all, none, first_half, "
                     "latter_half, middle_half, latter_two_thirds, odd, even, first_85%, last_25%, "
                     "or 0,2,5-7"}));
  }
  if (layer < 0 || layer >= num_layers) {
    throw Error(cat(
        {"layers '", spelling, "' name layer ", layer, "; the model has 0 to ", num_layers - 1}));
  }
  return layer;
}

/// P of "first_P%" or "last_P%", -1 where it is neither.
std::int32_t percent(std::string_view spelling, std::string_view prefix) {
  if (!spelling.starts_with(prefix) || !spelling.ends_with('%')) return -1;
  const std::string_view number =
      spelling.substr(prefix.size(), spelling.size() - prefix.size() - 1);
  std::int32_t value = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  const bool whole = error == std::errc() && end == number.data() + number.size();
  return whole && value > 0 && value < 100 ? value : -1;
}

/// Four over six is a rule of NVFP4 under a power of two, which leaves room for it.
void let_end_at_four(Quantizer& rule, FourOverSix metric, const char* what) {
  if (metric == FourOverSix::kOff || rule.element == Element::kBf16) return;
  if (rule.element != Element::kE2m1 || rule.is_mx()) {
    throw Error(cat({"contract.four_over_six is on, and the contract's ", what,
                     " are not NVFP4, which alone has it; set contract.four_over_six = \"off\""}));
  }
  rule.four_over_six = metric;
  rule.denominator = 256;
}

/// A power of two for a scale leaves a bias that a mantissa takes away; no other format has it.
void put_in_macro_blocks(Quantizer& rule, const char* what) {
  if (rule.element != Element::kE2m1 || !rule.is_mx()) {
    throw Error(cat({"contract.macro_blocks has ", what,
                     ", which are not MXFP4, the one format that has them; leave ", what,
                     " out, or set contract.", what, " = \"mxfp4\""}));
  }
  rule.macro_block = kMacroBlock;
}

Contract contract_of(const ArmSpec& spec, const ModelConfig& model) {
  static constexpr std::string_view kRuns[] = {
      "bf16", "lockstep", "te", "mx-floor", "mx-even", "mx-ceil", "mx-rceil", "mxfp8", "fp8"};
  if (std::find(std::begin(kRuns), std::end(kRuns), spec.contract) == std::end(kRuns)) {
    throw Error(
        cat({"contract.preset is \"", spec.contract,
             "\"; a rollout runs lockstep, te, mx-floor, mx-even, mx-ceil, mx-rceil, mxfp8, "
             "fp8 or bf16 (other dialects are read, written and compared, not run)"}));
  }
  Contract contract = contracts::preset(spec.contract, model.num_layers);
  const auto override = [&](Quantizer& rule, const std::string& format, contracts::Tensor tensor) {
    if (format == "true") return;
    rule = format == "false" ? Quantizer{} : contracts::format(format, tensor, spec.mx_rule);
  };
  override(contract.weight, spec.contract_weights, contracts::Tensor::kWeight);
  override(contract.activation, spec.contract_activations, contracts::Tensor::kActivation);
  override(contract.k, spec.contract_kv, contracts::Tensor::kCache);
  if (spec.contract_kv != "true") contract.v = contract.k;
  const bool plain =
      !contract.weight.quantizes() && !contract.activation.quantizes() && !contract.k.quantizes();
  if (spec.contract == "bf16" && plain) return contracts::bf16();
  contract.layers = layer_set(spec.contract_layers, model.num_layers);
  let_end_at_four(contract.weight, spec.four_over_six, "weights");
  let_end_at_four(contract.activation, spec.four_over_six, "activations");
  if ((spec.macro_blocks & 1) != 0) put_in_macro_blocks(contract.weight, "weights");
  if ((spec.macro_blocks & 2) != 0) put_in_macro_blocks(contract.activation, "activations");
  if (spec.four_over_six_kv) {
    let_end_at_four(contract.k, spec.four_over_six, "K and V");
    let_end_at_four(contract.v, spec.four_over_six, "K and V");
  }
  if (contract.k.global == GlobalScale::kStatic) contract.kv_exponents = spec.kv_exponents;
  return contract;
}

}  // namespace

const std::vector<std::string>& arm_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const ArmSpec& arm : all_arms()) list.push_back(arm.name);
    return list;
  }();
  return names;
}

ArmSpec arm_spec(std::string_view name) {
  for (ArmSpec& arm : all_arms()) {
    if (arm.name == name) return arm;
  }
  std::string known;
  for (const std::string& one : arm_names()) known += (known.empty() ? "" : ", ") + one;
  throw Error(cat({"there is no arm '", name, "'; the arms are ", known}));
}

Arm bind(const ArmSpec& spec, const ModelConfig& model, const rollout::Options& rollout,
         const rl::Options& rl) {
  Arm arm = {.name = spec.name,
             .contract = contract_of(spec, model),
             .qat = spec.qat,
             .guide = {.mode = spec.mode,
                       .sites = spec.sites,
                       .layers = layer_set(spec.layers, model.num_layers),
                       .replay_experts = spec.routing_replay == RoutingReplay::kR3,
                       .audit_every = spec.audit_every,
                       .max_version_diff = spec.max_version_diff,
                       .fallback = spec.fallback},
             .own_routes = spec.routing_replay == RoutingReplay::kR2,
             .rollout = rollout,
             .rl = rl,
             .sync = spec.sync};
  if (!spec.kv_layers.empty()) arm.guide.kv_layers = layer_set(spec.kv_layers, model.num_layers);
  arm.rollout.residual = spec.residual;
  arm.rollout.residual_scope = spec.residual_scope;
  arm.rollout.residual_permille = spec.residual_permille;
  arm.rollout.residual_sites = spec.residual_sites;
  arm.rollout.residual_alpha = spec.residual_alpha;
  if (spec.qat_residual) {
    arm.qat.residual_alpha = spec.residual_alpha;
    arm.qat.residual_sites = spec.residual_sites;
  }
  for (const char flag : spec.residual_groups) {
    if (flag != '0' && flag != '1') {
      throw Error(cat({"residual.groups holds '", std::string(1, flag),
                       "'; it takes a 0 or 1 for each group of 16 channels"}));
    }
    if (rollout::takes_groups(arm.rollout)) arm.contract.residual_groups.push_back(flag == '1');
  }
  return arm;
}

LayerSet layer_set(std::string_view spelling, std::int32_t num_layers) {
  const std::int32_t n = num_layers;
  if (spelling == "all") return LayerSet::range(0, n);
  if (spelling == "none") return {};
  if (spelling == "first_half") return LayerSet::range(0, n / 2);
  if (spelling == "latter_half") return LayerSet::range(n / 2, n);
  if (spelling == "middle_half") return LayerSet::range(n / 4, n / 4 + n / 2);
  if (spelling == "latter_two_thirds") return LayerSet::range((n + 1) / 3, n);
  const auto part = [n](std::int32_t share) {
    return std::clamp((n * share + 50) / 100, std::min(1, n), std::max(n - 1, 0));
  };
  if (const std::int32_t share = percent(spelling, "first_"); share > 0) {
    return LayerSet::range(0, part(share));
  }
  if (const std::int32_t share = percent(spelling, "last_"); share > 0) {
    return LayerSet::range(n - part(share), n);
  }
  LayerSet set;
  const auto add = [&](std::int32_t first, std::int32_t end) {
    const LayerSet more = LayerSet::range(first, end);
    for (std::size_t i = 0; i < set.bits.size(); ++i) set.bits[i] |= more.bits[i];
  };
  if (spelling == "odd" || spelling == "even") {
    for (std::int32_t layer = spelling == "odd" ? 1 : 0; layer < n; layer += 2) {
      add(layer, layer + 1);
    }
    return set;
  }
  for (std::string_view rest = spelling;;) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view item = rest.substr(0, comma);
    const std::size_t dash = std::min(item.find('-'), item.size());
    const std::int32_t first = layer_number(item.substr(0, dash), spelling, n);
    const std::int32_t last =
        dash == item.size() ? first : layer_number(item.substr(dash + 1), spelling, n);
    add(first, last + 1);
    if (comma == rest.size()) return set;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace lockstep
