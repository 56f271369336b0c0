#include "base/error.h"
#include "base/text.h"
#include "contract/contract.h"

namespace lockstep::contracts {
namespace {

constexpr Quantizer kNvfp4 = {.element = Element::kE2m1,
                              .scale = ScaleFormat::kE4m3,
                              .global = GlobalScale::kPerTensor,
                              .global_is_power_of_two = true};

constexpr Quantizer te() {
  Quantizer rule = kNvfp4;
  rule.global_is_power_of_two = false;
  rule.scale_rule = ScaleRule::kTe;
  rule.code_rule = CodeRule::kTe;
  rule.stored_global = StoredGlobal::kAmax;
  rule.sign_of_zero = SignOfZero::kKept;
  return rule;
}

constexpr Quantizer modelopt() {
  Quantizer rule = kNvfp4;
  rule.global_is_power_of_two = false;
  rule.scale_rule = ScaleRule::kModelOpt;
  rule.code_rule = CodeRule::kModelOpt;
  rule.zero_block = ZeroBlock::kOne;
  rule.sign_of_zero = SignOfZero::kNegativesKept;
  return rule;
}

constexpr Quantizer compressed_tensors() {
  Quantizer rule = kNvfp4;
  rule.global_is_power_of_two = false;
  rule.scale_rule = ScaleRule::kCompressedTensors;
  rule.code_rule = CodeRule::kCompressedTensors;
  rule.stored_global = StoredGlobal::kEncode;
  rule.zero_block = ZeroBlock::kEighth;
  rule.sign_of_zero = SignOfZero::kNegativesKept;
  return rule;
}

constexpr Quantizer torchao() {
  Quantizer rule = kNvfp4;
  rule.global_is_power_of_two = false;
  rule.scale_rule = ScaleRule::kTorchao;
  rule.code_rule = CodeRule::kTorchao;
  rule.zero_block = ZeroBlock::kSmallest;
  rule.sign_of_zero = SignOfZero::kKept;
  return rule;
}

constexpr Quantizer ggml() {
  Quantizer rule = kNvfp4;
  rule.global = GlobalScale::kNone;
  rule.global_is_power_of_two = false;
  rule.scale_rule = ScaleRule::kGgml;
  rule.tie = Tie::kTowardZero;
  return rule;
}

constexpr Quantizer mx(ScaleRule scale_rule) {
  return {.element = Element::kE2m1,
          .block = 32,
          .scale = ScaleFormat::kE8m0,
          .scale_rule = scale_rule};
}

constexpr ScaleRule scale_rule(MxRule rule) {
  switch (rule) {
    case MxRule::kFloor: return ScaleRule::kMxFloor;
    case MxRule::kEven: return ScaleRule::kMxEven;
    case MxRule::kCeil: return ScaleRule::kMxCeil;
    case MxRule::kRceil: return ScaleRule::kMxRceil;
  }
  return ScaleRule::kMxRceil;
}

/// E4M3 elements in blocks of a power of two each.
constexpr Quantizer e4m3(std::int32_t block, std::int32_t block_rows, ScaleRule scale_rule) {
  Quantizer rule = mx(scale_rule);
  rule.element = Element::kE4m3;
  rule.block = block;
  rule.block_rows = block_rows;
  return rule;
}

Quantizer nvfp4(Tensor tensor) {
  Quantizer rule = kNvfp4;
  if (tensor == Tensor::kActivation) rule.global = GlobalScale::kPerToken;
  if (tensor == Tensor::kCache) rule.global = GlobalScale::kStatic;
  return rule;
}

Quantizer fp8(Tensor tensor) {
  if (tensor == Tensor::kWeight) return e4m3(128, 128, ScaleRule::kMxRceil);
  if (tensor == Tensor::kActivation) return e4m3(128, 1, ScaleRule::kMxRceil);
  return {
      .element = Element::kE4m3, .global = GlobalScale::kStatic, .global_is_power_of_two = true};
}

constexpr Quantizer ggml_mxfp4() {
  Quantizer rule = mx(ScaleRule::kMxFloor);
  rule.tie = Tie::kTowardZero;
  return rule;
}

/// The dialect's rules for weights and activations. An activation's global scale is its token's
/// whatever the dialect's home does, for a tensor's would depend on what shares the batch. The
/// cache's global scale is a fixed power of two, which dialects with an FP32 one have no rule for.
Contract contract_of(const Quantizer& weight, int num_layers) {
  Contract contract;
  contract.weight = weight;
  contract.activation = weight;
  if (weight.global == GlobalScale::kPerTensor) {
    contract.activation.global = GlobalScale::kPerToken;
  }
  contract.k = weight.is_mx() ? weight : kNvfp4;
  if (!weight.is_mx()) contract.k.global = GlobalScale::kStatic;
  contract.v = contract.k;
  contract.layers = LayerSet::range(0, num_layers);
  return contract;
}

struct Named {
  std::string_view name;
  Quantizer weight;
};

constexpr Named kPresets[] = {
    {"lockstep", kNvfp4},
    {"te", te()},
    {"modelopt", modelopt()},
    {"compressed-tensors", compressed_tensors()},
    {"torchao", torchao()},
    {"ggml", ggml()},
    {"ggml-mxfp4", ggml_mxfp4()},
    {"mx-floor", mx(ScaleRule::kMxFloor)},
    {"mx-even", mx(ScaleRule::kMxEven)},
    {"mx-ceil", mx(ScaleRule::kMxCeil)},
    {"mx-rceil", mx(ScaleRule::kMxRceil)},
};

Contract contract_of(std::string_view weight, std::string_view cache, int num_layers) {
  Contract contract;
  contract.weight = format(weight, Tensor::kWeight);
  contract.activation = format(weight, Tensor::kActivation);
  contract.k = contract.v = format(cache, Tensor::kCache);
  contract.layers = LayerSet::range(0, num_layers);
  return contract;
}

}  // namespace

std::vector<std::string> formats() { return {"bf16", "nvfp4", "mxfp4", "mxfp8", "fp8"}; }

Quantizer format(std::string_view name, Tensor tensor, MxRule rule) {
  if (name == "bf16") return {};
  if (name == "nvfp4") return nvfp4(tensor);
  if (name == "mxfp4") return mx(scale_rule(rule));
  if (name == "fp8") return fp8(tensor);
  if (name != "mxfp8") {
    throw Error(cat({"format ", name, " is not known; known are bf16, nvfp4, mxfp4, mxfp8, fp8"}));
  }
  if (tensor == Tensor::kCache) {
    throw Error(
        "contract.kv is \"mxfp8\", which no kernel reads from the cache; take fp8, mxfp4, nvfp4 or "
        "bf16");
  }
  return e4m3(32, 1, scale_rule(rule));
}

Contract lockstep(int num_layers) { return contract_of(kNvfp4, num_layers); }

Contract preset(std::string_view name, int num_layers) {
  if (name == "bf16") return bf16();
  if (name == "fp8") return contract_of("fp8", "fp8", num_layers);
  if (name == "mxfp8") return contract_of("mxfp8", "bf16", num_layers);
  for (const Named& known : kPresets) {
    if (known.name == name) return contract_of(known.weight, num_layers);
  }
  const std::string near = nearest(name, names());
  throw Error(cat(
      {"contract ", name, " is not known", near.empty() ? "; known are " : "; did you mean ",
       near.empty() ? cat({"bf16, lockstep, te, modelopt, compressed-tensors, torchao, "
                           "ggml, ggml-mxfp4, mx-floor, mx-even, mx-ceil, mx-rceil, mxfp8, fp8"})
                    : cat({near, "?"})}));
}

std::vector<std::string> names() {
  std::vector<std::string> all = {"bf16"};
  for (const Named& known : kPresets) all.emplace_back(known.name);
  all.insert(all.end(), {"mxfp8", "fp8"});
  return all;
}

}  // namespace lockstep::contracts
