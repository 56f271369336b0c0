#include <algorithm>
#include <cmath>
#include <fstream>

#include "base/folder.h"
#include "base/text.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "cli/random_weights.h"
#include "cli/session.h"
#include "cli/unfinished.h"
#include "cli/verbs.h"
#include "model/json.h"
#include "model/names.h"
#include "step/run_dir.h"
#include "sync/refit.h"
#include "train/trainer.h"

namespace lockstep::cli {
namespace {

recipe::SftRecipe read(const SftArgs& args) {
  return of_the_caller([&] {
    const std::filesystem::path path = recipe::find(args.recipe, "the recipe");
    try {
      return recipe::read_sft_recipe(path, args.assignments);
    } catch (const Error&) {
      const std::string verb = recipe::other_verb(path);
      if (verb.empty() || recipe::is_sft(path)) throw;
      throw Usage(cat({args.recipe, " is a recipe for ", verb, ", not for sft; run ./lockstep ",
                       verb, " ", args.recipe}));
    }
  });
}

/// A worked solution with the stop token behind it, as a trajectory whose response it is.
Trajectory example(const data::Prompt& prompt, const Policy& policy) {
  if (prompt.solution.empty()) {
    throw Usage(cat({"prompt ", prompt.id.value,
                     " has no worked solution to learn from; task.name "
                     "= \"arith\" has"}));
  }
  Trajectory t = {.prompt = prompt.id, .tokens = prompt.tokens};
  for (const Token token : policy.tokenizer.encode(prompt.solution)) t.tokens.push_back(token);
  if (!policy.config.stop_tokens.empty()) t.tokens.push_back(policy.config.stop_tokens.front());
  if (std::cmp_greater(t.tokens.size(), policy.config.max_positions)) {
    throw Error(cat({"the solution of prompt ", prompt.id.value, " has ", t.tokens.size(),
                     " tokens, the model reads at most ", policy.config.max_positions}));
  }
  t.response_mask.assign(t.tokens.size(), 1);
  std::fill_n(t.response_mask.begin(), prompt.tokens.size(), std::uint8_t{0});
  t.rollout_logp.assign(t.tokens.size(), 0.0f);
  return t;
}

/// One update on the mean negative log-prob of the solutions' tokens; that loss.
double update(train::Trainer& trainer, const std::vector<Trajectory>& batch, Metrics& metrics) {
  std::int64_t tokens = 0;
  for (const Trajectory& t : batch) {
    tokens += std::count(t.response_mask.begin(), t.response_mask.end(), 1);
  }
  const double share = 1.0 / static_cast<double>(tokens);
  const double loss = trainer.accumulate(
      batch, nullptr, [&](std::size_t i, std::span<const float> logp, std::span<float> dlogp) {
        double sum = 0;
        for (std::size_t p = 0; p < logp.size(); ++p) {
          if (batch[i].response_mask[p] == 0) continue;
          sum -= share * static_cast<double>(logp[p]);
          dlogp[p] = static_cast<float>(-share);
        }
        return sum;
      });
  trainer.update();
  metrics = trainer.metrics();
  metrics["train/loss"] = loss;
  metrics["train/tokens"] = static_cast<double>(tokens);
  return loss;
}

/// Of the last steps, as it is told.
double smoothed(double before, double loss, std::int64_t step) {
  return step == 0 ? loss : 0.95 * before + 0.05 * loss;
}

/// The updates that are left; one line a step goes to `curve_path`. Returns the loss of the last
/// steps.
double teach(const recipe::SftRecipe& r, const Policy& policy, const data::Task& task,
             const Unfinished& unfinished, train::Trainer& trainer,
             const std::filesystem::path& curve_path) {
  std::ofstream curve(curve_path);
  if (!(curve << unfinished.curve() << std::flush)) {
    throw Usage(cat({"cannot write ", curve_path.string(), "; name another folder with --out"}));
  }
  double smooth = 0, began = seconds();
  const auto done = std::ssize(unfinished.losses());
  for (std::int64_t step = 0; step < done; ++step) {
    smooth = smoothed(smooth, unfinished.losses()[static_cast<std::size_t>(step)], step);
  }
  Progress progress("sft", r.steps);
  for (std::int64_t step = done; step < r.steps; ++step) {
    std::vector<Trajectory> batch;
    for (const data::Prompt& prompt : task.prompts(step, r.batch)) {
      batch.push_back(example(prompt, policy));
    }
    Metrics metrics;
    const double loss = update(trainer, batch, metrics);
    if (!std::isfinite(loss)) {
      throw Error(cat({"the loss of step ", step + 1, " is no number; lower trainer.lr, which is ",
                       r.trainer.lr}));
    }
    smooth = smoothed(smooth, loss, step);
    const double now = seconds();
    metrics["timing_s/step"] = now - began;
    began = now;
    if (!(curve << step::metrics_line(step + 1, metrics) << std::flush)) {
      throw Error(cat({"the curve of step ", step + 1,
                       " cannot be written; make room on the disk, and give the same command"}));
    }
    progress.at(step + 1, cat({"loss ", std::round(smooth * 1e4) / 1e4}));
    if ((step + 1) % 50 == 0 || step + 1 == r.steps) {
      info(cat({"step ", step + 1, "/", r.steps, "  loss ", std::round(smooth * 1e4) / 1e4, "  ",
                std::round(metrics["train/tokens"] / metrics["timing_s/step"]), " tokens/s"}));
    }
    if (r.save_every > 0 && (step + 1) % r.save_every == 0 && step + 1 < r.steps) {
      unfinished.save(trainer, value_or_throw(read_text(curve_path)));
      on_interrupt_say(cat({"the same command goes on from step ", step + 2}));
    }
  }
  return smooth;
}

/// Refuses a folder that holds something else than what this recipe wrote there.
void require_ours(const std::filesystem::path& out, const recipe::SftRecipe& r) {
  std::error_code error;
  if (!std::filesystem::exists(out, error)) return;
  if (!std::filesystem::is_directory(out)) {
    throw Usage(cat({out.string(), " is no folder; name another with --out"}));
  }
  if (std::filesystem::is_empty(out)) return;
  // A checkpoint without weights, of which fresh ones are drawn, is what the recipe begins with.
  const bool bare = r.fresh && std::filesystem::exists(out / "config.json") &&
                    !std::filesystem::exists(out / "sft.toml") &&
                    !std::filesystem::exists(out / "model.safetensors") &&
                    !std::filesystem::exists(out / "model.safetensors.index.json");
  if (bare) return;
  if (!std::filesystem::exists(out / "sft.toml")) {
    throw Usage(cat({out.string(), " is not empty and was not written by sft (it has no sft.toml);",
                     " name another folder with --out"}));
  }
  const std::string different = differs_from(out / "sft.toml", r);
  if (different.empty()) return;
  throw Usage(cat({out.string(), " holds a model of another recipe (before / now: ", different,
                   "); name another folder with --out, or delete that one"}));
}

}  // namespace

int sft(const SftArgs& args) {
  recipe::SftRecipe r = read(args);
  const double began = seconds();
  const std::filesystem::path out = run_folder(args.out.empty() ? stem(args.recipe) : args.out);
  require_ours(out, r);
  const Unfinished unfinished(out, r);
  const Policy policy = open_policy(r.model, !r.fresh);
  std::int64_t parameters = 0;
  for (const WeightId& id : weight_ids(policy.config)) {
    const auto [rows, cols] = weight_shape(policy.config, id.role);
    parameters += rows * cols;
  }
  const std::int64_t bytes = 2 * parameters;
  const bool is_open = r.device == recipe::kAutoDevice;
  const std::string may_be = is_open ? "cuda" : r.device;
  const recipe::Budget budget = {
      .parameters = parameters,
      .trainer = recipe::trainer_bytes(may_be, r.trainer.bf16) * parameters,
      .trainer_most = may_be != "cpu" ? r.trainer.memory_bytes : 0,
      .evaluation = r.eval_prompts > 0 ? bytes + rollout::Options{}.cache_bytes : 0};
  if (may_be != "cpu" && (!is_open || why_unusable(device_named(may_be)).empty())) {
    recipe::require_trainer_memory(r.trainer.memory_bytes, budget);
  }
  settle_device(r, budget);
  const Device device = recipe::ready_device(r.device, budget);
  require_memory(budget, device);
  // Of what an interrupted run goes on from, the old and the new: weights and two moments in FP32.
  const std::int64_t state = r.save_every > 0 && r.save_every < r.steps ? 24 * parameters : 0;
  require_room(out, bytes + state, "the model and what an interrupted run goes on from take",
               "name another folder with --out, or set save_every to 0");
  const std::unique_ptr<data::Task> task = make_task(r.task, policy, r.max_new_tokens, true);
  const std::unique_ptr<Comm> comm = Comm::single();
  const Agreement agreement = {
      .model = policy.config, .contract = contracts::bf16(), .guide = {}, .seed = r.seed};

  train::Trainer trainer(agreement, {}, r.trainer, device, *comm);
  const RandomWeights fresh(policy.config, r.init_std, r.seed);
  const WeightSource& start = r.fresh ? static_cast<const WeightSource&>(fresh) : *policy.weights;
  load(start, trainer.initial_weights());
  const auto done = std::ssize(unfinished.losses());
  if (done > 0) {
    unfinished.load(trainer);
    info(cat({"going on from step ", done + 1, " of ", out.string(), ".unfinished"}));
  }

  // The curve grows as training goes on, beside the folder that appears whole when it has ended.
  make_folder(std::filesystem::absolute(out).parent_path(), "the folder of --out,", "name another");
  const std::filesystem::path curve_path = out.string() + ".loss.jsonl";
  const GoneOnInterrupt gone(curve_path.string());
  on_interrupt_say(done > 0 ? cat({"the same command goes on from step ", done + 1})
                            : "nothing is kept yet: the same command begins at step 1");
  const double loss = teach(r, policy, *task, unfinished, trainer, curve_path);

  // Recipe and curve come into the folder with the weights: without them it is nobody's.
  CheckpointWriter writer(out, policy.config,
                          {.companion = policy.folder,
                           .texts = {{"sft.toml", recipe::resolved(r)},
                                     {"loss.jsonl", value_or_throw(read_text(curve_path))}}});
  sync::refit(trainer.weights(), writer, agreement.contract, WeightVersion{r.steps});
  std::filesystem::remove(curve_path);
  unfinished.remove();
  info(cat({"wrote ", out.string(), ": loss ", std::round(loss * 1e4) / 1e4, " after ",
            std::round(seconds() - began), " s"}));
  on_interrupt_say("the model is written, its pass rate is not known");
  if (r.eval_prompts > 0) {
    const PassRate rate = evaluate(agreement, trainer.weights(), *task, {.prompts = r.eval_prompts},
                                   {}, r.max_new_tokens, device);
    info(cat({"pass rate ", std::round(rate.mean * 1e3) / 1e3, " on ", r.eval_prompts,
              " problems never trained on, ", std::round(rate.tokens_per_s), " tokens/s"}));
  }
  return 0;
}

}  // namespace lockstep::cli
