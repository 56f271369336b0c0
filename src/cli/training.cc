#include "cli/training.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/text.h"
#include "cli/arms.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "cli/session.h"
#include "cli/verbs.h"
#include "step/step.h"
#include "sync/refit.h"
#include "sync/reweigh.h"

namespace lockstep::cli {
namespace {

/// Refuses a schedule that the task runs out of prompts in: at the start, not at that step.
/// And a cache in which the first step's longest prompt has no room for its answer.
void check_prompts(const data::Task& task, const recipe::Recipe& recipe, const Arm& arm,
                   const ModelConfig& model) {
  const Schedule& schedule = recipe.schedule;
  of_the_caller([&] {
    task.prompts(schedule.steps - 1, schedule.prompts_per_step);
    std::size_t longest = 0;
    for (const data::Prompt& prompt : task.prompts(0, schedule.prompts_per_step)) {
      longest = std::max(longest, prompt.tokens.size());
    }
    recipe::check(recipe, arm, model, static_cast<std::int64_t>(longest));
  });
}

using Begin = std::function<void(const recipe::Budget&)>;

/// All that a run is made of, in the order in which it is made.
class Training {
 public:
  Training(recipe::Recipe recipe, const std::filesystem::path& folder, const Begin& begin)
      : recipe_(std::move(recipe)),
        policy_(open_policy(recipe_.model)),
        task_(make_task(recipe_.task, policy_, recipe_.schedule.sampling.max_new_tokens)),
        run_dir_(folder, *comm_),
        arm_(prepared(begin)),
        agreement_{policy_.config, arm_.contract, arm_.guide, recipe_.schedule.seed},
        store_(store_options()),
        engine_(agreement_, arm_.rollout, device_, &store_, *comm_),
        trainer_(agreement_, arm_.qat, recipe_.trainer, device_, *comm_) {
    load(sync::Rescaled(*policy_.weights, arm_.sync.uaq_scale), trainer_.initial_weights());
    run_dir_.begin(recipe::resolved(recipe_, arm_.contract.id()));
    say_what_goes_on();
    if (arm_.rl.kl_weight > 0) {
      warn("rl.kl_weight is above 0: the KL to the first policy then contains rounding");
      Agreement plain = agreement_;
      plain.guide = Guide{};
      reference_.emplace(plain, arm_.qat, beside_the_policy(), device_, *comm_);
      load(*policy_.weights, reference_->initial_weights());
    }
  }

  void run(const std::function<void(std::int64_t, const Metrics&)>& watch) {
    step::run({.arm = arm_,
               .schedule = recipe_.schedule,
               .task = *task_,
               .engine = engine_,
               .store = store_,
               .trainer = trainer_,
               .reference = reference_ ? &*reference_ : nullptr,
               .run_dir = run_dir_,
               .comm = *comm_,
               .model = policy_.config,
               .export_model = [this](const auto& to) { export_model(to); },
               .evaluate = [this](std::int64_t step) { return evaluation(step); },
               .report =
                   [&](std::int64_t step, const Metrics& metrics) {
                     say_what_goes_on();
                     if (watch) watch(step, metrics);
                   }});
  }

  const recipe::Budget& budget() const { return budget_; }

 private:
  /// The arm, after all that can be refused without reading a weight.
  Arm prepared(const Begin& begin) {
    if (const std::string began = run_dir_.recipe(); !began.empty()) {
      recipe::take_settled(began, (run_dir_.folder() / "recipe.toml").string(), recipe_);
    }
    const Arm arm = checked_arm(recipe_, policy_.config);
    check_prompts(*task_, recipe_, arm, policy_.config);
    settle_device(recipe_, arm, policy_.config);
    if (!run_dir_.recipe().empty()) {
      run_dir_.require_same(recipe::resolved(recipe_, arm.contract.id()));
    }
    budget_ = recipe::budget(recipe_, arm, policy_.config);
    device_ = ready_device();
    require_memory(budget_, device_);
    require_room(run_dir_.folder(), budget_.checkpoints, "the checkpoints take",
                 "lower schedule.keep, or name another run directory");
    if (begin) begin(budget_);
    return ready_arm(recipe_, policy_, *task_);
  }

  void say_what_goes_on() const {
    const std::int64_t newest = run_dir_.newest();
    const std::int64_t first = std::min(recipe_.schedule.save_every, recipe_.schedule.steps);
    on_interrupt_say(newest > 0
                         ? cat({"the same command goes on from checkpoints/step_", newest})
                         : cat({"the same command goes on with this run from step 1, for its "
                                "first checkpoint is that of step ",
                                first, " (schedule.save_every)"}));
  }

  Device ready_device() const {
    try {
      return recipe::ready_device(recipe_.device, budget_);
    } catch (const Error& error) {
      if (run_dir_.recipe().empty()) throw;
      const std::string folder = run_dir_.folder().string();
      throw Error(cat({folder, " began on ", recipe_.device, " and goes on there alone, but ",
                       recipe::why_not_cuda(error.what()), "; begin another run from its policy, ",
                       "model=", folder, "/checkpoints/step_N"}));
    }
  }

  /// What is left of trainer.memory when the policy's trainer has its own.
  train::Options beside_the_policy() const {
    train::Options options = recipe_.trainer;
    if (options.memory_bytes > 0) options.memory_bytes -= budget_.trainer / 2;
    return options;
  }

  store::Options store_options() const {
    store::Options options = recipe_.store;
    if (recipe_.store_on_disk) options.folder = run_dir_.trace();
    options.run = recipe_.schedule.seed;
    options.contract = arm_.contract.id();
    return options;
  }

  void export_model(const std::filesystem::path& folder) {
    CheckpointWriter writer(folder, policy_.config, {.companion = policy_.folder});
    sync::refit(trainer_.weights(), writer, contracts::bf16(), WeightVersion{0});
  }

  Metrics evaluation(std::int64_t step) {
    const recipe::Evaluation& e = recipe_.evaluation;
    const bool due = step == recipe_.schedule.steps || (e.every > 0 && step % e.every == 0);
    if (!due || e.prompts == 0) return {};
    const double began = seconds();
    trainer_.rest(budget_.evaluation);
    engine_.rest(budget_.evaluation);
    const PassRate rate = evaluate(agreement_, trainer_.weights(), *task_, e, arm_.rollout,
                                   recipe_.schedule.sampling.max_new_tokens, device_);
    return {{"val-core/" + recipe_.task.name + "/reward/mean@1", rate.mean},
            {"val-core/" + recipe_.task.name + "/response_length/mean", rate.response_length},
            {"timing_s/testing", seconds() - began}};
  }

  recipe::Recipe recipe_;
  recipe::Budget budget_;
  Device device_;
  std::unique_ptr<Comm> comm_ = Comm::single();
  Policy policy_;
  std::unique_ptr<data::Task> task_;
  step::RunDir run_dir_;
  Arm arm_;
  Agreement agreement_;
  store::Store store_;
  rollout::Engine engine_;
  train::Trainer trainer_;
  std::optional<train::Trainer> reference_;
};

}  // namespace

TrainingResult run_training(
    recipe::Recipe recipe, const std::filesystem::path& folder,
    const std::function<void(std::int64_t step, const Metrics& metrics)>& watch,
    const std::function<void(const recipe::Budget& budget)>& begin) {
  const std::string pass_rate = "val-core/" + recipe.task.name + "/reward/mean@1";
  Training training(std::move(recipe), folder, begin);
  TrainingResult result = {.final_pass_rate = std::numeric_limits<double>::quiet_NaN(),
                           .record_per_token = training.budget().record_per_token,
                           .record_per_token_full = training.budget().record_per_token_full};
  training.run([&](std::int64_t step, const Metrics& metrics) {
    if (const auto found = metrics.find(pass_rate); found != metrics.end()) {
      result.final_pass_rate = found->second;
    }
    if (watch) watch(step, metrics);
  });
  return result;
}

int train(const TrainArgs& args) {
  const recipe::Recipe recipe = load_recipe(args.recipe, args.assignments);
  const std::filesystem::path folder = run_folder(args.run.empty() ? stem(args.recipe) : args.run);
  ShownSteps shown(folder, recipe.schedule.steps);
  const auto began = seconds();
  const TrainingResult result = run_training(
      recipe, folder,
      [&](std::int64_t step, const Metrics& metrics) {
        if (shown.count() == 0 && step > 1) {
          info(cat({"going on from checkpoints/step_", step - 1, ", the newest"}));
        }
        info(shown.line(step, metrics));
      },
      [&](const recipe::Budget& budget) {
        info(cat(
            {"arm ", recipe.arm.name, " of ", recipe.model, ", contract ", recipe.arm.contract}));
        info(recipe::to_string(budget));
      });
  if (std::isfinite(result.final_pass_rate)) {
    info(cat({"pass rate ", std::round(result.final_pass_rate * 1e3) / 1e3, " on ",
              recipe.evaluation.prompts, " prompts never trained on"}));
  }
  const std::string done = shown.count() > 0
                               ? cat({"done in ", std::round(seconds() - began), " s"})
                               : cat({"all ", recipe.schedule.steps,
                                      " steps were done before; for more, "
                                      "raise schedule.steps"});
  info(cat({done, "; the policy is ", folder.string(), "/checkpoints/step_", recipe.schedule.steps,
            ", its metrics ", folder.string(), "/metrics.jsonl"}));
  return 0;
}

}  // namespace lockstep::cli
