#include "recipe/recipe.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "recipe/compare.h"

namespace lockstep::recipe {
namespace {

constexpr const char* kDeviceDoc =
    "where rollout and trainer compute: cpu, cuda (under torchrun the GPU of LOCAL_RANK), cuda:1, "
    "or auto: cuda where that works";
constexpr const char* kDeviceBefore = "cpu";  // of a run whose recipe names none
constexpr double kMostInt = 2147483647, kMostLong = 9007199254740992.0;

std::vector<Key> task_keys(data::TaskOptions& task, std::string& file, std::string& eval_file) {
  data::ArithOptions& arith = task.arith;
  data::JsonlOptions& jsonl = task.jsonl;
  return {
      {"task.name", &task.name, "arith: sums with worked steps, made up as needed; or jsonl"},
      {"task.operations", &arith.operations, "arith: which of + - * are asked"},
      {"task.left", Interval{&arith.left}, "arith: the first operand", 0, 1e6},
      {"task.right", Interval{&arith.right}, "arith: the second operand", 0, 1e6},
      {"task.seed", &arith.seed, "the order of the problems or rows", 0, kMostLong},
      {"task.repeat", &arith.repeat,
       "arith: all problems again, in another order, once they are used up"},
      {"task.file", &file, "jsonl: rows with prompt, data_source, reward_model.ground_truth"},
      {"task.eval_file", &eval_file, "jsonl: for evaluation; empty: the last tenth of the rows"},
      {"task.judge", choice(jsonl.judge, {"exact", "number", "boxed", "answer"}),
       "jsonl: what is compared: the whole response, its last number, its last box, or either"},
      {"task.form", choice(jsonl.form, {"any", "boxed", "think"}), "jsonl: asked for beside it"},
      {"task.form_weight", &jsonl.form_weight, "jsonl: what the form alone earns", 0, 1},
  };
}

std::vector<Key> trainer_keys(train::Options& o) {
  return {
      {"trainer.bf16", &o.bf16, "compute in BF16; masters and optimizer are FP32 either way"},
      {"trainer.lr", &o.lr, "learning rate of AdamW", 0, 1},
      {"trainer.warmup_updates", &o.warmup_updates, "updates until lr is reached", 0, kMostInt},
      {"trainer.decay", choice(o.decay, {"constant", "linear", "cosine"}), "of lr after warm-up"},
      {"trainer.decay_updates", &o.decay_updates, "updates until lr * min_lr_fraction", 0,
       kMostInt},
      {"trainer.min_lr_fraction", &o.min_lr_fraction, "what is left of lr at the end", 0, 1},
      {"trainer.beta1", &o.beta1, "of AdamW", 0, 0.9999},
      {"trainer.beta2", &o.beta2, "of AdamW", 0, 0.999999},
      {"trainer.eps", &o.eps, "of AdamW", 1e-30, 1},  // FP32 has no less than 1e-38
      {"trainer.weight_decay", &o.weight_decay, "of AdamW", 0, 1},
      {"trainer.max_grad_norm", &o.max_grad_norm, "gradients are scaled down to this norm", 0, 1e9,
       true},
      {"trainer.tokens_per_pass", &o.tokens_per_pass,
       "whole trajectories are packed up to this many", 1, kMostInt},
      {"trainer.memory", Bytes{&o.memory_bytes},
       "of a GPU, all that training takes: weights, gradients, moments, activations; 0: what is "
       "free",
       0, kMostLong},
      {"trainer.recompute", &o.recompute, "activations again in backward: less memory, more time"},
  };
}

std::vector<Key> arm_keys(ArmSpec& a) {
  return {
      {"contract.preset", &a.contract,
       "the rollout's numbers: lockstep (NVFP4), te (NVFP4 under FP32 global scales), mx-floor, "
       "mx-even, mx-ceil, mx-rceil (MXFP4), mxfp8, fp8, or bf16"},
      {"contract.layers", &a.contract_layers, "layers that are quantized; the others stay BF16"},
      {"contract.weights", Format{&a.contract_weights, contracts::formats()},
       "the routed experts': true for the preset's format, false for bf16, or nvfp4, mxfp4, mxfp8 "
       "(block 32), fp8 (blocks of 128)"},
      {"contract.activations", Format{&a.contract_activations, contracts::formats()},
       "... of the routed experts' inputs"},
      {"contract.kv", Format{&a.contract_kv, contracts::formats()},
       "... of the KV cache; not mxfp8"},
      {"contract.mx_rule", choice(a.mx_rule, {"floor", "even", "ceil", "rceil"}),
       "how a block's maximum becomes the scale of mxfp4 and mxfp8 (docs/formats/mxfp4.md)"},
      {"contract.four_over_six", choice(a.four_over_six, {"off", "mae", "mse"}),
       "may a block of weights or activations end at 4 where that loses less, by which measure?"},
      {"contract.four_over_six_kv", &a.four_over_six_kv, "... and a block of K or V?"},
      {"contract.macro_blocks", Flags{&a.macro_blocks, {"weights", "activations"}},
       "which MXFP4 tensors have a mantissa for every 128 elements (MBS): weights, activations"},
      {"contract.kv_exponents", &a.kv_exponents,
       "K before V, layer by layer, of the cache's global scales 2^n; empty: calibrated at the "
       "start",
       -116, 116},
      {"qat.weights", &a.qat.weights, "does the trainer imitate the contract's weights?"},
      {"qat.activations", &a.qat.activations, "... its activations?"},
      {"qat.residual", &a.qat_residual, "... the second pass over them, which must be dense?"},
      {"qat.k", &a.qat.k, "... its K?"},
      {"qat.v", &a.qat.v, "... its V?"},
      {"qat.real_product", &a.qat.real_product,
       "the trainer's experts multiply NVFP4 or MXFP4 codes exactly, as the rollout's do (QaRL)"},
      {"guide.mode",
       choice(a.mode, {"own_scale", "rollout_scale", "lsb_scale_mod4", "lsb", "full_guided",
                       "full_forced"}),
       "how the trainer follows records; own_scale follows none"},
      {"guide.sites", Flags{&a.sites.bits, {"w13_in", "w2_in", "k", "v"}},
       "where it does: w13_in, w2_in, k, v"},
      {"guide.layers", &a.layers,
       "all, none, first_half, latter_half, middle_half, latter_two_thirds, odd, even, "
       "first_85%, last_25%, or 0,2,5-7"},
      {"guide.kv_layers", &a.kv_layers, "of K and V, in the same words; \"\": guide.layers"},
      {"guide.routing_replay", choice(a.routing_replay, {"none", "r2", "r3"}),
       "experts that an update takes: its own, those of the old policy's pass, or the rollout's"},
      {"guide.audit_every", &a.audit_every, "one token in so many is recorded in full; 0: none", 0,
       1000000},
      {"guide.max_version_diff", &a.max_version_diff,
       "records of weights that many versions behind the rollout's are still followed", 0, 1000},
      {"guide.fallback", choice(a.fallback, {"unguided", "rescore"}),
       "older ones: the trainer rounds by itself, or the engine reads the sample again"},
      {"sync.uaq_scale", &a.sync.uaq_scale,
       "gate, up and router of the first policy are divided by this, their norm multiplied (QuRL)",
       1, 16},
      {"sync.noise_on", choice(a.sync.noise.on, {"norms", "experts"}),
       "which of the rollout's weights get noise: norms, or experts relative to their size"},
      {"sync.noise_start", &a.sync.noise.start, "its sigma at first; 0: none", 0, 1},
      {"sync.noise_end", &a.sync.noise.end, "... and at last", 0, 1},
      {"sync.noise_stages", &a.sync.noise.stages,
       "parts of the run, the first without noise, between which sigma falls; 0: every step", 0,
       kMostInt},
      {"residual.kind", choice(a.residual, {"none", "channels", "dense", "2:4", "blocks"}),
       "the rollout's second FP4 pass over what the first lost (QUADS: channels)"},
      {"residual.sites", Flags{&a.residual_sites.bits, {"w13_in", "w2_in"}}, "where it has one"},
      {"residual.scope", choice(a.residual_scope, {"per_token", "batch", "static"}),
       "whose residuals choose channels or blocks; batch is the papers', and not batch-invariant; "
       "static: those of a calibration batch"},
      {"residual.permille", &a.residual_permille, "of channels (in groups of 16) or blocks", 0,
       1000},
      {"residual.alpha", &a.residual_alpha, "what the second pass counts: 1, 0.5 or 0.25", 0, 1,
       true},
      {"residual.groups", &a.residual_groups,
       "static: a 0 or 1 for each group of 16 channels, w13_in before w2_in, layer by layer; "
       "empty: calibrated at the start"},
  };
}

std::vector<Key> rollout_keys(rollout::Options& o, Sampling& s) {
  return {
      {"rollout.temperature", &s.temperature, "log-probs on both sides are after it", 0, 100, true},
      {"rollout.max_new_tokens", &s.max_new_tokens, "a response ends there at the latest", 1,
       kMostInt},
      {"rollout.top_logprobs", &s.top_logprobs,
       "likeliest tokens whose log-probs are kept at each draw, for score_centering; 0: none", 0,
       1 << 16},
      {"rollout.cache", Bytes{&o.cache_bytes}, "KV pages on the device", 1, kMostLong},
      {"rollout.swap", Bytes{&o.swap_bytes}, "KV pages of preempted sequences, in host memory", 0,
       kMostLong},
      {"rollout.page_tokens", &o.page_tokens, "tokens of a KV page", 1, 4096},
      {"rollout.tokens_per_pass", &o.tokens_per_pass,
       "prefill chunks and decode steps share a pass of this many", 1, 1 << 20},
      {"rollout.max_sequences", &o.max_sequences, "that decode side by side", 1, 1 << 16},
      {"drift.noise", &o.drift.noise,
       "declared noise of this relative size on the rollout's block outputs, for studies", 0, 1},
      {"drift.split_k", &o.drift.split_k, "declared: the rollout adds products in two halves"},
  };
}

std::vector<Key> rl_keys(rl::Options& o) {
  rl::Rejection& reject = o.reject;
  return {
      {"rl.advantage", choice(o.advantage, {"grpo", "dr_grpo"}),
       "grpo: (reward - mean) / std of the group; dr_grpo: reward - mean"},
      {"rl.surrogate",
       choice(o.surrogate, {"ppo", "gspo", "cispo", "tbpo", "acr", "score_centering"}),
       "what is minimised; ppo: the clipped ratio, token by token"},
      {"rl.clip_low", &o.clip_low, "the ratio is clipped at 1 - this", 0, 1, true},
      {"rl.clip_high", &o.clip_high, "... and at 1 + this", 0, 100, true},
      {"rl.dual_clip", &o.dual_clip, "bounds the loss of a negative advantage; 0: off", 0, 1e6},
      {"rl.correction", choice(o.correction, {"none", "tis", "cis", "icepop", "seq_tis", "ais"}),
       "what weighs tokens by pi_old / pi_rollout"},
      {"rl.correction_floor", &o.correction_floor, "of cis and icepop", 0, 1},
      {"rl.correction_cap", &o.correction_cap, "above which that weight is cut off", 0, 1e6, true},
      {"rl.correction_batch_norm", &o.correction_batch_norm, "weights over their mean"},
      {"rl.ais_ess", &o.ais_ess, "ais: how much effective sample size counts", 0, 1e6},
      {"rl.ais_k3", &o.ais_k3, "ais: how much KL counts", 0, 1e6},
      {"rl.ais_variance", &o.ais_variance, "ais: how much variance counts", 0, 1e6},
      {"rl.ais_k3_unit", &o.ais_k3_unit, "ais: the KL that counts as one", 0, 1e6, true},
      {"rl.ais_variance_unit", &o.ais_variance_unit, "ais: the variance that does", 0, 1e6, true},
      {"rl.reject_token_low", &reject.token_low, "tokens with rho below leave; 0: off", 0, 1},
      {"rl.reject_token_high", &reject.token_high, "... above; 0: off", 0, 1e6},
      {"rl.reject_seq_low", &reject.seq_low, "responses whose product of rho is below; 0: off", 0,
       1},
      {"rl.reject_seq_high", &reject.seq_high, "... above; 0: off", 0, 1e6},
      {"rl.reject_geo_low", &reject.geo_low, "... whose mean rho, geometric, is below; 0: off", 0,
       1},
      {"rl.reject_geo_high", &reject.geo_high, "... above; 0: off", 0, 1e6},
      {"rl.reject_k3", &reject.k3, "... whose k3 is above; 0: off", 0, 1e6},
      {"rl.reject_veto", &reject.veto, "... with any rho below; 0: off", 0, 1},
      {"rl.reject_opsm", &reject.opsm, "... bad ones that the policy has left; 0: off", 0, 1e6},
      {"rl.overlong_buffer_len", &o.overlong_buffer_len,
       "of max_new_tokens, the last so many cost reward (DAPO); 0: off", 0, kMostInt},
      {"rl.overlong_penalty_factor", &o.overlong_penalty_factor, "what all of them cost", 0, 1e6},
      {"rl.mask_truncated", &o.mask_truncated,
       "responses cut off by max_new_tokens leave the loss (DAPO's overlong filter)"},
      {"rl.bypass", &o.bypass, "the rollout's log-probs stand for the old policy's"},
      {"rl.aggregation",
       choice(o.aggregation, {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum"}),
       "of token losses, over the whole step"},
      {"rl.sum_length", &o.sum_length, "what seq_mean_token_sum divides by", 0, 1e9, true},
      {"rl.drop_flat_groups", &o.drop_flat_groups,
       "groups without advantage leave the denominator"},
      {"rl.masked_leave_denominator", &o.masked_leave_denominator, "masked tokens leave it too"},
      {"rl.kl_weight", &o.kl_weight, "of the KL to the first policy; 0: no reference model", 0,
       1000},
      {"rl.kl", choice(o.kl, {"k1", "k2", "k3", "k3_plus"}),
       "its estimator; k3_plus: the value of k3, the gradient of k2"},
      {"rl.kl_off_policy", &o.kl_off_policy, "times pi_theta / pi_rollout"},
      {"rl.triage_tail", &o.triage_tail, "triage/deep_tail_frac counts gaps below minus this", 0,
       20},
  };
}

void append(std::vector<Key>& keys, std::vector<Key> more) {
  std::move(more.begin(), more.end(), std::back_inserter(keys));
}

std::string file_text(const std::filesystem::path& file) {
  std::error_code none;  // then it is not there
  if (std::filesystem::exists(file, none) && !std::filesystem::is_regular_file(file, none)) {
    throw Error(cat({"the recipe ", file.string(), " is no regular file; write it into one"}));
  }
  std::ifstream in(file, std::ios::binary);
  if (!in) {
    throw Error(
        cat({"cannot read the recipe ", file.string(), "; recipes/ in the checkout has examples"}));
  }
  return {std::istreambuf_iterator<char>(in), {}};
}

/// Puts what the command line says over the entries.
std::vector<Entry> with(std::vector<Entry> entries, std::span<const std::string> assignments) {
  for (const std::string& assignment : assignments) {
    Entry entry = parse_assignment(assignment);
    std::erase_if(entries, [&](const Entry& e) { return e.name == entry.name; });
    entries.push_back(std::move(entry));
  }
  return entries;
}

/// The recipe of one arm of what may be a comparison.
Recipe one_arm(std::vector<Entry> entries, std::span<const std::string> assignments) {
  const Sections sections = split(with(std::move(entries), assignments));
  for (const Entry& entry : sections.plain) {
    if (entry.name != "arm") continue;
    const auto* label = std::get_if<std::string>(&entry.value);
    if (label == nullptr || !sections.variants.contains(*label)) continue;
    std::vector<Entry> over;
    for (const std::string& text : assignments) {
      if (Entry one = parse_assignment(text); one.name != "arm") over.push_back(std::move(one));
    }
    return recipe_of(sections, *label, over);
  }
  return recipe_of(sections.plain);
}

/// The task's own words for what a recipe says in common.
void settle_task(data::TaskOptions& task, const std::string& file, const std::string& eval_file) {
  if (task.name != "arith" && task.name != "jsonl") {
    throw Error(cat({"task.name is '", task.name, "'; the tasks are arith and jsonl"}));
  }
  if (task.name == "jsonl" && file.empty()) {
    throw Error("task.name is jsonl and task.file is empty; name the file of its rows");
  }
  if (task.name == "arith" && !(file.empty() && eval_file.empty())) {
    throw Error(cat({file.empty() ? "task.eval_file" : "task.file", " is '",
                     file.empty() ? eval_file : file,
                     "' and task.name is arith, which reads no file; name the task jsonl"}));
  }
  task.jsonl.file = file;
  task.jsonl.eval_file = eval_file;
  task.jsonl.seed = task.arith.seed;
}

}  // namespace

std::vector<Key> keys(Recipe& r) {
  std::vector<Key> keys = {
      {"arm", &r.arm.name, "the method; it sets contract, qat, guide and residual, keys override"},
      {"model", &r.model, "the first policy: a Hugging Face directory"},
      {"device", &r.device, kDeviceDoc},
      {"seed", &r.schedule.seed, "of prompts, samples, noise and audit tokens", 0, kMostLong},
  };
  append(keys, task_keys(r.task, r.task_file, r.task_eval_file));
  append(keys,
         {{"schedule.steps", &r.schedule.steps, "of rollout, training and sync", 1, kMostInt},
          {"schedule.prompts", &r.schedule.prompts_per_step, "a step", 1, 1 << 20},
          {"schedule.samples", &r.schedule.samples_per_prompt, "of each prompt", 1, 16382},
          {"schedule.max_gen_batches", &r.schedule.max_gen_batches,
           "rounds of prompts until enough groups differ within (DAPO); 1: all count as they come",
           1, 1024},
          {"schedule.updates", &r.schedule.updates_per_step, "of the weights, a step", 1, 1 << 16},
          {"schedule.save_every", &r.schedule.save_every, "steps a checkpoint is written", 1,
           kMostInt},
          {"schedule.keep", &r.schedule.keep_checkpoints, "the newest checkpoints; 0: all", 0,
           kMostInt},
          {"schedule.rescore_every", &r.schedule.rescore_every,
           "steps some samples are read again with the new weights; 0: never", 0, kMostInt},
          {"schedule.rescore_groups", &r.schedule.rescore_groups, "prompts whose samples these are",
           1, 1 << 20}});
  append(keys, arm_keys(r.arm));
  keys.push_back({"guide.min_coverage", &r.schedule.min_coverage,
                  "the run stops where a smaller part of guided rows is there", 0, 1});
  append(keys, rollout_keys(r.rollout, r.schedule.sampling));
  append(keys, trainer_keys(r.trainer));
  append(keys, rl_keys(r.rl));
  append(keys,
         {{"store.ram", Bytes{&r.store.ram_bytes}, "for records", 1, kMostLong},
          {"store.disk", Bytes{&r.store.disk_bytes}, "for what does not fit there", 0, kMostLong},
          {"store.on_disk", &r.store_on_disk, "may records go to the run directory?"},
          {"eval.every", &r.evaluation.every, "steps; 0: at the end", 0, kMostInt},
          {"eval.prompts", &r.evaluation.prompts, "0: no evaluation", 0, 1 << 20},
          {"eval.temperature", &r.evaluation.temperature, "of evaluation", 0, 100, true},
          {"eval.top_p", &r.evaluation.top_p, "of evaluation", 0, 1, true},
          {"eval.top_k", &r.evaluation.top_k, "of evaluation; 0: all", 0, kMostInt}});
  // A section's keys stand together: guide.min_coverage belongs to another struct.
  std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
    const auto rank = [](const std::string& name) {
      static const std::vector<std::string> order = {
          "",        "task",  "schedule", "contract", "qat",  "guide", "residual",
          "rollout", "drift", "trainer",  "rl",       "sync", "store", "eval"};
      const std::size_t dot = name.find('.');
      const std::string section = dot == std::string::npos ? "" : name.substr(0, dot);
      return std::find(order.begin(), order.end(), section) - order.begin();
    };
    return rank(a.name) < rank(b.name);
  });
  return keys;
}

std::vector<Key> keys(SftRecipe& r) {
  std::vector<Key> keys = {
      {"model", &r.model, "a Hugging Face directory: config, tokenizer, weights to go on from"},
      {"device", &r.device, kDeviceDoc},
      {"fresh", &r.fresh, "its weights are left alone: new ones are drawn"},
      {"init_std", &r.init_std, "of new weights", 0, 1, true},
      {"seed", &r.seed, "of new weights", 0, kMostLong},
      {"steps", &r.steps, "updates", 1, kMostInt},
      {"batch", &r.batch, "worked solutions a step", 1, 1 << 20},
      {"save_every", &r.save_every,
       "steps between what an interrupted run goes on from; 0: it begins anew", 0, kMostInt},
      {"eval_prompts", &r.eval_prompts, "for the pass rate at the end; 0: none", 0, 1 << 20},
      {"max_new_tokens", &r.max_new_tokens, "of their answers", 1, kMostInt},
  };
  append(keys, task_keys(r.task, r.task_file, r.task_eval_file));
  append(keys, trainer_keys(r.trainer));
  return keys;
}

std::vector<Entry> read_entries(const std::filesystem::path& file) {
  constexpr int kMost = 8;  // files above each other
  std::vector<Entry> entries;
  std::filesystem::path next = file;
  for (int depth = 0; !next.empty(); ++depth) {
    if (depth == kMost) {
      throw Error(cat({file.string(), ": defaults leads through more than ", kMost,
                       " files; it must not lead back to where it began"}));
    }
    const std::filesystem::path here = std::exchange(next, {});
    for (Entry& entry : parse(file_text(here), here.string())) {
      if (entry.name == "defaults") {
        const auto* path = std::get_if<std::string>(&entry.value);
        if (path == nullptr) throw Error(entry.where + ": defaults takes a recipe's path");
        next = find(*path, entry.where + ": defaults");
      } else if (std::none_of(entries.begin(), entries.end(),
                              [&](const Entry& e) { return e.name == entry.name; })) {
        entries.push_back(std::move(entry));
      }
    }
  }
  return entries;
}

Recipe recipe_of(std::span<const Entry> entries) {
  Recipe recipe;
  for (const Entry& entry : entries) {
    if (entry.name != "arm") continue;
    const auto* arm = std::get_if<std::string>(&entry.value);
    if (arm == nullptr) throw Error(entry.where + ": arm takes the name of an arm, in quotes");
    try {
      recipe.arm = arm_spec(*arm);
      recipe.rl.surrogate = recipe.arm.surrogate.value_or(recipe.rl.surrogate);
    } catch (const Error& error) {
      throw Error(entry.where + ": " + error.what());
    }
  }
  assign(entries, keys(recipe));
  settle_task(recipe.task, recipe.task_file, recipe.task_eval_file);
  return recipe;
}

Recipe parse_recipe(std::string_view text, const std::string& name,
                    std::span<const std::string> assignments) {
  return one_arm(parse(text, name), assignments);
}

Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> assignments) {
  return one_arm(read_entries(file), assignments);
}

bool is_sft(const std::filesystem::path& file) {
  try {
    read_sft_recipe(file, {});
  } catch (const Error&) {
    return false;
  }
  try {
    read_recipe(file, {});
  } catch (const Error&) {
    return true;
  }
  return false;
}

std::string other_verb(const std::filesystem::path& file) {
  try {
    if (!split(read_entries(file)).compare.empty()) return "compare";
    read_recipe(file, {});
    return "train";
  } catch (const Error&) {
    return "";
  }
}

SftRecipe read_sft_recipe(const std::filesystem::path& file,
                          std::span<const std::string> assignments) {
  SftRecipe recipe;
  recipe.trainer.lr = 1e-3;
  assign(with(parse(file_text(file), file.string()), assignments), keys(recipe));
  settle_task(recipe.task, recipe.task_file, recipe.task_eval_file);
  return recipe;
}

std::string resolved(const Recipe& recipe, ContractId contract) {
  Recipe copy = recipe;
  constexpr const char* kHex = "0123456789abcdef";
  std::string id;
  for (int shift = 60; shift >= 0; shift -= 4) id += kHex[contract.value >> shift & 15];
  return "# contract " + id + "\n" + write(keys(copy));
}

std::string resolved(const SftRecipe& recipe) {
  SftRecipe copy = recipe;
  return write(keys(copy));
}

namespace {

/// Is "NAME: absent / VALUE" what the recipe `before` means by saying nothing?
bool came_later(std::string_view line, std::string_view before, const std::string& old_file) {
  try {
    Recipe old = parse_recipe(before, old_file);
    if (old.device == kAutoDevice) old.device = kDeviceBefore;
    const std::string filled = resolved(old, {});
    return differences(before, filled, old_file).find(line) != std::string::npos;
  } catch (const Error&) {
    return false;  // other keys of it are gone: it is another recipe
  }
}

}  // namespace

std::string in_one_line(std::string differences) {
  if (differences.ends_with('\n')) differences.pop_back();
  for (std::size_t at = 0; (at = differences.find('\n', at)) != std::string::npos;) {
    differences.replace(at, 1, "; ");
  }
  return differences;
}

std::string hindrances(std::string_view before, std::string_view after,
                       const std::string& old_file) {
  // How much memory there may be changes when something is done, and no number.
  constexpr std::string_view kFree[] = {"schedule.save_every", "schedule.keep",     "eval.every",
                                        "trainer.memory",      "trainer.recompute", "rollout.cache",
                                        "rollout.swap",        "store.ram",         "store.disk"};
  double steps[2] = {}, noise = 0;
  const std::string_view texts[] = {before, after};
  for (std::size_t i = 0; i < 2; ++i) {
    for (const Entry& entry : parse(texts[i], i == 0 ? old_file : "the new recipe")) {
      const auto* whole = std::get_if<std::int64_t>(&entry.value);
      const auto* real = std::get_if<double>(&entry.value);
      if (entry.name == "schedule.steps" && whole != nullptr) {
        steps[i] = static_cast<double>(*whole);
      }
      if (entry.name == "sync.noise_start" && real != nullptr) noise += *real;
    }
  }
  const bool longer = steps[1] > steps[0] && noise == 0;
  std::string left;
  const std::string all = differences(before, after, old_file);
  for (std::string_view lines = all; !lines.empty();) {
    const std::string_view line = lines.substr(0, lines.find('\n') + 1);
    lines.remove_prefix(line.size());
    const std::string_view name = line.substr(0, line.find(": "));
    const bool free = std::find(std::begin(kFree), std::end(kFree), name) != std::end(kFree);
    // A key that came later has done then what its default does.
    const bool later =
        line.find(": absent / ") == name.size() && came_later(line, before, old_file);
    if (!free && !later && !(longer && name == "schedule.steps")) left += line;
  }
  return left;
}

void take_settled(std::string_view began, const std::string& file, Recipe& recipe) {
  const std::vector<Key> own = keys(recipe);
  std::vector<Entry> found = parse(began, file);
  // With its complaints: who damaged that file shall read of it, and no guess.
  const std::string device = recipe_of(found).device;
  if (recipe.device == kAutoDevice) {
    const bool names = std::any_of(found.begin(), found.end(),
                                   [](const Entry& entry) { return entry.name == "device"; });
    recipe.device = names ? device : kDeviceBefore;
  }
  std::erase_if(found, [&](const Entry& entry) {
    if (!is_calibrated(entry.name)) return true;
    const auto key =
        std::find_if(own.begin(), own.end(), [&](const Key& k) { return k.name == entry.name; });
    return !is_empty(key->target);
  });
  assign(found, own);
}

std::filesystem::path find(const std::string& path, const std::string& key) {
  std::error_code none;  // then it is not there: a name that is too long, a folder that is closed
  if (std::filesystem::exists(path, none)) return path;
  const char* home = std::getenv("LOCKSTEP_HOME");
  if (home != nullptr && !path.empty() &&
      std::filesystem::exists(std::filesystem::path(home) / path, none)) {
    return std::filesystem::path(home) / path;
  }
  const bool relative = std::filesystem::path(path).is_relative();
  throw Usage(cat({key, " is '", path, "', which is not there",
                   relative ? ", neither from this folder nor from the checkout" : "",
                   "; give a path that is"}));
}

std::filesystem::path find_file(const std::string& path, const std::string& key) {
  const std::filesystem::path found = find(path, key);
  if (!std::filesystem::is_directory(found)) return found;
  throw Usage(cat({key, " is '", path, "', which is a folder; name a file"}));
}

}  // namespace lockstep::recipe
