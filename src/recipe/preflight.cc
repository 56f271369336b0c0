#include "recipe/preflight.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "base/build.h"
#include "base/error.h"
#include "base/text.h"
#include "base/wait.h"
#include "device/memory.h"

namespace lockstep::recipe {
namespace {

void check_block(const Quantizer& rule, std::int32_t size, const char* tensor, const char* key) {
  if (!rule.quantizes() || rule.block_rows > 1) return;  // a weight's blocks end where it ends
  // Blocks of FP8 longer than a row are a row.
  const std::int32_t block =
      rule.scale == ScaleFormat::kNone || (rule.is_wide() && size < rule.block) ? 16 : rule.block;
  if (size % block == 0) return;
  throw Error(
      cat({"contract.preset cannot quantize ", tensor, ": its rows are ", size,
           " long, no multiple of the block of ", block, "; set contract.", key, " = false"}));
}

void check_shapes(const Arm& arm, const ModelConfig& model) {
  if (model.num_layers > 128) {
    throw Error(cat({"the model has ", model.num_layers, " layers; at most 128 are supported"}));
  }
  const Contract& c = arm.contract;
  check_block(c.weight, model.hidden, "experts.gate_up_proj", "weights");
  check_block(c.weight, model.expert_width, "experts.down_proj", "weights");
  check_block(c.activation, model.hidden, "w13_in", "activations");
  check_block(c.activation, model.expert_width, "w2_in", "activations");
  check_block(c.k, model.head_dim, "K", "kv");
  check_block(c.v, model.head_dim, "V", "kv");
}

/// The trainer imitates no more than the rollout does, and follows no record of what is not there.
void check_qat(const Arm& arm) {
  const struct {
    const char* key;
    bool imitated;
    const Quantizer& rule;
  } rows[] = {{"weights", arm.qat.weights, arm.contract.weight},
              {"activations", arm.qat.activations, arm.contract.activation},
              {"k", arm.qat.k, arm.contract.k},
              {"v", arm.qat.v, arm.contract.v}};
  for (const auto& row : rows) {
    if (row.imitated && !row.rule.quantizes()) {
      throw Error(cat({"qat.", row.key, " is true, and the contract leaves that in BF16; set qat.",
                       row.key, " = false, or let the contract quantize it"}));
    }
  }
}

/// Each guided site is one that the trainer quantizes, by a rule that the mode can follow.
void check_sites(const Arm& arm) {
  const struct {
    const char* name;
    Site site;
    bool imitated;
    const char* key;
    const Quantizer& rule;
  } sites[] = {
      {"w13_in", Site::kW13In, arm.qat.activations, "activations", arm.contract.activation},
      {"w2_in", Site::kW2In, arm.qat.activations, "activations", arm.contract.activation},
      {"k", Site::kK, arm.qat.k, "k", arm.contract.k},
      {"v", Site::kV, arm.qat.v, "v", arm.contract.v}};
  for (const auto& row : sites) {
    if (!arm.guide.sites.has(row.site)) continue;
    if (!row.imitated) {
      throw Error(cat({"guide.sites has ", row.name,
                       ", which the trainer does not quantize; set "
                       "qat.",
                       row.key, " = true, or leave it out"}));
    }
    if (!row.rule.is_guidable()) {
      throw Error(cat({"guide.sites has ", row.name, ", whose ",
                       row.rule.macro_block > 0 ? "macro blocks" : "FP32 global scale",
                       " no record holds; leave it out, or set ",
                       row.rule.macro_block > 0 ? "contract.macro_blocks = []"
                                                : "contract.preset = \"lockstep\""}));
    }
  }
  if (arm.guide.mode == Guidance::kRolloutScale &&
      (arm.guide.sites.has(Site::kK) || arm.guide.sites.has(Site::kV)) &&
      arm.contract.k.quantizes() && arm.contract.k.scale == ScaleFormat::kNone) {
    throw Error(
        "guide.mode is rollout_scale and guide.sites has k or v, whose FP8 scale is the contract's "
        "and leaves nothing to record; take k and v out of guide.sites");
  }
}

void check_guided_layers(const Arm& arm, Site site) {
  const LayerSet& layers = arm.guide.layers_of(site);
  const char* key = &layers == &arm.guide.layers ? "guide.layers" : "guide.kv_layers";
  if (layers == LayerSet{}) {
    throw Error(cat({key,
                     " names no layer, and guide.sites has what lies there; choose some, or "
                     "leave the sites out"}));
  }
  for (std::size_t i = 0; i < layers.bits.size(); ++i) {
    if ((layers.bits[i] & ~arm.contract.layers.bits[i]) != 0) {
      throw Error(cat({key,
                       " has layers that contract.layers leaves in BF16; guide only what is "
                       "quantized"}));
    }
  }
}

/// Mode, sites and layers go together.
void check_guide(const Arm& arm) {
  const bool any = arm.guide.sites.bits != 0;
  if (any && arm.guide.mode == Guidance::kOwnScale) {
    throw Error(
        "guide.sites is not empty and guide.mode is own_scale, which follows no record; "
        "choose a mode, or set guide.sites = []");
  }
  if (!any && arm.guide.mode != Guidance::kOwnScale) {
    throw Error(
        "guide.mode follows records and guide.sites is empty; name sites, or set guide.mode "
        "= \"own_scale\"");
  }
  for (const Site site : {Site::kW13In, Site::kW2In, Site::kK, Site::kV}) {
    if (arm.guide.sites.has(site)) check_guided_layers(arm, site);
  }
  if (arm.guide.sites.has(Site::kW2In) && !arm.guide.replay_experts) {
    throw Error(
        "guide.sites has w2_in, whose records are per expert, and guide.routing_replay is "
        "not r3; set it to r3");
  }
}

/// The second pass is defined where both operands are NVFP4.
void check_residual(const ArmSpec& spec, const Arm& arm, const ModelConfig& model) {
  const rollout::Options& o = arm.rollout;
  if (spec.qat_residual && (o.residual != rollout::Residual::kDense || !arm.qat.activations)) {
    throw Error(
        "qat.residual is true, which imitates a dense second pass over quantized activations; set "
        "residual.kind = \"dense\" and qat.activations = true, or qat.residual = false");
  }
  if (spec.qat_residual &&
      (arm.guide.sites.has(Site::kW13In) || arm.guide.sites.has(Site::kW2In))) {
    throw Error(
        "qat.residual is true and guide.sites has w13_in or w2_in: a record says nothing of a "
        "second pass; guide only k and v, or set qat.residual = false");
  }
  if (o.residual == rollout::Residual::kNone) return;
  const auto both = [&](const auto& is) {
    return is(arm.contract.weight) && is(arm.contract.activation);
  };
  const bool nvfp4 = both([](const Quantizer& rule) {
    return rule.element == Element::kE2m1 && !rule.is_mx() && rule.global_is_power_of_two;
  });
  const bool mxfp4 =
      both([](const Quantizer& rule) { return rule.element == Element::kE2m1 && rule.is_mx(); });
  if (!nvfp4 && !(mxfp4 && o.residual == rollout::Residual::kDense)) {
    throw Error(
        "residual.kind is not none, and the contract's weights and activations are not both "
        "NVFP4 under powers of two, whose product has a second pass, nor both MXFP4, which has a "
        "dense one; set residual.kind = \"none\"");
  }
  if (o.residual_alpha != 1.0f && o.residual_alpha != 0.5f && o.residual_alpha != 0.25f) {
    throw Error(cat(
        {"residual.alpha is ", o.residual_alpha, "; take 1, 0.5 or 0.25, whose sums are exact"}));
  }
  if (o.residual_sites == SiteSet{}) {
    throw Error(
        "residual.kind is not none and residual.sites is empty; name w13_in, w2_in or both");
  }
  const auto expected =
      static_cast<std::size_t>(model.num_layers * (model.hidden / 16 + model.expert_width / 16));
  const std::size_t given = spec.residual_groups.size();
  if (given != 0 && given != expected) {
    throw Error(cat({"residual.groups has ", given, " flags; the model takes ", expected,
                     ", or none: calibrated at the start"}));
  }
}

/// The trainer's exact product takes codes that it made itself, of the formats that have one.
void check_product(const Recipe& r, const Arm& arm) {
  if (!arm.qat.real_product) return;
  const auto refuse = [](const char* what) {
    throw Error(
        cat({"qat.real_product is true, which multiplies the trainer's own codes: ", what}));
  };
  if (!arm.qat.weights || !arm.qat.activations) {
    refuse("set qat.weights = true and qat.activations = true, or qat.real_product = false");
  }
  if (!r.trainer.bf16) refuse("set trainer.bf16 = true, or qat.real_product = false");
  if (expert_product(arm.contract) == ExpertProduct::kBf16) {
    refuse(
        "the contract's weights and activations must be both NVFP4 or both MXFP4, without macro "
        "blocks; change them, or set qat.real_product = false");
  }
  if (arm.guide.sites.has(Site::kW13In) || arm.guide.sites.has(Site::kW2In)) {
    refuse("take w13_in and w2_in out of guide.sites, or set qat.real_product = false");
  }
  if (arm.qat.residual_alpha != 0.0f) {
    refuse("set qat.residual = false, or qat.real_product = false");
  }
}

/// Bounds between which nothing lies would leave no token to learn from.
void check_bounds(const rl::Options& o) {
  const bool floor =
      o.correction == rl::Correction::kCis || o.correction == rl::Correction::kIcePop;
  const struct {
    const char *low_key, *high_key;
    float low, high;
    bool used;
  } rows[] = {
      {"rl.correction_floor", "rl.correction_cap", o.correction_floor, o.correction_cap, floor},
      {"rl.reject_token_low", "rl.reject_token_high", o.reject.token_low, o.reject.token_high,
       true},
      {"rl.reject_seq_low", "rl.reject_seq_high", o.reject.seq_low, o.reject.seq_high, true},
      {"rl.reject_geo_low", "rl.reject_geo_high", o.reject.geo_low, o.reject.geo_high, true}};
  for (const auto& row : rows) {
    if (row.used && row.high > 0 && row.low >= row.high) {
      throw Error(cat({row.low_key, " is ", row.low, ", not below ", row.high_key, ", ", row.high,
                       ": no token would count; lower the one, or raise the other"}));
    }
  }
}

void check_rl(const Recipe& r, const Arm& arm) {
  if (r.rl.bypass && arm.own_routes) {
    throw Error(
        "rl.bypass is true and guide.routing_replay is r2: without a pass of the old policy there "
        "are no experts of its to take; set guide.routing_replay = \"r3\", or rl.bypass = false");
  }
  if (r.rl.bypass && r.rl.correction != rl::Correction::kNone) {
    throw Error(
        "rl.bypass is true and rl.correction is not none: the drift would be counted twice; "
        "set rl.correction = \"none\", or rl.bypass = false");
  }
  if (r.rl.surrogate == rl::Surrogate::kScoreCentering &&
      (r.rl.correction != rl::Correction::kNone || r.schedule.sampling.top_logprobs == 0)) {
    throw Error(
        "rl.surrogate is score_centering, which weighs by the rollout's log-probs itself and needs "
        "those of the likeliest tokens; set rl.correction = \"none\" and rollout.top_logprobs, "
        "128 is usual");
  }
  if (r.rl.surrogate == rl::Surrogate::kAcr && r.rl.correction != rl::Correction::kTis) {
    throw Error(
        "rl.surrogate is acr, whose clip widens by what truncation took, and rl.correction is not "
        "tis; set rl.correction = \"tis\", or rl.surrogate = \"ppo\"");
  }
  if (r.rl.bypass && r.schedule.updates_per_step > 1) {
    throw Error(cat({"rl.bypass is true and schedule.updates is ", r.schedule.updates_per_step,
                     "; the rollout's policy is the old one for a single update: set "
                     "schedule.updates = 1, or rl.bypass = false"}));
  }
  if (r.schedule.updates_per_step > r.schedule.prompts_per_step) {
    throw Error(cat({"schedule.updates is ", r.schedule.updates_per_step, " with ",
                     r.schedule.prompts_per_step,
                     " prompts a step; an update takes whole prompts: "
                     "lower schedule.updates"}));
  }
  if (r.schedule.samples_per_prompt < 2) {
    throw Error("schedule.samples is 1; an advantage needs a group: take 2 or more");
  }
  if (r.rl.overlong_buffer_len > r.schedule.sampling.max_new_tokens) {
    throw Error(cat({"rl.overlong_buffer_len is ", r.rl.overlong_buffer_len,
                     " of rollout.max_new_tokens = ", r.schedule.sampling.max_new_tokens,
                     "; it is its last part: take less"}));
  }
  if (r.rl.clip_low >= 1) throw Error("rl.clip_low is 1; take less, 0.2 is usual");
  if (r.rl.dual_clip > 0 && r.rl.dual_clip <= 1) {
    throw Error(cat({"rl.dual_clip is ", r.rl.dual_clip,
                     ", and would cut into what clipping leaves; take more than 1, 3 is usual, or "
                     "0 for none"}));
  }
  check_bounds(r.rl);
}

void check_sync(const sync::Options& o) {
  if (o.noise.start == 0 && o.noise.end > 0) {
    throw Error("sync.noise_end is above 0 and sync.noise_start is 0: give both, or neither");
  }
  if (o.noise.start > 0 && o.noise.end == 0) {
    throw Error("sync.noise_end is 0, and sigma falls to it geometrically: take a number above 0");
  }
  if (o.noise.start > 0 && o.noise.stages == 1) {
    throw Error("sync.noise_stages is 1, and the first stage has no noise: take 2 or more, or 0");
  }
}

/// Refuses a trainer.memory that a GPU's trainers use up before they have read a token.
void check_trainer_memory(const Recipe& r, const Arm& arm, const ModelConfig& model) {
  Recipe there = r;
  if (r.device == kAutoDevice) {  // which is the CPU where there is no GPU
    if (!why_unusable({Device::Kind::kCuda, 0}).empty()) return;
    there.device = "cuda";
  }
  if (device_named(there.device).kind == Device::Kind::kCuda) {
    require_trainer_memory(r.trainer.memory_bytes, budget(there, arm, model));
  }
}

void check_rollout(const Recipe& r, const Arm& arm, const ModelConfig& model,
                   std::int64_t prompt_tokens) {
  const Sampling& sampling = r.schedule.sampling;
  if (sampling.max_new_tokens >= model.max_positions) {
    throw Error(cat({"rollout.max_new_tokens is ", sampling.max_new_tokens,
                     ", and the model reads at most ", model.max_positions,
                     " tokens with the prompt; lower it"}));
  }
  if (sampling.top_logprobs > model.vocabulary) {
    throw Error(cat({"rollout.top_logprobs is ", sampling.top_logprobs, " of a vocabulary of ",
                     model.vocabulary, " tokens; take as many at most"}));
  }
  const Budget b = budget(r, arm, model);
  check_trainer_memory(r, arm, model);
  const std::int64_t longest =
      prompt_tokens + std::int64_t{sampling.max_new_tokens} + r.rollout.page_tokens;
  if (b.cache_per_token * longest > r.rollout.cache_bytes) {
    throw Error(cat({"rollout.cache is ", bytes_text(r.rollout.cache_bytes),
                     ", too small for one sequence of ", prompt_tokens, " given and ",
                     sampling.max_new_tokens, " new tokens, which takes ",
                     bytes_text(b.cache_per_token * longest), "; raise rollout.cache"}));
  }
  const std::int64_t records = b.record_per_token * (prompt_tokens + sampling.max_new_tokens);
  if (records > r.store.ram_bytes) {
    throw Error(cat({"store.ram is ", bytes_text(r.store.ram_bytes),
                     ", too small for the records of one sequence of ", prompt_tokens,
                     " given and ", sampling.max_new_tokens, " new tokens, which take ",
                     bytes_text(records), "; raise store.ram"}));
  }
}

}  // namespace

void check(const Recipe& recipe, const Arm& arm, const ModelConfig& model,
           std::int64_t prompt_tokens) {
  if (recipe.device != kAutoDevice) device_named(recipe.device);
  check_shapes(arm, model);
  check_qat(arm);
  check_sites(arm);
  check_guide(arm);
  check_residual(recipe.arm, arm, model);
  check_product(recipe, arm);
  check_rl(recipe, arm);
  check_sync(arm.sync);
  check_rollout(recipe, arm, model, prompt_tokens);
  const auto expected = static_cast<std::size_t>(2 * model.num_layers);
  const std::vector<std::int8_t>& exponents = recipe.arm.kv_exponents;
  if (!exponents.empty() && exponents.size() != expected) {
    throw Error(cat({"contract.kv_exponents has ", exponents.size(), " numbers; the model takes ",
                     expected, ", K before V of each layer, or none: calibrated at the start"}));
  }
}

Device ready_device(const std::string& name, const Budget& b) {
  const Device device = device_named(name);
  if (device.kind == Device::Kind::kCpu) return device;
  if (const std::string why = why_unusable(device); !why.empty()) {
    throw Error(cat({"device is ", name, ": ", why}));
  }
  if (b.device() <= device_memory(device).total) {
    wait_for(cat({bytes_text(b.device()), " of device ", name}),
             [&] { return b.device() <= device_memory(device).free; });
  }
  require_memory(name, device_memory(device), b);
  return device;
}

std::string why_not_cuda(std::string refusal) {
  for (const std::string_view name : {"device is cuda: ", "device = \"cuda\": "}) {
    if (refusal.starts_with(name)) refusal.erase(0, name.size());
  }
  // The last remedy, behind others or alone.
  const std::size_t cpu = refusal.rfind("device = \"cpu\"");
  if (cpu == std::string::npos) return refusal;
  std::size_t end = 0;
  for (const std::string_view joint : {"; ", ", or "}) {
    const std::size_t at = refusal.rfind(joint, cpu);
    if (at != std::string::npos) end = std::max(end, at);
  }
  return refusal.substr(0, end);
}

SettledDevice settle_device(const std::string& name, const Budget& budget,
                            const std::function<void(Device)>& require) {
  if (name != kAutoDevice) return {name, ""};
  // Without a GPU there is no choice, and nothing to tell of it.
  const bool is_there = std::filesystem::exists("/dev/nvidiactl");
  try {
    require(ready_device("cuda", budget));
  } catch (const Error& error) {
    return {"cpu", is_there ? why_not_cuda(error.what()) : ""};
  }
  return {"cuda", ""};
}

}  // namespace lockstep::recipe
